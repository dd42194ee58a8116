"""The optimizer: its settings, its state, and its update on the host and on the device, with the same bits.

    base                  the `Optimizer` protocol: state by name, factors of a step, an update
    elementwise           what zfunc's own have in common; `Elementwise`: an optimizer that is its state and a rule
    rules                 the frame of an element-wise step, its scalars and floors
    rules_in_c            the C of the rules, printed from them
    compiled_rules        a kernel for a rule of one's own, where there is a compiler
    adamw                 `AdamW`
    sgd                   `SGD`
    lion                  `Lion`
    adagrad               `Adagrad`
    adafactor             `Adafactor`
    muon                  `Muon`
    ema                   the moving average of the weights
    groups                several of them in one model, by the names of parameters
    by_name               the optimizers by their names on the command line, and as rules of the kernel
    optimizer_settings    fields of settings, and their checks, without torch
    learning_rate_schedules  functions of the step; public as `zfunc.lr`
    loss_scale            fp16's loss scale, as a value
    reference             an element-wise update in NumPy, which kernel and device match bit for bit
    formats               the formats of the state, for NumPy and torch, which the kernel matches bit for bit
    updates               the update on the host and on a device, accumulation, sums of squares; checks of buffers
    kernel_loader         loads the compiled extension `zfunc._cpu_adam`; `csrc/` has its C
    tensors               the operations of rules and formats on tensors
    adafactor_matrices    what Adafactor keeps of a parameter, and the scalars of a step, without torch
    adafactor_update      Adafactor's, in rounds: what ranks join, and when
    workspaces            what an update on the device allocates, without torch

A new element-wise optimizer: one file here with a subclass of `Elementwise`. Another one: a file that follows
`base.Optimizer`, and its row in `zfunc.core.optimizer_state`. A new format of the moments: a row in that table, its
codec in `formats`, its kernel.
"""

from zfunc.optim.adagrad import Adagrad as Adagrad
from zfunc.optim.adamw import AdamW as AdamW
from zfunc.optim.lion import Lion as Lion
from zfunc.optim.sgd import SGD as SGD
