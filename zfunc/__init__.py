"""zfunc: train models bigger than the GPU they run on. ZeRO-Offload as pure functions, the schedule an object.

The calls of a training loop are here; see README.md for one. Names are looked up when they are first used, so what
plans, verifies, simulates and draws a step needs no torch. From the ground up, each package imports only from those
before it:

    errors options units values   what everything may use
    core                    what a training step is, and when its parts run
    schedules               one schedule a file
    runtime                 the machine: executor, threads, memory, ranks
    optim                   the optimizer on host and device
    checkpoint              checkpoints as files
    engine                  compile, init, train_step, save, load
    viz                     pictures of a step
    planner                 before you run: does it fit, how long does it take
    models                  GPT-2 and Hugging Face models as segments
    train                   the application behind `zfunc train`
    cli                     the command line
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zfunc._version import __version__ as __version__

if TYPE_CHECKING:
    from zfunc import schedules as schedules
    from zfunc.checkpoint.writer import Save
    from zfunc.engine.compile.compile import compile
    from zfunc.engine.compile.segment import Segment, segment
    from zfunc.engine.state.init import init
    from zfunc.engine.state.save_load import load, save
    from zfunc.engine.step.evaluate import apply, buffers, evaluate, params
    from zfunc.engine.step.flush import flush
    from zfunc.engine.step.train_step import train_step
    from zfunc.errors import (
        AbandonedCalls,
        CheckpointError,
        DiskError,
        DonatedStateError,
        ExecutionError,
        LaneTimeout,
        NonFiniteError,
        OutOfMemory,
        PlanError,
        RankError,
        UndeclaredAccess,
    )
    from zfunc.optim import learning_rate_schedules as lr
    from zfunc.optim.adafactor import Adafactor
    from zfunc.optim.adagrad import Adagrad
    from zfunc.optim.adamw import AdamW, adam_update_
    from zfunc.optim.groups import groups
    from zfunc.optim.lion import Lion
    from zfunc.optim.loss_scale import LossScale
    from zfunc.optim.muon import Muon
    from zfunc.optim.optimizer_settings import matrices_only
    from zfunc.optim.sgd import SGD
    from zfunc.planner.plan_step import plan as plan
    from zfunc.runtime.executor import Jitter
    from zfunc.train.deepspeed.mapping import from_deepspeed

_HOMES = {
    "AbandonedCalls": "errors",
    "Adafactor": "optim.adafactor",
    "Adagrad": "optim.adagrad",
    "AdamW": "optim.adamw",
    "CheckpointError": "errors",
    "DiskError": "errors",
    "DonatedStateError": "errors",
    "ExecutionError": "errors",
    "Jitter": "runtime.executor",
    "LaneTimeout": "errors",
    "Lion": "optim.lion",
    "LossScale": "optim.loss_scale",
    "Muon": "optim.muon",
    "NonFiniteError": "errors",
    "OutOfMemory": "errors",
    "PlanError": "errors",
    "RankError": "errors",
    "SGD": "optim.sgd",
    "Save": "checkpoint.writer",
    "Segment": "engine.compile.segment",
    "UndeclaredAccess": "errors",
    "adam_update_": "optim.adamw",
    "apply": "engine.step.evaluate",
    "buffers": "engine.step.evaluate",
    "compile": "engine.compile.compile",
    "evaluate": "engine.step.evaluate",
    "flush": "engine.step.flush",
    "from_deepspeed": "train.deepspeed.mapping",
    "groups": "optim.groups",
    "init": "engine.state.init",
    "load": "engine.state.save_load",
    "matrices_only": "optim.optimizer_settings",
    "params": "engine.step.evaluate",
    "save": "engine.state.save_load",
    "plan": "planner.plan_step",
    "segment": "engine.compile.segment",
    "train_step": "engine.step.train_step",
}
_MODULES = {"hf": "models.hf", "lr": "optim.learning_rate_schedules"}

__all__ = [
    "SGD",
    "AbandonedCalls",
    "Adafactor",
    "Adagrad",
    "AdamW",
    "CheckpointError",
    "DiskError",
    "DonatedStateError",
    "ExecutionError",
    "Jitter",
    "LaneTimeout",
    "Lion",
    "LossScale",
    "Muon",
    "NonFiniteError",
    "OutOfMemory",
    "PlanError",
    "RankError",
    "Save",
    "Segment",
    "UndeclaredAccess",
    "adam_update_",
    "apply",
    "buffers",
    "compile",
    "evaluate",
    "flush",
    "from_deepspeed",
    "groups",
    "hf",
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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"zfunc.{_HOMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"zfunc.{_MODULES[name]}")
    if not name.startswith("_") and find_spec(f"zfunc.{name}"):
        return import_module(f"zfunc.{name}")
    raise AttributeError(f"module 'zfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
