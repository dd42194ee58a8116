"""zfunc: train models bigger than the GPU they run on. ZeRO-Offload as pure functions, the schedule an object.

The calls of a training loop are here; see README.md for one. Names are looked up when they are first used, so
the torch-free floors (`zfunc.graph`, `zfunc.plan`, `zfunc.verify`, `zfunc.schedules`, ...) need no torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zfunc._version import __version__ as __version__

if TYPE_CHECKING:
    from zfunc import lr as lr
    from zfunc import schedules as schedules
    from zfunc.adam import AdamW, matrices_only
    from zfunc.beginning import init
    from zfunc.checkpointing import load, save
    from zfunc.compiling import compile
    from zfunc.configured import from_deepspeed
    from zfunc.errors import (
        CheckpointError,
        DonatedStateError,
        ExecutionError,
        LaneTimeout,
        NonFiniteError,
        OutOfMemory,
        RankError,
        UndeclaredAccess,
    )
    from zfunc.execute import Jitter
    from zfunc.loss_scale import LossScale
    from zfunc.plan import PlanError
    from zfunc.planner import plan as plan
    from zfunc.reading import apply, evaluate, params
    from zfunc.saving import Save
    from zfunc.segments import Segment, segment
    from zfunc.step import flush, train_step
    from zfunc.sweeps import adam_update_

_HOMES = {
    "AdamW": "adam",
    "CheckpointError": "errors",
    "DonatedStateError": "errors",
    "ExecutionError": "errors",
    "Jitter": "execute",
    "LaneTimeout": "errors",
    "LossScale": "loss_scale",
    "NonFiniteError": "errors",
    "OutOfMemory": "errors",
    "PlanError": "plan",
    "RankError": "errors",
    "Save": "saving",
    "Segment": "segments",
    "UndeclaredAccess": "errors",
    "adam_update_": "sweeps",
    "apply": "reading",
    "compile": "compiling",
    "evaluate": "reading",
    "flush": "step",
    "from_deepspeed": "configured",
    "init": "beginning",
    "load": "checkpointing",
    "matrices_only": "adam",
    "params": "reading",
    "save": "checkpointing",
    "segment": "segments",
    "train_step": "step",
}

__all__ = [
    "AdamW",
    "CheckpointError",
    "DonatedStateError",
    "ExecutionError",
    "Jitter",
    "LaneTimeout",
    "LossScale",
    "NonFiniteError",
    "OutOfMemory",
    "PlanError",
    "RankError",
    "Save",
    "Segment",
    "UndeclaredAccess",
    "adam_update_",
    "apply",
    "compile",
    "evaluate",
    "flush",
    "from_deepspeed",
    "init",
    "load",
    "lr",
    "matrices_only",
    "params",
    "plan",
    "save",
    "schedules",
    "segment",
    "train_step",
]


class _Callable(ModuleType):
    """`zfunc.plan` is a module, of plans, and a call: `zfunc.plan(segments, example, hardware="h100")`.

    Importing a submodule puts it on its package, whatever was there under that name, so a function called `plan`
    would last until somebody's `from zfunc.plan import build`. The module itself is what can be called, in any
    order of imports; Python lets a module have a class of its own for such ends.
    """

    def __call__(self, *args: Any, **given: Any) -> Any:
        """`zfunc.planner.plan`, which says what it takes and gives."""
        return import_module("zfunc.planner").plan(*args, **given)


import_module("zfunc.plan")
sys.modules["zfunc.plan"].__class__ = _Callable


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"zfunc.{_HOMES[name]}"), name)
    if not name.startswith("_") and find_spec(f"zfunc.{name}"):
        return import_module(f"zfunc.{name}")
    raise AttributeError(f"module 'zfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
