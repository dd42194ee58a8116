"""The State: its memory, who may use it, and its weights.

    memory                  the memory of regions: tensors, slots, state on the disk, spill files
    state                   `State`, its buffers, and who may use them
    weights                 fp32 weights: into a State and out of it
    restore                 reads a checkpoint into a State, on any number of ranks

Which buffers there are follows from the regions of the program's graph that outlive a step.
"""
