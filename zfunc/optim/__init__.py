"""The optimizer: its settings, its state, and its update on the host and on the device, with the same bits.

    base                  the `Optimizer` protocol: state by name, factors of a step, an update
    elementwise           what zfunc's own have in common, fields of settings; `Elementwise`: a state and a rule
    rules                 the frame of an element-wise step, its scalars and floors
    rules_in_c            the C of the rules, printed from them, and compiled for a rule of one's own
    rules_in_cuda         one CUDA kernel of a rule, for updates on a device
    adamw                 `AdamW`
    sgd                   `SGD`
    lion                  `Lion`
    adagrad               `Adagrad`
    adafactor             `Adafactor`
    muon                  `Muon`
    groups                several of them in one model, by the names of parameters
    by_name               the optimizers by their names on the command line, and as rules of the kernel
    learning_rate_schedules  functions of the step; public as `zfunc.lr`
    loss_scale            fp16's loss scale, as a value
    formats               the formats of the state in torch operations, which the kernel matches bit for bit
    updates               an update on host and device, moving averages, accumulation, sums of squares; checks
    kernel_loader         loads the compiled extension `zfunc._cpu_adam`; `csrc/` has its C

A new element-wise optimizer: one file here with a subclass of `Elementwise`. Another one: a file that follows
`base.Optimizer` and adds its formats. A new format of the moments: a row in `zfunc.core.optimizer_state`, its codec
in `formats`, its kernel.
"""

from zfunc.optim.adafactor import Adafactor as Adafactor
from zfunc.optim.adagrad import Adagrad as Adagrad
from zfunc.optim.adamw import AdamW as AdamW
from zfunc.optim.lion import Lion as Lion
from zfunc.optim.muon import Muon as Muon
from zfunc.optim.sgd import SGD as SGD
