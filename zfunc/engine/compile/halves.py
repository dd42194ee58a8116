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
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial, wraps
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from zfunc.engine.compile.cost_trace import empty_like_strided
from zfunc.engine.compile.purity import check_deterministic, read_outside
from zfunc.engine.compile.recompute import JointGraph, changed_by, memory_of, mutates, part_of_graph
from zfunc.engine.compile.segment import Segment, Values, checked_segments
from zfunc.engine.compile.tensor_memory import FakeTensors, layouts
from zfunc.engine.compile.tile_attention import ROW_TOKENS
from zfunc.engine.compile.tile_cut import forward_graph
from zfunc.engine.compile.vjp import (
    MAX_TRACES,
    SegmentWeights,
    cotangents_of,
    joint_graph,
    pull_of,
    restrided,
)
from zfunc.engine.step.batches import Batch, unpacked
from zfunc.runtime.rng import is_draw_node

Needs = Mapping[Node, list[Node]]
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
    its output on. `example` is a batch, as for `zfunc.train_step`, of which only shapes matter; models of tokens
    need none.

    Raises ValueError for an `after` that no segment has, or after which one that has it cannot be cut.

    >>> from zfunc.models.gpt import GPTConfig, gpt_segments
    >>> [s.name for s in cut_blocks(gpt_segments(GPTConfig(num_layers=1, hidden_size=64)))]
    ['embed', 'block0/1', 'block0/2', 'head']
    """
    segments = checked_segments(segments)
    named = [s for s in segments[:-1] if after is not None and _submodule(s, after) is not None]
    if after is not None and not named:
        raise ValueError(f"after: got {after!r}, expected the name of a submodule, such as 'self_attn'")
    x = torch.zeros(2, 9, dtype=torch.int64) if example is None else unpacked(example, segments[-1])[0]
    made, tried, kept = list[Segment](), list[tuple[Any, _Block]](), defaultdict[str, list[str]](list)
    with FakeTensors(), torch.no_grad():
        x = tree_map_only(Tensor, partial(empty_like_strided, device="cpu"), x)
        for s in segments[:-1]:
            key = layouts(tree_leaves(x))
            block = next((b for k, b in tried if k == key and s.like(b.segment)), None)
            if block is None:
                tried.append((key, block := _Block(s, after if s in named else None)))
                block.find(x)
            x = block.output
            made += [s] if block.refusal else block.halves(s)
            if block.refusal and s in named:
                raise ValueError(f"segment {s.name!r}: {block.refusal}")
            if block.refusal:
                kept[block.refusal].append(s.name)
    for why, names in kept.items():
        log.info("cut_blocks: whole: %s: %s", ", ".join(names), why)
    return (*made, segments[-1])


@frozen(eq=False)
class _Cut:
    """The forward of a block for inputs of one layout, cut in two."""

    parts: list[GraphModule]  # (*what is read of parameters and constants, *leaves of the input) -> results
    reads: list[tuple[str, ...]]
    stream: int  # the leaf that is added to
    strides: tuple[int, ...]  # of the value between
    spec: Any  # of the results


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

    def find(self, x: Any) -> None:
        """Find the halves of a block with input `x`, and compare them with the whole."""
        s = self.segment
        values = {short: torch.empty(p.shape) for short, p in zip(s.short, s.parameters, strict=True)}
        values |= {name: empty_like_strided(t, "cpu") for name, t in {**s.constants, **s.buffers}.items()}
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
            self.reads = self._cut(values, *tree_flatten(x), evaluating=False).reads
            self.functions = [self._functions(half) for half in (0, 1)]
            self._compare(values, x)
        except Exception as error:
            self.refusal = str(error).partition("\n")[0]

    def halves(self, segment: Segment) -> Iterator[Segment]:
        """Those of a segment like this one. The first has what none reads; the second shares what both read."""
        named = dict(zip(segment.short, segment.parameters, strict=True))
        first, second = ([x for x in named if x in reads] for reads in self.reads)
        first += [x for x in named if x not in first and x not in second]
        for half, short in enumerate((first, second)):
            names = {named[x].name for x in short}
            shared = {named[x].name for x in first if half == 1} | segment.shared
            yield evolve(
                segment,
                name=f"{segment.name}/{half + 1}",
                parameters=[named[x] for x in short],
                short=short,
                initial=partial(_initial, segment, names - shared),
                shared=names & shared,
                origins={name: t for name, t in segment.origins.items() if name in names},
                constants={x: t for x, t in segment.constants.items() if x in self.reads[half]},
                half=half + 1,
                **self.functions[half],
                **({"source": None} if half else {}),  # changes are told once
            )

    def _functions(self, half: int) -> dict[str, Any]:
        def run(evaluating: bool, params: Values, x: Any, *cache: Any) -> Any:
            if cache:
                raise ValueError("got a cache for half a block, expected none: generate with the whole model")
            leaves, spec = tree_flatten(x)
            cut = self._cut(params, leaves, spec, evaluating=evaluating)
            if half == 1:
                leaves[cut.stream] = restrided(leaves[cut.stream], cut.strides)
            results = cut.parts[half](*(params[name] for name in cut.reads[half]), *leaves)
            if half == 1:
                return tree_unflatten(results, cut.spec)
            (leaves[cut.stream],) = results  # all else passes
            return tree_unflatten(leaves, spec)

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
        s, reached = self.segment, list[str]()
        device = next(t.device for t in leaves if isinstance(t, Tensor))
        values = {
            x: torch.empty(p.shape, dtype=dtype, device="meta")
            for x, p, dtype in zip(s.short, s.parameters, types, strict=True)
        } | s.constants
        everything, all_spec = tree_flatten((values, {}, (tree_unflatten(leaves, spec),)))
        module = None if self.after is None else _submodule(whole, self.after)

        def note(_module: nn.Module, _inputs: Any, y: Any) -> None:
            tensors = [t for t in tree_leaves(y) if isinstance(t, Tensor)]
            reached.extend(_node_of(t).name for t in tensors[:1])

        def marked(values: Values, x: Any) -> Any:
            with _Attention(), nullcontext() if module is None else module.register_forward_hook(note):
                return whole(values, x)

        def forward(values: Values, x: Any) -> Any:
            if evaluating:
                return marked(values, x)
            return pull_of(marked, True, False)(_weights(s, values), (x,))[0]

        with torch.no_grad():
            like = lambda _, t: empty_like_strided(t, device)  # noqa: E731
            graph, out_spec = forward_graph(forward, everything, all_spec, like)

        # 2. Both halves: what makes the value between, and what makes the results of it.
        *nodes, output = graph.graph.nodes
        weights, given = nodes[: len(values)], nodes[len(values) : len(everything)]
        floats = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
        if not floats:
            raise ValueError("got no floating-point input")
        stream = floats[0]
        needs, results = _needs(graph.graph), output.args[0]
        between = self._place(given[stream], weights[: len(s.short)], results, needs, reached[-1:])
        parts, reads, drawn = list[GraphModule](), list[tuple[str, ...]](), set[Node]()
        for made, inputs in (
            ([between], given),
            (results, [*given[:stream], between, *given[stream + 1 :]]),
        ):
            needed = _needed(made, needs, inputs)
            read = {name: node for name, node in zip(values, weights, strict=True) if node in needed}
            own = [x for x in nodes[len(everything) :] if x in needed and x not in inputs]
            draws = {x for x in own if is_draw_node(x)}
            if draws & drawn:
                raise ValueError("got random numbers that both halves read, expected each to draw its own")
            drawn |= draws
            parts.append(part_of_graph(graph, [*read.values(), *inputs], own, made))
            reads.append(tuple(read))
        if self.reads and not all({*a} <= {*b} for a, b in zip(reads, self.reads, strict=True)):
            shapes = [tuple(t.shape) for t in leaves if isinstance(t, Tensor)]
            raise ValueError(
                f"segment {s.name!r}: got other halves for inputs of shape {shapes} than for the example, expected "
                "the same: pass such an example to zfunc.cut_blocks"
            )
        return _Cut(parts, reads, stream, between.meta["val"].stride(), out_spec)

    def _place(
        self, x: Node, weights: list[Node], results: list[Any], needs: Needs, reached: list[str]
    ) -> Node:
        """The value of the shape of stream `x` at which a graph is cut."""
        live, fits, order = _needed(results, needs), list[Node](), [node.name for node in needs]
        layout = lambda node: [getattr(node.meta.get("val"), k, None) for k in ("shape", "dtype")]  # noqa: E731
        for node in (y for y in needs if y in live and layout(y) == layout(x)):
            first, second = _needed([node], needs), _needed(results, needs, [node])
            writes = (z for y in second - {node} if mutates(y.target) for z in changed_by(y))
            changed = {m for y in writes for m in memory_of(y)} & memory_of(node)
            if x in first - second and not changed and first & {*weights} and second & {*weights}:
                fits.append(node)
        if self.after is not None:
            found = [y for y in fits if reached and order.index(y.name) >= order.index(reached[0])][:1]
        else:
            again = [y for y in fits if sum(user in live for user in y.users) > 1]
            found = again if len(again) == 1 else fits
        if len(found) != 1:
            what, instead = f"{len(found)} values", "pass after=, the name of a submodule before it"
            if not found:
                what = "no value" if self.after is None else f"no value after {self.after!r}"
                instead = (
                    "leave it whole, as where attention and MLP read the same, or it is changed in place"
                )
            raise ValueError(
                f"got {what} through which all paths go, expected one, the sum after attention: {instead}"
            )
        return found[0]

    def _compare(self, values: Values, x: Any) -> None:
        """Raise ValueError unless the halves are the operations of the whole, in forward and in backward."""
        s, (first, second) = self.segment, (x["function"] for x in self.functions)
        weights = _weights(s, values)
        leaves, spec = tree_flatten((weights.trained, weights.fixed, (x,)))
        known: dict[Any, int] = {}
        whole, halves = (
            _expressions(
                joint_graph(pull_of(f, True, False), None, leaves, spec, cotangents_of(self.output)), known
            )
            for f in (s.function, lambda values, x: second(values, first(values, x)))
        )
        if whole != halves:
            raise ValueError(
                "got other operations in halves than in the whole, expected the same: torch.no_grad and a "
                "torch.autograd.Function are not in a trace of forward, leave it whole"
            )


def _initial(segment: Segment, names: set[str], seed: int) -> Values:
    return {name: t for name, t in segment.initial(seed).items() if name in names}


def _weights(segment: Segment, values: Values) -> SegmentWeights:
    trained = {x for x, p in zip(segment.short, segment.parameters, strict=True) if p.trainable}
    fixed = {x: t for x, t in values.items() if x not in trained}
    return SegmentWeights({x: values[x] for x in segment.short if x in trained}, fixed)


def _submodule(segment: Any, name: str) -> nn.Module | None:
    """The module of this name, or end of a name, in that of a segment or of its function."""
    modules = segment.module.named_modules() if getattr(segment, "module", None) is not None else ()
    return next((m for path, m in modules if f".{path}".endswith(f".{name}")), None)


# --- graphs -------------------------------------------------------------------------------------------------------


def _needs(graph: Graph) -> dict[Node, list[Node]]:
    """What each node of a graph needs: its inputs, and what has been written into their memory before."""
    needs, writers = dict[Node, list[Node]](), defaultdict[int, list[Node]](list)
    for node in graph.nodes:
        memory = [m for x in node.all_input_nodes for m in memory_of(x)]
        needs[node] = [*node.all_input_nodes, *(w for m in memory for w in writers[m])]
        for x in changed_by(node) if mutates(node.target) else ():
            for m in memory_of(x):
                writers[m].append(node)
    return needs


def _needed(results: Sequence[Any], needs: Needs, given: Sequence[Node] = ()) -> set[Node]:
    """The nodes that make `results` of what is `given`, and all of these that they use."""
    left, needed = [x for x in results if isinstance(x, Node)], set[Node]()
    while left:
        if (node := left.pop()) not in needed:
            needed.add(node)
            left += () if node in given else needs[node]
    return needed


def _expressions(joint: JointGraph, known: dict[Any, int]) -> list[Any]:
    """A number for each result and gradient of a joint graph: the same where the same operations make it."""
    numbers, needs = dict[Node, int](), _needs(joint.module.graph)
    for i, node in enumerate(needs):
        if node.target in NO_COPY:
            numbers[node] = numbers[node.args[0]]
            continue
        leaves, structure = tree_flatten((node.args, node.kwargs))
        own: Any = {"placeholder": i, "call_function": node.target}.get(node.op)
        own = str(getattr(joint.module, node.target)) if node.op == "get_attr" else own
        read = [numbers[x] if isinstance(x, Node) else (type(x), repr(x)) for x in leaves]
        key = own, structure, *read, *(numbers[x] for x in needs[node] if x in numbers)
        numbers[node] = known.setdefault(key, len(known))
    return [numbers.get(x, x) for x in (*joint.results, *joint.gradients)]


def _node_of(t: Tensor) -> Any:
    """The node that makes a tensor in the trace that runs."""
    while is_functorch_wrapped_tensor(t):
        t = get_unwrapped(t)
    mode = get_proxy_mode()
    assert mode is not None
    return get_proxy_slot(t, mode.tracer).proxy.node


class _Attention(TorchFunctionMode):
    """Keeps attention as one operation in a trace: how it runs depends on what differentiates or tiles it later."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            given["made_of"] = getattr(given.get("attn_mask"), "made_of", None)
            node = _node_of(y)  # the last of those that it is made of
            node.target, node.args, node.kwargs = attention, (), tree_map_only(Tensor, _node_of, given)
        return y


def attention(made_of: Any, **given: Any) -> Tensor:
    """Attention with a mask that says what it is made of (zfunc/models/sequences.py)."""
    if made_of is not None:
        given["attn_mask"].made_of = made_of
    return scaled_dot_product_attention(**given)
