"""The part of a module's graph between two cuts as a function of tensors, on any device.

Equal parts have equal texts, in which nodes are numbered and parameters are named from their block.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from zfunc.models.cut.ctc import ctc_losses
from zfunc.models.cut.exported_graph import GRAD_MODE, REGIONS, region_of
from zfunc.models.cut.known import without_modes
from zfunc.models.cut.spans import CutGraph

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.int8}


@frozen(eq=False)
class ModulePiece:
    """The part of a module's graph between two cuts: `run(device, *parameters and buffers, *tensors alive before)`
    returns the tensors alive after it. `short` has the module's names of parameters and buffers by short name."""

    run: GraphModule
    short: dict[str, str]
    text: str


def module_piece(cut: CutGraph, s: int) -> ModulePiece:
    """Span `s` of a cut graph as a function of its parameters, buffers and the tensors alive before it."""
    span, before, after = cut.spans[s], cut.alive[s], cut.alive[s + 1]
    prefix = f"{span.name.partition('@')[0]}."
    root, graph, copies = nn.Module(), Graph(), dict[Node, Any]()
    device = graph.placeholder("device")
    # 1. What is read: parameters and buffers by short names, constants of the trace, what is alive.
    read = dict.fromkeys(x for n in span.nodes for x in n.all_input_nodes if x.name in cut.sources)
    if s == len(cut.spans) - 1:
        read |= dict.fromkeys(x for x in after if x.name in cut.sources)
    constants = cut.exported.graph_signature.inputs_to_lifted_tensor_constants
    held: dict[str, Node] = {}
    for x in read:
        if x.name not in constants:
            held.setdefault(cut.sources[x.name], x)
    short = {name.removeprefix(prefix): name for name in held}
    if len(short) < len(held):  # a name of the block is one of the whole, too
        short = {name: name for name in held}
    weights = {name: graph.placeholder(f"weight_{k}") for k, name in enumerate(short.values())}
    copies |= {x: weights[cut.sources[x.name]] for x in read if x.name not in constants}
    for k, x in enumerate(before):
        copies[x] = graph.placeholder(f"alive_{k}")
    last = s == len(cut.spans) - 1
    for x in before:
        if s:
            copies[x] = graph.call_function(_from_crossing, (copies[x], *_crossing(cut, x)))
    texts = list[str]()
    for k, x in enumerate(x for x in read if x.name in constants):
        with without_modes():  # fake tensors of complex numbers have no values
            value = cut.exported.constants[cut.sources[x.name]].detach()
            said = repr((value.dtype, value.shape, value.tolist()))
        root.register_buffer(f"constant_{k}", value)
        copies[x] = graph.call_function(torch.Tensor.to, (graph.get_attr(f"constant_{k}"), device))
        texts.append(hashlib.sha256(said.encode()).hexdigest())
    # 2. What is computed, and what is passed on.
    texts += _copy_nodes(span.nodes, root, graph, copies, device)
    results = [copies[x] for x in after]
    if not last:
        results = [
            graph.call_function(_crossing_form, (r, *_crossing(cut, x)))
            for r, x in zip(results, after, strict=True)
        ]
    graph.output(results)
    run = GraphModule(root, graph)
    return ModulePiece(run, short, "\n".join([run.code, *short, *texts]))


def _copy_nodes(
    nodes: Any, root: nn.Module, graph: Graph, copies: dict[Node, Any], device: Node
) -> list[str]:
    """Copy `nodes` into `graph` and enter each copy in `copies`, by node. Regions in another grad or autocast
    mode become modules of `root`; returns their code. `device` replaces every device among arguments."""
    texts = list[str]()

    def copied(x: Any) -> Any:
        return device if isinstance(x, torch.device) else copies[x] if isinstance(x, Node) else x

    for n in nodes:
        if n.target in REGIONS:
            k = 1 if n.target is GRAD_MODE else 4
            inner = _with_device(region_of(n)[0])
            name = f"inner_{len(texts)}"
            root.add_module(name, inner)
            texts.append(inner.code)
            function = _with_grad_mode if n.target is GRAD_MODE else _with_autocast
            arguments = torch.fx.map_arg(n.args[k + 1 :], copied)
            copies[n] = graph.call_function(function, (graph.get_attr(name), n.args[:k], device, *arguments))
            continue
        args, kwargs = (_replaced(x, copied) for x in (n.args, n.kwargs))
        copies[n] = graph.create_node(n.op, INSTEAD.get(n.target, n.target), args, kwargs)
    return texts


def _replaced(x: Any, copied: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)([_replaced(y, copied) for y in x])
    if isinstance(x, Mapping):
        return {k: _replaced(y, copied) for k, y in x.items()}
    if isinstance(x, slice):
        return slice(*(_replaced(y, copied) for y in (x.start, x.stop, x.step)))
    return copied(x)


def _with_device(module: GraphModule) -> GraphModule:
    """A copy of the graph of a region in another grad or autocast mode, with the device as first argument."""
    root, graph, copies = nn.Module(), Graph(), dict[Node, Any]()
    device = graph.placeholder("device")
    *nodes, output = module.graph.nodes
    for k, n in enumerate(x for x in nodes if x.op == "placeholder"):
        copies[n] = graph.placeholder(f"given_{k}")
    calls = [n for n in nodes if n.op == "call_function"]
    _copy_nodes(calls, root, graph, copies, device)
    graph.output(_replaced(output.args[0], lambda x: copies[x] if isinstance(x, Node) else x))
    return GraphModule(root, graph)


def _one_hot(t: Tensor, num_classes: int) -> Tensor:
    """`F.one_hot` in operations that read no values of `t` on the host, as a trace without values needs."""
    return (t[..., None] == torch.arange(num_classes, device=t.device)).long()


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *args: Any) -> Tensor:
    """`torch.batch_norm` for `x` in 16 bits too, with running statistics, weight and bias in fp32."""
    if mean is not None and mean.dtype != x.dtype:
        weight, bias = (t if t is None else t.to(mean.dtype) for t in (weight, bias))
    return torch.batch_norm(x, weight, bias, mean, var, *args)


INSTEAD = {
    torch.ops.aten.one_hot.default: _one_hot,
    torch.ops.aten.batch_norm.default: _batch_norm,
    torch.ops.zfunc.ctc_losses.default: ctc_losses,
}


def _with_grad_mode(run: GraphModule, mode: tuple[Any, ...], device: torch.device, *arguments: Any) -> Any:
    with torch.set_grad_enabled(*mode):
        return run(device, *arguments)


def _with_autocast(run: GraphModule, mode: tuple[Any, ...], device: torch.device, *arguments: Any) -> Any:
    _, dtype, enabled, cached = mode
    with torch.autocast(device.type, dtype, enabled, cached):
        return run(device, *arguments)


def _crossing(cut: CutGraph, x: Node) -> tuple[torch.dtype, bool]:
    """The dtype of the tensor of node `x`, which is alive at a cut, and whether a gradient flows through it."""
    return x.meta["val"].dtype, x in cut.differentiable


def _crossing_form(t: Tensor, dtype: torch.dtype, differentiable: bool) -> Tensor:
    """Tensor `t` of `dtype` in the form that crosses a cut: complex as real pairs, and bits as integers if no
    gradient flows through it."""
    t = torch.view_as_real(t.resolve_conj()) if dtype.is_complex else t
    return t if differentiable or not t.is_floating_point() else t.detach().view(BITS[t.element_size()])


def _from_crossing(t: Tensor, dtype: torch.dtype, differentiable: bool) -> Tensor:
    real = dtype.to_real() if dtype.is_complex else dtype
    t = t.view(real) if t.dtype != real and real.is_floating_point and not differentiable else t
    return torch.view_as_complex(t) if dtype.is_complex else t
