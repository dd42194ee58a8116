"""Replaces each `torch.vmap` of an exported graph by the operations that it makes, so that it can be cut.

An export records that a vmap begins and ends, and on what it maps; these nodes are no functions of tensors alone.
"""

from torch.export import ExportedProgram
from torch.fx import Node

from zfunc.engine.trace.graph_cuts import graph_of, part_of_graph
from zfunc.models.cut.exported_graph import REGIONS, NotCutError, place_of


def expand_vmaps(exported: ExportedProgram) -> None:
    """Replace the nodes of each outermost vmap in an exported graph, in place. Raises NotCutError where it has
    another grad or autocast mode inside, or cannot be traced."""
    depth, region = 0, list[Node]()
    for n in [*exported.graph.nodes]:
        name = getattr(n.target, "__name__", "")
        depth += name == "_vmap_increment_nesting"
        region += [n] if depth else []
        depth -= name == "_vmap_decrement_nesting"
        if region and not depth:
            try:
                _expand(exported, region)
            except Exception as error:
                reason = str(error).strip().partition("\n")[0][:300]
                raise NotCutError(
                    f"its trace has a torch.vmap at {_place(region)} that is not made of tensor operations "
                    f"({type(error).__name__}: {reason})"
                ) from error
            region = []


def _expand(exported: ExportedProgram, region: list[Node]) -> None:
    graph, inside = exported.graph, {*region}
    read = dict.fromkeys(x for n in region for x in n.all_input_nodes if x not in inside)
    inputs = [x for x in read if x.op != "get_attr"]
    results = [n for n in region if not inside.issuperset(n.users)]
    if any(n.target in REGIONS for n in region):
        raise ValueError("another grad or autocast mode inside")
    # 1. What the vmap makes, by a trace below it.
    nodes = [*(x for x in read if x.op == "get_attr"), *region]
    part = part_of_graph(exported.graph_module, inputs, nodes, results)
    expanded = graph_of(part, *(x.meta["val"] for x in inputs))
    # 2. That in place of the region, as code of the same block and line.
    placeholders = expanded.graph.find_nodes(op="placeholder")
    copies: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
    shown = next(n for n in region if n.meta.get("stack_trace"))
    about = {x: shown.meta[x] for x in ("stack_trace", "nn_module_stack") if x in shown.meta}
    with graph.inserting_before(region[0]):
        for n in expanded.graph.nodes:
            if n.op == "call_function":
                copies[n] = graph.node_copy(n, copies.__getitem__)
                copies[n].meta |= about
            elif n.op == "get_attr":
                raise ValueError("a tensor that is not passed in")
    outputs = expanded.graph.output_node().args[0]
    for old, new in zip(results, outputs, strict=True):  # pyright: ignore
        old.replace_all_uses_with(copies[new])
    for n in reversed(region):
        graph.erase_node(n)


def _place(region: list[Node]) -> str:
    return place_of(next((n for n in region if n.meta.get("stack_trace")), region[0]))
