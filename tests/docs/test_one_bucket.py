"""docs/one_bucket.md says what its command makes now, and that is what graph, plan and simulated step say."""

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zfunc import schedules
from zfunc.core.graph import Graph, Op, Region
from zfunc.core.hardware import ROUND
from zfunc.core.plan import PlanError, build
from zfunc.core.simulator import simulate
from zfunc.core.verifier import races, verify

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import make_one_bucket as made  # noqa: E402
import one_bucket_pictures as drawn  # noqa: E402
import one_bucket_step as step  # noqa: E402
import one_bucket_tables as tabled  # noqa: E402
import one_bucket_timelines as timed  # noqa: E402

PAGE = (DOCS / "one_bucket.md").read_text()
WALK = step.walk(step.PLAIN)
FRESH = "write it anew with `python docs/make_one_bucket.py`"
SVG = "{http://www.w3.org/2000/svg}"

# Where a verb's index has the bucket, as the methods of `Emit` have their arguments.
BUCKET_AT = {
    **dict.fromkeys(("forward", "backward", "pack", "reduce_scatter", "to_host", "accumulate"), 1),
    **dict.fromkeys(("square_sum", "adam", "speculate", "confirm", "to_device", "all_gather"), 0),
}


def spans(page: str) -> list[str]:
    """What stands in the page as code, outside its blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))


def svg(op: Op | None) -> ElementTree.Element:
    return ElementTree.parse(DOCS / f"bucket-{op.verb if op else 'rest'}.svg").getroot()


def titled(picture: ElementTree.Element) -> dict[str, tuple[ElementTree.Element, int, str]]:
    """The boxes of a picture, by region: the element, the bytes it tells, and its class."""
    found: dict[str, tuple[ElementTree.Element, int, str]] = {}
    for rect in picture.iter(f"{SVG}rect"):
        if title := rect.findtext(f"{SVG}title"):
            name, said = title.split(": ")
            found[name] = rect, int(said.split()[0].replace(",", "")), rect.get("class", "")
    return found


# --- the page --------------------------------------------------------------------------------------------


def test_page_and_pictures_are_what_the_command_makes_now() -> None:
    assert made.fill(PAGE) == PAGE, FRESH
    pictures = made.pictures()
    assert {p.name for p in DOCS.glob("bucket-*.svg")} == set(pictures)
    for name, picture in pictures.items():
        assert (DOCS / name).read_text() == picture, f"{name}: {FRESH}"
        assert f"]({name})" in PAGE


def test_it_is_made_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.append('docs'); import make_one_bucket as m; "
        "page = m.PAGE.read_text(); assert m.fill(page) == page and m.pictures()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=DOCS.parent, check=True)


def test_the_walk_is_the_buckets_operations_in_order() -> None:
    own = step.ops_of(step.PLAIN)
    between = PAGE[PAGE.index("## 1.") : PAGE.index("## The way")]
    told = dict.fromkeys(name for name in spans(between) if name in {op.name for op in own})
    assert list(told) == [op.name for op in own]
    shown = re.findall(r"\]\(bucket-(\w+)\.svg\)", PAGE)
    assert shown[: len(WALK) + 1] == ["rest", *(op.verb for op in WALK)]
    rows = re.findall(r"^\| `([\w,\[\]]+)` \| (?:compute|d2h|h2d|host) \|", PAGE, re.MULTILINE)
    assert rows == [op.name for op in WALK]


def test_every_name_on_the_page_is_one_of_a_graph() -> None:
    names = {str(x) for graph in step.GRAPHS for x in (*graph.ops, *graph.regions)}
    words = {name.partition("[")[0] for name in names} | set(schedules.__all__)
    for span in (*spans(PAGE), *re.findall(r"\w+\[[\d,]+\]", " ".join(re.findall(r"!\[.*\]", PAGE)))):
        if re.fullmatch(r"\w+(\[[\d,]+\])", span):
            assert span in names
        elif re.fullmatch(r"[a-z]+_[a-z_]+", span):
            assert span in words


def test_every_figure_in_a_sentence_is_filled_in() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    prose = made.FILLED.sub("", prose)
    prose = re.sub(r"!\[.*\]\(.*\)|`[^`\n]+`|\]\([^)]*\)|\[examples/\d\d_\w+\.py|<!--.*?-->", "", prose)
    prose = re.sub(r"^(## )?\d\. ", "", prose, flags=re.MULTILINE)
    prose = re.sub(
        r"\b([Bb]ucket|block|micro-batch) [0-4]\b|\b(fp|bf)(32|16)\b|\b16(-bit| bits)\b", "", prose
    )
    assert not re.findall(r".*\d.*", prose)


def test_no_line_of_a_sentence_begins_with_a_marker() -> None:
    """It would begin a block of HTML, in which Markdown is not read."""
    for line in PAGE.splitlines()[1:]:
        assert not line.startswith("<!--") or re.fullmatch(r"<!--[\w./ ]+-->", line), line


def test_everything_that_is_made_stands_on_the_page() -> None:
    filled = {name for name, _ in made.FILLED.findall(PAGE)}
    assert filled == {*made.figures(), *made.tables(), "printed"}


def test_a_marker_nothing_is_made_for_is_refused() -> None:
    with pytest.raises(KeyError, match=r"got the marker 'nothing', expected one of adam.bytes"):
        made.fill("so <!--nothing-->1<!--/--> many")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (DOCS / target).exists()


# --- what it tells ---------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_recipe() -> None:
    by = {op.verb: op for op in WALK}
    numel = step.make_job().layout.buckets[step.BUCKET].numel
    assert numel == step.BLOCK == 50_000_000
    assert by["to_host"].nbytes == by["to_device"].nbytes == 2 * numel
    assert by["adam"].nbytes == (2 * 12 + 2 + 2) * numel
    cells = re.findall(r"^\| `([\w,\[\]]+)` \| \w+ \| ([\d.]+) (MB|GB) \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(cells) == 5
    for name, value, unit, per in cells:
        nbytes = step.PLAIN.ops[step.PLAIN.position[name]].nbytes
        assert float(value) * {"MB": 1e6, "GB": 1e9}[unit] == nbytes == int(per) * numel


@pytest.mark.parametrize("op", [None, *WALK], ids=str)
def test_a_picture_shows_what_the_operation_touches(op: Op | None) -> None:
    shown = titled(svg(op))
    assert set(shown) == {str(r) for r in step.boxes(step.PLAIN)}
    for r in step.boxes(step.PLAIN):
        rect, nbytes, kind = shown[str(r)]
        assert nbytes == r.nbytes
        held = drawn.held(step.PLAIN, r, op)
        reads, writes = (op.reads, op.writes) if op else ((), ())
        expected = "written" if r in writes else "read" if r in reads else "held" if held else "empty"
        assert kind == expected
        if nbytes > 8:
            assert float(rect.get("height", "")) == pytest.approx(drawn.HUNDRED * nbytes / 1e8, abs=0.1)
    arrows = [e for e in svg(op).iter(f"{SVG}path") if e.get("class") == "arrow"]
    assert len(arrows) == (sum(str(r) in shown for r in op.regions) if op else 0)


def test_at_rest_there_is_what_is_kept() -> None:
    kinds = {name: kind for name, (_, _, kind) in titled(svg(None)).items()}
    assert {n for n, kind in kinds.items() if kind == "held"} == {
        "params[2]", "master[2]", "exp_avg[2]", "exp_avg_sq[2]",
    }  # fmt: skip


@pytest.mark.parametrize("graph", step.GRAPHS, ids=len)
def test_operations_are_dealt_to_the_buckets_their_indices_name(graph: Graph) -> None:
    named = {op.name: op.index[BUCKET_AT[op.verb]] for op in graph if op.verb in BUCKET_AT}
    assert step.owners(graph) == named


def needed(graph: Graph, region: Region, i: int) -> bool:
    """Whether somebody reads a region from operation `i` on before it is written over, in this step or the next."""
    for op in (*graph.ops[i:], *(graph.ops if region.kept else ())):
        if region in op.reads:
            return True
        if region in op.writes:
            return False
    return False


@pytest.mark.parametrize("graph", step.GRAPHS, ids=len)
def test_a_value_is_held_exactly_while_somebody_is_to_read_it(graph: Graph) -> None:
    for region in step.boxes(graph):
        found = list(step.values(graph, region))
        begun = False
        for i, op in enumerate(graph):
            held = sum(v.is_held(i) for v in found)
            assert held == (needed(graph, region, i) and (begun or region.kept))
            begun = begun or region in op.writes


def test_schedules_move_the_same_bytes_at_other_times() -> None:
    plans = {name: step.planned(step.PLAIN, name) for name in tabled.SCHEDULES}
    assert plans["Overlapped"].digest == plans["Interleaved"].digest == plans["CriticalPath"].digest
    assert len({simulate(plan).seconds for plan in plans.values()}) == 2
    two = {name: simulate(step.planned(step.TWO_RANKS, name)).seconds for name in tabled.SCHEDULES}
    assert two["Interleaved"] < two["Overlapped"] < two["Serial"]


def test_recipes_without_the_barrier_are_faster() -> None:
    took = {name: simulate(step.planned(graph)).seconds for name, graph in step.RECIPES.items()}
    assert took["delayed"] < took["no clipping"] < took["speculative"] < took["clipping"]


def test_the_race_is_one_that_round_numbers_hide() -> None:
    bad, writes, reads = step.broken(step.planned(step.PLAIN))
    with pytest.raises(PlanError, match=r"race on grad_slot"):
        verify(bad)
    assert len(list(races(bad))) == 1
    assert reads in step.ops_of(step.PLAIN)
    for hardware, strikes in ((ROUND, False), (step.SLOW_BUS, True)):
        at = {e.op: e for e in simulate(bad, hardware).events}
        assert (at[writes.name].start < at[reads.name].end) == strikes


def test_the_answers_are_right() -> None:
    """Of the questions at the end: what shares nothing may change places, what shares a slot may not."""

    def exchanged(a: str, b: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, op in enumerate(step.PLAIN):
            found.setdefault("all" if op.name == "load[0]" else op.kind, []).append(i)
        host, position = found["host"], step.PLAIN.position
        there = [host.index(position[name]) for name in (a, b)]
        host[there[0]], host[there[1]] = host[there[1]], host[there[0]]
        return found

    verify(build(step.PLAIN, exchanged("adam[4]", "adam[3]")))
    with pytest.raises(PlanError, match="deadlock"):
        build(step.PLAIN, exchanged("adam[4]", "adam[2]"))
    reads = step.PLAIN.ops[step.PLAIN.position["forward[0,2]"]].reads
    assert any(r in tabled.named("to_device").writes for r in reads)


# --- pictures --------------------------------------------------------------------------------------------


def labels(picture: ElementTree.Element) -> Iterator[list[tuple[float, float]]]:
    """From where to where words over bars reach, line by line."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for element in picture.iter(f"{SVG}text"):
        if element.get("class") == "small halo":
            half = timed.SMALL * len(element.text or "") / 2
            x = float(element.get("x", ""))
            lines.setdefault(element.get("y", ""), []).append((x - half, x + half))
    yield from (sorted(line) for line in lines.values())


@pytest.mark.parametrize("name", ["lanes", "race", "recipes", "ranks"])
def test_words_over_bars_do_not_overlap_and_stay_inside(name: str) -> None:
    found = list(labels(ElementTree.parse(DOCS / f"bucket-{name}.svg").getroot()))
    assert found
    for line in found:
        assert line[0][0] >= 0
        assert line[-1][1] <= timed.WIDTH
        assert all(a[1] <= b[0] for a, b in pairwise(line))


def test_every_operation_of_the_bucket_is_lit_under_each_schedule() -> None:
    picture = ElementTree.parse(DOCS / "bucket-lanes.svg").getroot()
    lit = [r for r in picture.iter(f"{SVG}rect") if r.get("class") == "lit"]
    told = sorted((r.findtext(f"{SVG}title") or "").partition(":")[0] for r in lit)
    assert told == sorted(2 * [op.name for op in WALK])
