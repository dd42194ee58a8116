"""The optimizer: its settings, its state, and its update on the host and on the device, with the same bits.

    base                        what a step asks of an optimizer
    adamw                       AdamW as a value
    lr, loss_scale              the learning rate of a step; fp16's loss scale
    host_adam, kernel           the update in host memory, by `zfunc._cpu_adam` (its headers are in `csrc/`)
    device_adam, device_formats the same update in torch operations
    compact                     moments in 16 and 8 bits, master weights split in two
    buffer_checks               shapes, dtypes and overlaps that the kernel relies on
    reference, compact_reference  the meaning of all of it, in NumPy; the kernel equals it to the bit

A new optimizer: a value with the methods of `base.Optimizer`, a row in `zfunc.core.optimizer_state`, and a kernel
if it wants one (as in `tests/engine/test_own_optimizer.py`). A new format of Adam's moments: a row there,
its reference, its kernel, its device twin.
"""
