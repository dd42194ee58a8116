"""The traces of a module: its graph cut into pieces, for each set of shapes and dtypes, in training and eval mode.

The first trace is of the example, and names the pieces; others are made when the first segment gets a batch of
other shapes, and have the same pieces, or are refused.
"""

import logging
import math
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from zfunc.engine.trace.graph_cuts import alone
from zfunc.engine.trace.outside import Outside
from zfunc.engine.trace.traced_passes import MAX_TRACES
from zfunc.errors import refuse
from zfunc.models.cut.batch_call import BatchCall, mark_values
from zfunc.models.cut.exported_graph import REGIONS, BuffersWrittenError, NotCutError, place_of
from zfunc.models.cut.functions import FunctionCall
from zfunc.models.cut.module_export import ModuleExport, in_thread, without_values
from zfunc.models.cut.pieces import ModulePiece, module_piece
from zfunc.models.cut.spans import CutGraph, Division, blocks_of
from zfunc.runtime.rng import fold_seed

IN_EVAL = -1  # the key of the example in eval mode, which is cut for what it reads alone
log = logging.getLogger("zfunc")


@frozen(eq=False)
class ModuleTrace:
    """A module traced and cut for one set of shapes, `key` of its cache, as `pieces` in order; `inputs` are
    the indices of the input leaves that the graph reads.

    `first_alike[s]` is the index of the first piece equal to piece `s`. `apart` is true if this trace differs
    in pieces that the module's first trace has equal.
    """

    key: int
    names: list[str]
    pieces: list[ModulePiece | None]  # None: a block that is not called
    inputs: list[int]
    output: Any  # of the last piece: the places of its results in what the module returns
    first_alike: list[int]
    whole: str  # why it is one piece
    like: Division
    least: int  # elements of parameters of the largest part that cannot be cut
    places: list[str]  # where each piece first reads a parameter
    written: set[str]  # names of the buffers that it writes
    apart: bool = False
    late: list[dict[str, str]] = field(factory=list)  # by piece, as `short`; of the first trace

    @property
    def read(self) -> set[str]:
        """The names of the parameters and buffers that the pieces read."""
        return {name for p in self.pieces if p is not None for name in p.short.values()}

    def check_functions(self) -> None:
        """Raise NotCutError if an autograd function reads another value now, as of eval mode, than in the trace."""
        nodes = (n for p in self.pieces if p is not None for n in p.run.graph.nodes)
        for x in (n.target for n in nodes if isinstance(n.target, FunctionCall)):
            if x.change():
                raise NotCutError(f"forward sets what the autograd function {x.kind.__qualname__} reads")

    def with_late(self, other: "ModuleTrace", late: set[str]) -> "ModuleTrace":
        """This trace, whose pieces also have the tensors `late` that those of `other`, of eval mode, read."""
        other = other.with_places(self.names)
        if other.names != self.names:
            return self
        names = (p.short if p is not None else {} for p in other.pieces)
        return evolve(self, late=[{x: y for x, y in short.items() if y in late} for short in names])

    def short(self, s: int) -> dict[str, str]:
        """The names of the parameters and buffers that piece `s` reads, in eval mode too, by short name."""
        piece = self.pieces[s]
        return {**(piece.short if piece is not None else {}), **(self.late[s] if self.late else {})}

    def with_places(self, names: list[str]) -> "ModuleTrace":
        """This trace with its pieces at the places of `names`, None for a name it lacks; unchanged if its own
        names come in another order."""
        if [x for x in names if x in self.names] != self.names:
            return self
        at = [self.names.index(x) if x in self.names else None for x in names]
        alike = [s if n is None else at.index(self.first_alike[n]) for s, n in enumerate(at)]
        pieces = [None if n is None else self.pieces[n] for n in at]
        return evolve(self, names=names, pieces=pieces, first_alike=alike)


@define(eq=False)
class ModuleTraces:
    """The traces of a module by key, of which the last 64 are kept."""

    export: ModuleExport
    outside: Outside  # of all of them
    most: int  # elements of parameters of a segment that can be cut
    by_value: Mapping[str, bool]  # inputs on whose values a trace in training depends, as of `mark_values`
    in_eval: dict[str, bool]  # the same, in eval mode
    knows_in_eval: bool  # whether traces in eval mode know values of inputs or buffers, as `called.by_value`
    late: set[str] = field(factory=set)  # names of what eval mode alone reads
    known: dict[int, ModuleTrace] = field(factory=dict)
    first: ModuleTrace | None = None
    lock: Any = field(factory=threading.RLock)
    uncut: dict[int, Any] = field(factory=dict)  # by key, what cuts the graphs of the example

    def with_late(self, first: ModuleTrace, call: BatchCall) -> ModuleTrace:
        """The trace `first` of the example `call`, with what its pieces read in eval mode alone."""
        if self.late:
            x = without_values(mark_values(call, self.in_eval))
            with suppress(ValueError, NotCutError, BuffersWrittenError):  # which evaluation will raise
                other = in_thread(self._trace, IN_EVAL, x, torch.float32, False)
                self.first = self.known[first.key] = first.with_late(other, self.late)
        return self.first or first

    def of(self, x: Any, dtype: torch.dtype, *, training: bool) -> ModuleTrace:
        """The module's trace for inputs like `x`, parameters of `dtype`, and train or eval mode; cached."""
        leaves, structure = tree_flatten(x)
        facts = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else (type(t), t) for t in leaves]
        key = fold_seed(training, dtype, str(structure), facts) >> 2
        with suppress(KeyError):
            return self.by_key(key)
        # In this order, as a thread that traces segments asks for `lock`.
        with alone(), self.lock:
            trace = self.known.pop(key, None) or self._checked_trace(key, x, dtype, training)
            self.first = self.first or trace
            self.known[key] = trace
            if len(self.known) > MAX_TRACES:
                del self.known[next(iter(self.known))]
        return trace

    def by_key(self, key: int) -> ModuleTrace:
        """The module's trace under `key`, which the first segment passes on after it has looked the trace up."""
        with self.lock:
            trace = self.known[key] = self.known.pop(key)
            return trace

    def _checked_trace(self, key: int, x: Any, dtype: torch.dtype, training: bool) -> ModuleTrace:
        mode = "training" if training else "eval mode"
        try:
            with self.outside.tracing():
                trace = in_thread(self._trace, key, x, dtype, training)
        except (NotCutError, BuffersWrittenError) as error:
            if self.first is None:
                raise
            why = f"buffers are written: {error}" if isinstance(error, BuffersWrittenError) else str(error)
            got = f"a batch that cannot be cut in {mode} as the example is ({why})"
            refuse("model", got, "operations like those of the example", cause=error)
        first = self.first or trace
        if trace.names != first.names:  # some blocks may not be called, as in eval mode
            trace = trace.with_places(first.names)
        pieces = enumerate(trace.pieces)
        if trace.names != first.names or any(
            p and p.short.items() - first.short(s).items() for s, p in pieces
        ):
            got = f"a batch for which it runs other blocks or reads other parameters in {mode}"
            do = "pass a batch of this shape as the example"
            if not training:
                do = "read there what this or an earlier block trains, or no block, and no buffer that another "
                do += "block writes, or evaluate the module itself"
            refuse("model", got, "those of the example", do)
        # Functions of blocks that are alike in the first trace, and not in this one, need to be told their place.
        alike = trace.first_alike
        return evolve(trace, apart=any(alike[s] != alike[n] for s, n in enumerate(first.first_alike)))

    def _trace(self, key: int, x: Any, dtype: torch.dtype, training: bool) -> ModuleTrace:
        cut_in = self.uncut.get(key) or self.export.graph(
            x,
            dtype,
            training=training,
            by_value=None if training else self.knows_in_eval,
            subject="batch" if self.first else "example",
        )
        if self.first is None or key == IN_EVAL:
            self.uncut[key] = cut_in
        like = self.first.like if self.first else None
        return self._pieces(key, cut_in(blocks_of(self.export.model), most=self.most, like=like))

    def _pieces(self, key: int, cut: CutGraph) -> ModuleTrace:
        for why in cut.why:
            log.info("model: %s", why)
        pieces = [module_piece(cut, s) for s in range(len(cut.spans))]
        texts = [p.text for p in pieces]
        outputs = [
            ... if isinstance(x, torch.fx.Node) else x for x in cut.exported.graph.output_node().args[0]
        ]
        return ModuleTrace(
            key,
            [span.name for span in cut.spans],
            pieces,
            cut.inputs,
            (outputs, cut.exported.call_spec.out_spec),
            [texts.index(x) for x in texts],
            self._why_whole(cut) if len(pieces) == 1 else "",
            cut.like,
            cut.least,
            [span.place for span in cut.spans],
            cut.written,
        )

    def _why_whole(self, cut: CutGraph) -> str:
        """Why there is no cut in a graph of one span, as text for the log."""
        if cut.why:
            return cut.why[0]
        if (numel := sum(math.prod(p.shape) for p in self.export.whole.parameters)) <= self.most:
            return f"its {numel:,} elements of parameters are not more than {self.most:,}, the most for a segment"
        weights = cut.exported.graph_signature.inputs_to_parameters
        for n in cut.spans[0].nodes:
            if n.target in REGIONS and any(x.name in weights for x in n.all_input_nodes):
                return f"its parameters are read within the torch.autocast or torch.no_grad at {place_of(n)}"
        model = self.export.model
        return (
            f"{type(model).__name__} in {file_of(model)} reads its parameters in one operation, or several times, "
            "or behind frozen ones alone"
        )


def file_of(model: nn.Module) -> str:
    """The file that defines the class of `model`; the name of its module if that has no file."""
    home = type(model).__module__
    return getattr(sys.modules.get(home), "__file__", None) or home
