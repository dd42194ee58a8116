"""The machine: it runs a plan here, and knows no layer and no optimizer.

executor                    a plan's lanes as threads and streams
access_guard                debug mode: operations touch only the regions they declare
fault_injection             failures on purpose
rng                         random numbers as a function of key, pass and draw
cpu_topology, numa          cores, quotas, caches and NUMA nodes, from /proc and /sys
thread_budget, thread_pinning  how many threads a sweep gets, and on which cores
host_memory, host_pages     how much memory is free; huge, pinned, first-touched buffers
torch_dtypes                the types of elements as torch has them
collectives                 the ranks that train together
failure_detection           which rank is gone
launch, rendezvous          joining the ranks that torchrun started
"""
