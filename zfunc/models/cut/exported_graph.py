"""Questions about the nodes of a module's exported graph: what they write, share and need, and what is refused."""

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from zfunc.engine.trace.graph_cuts import changed_by, mutates
from zfunc.errors import refuse
from zfunc.models.cut.functions import FunctionCall
from zfunc.models.cut.user_code import LIBRARIES

GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
REGIONS = {GRAD_MODE, AUTOCAST}  # whose graphs pieces copy
CHECKS = {  # of what a trace knows, or of values
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
}
BRANCH = (
    "on which a shape or a branch depends, expected what can be traced without values: compute all of it, and mask "
    "with torch.where(mask, a, b) (each expert for all rows; padded sequences, none that are packed), compute it "
    "in the collator and pass the number, pass what decides it as a Python number (to nn.Transformer, "
    "tgt_is_causal), or leave out what skips or masks at random (of transformers, layerdrop=0.0, "
    "apply_spec_augment=False)"
)
BRANCHES = (
    "DataDependentOutput",
    "DynamicOutputShape",
    "GuardOnDataDependent",
    "Unbacked",
    "unbacked",
    "data-dependent",
    "_local_scalar_dense",
    "but got FakeTensor",
)
aten = torch.ops.aten
CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other}
CALLED = str(Path(__file__).with_name("called.py"))
CONTROL = {"cond", "while_loop", "scan", "associative_scan", "map_impl"}  # operations that take functions
# Operations that may return their argument, or views, as no schema says: a dropout of 0 its input.
VIEWS = {aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout, aten.type_as}
VIEWS |= {aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.broadcast_tensors, aten.meshgrid}
STATISTICS = {aten.batch_norm.default: (3, 4), aten.instance_norm.default: (3, 4)}


class NotCutError(Exception):
    """Raised, with the reason, for a module that cannot be cut and becomes one segment."""


class ValueBranchError(ValueError):
    """Raised, with the line, for a module in which a shape or a branch depends on the value of a tensor."""


class BuffersWrittenError(Exception):
    """Raised, with their names, for buffers that forward writes and the caller did not list as changing."""


def is_branch(error: Exception) -> bool:
    """Whether `error` says that traced code branched on a tensor's value."""
    text = f"{type(error).__name__}: {error}"
    return any(x in text for x in BRANCHES)


def drop_casts(graph: Graph) -> None:
    """Remove casts to the type that a tensor has, which return the tensor: a trace knows both by one name."""
    for n in graph.nodes:
        said = (*n.args[1:], *n.kwargs.values())
        copies = any(x is True or isinstance(x, torch.memory_format) for x in said)
        if n.target in CASTS and not copies and n.meta["val"].dtype == n.args[0].meta["val"].dtype:
            n.replace_all_uses_with(n.args[0])


def place_assignments(graph: Graph) -> None:
    """Move each copy into a buffer of an exported `graph`, which a trace has at its end (CalledModel), to where the
    copied value is made, or behind the last read of the buffer's former value. A clone of a former value, as where
    two buffers are swapped, moves before the first read of its buffer, unless a node writes the buffer earlier.
    A copy gets the line of the value."""
    base = memory_roots(graph.nodes)
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    copies = [n for n in copies if n.args[0].op == "placeholder"]
    for x in dict.fromkeys(n.args[1] for n in copies):
        if x.target is aten.clone.default and x.args[0].op == "placeholder":
            reads, writes = _uses_before(x, x.args[0], base)
            if reads and not writes:
                reads[0].prepend(x)
                x.meta |= {k: reads[0].meta.get(k) for k in ("nn_module_stack", "stack_trace")}
    for n in copies:
        to, x = n.args[:2]
        n.meta["stack_trace"] = x.meta.get("stack_trace")
        at = {m: i for i, m in enumerate(graph.nodes)}
        last = max((x, *_uses_before(n, to, base)[0], *_uses_before(n, base[x], base)[1]), key=at.__getitem__)
        if last.op == "call_function":
            last.append(n)
            n.meta["nn_module_stack"] = last.meta.get("nn_module_stack")


Readers = Mapping[
    str, list[str]
]  # by name of a tensor, the modules in whose forward a node reads it, by path


def readers_of(nodes: Iterable[Node], sources: Mapping[str, str]) -> Readers:
    """Who reads each parameter, buffer and constant in `sources`, a module for each node that does."""
    readers = defaultdict[str, list[str]](list)
    for n in nodes:
        for x in n.all_input_nodes:
            if x.name in sources:
                readers[sources[x.name]].append(_caller(n))
    return readers


def pass_to_others(graph: Graph, sources: Mapping[str, str], readers: Readers) -> None:
    """Let nodes that read one of `sources` in addition to `readers`, those in training, and after one of these,
    read a copy made before that one: a value that is passed on, where the tensor itself would be tied."""
    at = {n: i for i, n in enumerate(graph.nodes)}
    for x in graph.find_nodes(op="placeholder"):
        left, others, first = [*readers.get(sources.get(x.name, ""), ())], list[Node](), None
        for n in sorted(x.users, key=at.__getitem__):
            if _caller(n) in left:
                left.remove(_caller(n))
                first = first or n
            elif first is not None:
                others.append(n)
        if first is not None and others:
            with graph.inserting_before(first):
                copy = graph.call_function(aten.clone.default, (x,))
            copy.meta = {**first.meta, "val": x.meta["val"]}
            for n in others:
                n.replace_input_with(x, copy)


def _caller(node: Node) -> str:
    """The path of the module whose forward made a node; "" of the model itself."""
    return ([path for path, _ in (node.meta.get("nn_module_stack") or {}).values()] or [""])[-1]


def _uses_before(node: Node, root: Node, base: Mapping[Node, Node]) -> tuple[list[Node], list[Node]]:
    """The nodes before `node` that get memory of `root`, and those of them that write it. `base` is of
    `memory_roots`."""
    before = [*takewhile(lambda m: m is not node, node.graph.nodes)]
    reads = [m for m in before if root in {base[y] for y in m.all_input_nodes}]
    return reads, [m for m in reads if root in {base[y] for y in arguments_written(m)}]


def checked_writes(exported: ExportedProgram, sources: Mapping[str, str], fixed: set[str]) -> set[str]:
    """The names of the buffers that the graph writes. Raises BuffersWrittenError, with their names, for those in
    `fixed`, and ValueError if it writes into a parameter or reads a sparse tensor, or a constant whose values the
    trace lacks. `sources` has the names of the module's tensors by placeholder."""
    signature = exported.graph_signature
    base = memory_roots(exported.graph.nodes)
    written: dict[str, Node] = {}  # by placeholder or node written into: what writes it first
    for n in base:
        for x in arguments_written(n):
            written.setdefault(base.get(x, x).name, n)
    if buffers := {x for x in map(sources.get, written) if x in fixed}:
        raise BuffersWrittenError(buffers)
    for name, n in written.items():
        if name in signature.inputs_to_parameters and n.target is torch.ops.aten.embedding_renorm_.default:
            got = f"max_norm of an embedding at {place_of(n)}, which scales the weight {sources[name]!r} in forward"
            do = "leave max_norm out"
            refuse("model", got, "parameters that the optimizer alone changes", do)
        if name in signature.inputs_to_parameters:
            got = f"a write into the parameter {sources[name]!r} at {place_of(n)}"
            do = "make it a buffer (register_buffer), which forward may write"
            refuse("model", got, "parameters that the optimizer alone changes", do)
    for n in exported.graph.nodes:
        value = n.meta.get("val")
        if n.users and isinstance(value, Tensor) and value.layout is not torch.strided:
            at = place_of(n if n.op == "call_function" else next(iter(n.users)))
            do = "call to_dense(), or select and add rows by their indices (x[index], index_add)"
            refuse("model", f"a tensor of {value.layout} at {at}", "dense ones", do)
        constant = exported.constants.get(signature.inputs_to_lifted_tensor_constants.get(n.name, ""))
        if n.users and isinstance(constant, FakeTensor):
            place = place_of(next(iter(n.users)))
            got = f"a gradient of torch.autograd.grad, read at {place}"
            refuse("model", f"{got}, whose values a trace lacks", "torch.func.grad")
        if n.users and is_fake(constant):  # wrapped by torch.func
            raise NotCutError(f"its trace has a torch.func.grad at {place_of(next(iter(n.users)))}")
    return {sources[x] for x in written if x in sources}


def check_operations(calls: Iterable[Node]) -> None:
    """Raise ValueBranchError if the result of one of `calls` has a size that a tensor's values decide, and
    NotCutError if one, also in a region of another grad or autocast mode, is no operation of tensors."""
    for n in calls:
        if any(map(_of_value, tree_leaves(n.meta.get("val")))):
            raise ValueBranchError(f"model: got a number of a tensor's value at {place_of(n)}, {BRANCH}")
        for x in region_of(n)[0].graph.nodes if n.target in REGIONS else (n,):
            known = isinstance(x.target, OpOverload | FunctionCall) or x.target is operator.getitem
            name = getattr(x.target, "__name__", str(x.target))
            if name in CONTROL:
                do = "compute all of it and mask with torch.where(mask, a, b), or loop in Python"
                refuse("model", f"torch's {name} at {place_of(n)}", "operations of tensors alone", do)
            if x.op == "call_function" and not known and x.target not in REGIONS:
                # Part of it may stay open over several operations.
                raise NotCutError(f"its trace has {name} at {place_of(n)}, as torch.func.grad leaves")


def arguments_written(node: Node) -> list[Node]:
    """The arguments of a node that it writes into, also in a region of another grad or autocast mode."""
    if node.op != "call_function":
        return []
    if node.target in REGIONS:
        inner, arguments = region_of(node)
        inside = dict(zip(inner.graph.find_nodes(op="placeholder"), arguments, strict=True))
        base = memory_roots(inner.graph.nodes)
        roots = (base.get(x, x) for n in base for x in arguments_written(n))
        return [inside[x] for x in roots if x in inside]
    statistics = [x for i in STATISTICS.get(node.target, ()) if isinstance(x := node.args[i], Node)]
    return [*(changed_by(node) if mutates(node.target) else ()), *statistics]


def memory_roots(nodes: Iterable[Node]) -> dict[Node, Node]:
    """By node, the node whose memory its result may be a view of: itself where it has memory of its own."""
    base: dict[Node, Node] = {}
    for n in nodes:
        base[n] = next((base.get(x, x) for x in n.all_input_nodes), n) if _may_alias(n) else n
    return base


def _may_alias(node: Node) -> bool:
    """Whether the result of a node may share memory with an argument, as a view does."""
    schema = getattr(node.target, "_schema", None)
    viewed = schema is not None and any(r.alias_info for r in schema.returns)
    packet = getattr(node.target, "overloadpacket", None)
    return node.target is operator.getitem or viewed or packet in VIEWS


def region_of(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """The module of the graph of a region in another grad or autocast mode, and the region's arguments."""
    k = 1 if node.target is GRAD_MODE else 4
    return getattr(node.graph.owning_module, node.args[k].target), node.args[k + 1 :]


def needed_nodes(nodes: list[Node], outputs: Iterable[Node]) -> set[Node]:
    """The nodes that a graph's outputs need, and the nodes that write in place, with the inputs of both."""
    needed = {*outputs}
    for n in reversed(nodes):
        if n.target not in CHECKS and (n in needed or arguments_written(n)):
            needed |= {n, *n.all_input_nodes}
    return needed


def differentiable_nodes(nodes: list[Node], sources: Mapping[str, str], trained: set[str]) -> set[Node]:
    """The nodes of a graph with a gradient: not integer, computed from `trained` parameters with grad mode on."""
    differentiable = {n for n in nodes if n.op == "placeholder" and sources.get(n.name) in trained}
    for n in nodes:
        stops = n.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
        stops = stops or (n.target is GRAD_MODE and not n.args[0])
        value = n.meta.get("val")
        whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        if n.op != "call_function" or stops or whole:
            continue
        if not differentiable.isdisjoint(n.all_input_nodes):
            differentiable.add(n)
            # What is written becomes a function of what is written into it.
            differentiable |= {*changed_by(n)} if mutates(n.target) else set()
    return differentiable


def _of_value(x: Any) -> bool:
    """Whether `x`, a number or tensor of a trace, is or has a symbolic size that only a tensor's values decide."""
    numbers = x.shape if isinstance(x, Tensor) else (x,)
    return any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in numbers)


def place_of(node: Node) -> str:
    """The file and line of the user's code that made a node, as "file:line"; else the node's name."""
    if node.target in REGIONS:
        inside = [n for n in region_of(node)[0].graph.nodes if n.meta.get("stack_trace")]
        return place_of(inside[0]) if inside else node.name
    trace = node.meta.get("stack_trace") or ""
    lines = re.findall(r'^ *File "(.*)", line (\d+)', trace, re.MULTILINE)  # innermost last
    lines = [x for x in lines if not x[0].startswith(LIBRARIES)] or lines
    if lines and lines[-1][0] == CALLED:  # a trace has lines of functions that are called forward
        return "a line of the loss, or of a forward that was replaced"
    return ":".join(lines[-1]) if lines else node.name
