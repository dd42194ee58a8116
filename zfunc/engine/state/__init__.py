"""What a Program trains: the State, how it is made, saved, loaded and read.

    module_buffers          the buffers that forward changes, such as running statistics
    memory                  the memory of regions: tensors, what slots have in turn, what is on the disk
    state                   `State`, its buffers, and who may use them
    weights                 fp32 weights: into a State and out of it
    init                    `init`: the first State
    release                 `zfunc.release`: a State off the device between steps, and back
    save_load               `zfunc.save`, `zfunc.load`
    swap_state              a program's swap space: new, opened again, committed
    restore                 reads a checkpoint into a State, on any number of ranks

Which buffers there are follows from the regions of the program's graph that outlive a step.
"""
