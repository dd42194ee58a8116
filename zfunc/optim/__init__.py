"""The optimizer: its settings, its state, and its update on the host and on the device, with the same bits.

    base                  the `Optimizer` protocol: state by name, factors of a step, an update
    kernel_optimizer      what all of them have in common
    adamw                 `AdamW`, as a value
    sgd                   `SGD`
    lion                  `Lion`
    adagrad               `Adagrad`
    adafactor             `Adafactor`
    muon                  `Muon`
    newton_schulz         makes a matrix orthogonal, for Muon
    ema                   the moving average of the weights
    groups                several of them in one model, by the names of parameters
    by_name               the optimizers by their names on the command line
    one_buffer            what SGD, Lion and Adagrad have in common as values
    optimizer_settings    the settings that all of them have
    lr                    learning rate schedules: functions of the step
    loss_scale            fp16's loss scale, as a value
    host_adam             Adam's update in host memory
    host_one_buffer       that of SGD, Lion and Adagrad
    kernel_loader         loads the compiled extension `zfunc._cpu_adam`; `csrc/` has its C
    device_adam           Adam's update in torch operations
    device_one_buffer     that of SGD, Lion and Adagrad
    adafactor_rounds      Adafactor's update of a part of a parameter: what ranks join, and when
    host_adafactor        that in host memory
    device_adafactor      the same in torch operations
    device_formats        the compact formats in torch operations
    compact               moments in 16 and 8 bits; master weights split in two halves
    argument_checks       checks of buffers and factors, which the kernel relies on
    setting_checks        those of settings, without torch
    workspaces            what an update on the device allocates, without torch
    adam_reference        the NumPy reference that kernel and device match bit for bit
    one_buffer_reference  that of SGD, Lion and Adagrad
    adafactor_reference   Adafactor's, with sums that no order changes
    compact_reference     the same for the compact formats

A new optimizer: one file here that follows `base.Optimizer`, its row in `zfunc.core.optimizer_state`, and a kernel
if it needs one. A new format of the moments: a row in that table, its reference, its kernel, its device version.
"""
