"""zfunc: train models bigger than the GPU they run on. ZeRO-Offload as pure functions, the schedule an object.

The calls of a training loop are here; see README.md for one. The torch-free floors (`zfunc.graph`, `zfunc.plan`,
`zfunc.verify`, ...) can be imported without torch: this module imports nothing until it is asked.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AdamW": "zfunc.adam",
    "adam_update_": "zfunc.adam",
    "matrices_only": "zfunc.adam",
    "Segment": "zfunc.segments",
    "segment": "zfunc.segments",
    "compile": "zfunc.compiling",
    "init": "zfunc.step",
    "train_step": "zfunc.step",
    "params": "zfunc.step",
    "apply": "zfunc.step",
    "evaluate": "zfunc.step",
    "Jitter": "zfunc.execute",
    "LossScale": "zfunc.loss_scale",
    "NonFiniteError": "zfunc.errors",
}

__all__ = [*_HOMES, "lr", "schedules"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("lr", "schedules"):
        return import_module(f"zfunc.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
