"""The State: its memory, who may use it, and its weights.

    memory                  the memory of regions: tensors, slots, state on the disk, spill files
    ownership               which State may use the buffers, and what a step that failed has begun
    state                   `State` and its buffers
    weights                 fp32 weights: into a State and out of it
    restore                 reads a checkpoint into a State, on any number of ranks

Which buffers there are follows from the regions of the program's graph that outlive a step.
"""
