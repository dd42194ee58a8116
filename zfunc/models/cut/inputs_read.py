"""Which inputs a module reads by their values, and which of its tensors it reads: by a run without other values."""

import logging
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from zfunc.engine.trace.batches import unmarked
from zfunc.engine.trace.graph_cuts import alone
from zfunc.engine.trace.traced_passes import MAX_TRACES
from zfunc.errors import SettingError, refuse
from zfunc.models.cut.batch_call import BatchCall, mark_values
from zfunc.models.cut.exported_graph import ValueBranchError
from zfunc.models.cut.module_export import ModuleExport, in_thread, quiet, refuse_branch, without_values
from zfunc.models.cut.module_traces import ModuleTrace, ModuleTraces
from zfunc.models.cut.user_code import place_here, place_of_error

log = logging.getLogger("zfunc")


class Reads(NamedTuple):
    """What a module reads: of the inputs whose values it reads (`values`), or whose number of set elements in masks
    made of them (`counted`), the place by name, as text; the names of its `tensors`."""

    values: dict[str, str]
    counted: dict[str, str]
    tensors: set[str]

    @property
    def by_value(self) -> dict[str, bool]:
        """The inputs on whose values a trace depends, as of `mark_values`."""
        return {name: name not in self.values for name in (*self.values, *self.counted)}


def inputs_by_value(export: ModuleExport, call: BatchCall) -> dict[str, bool]:
    """The integer inputs of `call` on whose values a trace depends, by name: False if on all values, which is
    logged; True if only on how many elements masks made of the input select."""
    reads = _reads_of(export, _numbers_marked(call), training=True, by_value=True)
    for name, place in reads.values.items():
        log.warning(
            "model: the values of %s decide shapes or a branch %s: each other ones cost a trace, of which %d are "
            "kept; compute what depends on many in the collator",
            *(name.removeprefix(".inputs"), place, MAX_TRACES),
        )
    return reads.by_value


def find_late(traces: ModuleTraces, call: BatchCall, first: ModuleTrace) -> None:
    """Run the module of `traces` on the example `call` in eval mode, and set what that reads and training mode,
    whose trace is `first`, does not: `traces.in_eval`, `traces.late`. Where it fails, evaluation will say why."""
    with suppress(ValueError):
        try:
            knows = traces.knows_in_eval
            reads = _reads_of(traces.export, without_values(call), training=False, by_value=knows)
        except ValueBranchError:
            traces.knows_in_eval = True
            reads = _reads_of(traces.export, _numbers_marked(call), training=False, by_value=True)
            traces.in_eval |= reads.by_value
        traces.late = reads.tensors - first.read - {*traces.export.whole.buffers}


def _numbers_marked(call: BatchCall) -> Any:
    """`call` for a trace, with the values of all its integer inputs known."""
    leaves = ((keystr(path), unmarked(t)) for path, t in tree_flatten_with_path(call)[0])
    numbers = {name: True for name, t in leaves if isinstance(t, Tensor) and not t.is_floating_point()}
    return without_values(mark_values(call, numbers))


def _reads_of(export: ModuleExport, x: Any, *, training: bool, by_value: bool) -> Reads:
    """What the module reads for inputs `x`, of which those in BySample are known if `by_value`, in training or eval
    mode. Raises ValueBranchError for a branch on any other value."""
    return in_thread(_run, export, x, training, by_value)


def _run(export: ModuleExport, x: Any, training: bool, by_value: bool) -> Reads:
    fakes = export.fakes(x, torch.float32)
    buffers = {name: t.clone() for name, t in fakes.buffers.items()}  # which forward may write
    called = export.called.with_tensors(fakes.params | buffers)
    if not training:
        called.eval()
    called.by_value = by_value
    places = (dict[str, str](), dict[str, str]())
    called.read = lambda name, count: places[count].setdefault(name, place_here())
    # A check of values, which no trace keeps, reads none.
    checks = [patch.object(torch, x, lambda *_, **__: None) for x in dir(torch) if x.startswith("_check")]
    grads = torch.set_grad_enabled
    with alone(), fakes.mode, _compiling_state_context(), quiet(), grads(training), ExitStack() as stack:
        for check in checks:
            stack.enter_context(check)
        try:
            with _TensorsRead(called) as tensors:
                called(fakes.inputs)
        except Exception as error:
            refuse_branch(error)
            if isinstance(error, SettingError) and error.names == ("model",):
                raise
            said = f"{type(error).__name__} {place_of_error(error)}: {error}"
            got = f"values that do not fit the model ({said})"
            refuse("example", got, "a real batch", "the model branches on values", cause=error)
    return Reads(*places, tensors.read)


class _TensorsRead(TorchFunctionMode):
    """A mode that notes in `read` the first names of the parameters and buffers of `module` that functions get."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = *module.named_parameters(), *module.named_buffers()
        self.names, self.read = {id(t): name for name, t in named}, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= {self.names[id(t)] for t in tree_leaves((args, kwargs)) if id(t) in self.names}
        return func(*args, **(kwargs or {}))
