"""The optimizer: its settings, its state, and its update on the host and on the device, with the same bits.

    adamw                       the optimizer as a value
    lr, loss_scale              the learning rate of a step; fp16's loss scale
    host_adam, kernel           the update in host memory, by `zfunc._cpu_adam` (its headers are in `csrc/`)
    device_adam, device_formats the same update in torch operations
    compact                     moments in 16 and 8 bits, master weights split in two
    buffer_checks               shapes, dtypes and overlaps that the kernel relies on
    reference, compact_reference  the meaning of all of it, in NumPy; the kernel equals it to the bit

A new format of the moments: a row in `zfunc.core.optimizer_state`, its reference, its kernel, its device twin.
"""
