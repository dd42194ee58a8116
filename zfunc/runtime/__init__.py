"""The machine: it runs a plan here, and knows no layer and no optimizer.

    prepared_plan       what each thread of a plan issues, with all that is known before a step
    executor            a plan's lanes as threads and streams
    accelerator         the device that computes: which one, waiting for it, its memory
    nvrtc               machine code of CUDA source
    access_guard        debug mode: operations touch only the regions they declare
    fault_injection     failures on purpose, at a rank, step and operation; random delays
    rng                 random numbers as a function of key, pass and draw
    thread_budget       how many OpenMP threads the host kernel gets, on which NUMA nodes; cores, from /sys
    memory_limits       how much host memory this process has, and may have
    host_memory         maps pages, allocates and pins host buffers
    blocking_calls      reads and writes on threads; an interrupt does not wait for a drive that hangs
    direct_io           files read and written past the page cache; how fast a drive is
    system_calls        calls that macOS or Windows lack, each with a plain fallback
    torch_dtypes        torch's names for `core.dtypes`
    collectives         the ranks that train together, their collectives, and noticing that one failed
    stage_ranks         the ranks of a pipeline stage, and what they send to those of others
    failure_detection   which ranks are missing, once a collective has failed
    launch              joins the ranks that torchrun started, in a store that no earlier process can reach

The executor looks a stage up by its operation's verb; which verbs there are is the recipe's business.
"""
