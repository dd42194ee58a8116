"""What backward recomputes: forward and backward of a segment as one graph, cut in two.

    recompute="all"         `repeat_forward`: backward is given weights and inputs, and repeats nodes of forward
    recompute="none"        `keep_as_autograd`: backward is given all results of forward that it reads
    recompute="min-cut"     `min_cut`: backward is given the tensors that the min-cut partitioner chooses

A cut copies nodes; the bits are those of the joint graph. The forward of tiles is cut by `piece_of`, and a backward
in halves by `split_backward`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
from attrs import frozen
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from zfunc.engine.trace.tensor_memory import dense_strides, storage_of
from zfunc.runtime.rng import is_draw_node, number_draws

# Of each differentiated output: short names of weights, and numbers of floating-point inputs, behind it.
Paths = list[set[str | int]]


@frozen(eq=False)
class JointGraph:
    """Forward and backward of a segment as one graph: `(*leaves, *cotangents) -> (*results, *gradients)`."""

    module: GraphModule
    leaves: list[Node]  # placeholders of weights and inputs
    cotangents: list[Node]  # placeholders of the output's gradients
    forward: list[Node]
    backward: list[Node]
    results: list[Any]  # nodes, or constants
    gradients: list[Any]  # nodes or constants, of trained weights and then of the input
    forward_draws: int  # draws of random numbers in forward
    out_spec: Any  # of the results
    strides: list[tuple[int, ...]]  # of the cotangents
    paths: Paths


Cut = Callable[[JointGraph], tuple[GraphModule, GraphModule]]
DECODERS = set[Any]()  # operations that make a large result of leaves, which lives where it is read
Needs = Mapping[Node, list[Node]]


_TRACING, _TRACES = Lock(), ContextVar("whether this context traces", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """A context in which no other thread traces, because make_fx and the partitioner patch the whole process, and
    what torch.compile returned runs as it was before, because compiled code crashes on tensors without memory.
    A trace inside another one, or in a copy of its context, does not wait. Graphs made there have no code
    until they are called, or `with_code`."""
    if _TRACES.get():
        yield
        return
    with _TRACING, _use_lazy_graph_module(True), torch.compiler.set_stance("force_eager"):
        token = _TRACES.set(True)
        try:
            yield
        finally:
            _TRACES.reset(token)


def graph_of(function: Callable[..., Any], *arguments: Any) -> GraphModule:
    """The graph of the operations of `function`, traced on `arguments` of fake tensors."""
    # For each node make_fx notes the Python function that was called, by a mode, and the layout of "val" again.
    unread = {"TorchFunctionMetadataMode": nullcontext, "_extract_tensor_metadata": lambda _: None}
    with alone(), patch.multiple(proxy_tensor, create=True, **unread):
        return make_fx(function, tracing_mode="fake")(*arguments)


def part_of_graph(
    module: GraphModule, inputs: Iterable[Node], nodes: Iterable[Node], results: Iterable[Any]
) -> GraphModule:
    """Copy `nodes` of a graph to a graph of their own with placeholders `inputs` and outputs `results`, which
    has no code until it is called, or `with_code`: most are cut again."""
    part, copies = Graph(), dict[Node, Node]()
    for x in inputs:
        copies[x] = part.placeholder(x.name)
        copies[x].meta = {**x.meta}
    for x in nodes:
        copies[x] = part.node_copy(x, copies.__getitem__)
    part.output([copies.get(x, x) for x in results])  # constants have no node
    return _LazyGraphModule(module, part)


def with_code(module: GraphModule) -> GraphModule:
    """`module` with the code of its graph as it is now: before threads call it, which would all make the code."""
    module.recompile()
    _LazyGraphModule.force_recompile(module)
    return module


@frozen(eq=False)
class GraphPiece:
    """A part of a traced graph that can be run by itself, with the names of the weights that it reads and the
    numbers of its random draws."""

    run: GraphModule  # (*weights that are read, *inputs) -> results
    reads: tuple[str, ...]
    draws: frozenset[Node]


def piece_of(
    module: GraphModule,
    needs: Needs,
    weights: Mapping[str, Node],
    inputs: Sequence[Node],
    results: Sequence[Any],
    end: Node,
) -> GraphPiece:
    """The part of a graph that computes `results` from the nodes `inputs` and those of `weights` that it
    needs. In-place writes into the memory of results are included if node `end`, which reads the results,
    comes after them."""
    needed = needed_for([*results, *needs[end]], needs, inputs)
    reads = tuple(name for name, x in weights.items() if x in needed)
    placeholders = dict.fromkeys([*(weights[name] for name in reads), *inputs])
    nodes = [x for x in needs if x in needed and x not in placeholders and x.op != "placeholder"]
    piece = with_code(part_of_graph(module, placeholders, nodes, results))
    return GraphPiece(piece, reads, frozenset(filter(is_draw_node, nodes)))


def needs_of(graph: Graph) -> Needs:
    """The nodes that each node of a graph needs: its inputs, and earlier nodes that write into their memory."""
    needs, writers = dict[Node, list[Node]](), defaultdict[int, list[Node]](list)
    for node in graph.nodes:
        memory = [m for x in node.all_input_nodes for m in memory_of(x)]
        needs[node] = [*node.all_input_nodes, *(w for m in memory for w in writers[m])]
        for x in changed_by(node) if mutates(node.target) else ():
            for m in memory_of(x):
                writers[m].append(node)
    return needs


def needed_for(results: Sequence[Any], needs: Needs, inputs: Sequence[Node] = ()) -> set[Node]:
    """The nodes that compute `results` from the nodes `inputs`, including those of `inputs` that are used.
    Later in-place writes into the memory of `results` are not included: nodes that read the results need
    them."""
    left, needed = [x for x in results if isinstance(x, Node)], set[Node]()
    while left:
        if (node := left.pop()) not in needed:
            needed.add(node)
            left += () if node in inputs else needs[node]
    return needed


def depending_on(roots: Iterable[Node], needs: Needs) -> set[Node]:
    """The nodes of a graph that depend on the nodes `roots`, and `roots` themselves."""
    dependent = {*roots}
    for node, read in needs.items():
        if not dependent.isdisjoint(read):
            dependent.add(node)
    return dependent


def decode_late(graph: Graph, num_forward: int) -> None:
    """Move each operation that decodes quantized weights in `graph` to just before its first reader, and
    repeat it for backward, so no decoded weights are kept. The first `num_forward` nodes of `graph` are the
    forward's."""
    nodes = list(graph.nodes)
    decoded = {x for x in nodes[:num_forward] if x.target in DECODERS and x.users}
    if not decoded:
        return
    for node in nodes[:num_forward]:
        if node.target not in DECODERS and _views_one_of(node, decoded):
            decoded.add(node)
    late = {*nodes[num_forward:-1]}
    for node in (x for x in reversed(nodes[:num_forward]) if x in decoded):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE  # for the partitioner
        if users := [x for x in graph.nodes if x in late and x in node.users]:
            with graph.inserting_before(users[0]):
                late.add(again := graph.node_copy(node))
            for user in users:
                user.replace_input_with(node, again)
        if node.users:
            next(x for x in graph.nodes if x in node.users).prepend(node)


def _views_one_of(node: Node, nodes: Collection[Node]) -> bool:
    """Whether `node` is a view of one of the nodes `made`."""
    return isinstance(node.target, OpOverload) and node.target.is_view and node.args[0] in nodes


def repeat_forward(joint: JointGraph) -> tuple[GraphModule, GraphModule]:
    """Divide a joint graph into a forward and a backward that takes weights and inputs, and recomputes what
    it needs of forward."""
    forward = part_of_graph(joint.module, joint.leaves, joint.forward, joint.results)
    inputs, nodes = [*joint.leaves, *joint.cotangents], [*joint.forward, *joint.backward]
    backward = part_of_graph(joint.module, inputs, nodes, joint.gradients)
    _cast_again(backward.graph, len(inputs) + len(joint.forward))
    return forward, backward


def _cast_again(graph: Graph, num_forward: int) -> None:
    """Repeat casts of forward to a wider dtype just before backward first reads them, so that only the
    narrower tensor is kept until then.

    The first `num_forward` nodes of `graph` are the forward's. A cast from or to memory that is written in
    place is not repeated.
    """
    nodes, written = list(graph.nodes), of_written_memory(graph)
    for node in nodes[:num_forward]:
        source = node.args[0] if node.target is torch.ops.aten._to_copy.default else node
        if source is node or written & {node, source}:
            continue
        if node.meta["val"].element_size() <= source.meta["val"].element_size():
            continue
        late = [x for x in nodes[num_forward:-1] if x in node.users]
        if late:
            with graph.inserting_before(late[0]):
                again = graph.node_copy(node)
            for user in late:
                user.replace_input_with(node, again)


def keep_as_autograd(joint: JointGraph) -> tuple[GraphModule, GraphModule]:
    """Divide a joint graph into a forward and a backward that gets every tensor of forward that it reads, as
    autograd keeps them."""
    of_forward = {*joint.leaves, *joint.forward}
    reads = [x for node in joint.backward for x in node.all_input_nodes]
    reads += [x for x in joint.gradients if isinstance(x, Node)]
    residuals = [x for x in dict.fromkeys(reads) if x in of_forward]
    for x in residuals:
        if not isinstance(x.meta["val"], Tensor):
            raise ValueError(f"backward reads {x}, which is no tensor")
    forward = part_of_graph(joint.module, joint.leaves, joint.forward, [*joint.results, *residuals])
    inputs = [*residuals, *joint.cotangents]
    return forward, part_of_graph(joint.module, inputs, joint.backward, joint.gradients)


def min_cut(joint: JointGraph) -> tuple[GraphModule, GraphModule]:
    """Divide a joint graph into forward and backward; torch's min-cut partitioner chooses the residuals."""
    # 1. The partitioner takes pure graphs: writes in place become writes out of place, if the bits are the same.
    module = joint.module
    changes = [node for node in module.graph.nodes if mutates(node.target)]
    for node in changes:
        outs = sum(a.is_out for a in node.target._schema.arguments)
        if outs and len(changed_by(node)) > outs:  # torch takes one for the other, as of rrelu_with_noise.out
            raise ValueError(f"{node.target} writes into more than its results")
        for changed in tree_leaves([x.meta["val"] for x in changed_by(node)]):
            if changed.stride() != dense_strides(changed):  # vectorized kernels differ for views
                raise ValueError(f"{node.target} changes a view in place, and gives other bits out of place")
    if changes:
        pure = functionalize(module)
        # A number among the inputs has no "val", and no node reads it.
        inputs = joint.leaves, joint.cotangents
        primals, tangents = ([x.meta.get("val", 0) for x in nodes] for nodes in inputs)
        by_name = lambda primals, tangents: pure(primals, tangents)  # noqa: E731  # the partitioner's names
        with unset_fake_temporarily():  # the mode is that of the joint graph's own fake tensors
            module = graph_of(by_name, primals, tangents)
        number_draws(module.graph, joint.forward_draws)
        if _output_strides(module) != _output_strides(joint.module):
            raise ValueError("an operation in place gives other strides out of place")
    # 2. Equal nodes are merged, so that no value is kept or recomputed twice; then the cut.
    import torch._functorch.config as partitioning
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # Its own merging of equal nodes imports the lowerings of a compiler, which takes a second.
    with alone(), partitioning.patch(cse=False):
        merged = _with_equal_nodes_merged(module)
        return min_cut_rematerialization_partition(merged, None, num_fwd_outputs=len(joint.results))


def sized_min_cut(joint: JointGraph) -> tuple[GraphModule, GraphModule]:
    """`min_cut`, if the sizes of all residuals are known in a trace. Raises ValueError if the workspace of a
    recurrent kernel is kept, as only the kernel knows its size."""
    forward, backward = min_cut(joint)
    for x in list(forward.graph.nodes)[-1].args[0][len(joint.results) :]:
        value = x.meta["val"]
        if isinstance(value, Tensor) and value.dtype == torch.uint8 and not value.numel():
            raise ValueError(f"backward reads {x}, whose size is not known before it runs")
    return forward, backward


def split_backward(backward: GraphModule, trained: int, weights: int) -> tuple[GraphModule, GraphModule]:
    """Divide a backward, whose first `trained` results are gradients of weights, into two graphs: `inputs ->
    (*others, *pending)`, and `pending -> gradients of weights`. Only the first graph reads the first
    `weights` placeholders.

    The second graph has the matrix products, and nodes that only they need. A gradient made without a
    product, as of a norm's weight, is made in the first graph: the gradient is small, the tensors it is made
    of are large.
    """
    *nodes, output = backward.graph.nodes
    results, needs = list(output.args[0]), needs_of(backward.graph)
    gradients, others = results[:trained], results[trained:]
    placeholders, needed = [x for x in nodes if x.op == "placeholder"], needed_for([output], needs)
    # 1. Reads of weights, or of memory that is written in place, stay in the first graph, in the same order.
    held = {m for x in placeholders[:weights] for m in memory_of(x)}
    held = {x for x in nodes if memory_of(x) & held} | of_written_memory(backward.graph)
    early = [x for x in nodes if x in needed and not held.isdisjoint((x, *x.all_input_nodes))]
    first = needed_for([*others, *early], needs)
    early += [x for x in gradients if not any(map(_multiplies, needed_for([x], needs) - first))]
    first = {*placeholders, *needed_for([*others, *early], needs)}
    # 2. If the first graph has a kernel with several results, it also unpacks them: only tensors are pending.
    first |= {
        x
        for x in needed
        if any(y in first and isinstance(y.meta.get("val"), tuple | list) for y in x.all_input_nodes)
    }
    second = [x for x in nodes if x in needed and x not in first]
    reads = [y for x in second for y in x.all_input_nodes]
    pending = [*dict.fromkeys(x for x in (*reads, *gradients) if x in first)]
    nodes_of_first = [x for x in nodes if x in first and x not in placeholders]
    return (
        part_of_graph(backward, placeholders, nodes_of_first, [*others, *pending]),
        part_of_graph(backward, pending, second, gradients),
    )


def _multiplies(node: Node) -> bool:
    """Whether the operation of `node` is a matrix product, or composed of such, by torch's count of FLOPs."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet in flop_registry or packet is torch.ops.aten._grouped_mm


def _with_equal_nodes_merged(module: GraphModule) -> GraphModule:
    """A copy of a graph without in-place writes in which nodes that call one function with the same arguments
    are one node. Random draws, empty tensors, and nodes that share memory with a result stay separate, as in
    eager code."""
    *nodes, output = module.graph.nodes
    merged, known = part_of_graph(module, (), nodes, output.args[0]), dict[Any, Node]()
    merged.graph.eliminate_dead_code()
    results = {x for node in list(merged.graph.nodes)[-1].all_input_nodes for x in memory_of(node)}
    for node in merged.graph.nodes:
        apart = node.target is torch.ops.aten.empty.memory_format or "draw" in node.meta
        if node.op != "call_function" or apart or memory_of(node) & results:
            continue
        leaves, structure = tree_flatten((node.args, node.kwargs))
        first = known.setdefault((node.target, structure, *((type(x), x) for x in leaves)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            merged.graph.erase_node(node)
    return merged


def memory_of(node: Node) -> set[int]:
    """The identities of the storages of the tensors that a node returns."""
    values = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    return {storage_of(t) for t in values if t.layout is torch.strided}


def mutates(target: Any) -> bool:
    """Whether the target of a node is an operation that writes into an argument."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call of the operation `func` that the call writes into."""
    declared = func._schema.arguments
    arguments = dict(zip((a.name for a in declared), args, strict=False)) | dict(kwargs)
    written = [a.name for a in declared if a.alias_info is not None and a.alias_info.is_write]
    return tree_leaves([arguments.get(name) for name in written])


def changed_by(node: Node) -> list[Node]:
    """The argument nodes that the operation of `node` writes into."""
    return [x for x in written_by(node.target, node.args, node.kwargs) if isinstance(x, Node)]


def of_written_memory(graph: Graph) -> set[Node]:
    """The nodes of a graph whose results share memory with a tensor that the graph writes in place."""
    memory = {node: memory_of(node) for node in graph.nodes}
    changed = {m for node in graph.nodes if mutates(node.target) for x in changed_by(node) for m in memory[x]}
    return {node for node, storages in memory.items() if storages & changed}


def _output_strides(module: GraphModule) -> list[Any]:
    outputs = list(module.graph.nodes)[-1].args[0]
    values = (x.meta["val"] for x in outputs if isinstance(x, Node))
    return [t.stride() for t in values if isinstance(t, Tensor)]
