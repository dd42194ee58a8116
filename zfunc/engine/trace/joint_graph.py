"""Forward and backward of a segment as one graph, traced; and a graph, or a part of it, as a callable."""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zfunc.engine.trace.fake_tensors import FakeTensors
from zfunc.engine.trace.graph_cuts import (
    JointGraph,
    Paths,
    decode_late,
    graph_of,
    mutates,
    of_written_memory,
    with_code,
)
from zfunc.engine.trace.segment_vjp import Pull, SegmentWeights, differentiated
from zfunc.engine.trace.tensor_memory import Leaves, Tree, dense_strides, layouts
from zfunc.errors import refuse, setting
from zfunc.runtime.accelerator import on_accelerator
from zfunc.runtime.rng import count_draws, number_draws, redirect_draws, seeded

GRAPHS_IN_THREADS = torch.__version__ >= "2.13"  # pytorch/pytorch#123177
Joints = dict[Hashable, JointGraph]  # by layouts of leaves and cotangents
GraphCall = Callable[..., Sequence[Any]]  # a graph, or what runs it: flat tensors in, flat results out
CotangentLayout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # shape, strides, ...
# A graph's code cannot name the overload `from`.
for _packet in (torch.ops.aten.random, torch.ops.aten.random_):
    _packet.from_ = getattr(_packet, "from")
    _packet.from_.__name__ = f"{_packet.__name__}.from_"


class OtherOutputError(Exception):
    """Raised if the output of a segment has other shapes than its trace assumed; `args[0]` describes the
    cotangents (output gradients) that it needs."""


def cotangents_of(y: Tree) -> list[CotangentLayout]:
    """Shape, strides, dtype and device of the cotangent of each differentiable tensor in a segment's output `y`."""
    return [(t.shape, dense_strides(t), t.dtype, t.device) for t in differentiated(y)]


def joint_graph(
    pull: Pull, joints: Joints | None, leaves: Leaves, spec: TreeSpec, cotangents: list[CotangentLayout]
) -> JointGraph:
    """Trace forward and backward of a segment as one graph, from `leaves`, the weights and inputs, of pytree
    structure `spec`; cached in `joints`. Raises OtherOutputError if the outputs do not fit `cotangents`, the
    descriptions of their gradients."""
    key = layouts(leaves), spec, tuple(cotangents)
    if joints is not None and key in joints:
        return joints[key]
    num_forward = forward_draws = num_out = 0
    out_spec: TreeSpec | None = None
    paths: Paths = []

    def joint(primals: Leaves, tangents: list[Tensor]) -> Leaves:
        nonlocal num_forward, forward_draws, num_out, out_spec
        # 1. Forward, and whether its output is the one that the cotangents are for.
        trained, fixed, inputs = tree_unflatten(primals, spec)
        paths.clear()
        y, pullback = pull(SegmentWeights(trained, fixed), inputs, paths)
        with disable_proxy_modes_tracing():
            if (actual := cotangents_of(y)) != cotangents:
                raise OtherOutputError(actual)
        out, out_spec = tree_flatten(y)
        num_out = len(out)
        # 2. What has been recorded so far is the forward's: backward's nodes and draws come behind it.
        mode = get_proxy_mode()
        assert mode is not None
        num_forward, forward_draws = len(mode.tracer.graph.nodes), count_draws(mode.tracer.graph)
        grads, below = pullback(tangents)
        return [*out, *grads.values(), *below]

    with seeded(None), detect_fake_mode(leaves) or FakeTensors(allow_non_fake_inputs=True):
        tangents = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in cotangents
        ]
        module = graph_of(joint, leaves, tangents)
    number_draws(module.graph, forward_draws)
    decode_late(module.graph, num_forward)
    *nodes, output = module.graph.nodes
    num_inputs, outputs = len(leaves) + len(tangents), list(output.args[0])
    traced = JointGraph(
        module,
        leaves=nodes[: len(leaves)],
        cotangents=nodes[len(leaves) : num_inputs],
        forward=nodes[num_inputs:num_forward],
        backward=nodes[num_forward:],
        results=outputs[:num_out],
        gradients=outputs[num_out:],
        forward_draws=forward_draws,
        out_spec=out_spec,
        strides=[t.stride() for t in tangents],
        paths=paths,
    )
    return traced if joints is None else joints.setdefault(key, traced)


# --- running a graph ----------------------------------------------------------------------------------------


def runnable(graph: GraphModule, compiled: bool | str) -> GraphCall:
    """A callable that runs `graph` with the random numbers of the pass it is called in; `compiled`: whether
    torch.compile compiles it, or in which mode."""
    # An operation that writes into an argument is never dead; `mutates` knows it until draws are redirected.
    graph.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or mutates(node.target))
    # A kernel may return other strides than were traced. A view that those do not allow is a copy then, as eager
    # code makes one, but not of what is written: that would lose the writes, so it fails instead.
    written = of_written_memory(graph.graph)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if node not in written:
            node.target = torch.ops.aten.reshape.default
    # Constants of forward lie on the host: a copy to the device that waited for it may end the launching ahead.
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        to_device = getattr(node.kwargs.get("device"), "type", "cpu") != "cpu"
        if node.args[0].op == "get_attr" and to_device:
            node.kwargs = {**node.kwargs, "non_blocking": True}
    redirect_draws(graph.graph, compiled=compiled)
    with_code(graph)
    if compiled == "reduce-overhead":
        return _as_device_graph(torch.compile(graph, dynamic=False, mode=compiled))
    return torch.compile(graph, dynamic=False) if compiled else graph


def _as_device_graph(run: GraphCall) -> GraphCall:
    """A wrapper of the compiled pass `run`, which may replay a CUDA graph: copies results out of the graph's
    memory, which the next replay overwrites."""

    def call(*tensors: object) -> Leaves:
        if any(isinstance(x, Tensor) and on_accelerator(x.device) for x in tensors):
            check_device_graphs(threading.current_thread() is not threading.main_thread())
        torch.compiler.cudagraph_mark_step_begin()
        return [x.clone() if isinstance(x, Tensor) else x for x in run(*tensors)]

    return call


def check_device_graphs(beside: bool) -> None:
    """Raise ValueError if steps run `beside` the main thread and this torch has CUDA graphs only there."""
    if beside and not GRAPHS_IN_THREADS:
        got = f'"reduce-overhead" beside the main thread with torch {torch.__version__}'
        got += ", whose graphs of a device are the main thread's"
        one = f"{setting('devices', 1)} with all steps in the main thread"
        do = f"expected torch 2.13 or later, or {one}, or {setting('compile_segments', True)}"
        refuse("compile_segments", got, do=do)
