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

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfunc._version import __version__ as __version__
from zfunc.core.methods import FUNCTIONS

if TYPE_CHECKING:  # the one list of names, which the functions below read too
    from zfunc import schedules as schedules
    from zfunc.checkpoint.writer import Save as Save
    from zfunc.core.explain import explain as explain
    from zfunc.core.hardware import Hardware as Hardware
    from zfunc.core.step_graph import step_graph as step_graph
    from zfunc.engine.compile import compile as compile
    from zfunc.engine.step.evaluate import apply as apply
    from zfunc.engine.step.evaluate import buffers as buffers
    from zfunc.engine.step.evaluate import evaluate as evaluate
    from zfunc.engine.step.evaluate import params as params
    from zfunc.engine.step.evaluate import weights as weights
    from zfunc.engine.step.flush import flush as flush
    from zfunc.engine.step.init import init as init
    from zfunc.engine.step.init import replace as replace
    from zfunc.engine.step.release import release as release
    from zfunc.engine.step.save_load import load as load
    from zfunc.engine.step.save_load import save as save
    from zfunc.engine.step.train_step import train_step as train_step
    from zfunc.engine.trace.batches import Whole as Whole
    from zfunc.engine.trace.segment import Segment as Segment
    from zfunc.engine.trace.segment import segment as segment
    from zfunc.errors import NonFiniteError as NonFiniteError
    from zfunc.errors import PlanError as PlanError
    from zfunc.models import hf as hf
    from zfunc.models.cut.modules import segments as segments
    from zfunc.models.quantization import quantized as quantized
    from zfunc.optim import learning_rate_schedules as lr  # noqa: F401
    from zfunc.optim.adafactor import Adafactor as Adafactor
    from zfunc.optim.adagrad import Adagrad as Adagrad
    from zfunc.optim.adamw import AdamW as AdamW
    from zfunc.optim.adamw import adam_update_ as adam_update_
    from zfunc.optim.elementwise import matrices_only as matrices_only
    from zfunc.optim.groups import groups as groups
    from zfunc.optim.lion import Lion as Lion
    from zfunc.optim.loss_scale import LossScale as LossScale
    from zfunc.optim.muon import Muon as Muon
    from zfunc.optim.sgd import SGD as SGD
    from zfunc.planner.plan_step import plan as plan
    from zfunc.train.deepspeed.mapping import from_deepspeed as from_deepspeed


@cache
def _homes() -> dict[str, tuple[str, str]]:
    """Public names of zfunc, each with the module that defines it and its name in that module."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [(x.module or "", x.names[0]) for x in block.body if isinstance(x, ast.ImportFrom)]
    return {alias.asname or alias.name: (module, alias.name) for module, alias in imports}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("_") or not (name in _homes() or find_spec(f"zfunc.{name}")):
        error = getattr(import_module("zfunc.errors"), name, None)
        is_error = isinstance(error, type) and issubclass(error, BaseException)
        instead = f": it is zfunc.errors.{name}" if is_error else ""
        raise AttributeError(f"module 'zfunc' has no attribute {name!r}{instead}")
    module, own = _homes().get(name, ("zfunc", name))
    home = import_module(module)
    # A module of its package, or what a module has.
    return import_module(f"{module}.{own}") if hasattr(home, "__path__") else getattr(home, own)


def __dir__() -> list[str]:
    return sorted(_homes())


FUNCTIONS |= {
    "simulate": "zfunc.core.simulator",
    "lower_bound": "zfunc.core.simulator",
    "verify": "zfunc.core.verifier",
    "peak_memory": "zfunc.core.memory_model",
    "text": "zfunc.viz.timeline_text",
    "svg": "zfunc.viz.timeline_svg",
    "plan_html": "zfunc.viz.notebook",
    "timeline_html": "zfunc.viz.notebook",
    "make_order": "zfunc.schedules",
    "cuts": "zfunc.models.cut.modules",
}

if find_spec("zfunc.schedules") is None:  # it is beside this folder, and an installation finds it
    raise ImportError(
        f"got zfunc from {Path(__file__).parent}, which is not installed, expected an installed one: "
        "pip install -e . in that clone, or run Python in another folder"
    )
