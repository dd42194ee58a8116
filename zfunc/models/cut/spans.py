"""Cuts the graph of a module into spans, between the children of its lists of modules.

A cut never separates tensors that share memory from a later write into it, so that each span is a pure function.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, groupby, pairwise
from typing import Any

from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from zfunc.models.cut.exported_graph import (
    Readers,
    arguments_written,
    check_operations,
    checked_writes,
    differentiable_nodes,
    drop_casts,
    memory_roots,
    needed_nodes,
    pass_to_others,
    place_assignments,
    place_of,
    readers_of,
)


@define(eq=False)
class NodeSpan:
    """Nodes of a graph between two cuts. `name` is the block called, "" outside blocks; `call` identifies the
    call of it; `part` counts the spans of that call, from 0; `place` is the "file:line" where a parameter is
    first read."""

    name: str
    call: Any
    nodes: list[Node] = field(factory=list)
    part: int = 0
    place: str = ""


@frozen(eq=False)
class Division:
    """How a module's first trace is divided, for others to be divided alike: the parameters before whose first read
    a block is cut (`starts`); who reads each tensor; the name of each span, and those of the tensors it reads."""

    starts: frozenset[str]
    readers: Readers
    spans: list[tuple[str, set[str]]]


@frozen(eq=False)
class CutGraph:
    """The exported graph of a module in spans. `alive[s]` are the nodes that span `s` gets from the spans before,
    the last element the graph's outputs; `differentiable` are the nodes with a gradient."""

    exported: ExportedProgram
    spans: list[NodeSpan]
    alive: list[list[Node]]
    differentiable: set[Node]
    sources: dict[str, str]  # of placeholders that are parameters, buffers and constants: their names
    why: list[str]  # of spans that were joined
    like: "Division"
    least: int  # elements of parameters of the largest part that cannot be cut
    written: set[str]  # names of the buffers that the graph writes

    @property
    def inputs(self) -> list[int]:
        """The indices of the graph's input leaves that the first span gets."""
        inputs = [
            n for n in self.exported.graph.nodes if n.op == "placeholder" and n.name not in self.sources
        ]
        return [inputs.index(x) for x in self.alive[0]]


def blocks_of(model: nn.Module) -> set[str]:
    """Names of a model's blocks: children of ModuleLists and Sequentials of two or more, none in another."""
    lists = nn.ModuleList | nn.Sequential
    every = {
        f"{name}.{i}".lstrip(".")
        for name, m in model.named_modules()
        if isinstance(m, lists) and len(m) > 1
        for i in m._modules
    }
    return {x for x in every if not any(x[:n] in every for n, letter in enumerate(x) if letter == ".")}


def cut_graph(
    exported: ExportedProgram,
    blocks: set[str],
    *,
    names: Mapping[str, str],
    trained: set[str],
    changed: set[str],
    most: int,
    like: Division | None = None,
) -> CutGraph:
    """Cut an exported graph between the calls of the modules `blocks` (names), and a call whose parameters have
    more than `most` elements into parts. A part that cannot be cut may have more than `most`. `names` maps names of
    the module's tensors to their first name; `trained` are names of parameters, `changed` of buffers that forward
    writes. With `like`, of the first trace, the cuts are where it has them: none is made for parameters that it
    does not read, and further readers of others get a copy. Raises BuffersWrittenError."""
    drop_casts(exported.graph)
    place_assignments(exported.graph)
    nodes, signature = [*exported.graph.nodes], exported.graph_signature
    sources = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    sources = {x: names.get(name, name) for x, name in sources.items()}
    buffers = {names.get(name, name) for name in signature.inputs_to_buffers.values()}
    written = checked_writes(exported, sources, buffers - changed)
    if like is not None:
        pass_to_others(exported.graph, sources, {x: y for x, y in like.readers.items() if x not in written})
        nodes = [*exported.graph.nodes]
    outputs = [x for x in nodes[-1].args[0] if isinstance(x, Node)]
    needed = needed_nodes(nodes, outputs)
    calls = [n for n in nodes if n.op == "call_function" and n in needed]
    check_operations(calls)
    # Spans by block, and where no cut may be.
    known = {x: name for x, name in sources.items() if like is None or name in like.readers}
    parameters = known.keys() & signature.inputs_to_parameters.keys()
    weights = parameters | {x for x, name in known.items() if like and name in changed}
    spans = _spans_by_block(calls, blocks, weights)
    bonds = [*_bonds(calls, sources, changed)]
    closed = {*chain.from_iterable(calls[i + 1 : j + 1] for i, j, _ in bonds)}
    # What has more than `most` elements is cut where the fewest bytes are alive.
    within = [_runs(span, closed, sources, parameters) for span in spans]
    least = max((run.numel for runs in within for run in runs), default=0)
    if like is not None:
        starts = like.starts
    else:
        most = max(most, least)
        starts = frozenset(run.name for runs in within for run in _first_runs(runs, most))
    parts = [x for span, runs in zip(spans, within, strict=True) for x in _parts(span, runs, starts)]
    why = [*_why_joined(spans, bonds)]
    differentiable = differentiable_nodes(nodes, sources, trained)
    spans = _join_uncuttable(parts, closed, weights, differentiable)
    spans = spans if like is None else _join_as_before(spans, like, known)
    inputs = [n for n in nodes if n.op == "placeholder" and n.name not in sources]
    alive = [*_alive_at_cuts(spans, inputs, outputs), outputs]
    made = Division(
        starts, readers_of(calls, sources), [(span.name, _names_read(span, sources)) for span in spans]
    )
    return CutGraph(exported, spans, alive, differentiable, sources, why, made, least, written)


def _alive_at_cuts(spans: list[NodeSpan], inputs: list[Node], outputs: list[Node]) -> list[list[Node]]:
    """By span, the nodes that it gets from the spans before: those that it or a later span reads, in one order at
    all cuts. `inputs` are the graph's, which the first span gets."""
    at = {n: s for s, span in enumerate(spans) for n in span.nodes}
    last = {n: len(spans) if n in outputs else -1 for n in (*inputs, *at)}
    for n, s in at.items():
        for x in n.all_input_nodes:
            if x in last:
                last[x] = max(last[x], s)
    calls = [[*call] for _, call in groupby(range(len(spans)), lambda s: _called_block(spans[s]) or s)]
    passed = _passed_on(spans, calls, at)
    for n in last.keys() & passed.keys():  # not parameters
        last[n] = max(last[n], min(passed[n] + 1, len(spans) - 1))
    # What outlives the block that gets it first comes first, so that it has the same place at each cut.
    end = {s: call[-1] for call in calls for s in call}
    order = [*(n for n in inputs if isinstance(n.meta.get("val"), Tensor)), *at]
    order.sort(key=lambda n: -last[n] if last[n] > end.get(at.get(n, -1) + 1, 0) else 0)
    return [[n for n in order if at.get(n, -1) < s <= last[n]] for s in range(len(spans))]


def _passed_on(spans: list[NodeSpan], calls: list[list[int]], at: Mapping[Node, int]) -> dict[Node, int]:
    """By node that several blocks of a list read, the span up to which all pass it on, so that equal blocks are
    alike in this: the end of the list for a node made before it that is read in turn up to there, else the end of
    the last block that reads it. `calls` are indices of spans by call of a block; `at[n]` is the span that makes
    node `n`."""
    lists, passed = defaultdict[str, list[list[int]]](list), dict[Node, int]()
    for call in calls:
        if block := _called_block(spans[call[0]]):
            lists[block[0].rpartition(".")[0]].append(call)
    for blocks in lists.values():
        readers = defaultdict[Node, list[int]](list)
        for b, call in enumerate(blocks):
            for x in {x for s in call for n in spans[s].nodes for x in n.all_input_nodes}:
                if at.get(x, -1) < call[0]:
                    readers[x].append(b)
        for n, read in readers.items():
            if len(read) > 1:
                turn = max(later - b for b, later in pairwise(read))
                to_the_end = at.get(n, -1) < blocks[0][0] and len(blocks) - read[-1] <= turn
                passed[n] = max(passed.get(n, 0), blocks[-1 if to_the_end else read[-1]][-1])
    return passed


def _called_block(span: NodeSpan) -> Any:
    """The name of the block that `span` is in, and a key of the block's call; None outside blocks."""
    return span.call and span.call[0]


def _spans_by_block(nodes: list[Node], blocks: set[str], weights: set[str]) -> list[NodeSpan]:
    """Group nodes into spans, in order: a span for each call of a block, and one for the nodes between two
    calls. Spans of one call are joined if no node between them reads one of `weights`."""
    spans: list[NodeSpan] = []
    for n in nodes:
        name, call = _block(n, blocks)
        if n.target is operator.getitem and spans and n.args[0] in spans[-1].nodes:
            name, call = spans[-1].name, spans[-1].call
        if not spans or call != spans[-1].call:
            spans.append(NodeSpan(name, call))
        spans[-1].nodes.append(n)
    joined: list[NodeSpan] = []
    for span in spans:
        k = next((k for k in range(len(joined), 0, -1) if _reads(joined[k - 1], weights)), 0)
        if k and span.call is not None and span.call == joined[k - 1].call:
            joined[k - 1].nodes += [n for x in (*joined[k:], span) for n in x.nodes]
            del joined[k:]
        else:
            joined.append(span)
    return joined


def _block(node: Node, blocks: set[str]) -> tuple[str, Any]:
    """The name of the block in which a node is called, and a key of the block's call; ("", None) outside blocks."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        starts = [path, *(path[:n] for n, letter in enumerate(path) if letter == ".")]
        if name := next((x for x in starts if x in blocks), ""):
            return name, (name, key if path == name else "")
    return "", None


def _bonds(
    nodes: list[Node], sources: Mapping[str, str], changed: set[str]
) -> Iterator[tuple[int, int, str]]:
    """Yield pairs of indices of `nodes` that no cut may separate, and why, as text for the log: a write in
    place and the node whose memory it writes; the first and last reader of a buffer in `changed`; or, with
    "", an operation and its result."""
    at = {n: i for i, n in enumerate(nodes)}
    base = memory_roots(at)
    first: dict[Node, int] = {}
    places: dict[Node, Node] = {}  # of buffers that are written: where
    for n, i in at.items():
        first.setdefault(base[n], at.get(base[n], i))
        for x in arguments_written(n):
            x = base.get(x, x)
            if x.name in sources and sources[x.name] not in changed:
                continue
            yield first.setdefault(x, at.get(x, i)), i, f"are one, for a write in place at {place_of(n)}"
            if x.name in sources:
                places[x] = n
        if n.target is operator.getitem:
            yield at.get(n.args[0], i), i, ""
    for x, n in places.items():
        read = [i for m, i in at.items() if x in {base.get(y, y) for y in m.all_input_nodes}]
        yield read[0], read[-1], f"are one, as both read a buffer that is written at {place_of(n)}"


def _why_joined(spans: list[NodeSpan], bonds: Iterable[tuple[int, int, str]]) -> Iterator[str]:
    """Yield a line for the log for each of `bonds` whose two nodes are in different `spans`: the spans' names
    and why they must be one."""
    of = [s for s, span in enumerate(spans) for _ in span.nodes]
    names = [span.name for span in spans]
    for i, j, why in bonds:
        if why and of[i] != of[j]:
            yield f"{_called(names, of[i])} and {_called(names, of[j])} {why}"


def _called(names: list[str], s: int) -> str:
    """What a line for the log calls span `s`, with the `names` of all spans: code outside of blocks ("") is said
    by the block before it, or after."""
    after, before = (next(filter(None, x), "") for x in (reversed(names[:s]), names[s:]))
    where = f"after {after}" if after else f"before {before}" if before else "outside of blocks"
    return names[s] or f"the code {where}"


@frozen(eq=False)
class Run:
    """Consecutive nodes of a span that read parameters and are never separated. Cutting before node `start`
    leaves `nbytes` of values alive at the cut. `name` is the first parameter read; `numel` counts the
    elements of all."""

    name: str
    numel: int
    start: int
    nbytes: int


def _runs(span: NodeSpan, closed: set[Node], sources: Mapping[str, str], weights: set[str]) -> list[Run]:
    """The runs of a span: it may be cut between two runs, but not before a node in `closed`, nor between two
    readers of one parameter, which would become tied."""
    at = {n: i for i, n in enumerate(span.nodes)}
    used: dict[Node, list[int]] = {}
    for n, i in at.items():
        for x in n.all_input_nodes:
            used.setdefault(x, []).append(i)
    read = {x: used.pop(x) for x in [*used] if x.name in weights}
    shut = {i for n, i in at.items() if n in closed}
    shut |= {i for readers in read.values() for i in range(readers[0] + 1, readers[-1] + 1)}
    alive = [0] * len(at)  # bytes at the cut before each node, but for what the whole span passes on
    for x in {**used, **at}:
        if x.name not in sources and isinstance(t := x.meta.get("val"), Tensor):
            later = any(n not in at and n.op != "placeholder" for n in x.users)
            end = len(at) - 1 if later else used.get(x, [0])[-1]
            for i in range(at.get(x, 0) + 1, end + 1) if x in at or not later else ():
                alive[i] += t.numel() * t.element_size()
    runs, places = list[Run](), list[int]()
    for i in range(len(at)):
        places += [] if i in shut else [i]
        new = [x for x, readers in read.items() if readers[0] == i]
        if not new:
            continue
        numel = sum(x.meta["val"].numel() for x in new)
        if runs and not places:
            runs[-1] = evolve(runs[-1], numel=runs[-1].numel + numel)
        else:
            start = min(places, key=lambda i: (alive[i], -i)) if runs else 0
            runs.append(Run(sources[new[0].name], numel, start, alive[start]))
        places = []
    return runs


def _first_runs(runs: list[Run], most: int) -> list[Run]:
    """The runs before which to cut a span: each part has at most `most` elements of parameters, or is a
    single run, and the fewest bytes are alive at the cuts."""
    best: list[tuple[int, list[int]]] = [(0, [])]
    for k in range(1, len(runs) + 1):
        ways = [
            (best[j][0] + (runs[j].nbytes if j else 0), [*best[j][1], j])
            for j in range(k)
            if j == k - 1 or sum(run.numel for run in runs[j:k]) <= most
        ]
        best.append(min(ways))
    return [runs[j] for j in best[-1][1] if j]


def _parts(span: NodeSpan, runs: list[Run], starts: frozenset[str]) -> Iterator[NodeSpan]:
    """Yield the parts of a span, cut before each run whose first parameter is in `starts`."""
    places = [0, *(run.start for run in runs[1:] if run.name in starts), len(span.nodes)]
    for part, (i, j) in enumerate(pairwise(places)):
        yield NodeSpan(span.name, span.call and (span.call, part), span.nodes[i:j], part)


def _join_uncuttable(
    spans: list[NodeSpan], closed: set[Node], weights: set[str], differentiable: set[Node]
) -> list[NodeSpan]:
    """Join each span that reads no parameter, or begins with a node in `closed`, where no cut may be, to the
    span before, and name all spans."""
    joined: list[NodeSpan] = []
    for span in spans:
        alone = joined and (not _reads(joined[0], weights) or differentiable.isdisjoint(joined[-1].nodes))
        if joined and (span.nodes[0] in closed or alone or not _reads(span, weights)):
            if not _reads(joined[-1], weights):
                joined[-1].name, joined[-1].call, joined[-1].part = span.name, span.call, span.part
            joined[-1].nodes += span.nodes
        else:
            joined.append(evolve(span, nodes=[*span.nodes]))
    names = set[str]()
    for span in joined:
        reader = next(
            (n for n in span.nodes if any(x.name in weights for x in n.all_input_nodes)), span.nodes[0]
        )
        name = span.name or [path for path, _ in reader.meta["nn_module_stack"].values()][-1] or "model"
        alike = chain([name], (f"{name}@{n}" for n in count(2)))
        span.name, span.place = next(x for x in alike if x not in names), place_of(reader)
        names.add(span.name)
    return joined


def _join_as_before(spans: list[NodeSpan], like: Division, sources: Mapping[str, str]) -> list[NodeSpan]:
    """Join spans that read what one span of `like` does, and name them as that; `spans` as they are if one reads
    what no span that comes next there does."""
    joined, last = list[NodeSpan](), 0
    for span in spans:
        read = _names_read(span, sources)
        fitting = [i for i in range(last, len(like.spans)) if read <= like.spans[i][1]]
        if not fitting:
            return spans
        here = next((i for i in fitting if like.spans[i][0] == span.name), fitting[0])
        if joined and here == last:
            joined[-1].nodes += span.nodes
        else:
            joined.append(evolve(span, name=like.spans[here][0], nodes=[*span.nodes]))
        last = here
    return joined


def _names_read(span: NodeSpan, sources: Mapping[str, str]) -> set[str]:
    return {sources[x.name] for n in span.nodes for x in n.all_input_nodes if x.name in sources}


def _reads(span: NodeSpan, weights: set[str]) -> bool:
    return any(x.name in weights for n in span.nodes for x in n.all_input_nodes)
