"""A block in two halves, cut where the residual stream is added to: attention, and MLP or experts.

The forward of a block is traced, and cut at the value that every path from its input to its output goes through. No
operation is recognised by name: norms before, after or around are one case. A half is a segment that runs its part
of the graph, so it is planned, kept, moved and recomputed by itself.

The invariant: forward and backward of the halves are, operation by operation, those of the whole, and so are the
bits. It is checked when a block is cut.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial, wraps
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zfunc.engine.rows.cut import forward_graph
from zfunc.engine.rows.tile_attention import ROW_TOKENS
from zfunc.engine.trace.batches import Batch, unpacked
from zfunc.engine.trace.graph_cuts import (
    GraphPiece,
    Needs,
    changed_by,
    memory_of,
    mutates,
    needed_for,
    needs_of,
    piece_of,
)
from zfunc.engine.trace.purity import check_deterministic, read_outside
from zfunc.engine.trace.segment import Segment, Values, checked_segments
from zfunc.engine.trace.tensor_memory import FakeTensors, empty_like_strided, layouts
from zfunc.engine.trace.vjp import MAX_TRACES, cotangents_of, joint_graph, pull_of, restrided

NO_COPY = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
log = logging.getLogger("zfunc")


def cut_blocks(
    segments: Sequence[Segment] | nn.Sequential,
    *,
    after: str | None = None,
    example: Batch | Mapping[str, Any] | None = None,
) -> tuple[Segment, ...]:
    """The segments of a model, each block as two: "block0/1" up to the sum after attention, "block0/2" from it.

    Each is a segment like any other: `recompute`, places and memory are its own, and a slot of weights is as large
    as a half. Bits are those of the whole, but for dropout, whose numbers depend on a segment's place. Parameters
    keep their names, and `zfunc.init` their values, so checkpoints and exports fit both ways. Halves do not
    generate token by token: load the checkpoint into the whole for that.

    The place is found in a trace: the one value that all paths go through and that is used again. Segments without
    one stay whole, which is logged: embeddings, blocks whose attention and MLP read the same values, several layers
    in one. `after` names a submodule instead, such as "self_attn": the first value that all paths go through, from
    its parameters on. `example` is a batch, as for `zfunc.train_step`, of which only shapes matter; models of
    tokens need none.

    Raises ValueError for an `after` that no segment has, or after which one that has it cannot be cut.

    >>> from zfunc.models.gpt import GPTConfig, gpt_segments
    >>> [s.name for s in cut_blocks(gpt_segments(GPTConfig(num_layers=1, hidden_size=64)))]
    ['embed', 'block0/1', 'block0/2', 'head']
    """
    segments = checked_segments(segments)
    if after is not None and not any(_Block(s, after).inside for s in segments[:-1]):
        raise ValueError(
            f"after: got {after!r}, expected the name of a submodule with parameters, such as 'self_attn'"
        )
    x = torch.zeros(2, 9, dtype=torch.int64) if example is None else unpacked(example, segments[-1])[0]
    made, tried, kept = list[Segment](), list[tuple[Any, _Block]](), defaultdict[str, list[str]](list)
    with FakeTensors(), torch.no_grad():
        x = empty_like_strided(x, "cpu")
        for s in segments[:-1]:
            key = layouts(tree_leaves(x))
            block = next((b for k, b in tried if k == key and s.like(b.segment)), None)
            if block is None:
                tried.append((key, block := _Block(s, after)))
                block.find(x)
            x = block.output
            made += [s] if block.refusal else block.halves(s)
            if block.refusal:
                kept[block.refusal].append(s.name)
                if block.inside:
                    raise ValueError(f"segment {s.name!r}: {block.refusal}")
    for why, names in kept.items():
        log.info("cut_blocks: whole: %s: %s", ", ".join(names), why)
    return (*made, segments[-1])


@frozen(eq=False)
class _Cut:
    """The forward of a block for inputs of one layout, cut in two."""

    halves: tuple[GraphPiece, GraphPiece]  # of parameters and constants, and the leaves of the input
    specs: tuple[Any, Any]  # of their results
    stream: int  # the leaf that is added to
    strides: tuple[int, ...]  # of the value between


@define(eq=False)
class _Block:
    """A segment that is cut, for all that are like it; or why it is not."""

    segment: Segment
    after: str | None
    refusal: str = ""
    output: Any = None
    reads: list[tuple[str, ...]] = field(factory=list)
    known: dict[Any, _Cut] = field(factory=dict)
    functions: list[dict[str, Any]] = field(factory=list)

    @property
    def inside(self) -> set[str]:
        """The parameters of the submodule `after`, by short name."""
        return {x for x in self.segment.short if self.after and f".{self.after}." in f".{x}"}

    def find(self, x: Any) -> None:
        """Find the halves of a block with input `x`, and compare them with the whole."""
        s = self.segment
        values = {short: torch.empty(p.shape) for short, p in zip(s.short, s.parameters, strict=True)}
        values |= empty_like_strided({**s.constants, **s.buffers}, "cpu")
        try:
            self.output = s.evaluation(values, x)
        except Exception as error:
            shapes = [tuple(t.shape) for t in tree_leaves(x) if isinstance(t, Tensor)]
            raise ValueError(
                f"segment {s.name!r}: got an error on inputs of shape {shapes}, expected it to accept them: pass "
                f"example=(inputs, targets) ({error})"
            ) from error
        try:
            if s.buffers:
                raise ValueError("got buffers that forward changes")
            check_deterministic(s.module, s.function, values, (x,), s.constants)
            self.reads = [half.reads for half in self._cut(values, *tree_flatten(x), evaluating=False).halves]
            self.functions = [self._functions(half) for half in (0, 1)]
            self._compare(values, x)
        except Exception as error:
            self.refusal = str(error).partition("\n")[0]

    def halves(self, segment: Segment) -> Iterator[Segment]:
        """Those of a segment like this one. The first has what none reads; the second shares what both read."""
        named, (first, second) = dict(zip(segment.short, segment.parameters, strict=True)), self.reads
        owned = set(segment.shared)
        for half, short in enumerate(
            ([x for x in named if x in first or x not in second], [x for x in named if x in second])
        ):
            names = {named[x].name for x in short}
            yield evolve(
                segment,
                name=f"{segment.name}/{half + 1}",
                parameters=[named[x] for x in short],
                short=short,
                shared=names & owned,
                constants={x: t for x, t in segment.constants.items() if x in self.reads[half]},
                behaviour={**segment._behaviour, "half": half},
                **self.functions[half],
                **({"source": None} if half else {}),  # changes are told once
            )
            owned |= names

    def _functions(self, half: int) -> dict[str, Any]:
        def run(evaluating: bool, params: Values, x: Any, *cache: Any) -> Any:
            if cache:
                raise ValueError("got a cache for half a block, expected none: generate with the whole model")
            leaves, spec = tree_flatten(x)
            cut = self._cut(params, leaves, spec, evaluating=evaluating)
            if half == 1:
                leaves[cut.stream] = restrided(leaves[cut.stream], cut.strides)
            piece = cut.halves[half]
            return tree_unflatten(piece.run(*(params[x] for x in piece.reads), *leaves), cut.specs[half])

        whole = {"function": self.segment.function, "evaluate": self.segment.evaluation}
        return {name: wraps(f)(partial(run, name == "evaluate")) for name, f in whole.items()}

    # --- the cut ------------------------------------------------------------------------------------------------

    def _cut(self, params: Values, leaves: list[Any], spec: Any, *, evaluating: bool) -> _Cut:
        """The block for inputs like these, cut at first use; `params` are those of a half, or all."""
        s, whole = self.segment, self.segment.evaluation if evaluating else self.segment.function
        # The other half's parameters are taken to have the type of the largest of this one's.
        largest = max((params[x] for x in s.short if x in params), key=Tensor.numel)
        types = [params.get(x, largest).dtype for x in s.short]
        outside = str(read_outside(s.module, whole))
        key = evaluating, ROW_TOKENS.get(), outside, spec, layouts(leaves), *types
        cut = self.known.get(key)
        if cut is None:
            with ThreadPoolExecutor(1) as apart:  # from modes and transforms of this thread
                trace = partial(copy_context().run, self._traced, whole, types, leaves, spec, evaluating)
                self.known[key] = cut = apart.submit(trace).result()
            if len(self.known) > MAX_TRACES:
                self.known.pop(next(iter(self.known)), None)
        return cut

    def _traced(
        self, whole: Any, types: list[torch.dtype], leaves: list[Any], spec: Any, evaluating: bool
    ) -> _Cut:
        # 1. The graph of the forward, as passes differentiate it.
        s, device = self.segment, next(t.device for t in leaves if isinstance(t, Tensor))
        with FakeTensors():
            values = {
                x: torch.empty(p.shape, dtype=d) for x, p, d in zip(s.short, s.parameters, types, strict=True)
            }
            values, leaves = empty_like_strided(({**values, **s.constants}, leaves), device)
        floats = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        if not floats:
            raise ValueError("got no floating-point input")
        trained = (values[x] for x, p in zip(s.short, s.parameters, strict=True) if p.trainable)
        for t in (*trained, *(leaves[i] for i in floats)):
            t.requires_grad_(not evaluating)
        with torch.set_grad_enabled(not evaluating):
            graph, out_spec = forward_graph(whole, (values, tree_unflatten(leaves, spec)))

        # 2. Both halves: what makes the value between, all else passing, and what makes the results of it.
        *nodes, output = graph.graph.nodes
        needs, weights = needs_of(graph.graph), dict(zip(values, nodes, strict=False))
        given, stream = nodes[len(values) :][: len(leaves)], floats[0]
        between = self._place(given[stream], {x: weights[x] for x in s.short}, output, needs)
        passing = [*given[:stream], between, *given[stream + 1 :]]
        piece = partial(piece_of, graph, needs, weights)
        first, second = piece(given, passing, between), piece(passing, output.args[0], output)
        if first.draws & second.draws:
            raise ValueError("got random numbers that both halves read, expected each to draw its own")
        read = zip((first.reads, second.reads), self.reads, strict=False)
        if not all({*now} <= {*before} for now, before in read):
            shapes = [tuple(t.shape) for t in leaves if isinstance(t, Tensor)]
            raise ValueError(
                f"segment {s.name!r}: got other halves for inputs of shape {shapes} than for the example, expected "
                "the same: pass such an example to zfunc.cut_blocks"
            )
        return _Cut((first, second), (spec, out_spec), stream, between.meta["val"].stride())

    def _place(self, x: Node, parameters: Mapping[str, Node], output: Node, needs: Needs) -> Node:
        """The value of the shape of stream `x` at which a graph is cut."""
        live, weights, fits = needed_for([output], needs) - {output}, {*parameters.values()}, list[Node]()
        before = {parameters[name] for name in self.inside} & live
        layout = lambda node: [getattr(node.meta.get("val"), k, None) for k in ("shape", "dtype")]  # noqa: E731
        for node in (y for y in needs if y in live and layout(y) == layout(x)):
            first, second = needed_for([node], needs), needed_for([output], needs, [node])
            writes = (z for y in second - {node} if mutates(y.target) for z in changed_by(y))
            apart = memory_of(node).isdisjoint(m for y in writes for m in memory_of(y))
            if x in first - second and apart and first & weights and second & weights and before <= first:
                fits.append(node)
        again = [y for y in fits if sum(user in live for user in y.users) > 1]
        found = fits[:1] if before else again if len(again) == 1 else fits
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} values" if found else f"no value after {self.after!r}" if before else "no value"
        instead = "leave it whole, as where attention and MLP read the same, or it is changed in place"
        instead = "pass after=, the name of a submodule before it" if found else instead
        raise ValueError(
            f"got {what} through which all paths go, expected one, the sum after attention: {instead}"
        )

    def _compare(self, values: Values, x: Any) -> None:
        """Raise ValueError unless the halves are the operations of the whole, in forward and in backward."""
        s, (first, second) = self.segment, (x["function"] for x in self.functions)
        trained = {x: values.pop(x) for x, p in zip(s.short, s.parameters, strict=True) if p.trainable}
        leaves, spec = tree_flatten((trained, values, (x,)))
        given, known = cotangents_of(self.output), dict[Any, int]()
        whole, halves = (
            expression(joint_graph(pull_of(f, True, False), None, leaves, spec, given).module, known)
            for f in (s.function, lambda values, x: second(values, first(values, x)))
        )
        if whole != halves:
            raise ValueError(
                "got other operations in halves than in the whole, expected the same: torch.no_grad and a "
                "torch.autograd.Function are not in a trace of forward, leave it whole"
            )


def expression(joint: GraphModule, known: dict[Any, int]) -> int:
    """A number for what a graph returns: the same where the same operations make it."""
    numbers = dict[Node, int]()
    for i, (node, needs) in enumerate(needs_of(joint.graph).items()):
        leaves, structure = tree_flatten((node.args, node.kwargs))
        read = [numbers[x] if isinstance(x, Node) else (type(x), repr(x)) for x in leaves]
        constant = str(getattr(joint, str(node.target), None))
        own = {"placeholder": i, "get_attr": constant}.get(node.op, node.target)
        key = own, structure, *read, frozenset(numbers[x] for x in needs)
        numbers[node] = numbers[node.args[0]] if node.target in NO_COPY else known.setdefault(key, len(known))
    return [*numbers.values()][-1]
