"""The optimizers by the names that the command line and configurations have for them."""

from typing import Any

from zfunc.core.optimizer_state import OPTIMIZER_NAMES
from zfunc.optim.adafactor import Adafactor
from zfunc.optim.adagrad import Adagrad
from zfunc.optim.adamw import AdamW
from zfunc.optim.lion import Lion
from zfunc.optim.sgd import SGD

NamedOptimizer = AdamW | SGD | Lion | Adagrad | Adafactor

_CLASSES: dict[str, type[NamedOptimizer]] = dict(
    zip(OPTIMIZER_NAMES, (AdamW, SGD, Lion, Adagrad, Adafactor), strict=True)
)


def make_optimizer(name: str, **arguments: Any) -> NamedOptimizer:
    """The optimizer of `OPTIMIZER_NAMES`, with these arguments of its class.

    >>> make_optimizer("lion", lr=1e-4).betas
    (0.9, 0.99)
    """
    return _CLASSES[name](**arguments)
