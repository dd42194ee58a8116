"""The optimizers by the names that the command line and configurations have for them."""

from typing import Any

from zfunc.optim.adafactor import Adafactor
from zfunc.optim.adagrad import Adagrad
from zfunc.optim.adamw import AdamW
from zfunc.optim.elementwise import Betas, hidden_matrices
from zfunc.optim.groups import GroupedOptimizer, groups
from zfunc.optim.lion import Lion
from zfunc.optim.muon import Muon
from zfunc.optim.rules_in_c import RULES_H, header
from zfunc.optim.sgd import SGD

NamedOptimizer = AdamW | SGD | Lion | Adagrad | Adafactor | GroupedOptimizer


def make_optimizer(name: str, **arguments: Any) -> NamedOptimizer:
    """The optimizer whose class is called `name`, in small letters, made with `arguments`.

    "muon" is Muon for hidden matrices, and AdamW for the rest, with `betas` and `eps`. The other arguments, such as
    the learning rate, go to both.

    >>> make_optimizer("lion", lr=1e-4).betas
    (0.9, 0.99)
    >>> [type(x).__name__ for x in make_optimizer("muon", lr=1e-3).optimizers]
    ['Muon', 'AdamW']
    """
    return _MAKERS[name](**arguments)


def _muon(*, betas: Betas = (0.9, 0.95), eps: float = 1e-8, **given: Any) -> GroupedOptimizer:
    muon = Muon(**{"adjust_lr_fn": "match_rms_adamw", **given})
    shared = {name: x for name, x in given.items() if name not in ("momentum", "adjust_lr_fn")}
    return groups((hidden_matrices, muon), AdamW(betas=betas, eps=eps, **shared))


CLASSES = {x.__name__.lower(): x for x in (AdamW, SGD, Lion, Adagrad, Adafactor, Muon)}
_MAKERS = {**CLASSES, "muon": _muon}


def rules_in_c() -> str:
    """The text of csrc/_rules.h: C code of the optimizer rules that the compiled kernel has."""
    adamw, muon = AdamW().rule, Muon()
    some = [adamw, SGD().rule, SGD(momentum=0.9, nesterov=True).rule, Lion().rule, Adagrad().rule]
    return header([*some, muon.look_ahead_rule, muon.rule], adamw)


if __name__ == "__main__":
    RULES_H.write_text(rules_in_c())
