"""docs/one_bucket.md states what docs/one_bucket.py prints and shows what docs/make_pictures.py draws."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zfunc import schedules
from zfunc.core.graph import Op
from zfunc.core.hardware import ROUND
from zfunc.core.plan import PlanError, build
from zfunc.core.simulator import simulate
from zfunc.core.verifier import races, verify

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

import make_pictures  # noqa: E402
import one_bucket as step  # noqa: E402

PAGE = (DOCS / "one_bucket.md").read_text()
WALK = step.walk(step.PLAIN)
GRAPHS = (*step.RECIPES.values(), step.TWO_RANKS, step.graph_of(micro_batches=4), step.STREAMED)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_has_the_tables_and_the_figures_that_the_script_prints() -> None:
    for text in (*step.tables(), step.refusal()):
        assert text in PAGE
    prose = re.sub(r"```.*?```|^\|.*$", "", PAGE, flags=re.M | re.S)
    printed = "\n".join((*step.tables(), *step.figures()))
    stated = set(re.findall(r"\d[\d,.]*\s(?:TFLOP/s|GB/s|[kMG]?B|ms|us|%)(?!\w)", prose))
    assert len(stated) > 15
    assert [figure for figure in stated if " ".join(figure.split()) not in printed] == []


def test_the_code_of_the_page_prints_what_stands_below_it() -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    for code in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        assert f"{code}```\n\n```text\n{out.getvalue()}```" in PAGE


def test_the_pictures_are_what_the_script_draws_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.path.append('docs'); import make_pictures as m; "
        "print(*(name for name, made in m.pictures() if (m.FOLDER / name).read_text() != made))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=DOCS.parent, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [], "run python docs/make_pictures.py"


def test_the_sections_are_the_buckets_operations_in_order() -> None:
    own = [op.name for op in step.ops_of(step.PLAIN)]
    between = PAGE[PAGE.index("## 1.") : PAGE.index("## The way")]
    named = dict.fromkeys(name for name in re.findall(r"`([^`\n]+)`", between) if name in own)
    assert list(named) == own
    shown = re.findall(r"\]\(bucket-(\w+)\.svg\)", PAGE)
    assert shown[: len(WALK) + 1] == ["rest", *(op.verb for op in WALK)]


def test_every_name_on_the_page_is_one_of_a_graph() -> None:
    names = {str(x) for graph in GRAPHS for x in (*graph.ops, *graph.regions)}
    words = {name.partition("[")[0] for name in names} | set(schedules.__all__)
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.S)
    for span in (*re.findall(r"`([^`\n]+)`", prose), *re.findall(r"\w+\[[\d,]+\]", prose)):
        if re.fullmatch(r"\w+\[[\d,]+\]", span):
            assert span in names
        elif re.fullmatch(r"[a-z]+_[a-z_]+", span):
            assert span in words


@pytest.mark.parametrize("op", [None, *WALK], ids=str)
def test_a_picture_shows_what_the_operation_touches(op: Op | None) -> None:
    root = ElementTree.fromstring(make_pictures.operation_picture(op))
    shown = {
        title.partition(": ")[0]: (title.partition(": ")[2], r.get("class"))
        for r in root.iter(f"{SVG}rect")
        if (title := r.findtext(f"{SVG}title"))
    }
    assert set(shown) == {str(r) for r in step.boxes(step.PLAIN)}
    reads, writes = (op.reads, op.writes) if op else ((), ())
    for r in step.boxes(step.PLAIN):
        held = "held" if step.is_held(step.PLAIN, r, op) else "empty"
        kind = "written" if r in writes else "read" if r in reads else held
        assert shown[str(r)] == (f"{r.nbytes:,} bytes, {kind}", kind)
    arrows = [e for e in root.iter(f"{SVG}path") if e.get("class") == "arrow"]
    assert len(arrows) == (sum(str(r) in shown for r in op.regions) if op else 0)


def test_faint_is_what_is_not_the_buckets() -> None:
    root = ElementTree.parse(DOCS / "bucket-overlapped.svg").getroot()
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    lit = {(r.findtext(f"{SVG}title") or "").partition("\n")[0] for r in bars if not r.get("fill-opacity")}
    assert lit == {op.name for op in WALK}
    assert len(bars) == len(step.PLAIN)


@pytest.mark.parametrize("graph", GRAPHS, ids=len)
def test_a_value_is_held_exactly_while_an_operation_is_to_read_it(graph: step.Graph) -> None:
    for region in step.boxes(graph):
        written = False
        for i, op in enumerate(graph):
            after = (*graph.ops[i:], *(graph.ops if region.kept else ()))
            next_use = next((o for o in after if region in o.regions), None)
            needed = next_use is not None and region in next_use.reads and (written or region.kept)
            assert step.is_held(graph, region, op) == needed
            written = written or region in op.writes


def test_the_streamed_bucket_is_followed_in_order() -> None:
    own = [op.name for op in step.ops_of(step.STREAMED)]
    section = PAGE[PAGE.index("## Parameters on the host") : PAGE.index("| operation | lane | reads")]
    named = dict.fromkeys(name for name in re.findall(r"`([^`\n]+)`", section) if name in own)
    assert list(named) == [name for name in own if name in named]
    assert {op.verb for op in step.ops_of(step.STREAMED)} == {name.partition("[")[0] for name in named}


def test_schedules_and_recipes_differ_as_the_page_says() -> None:
    digests = [step.planned(step.PLAIN, name).digest for name in step.SCHEDULES]
    serial, overlapped, interleaved, critical = digests
    assert overlapped == critical
    assert len({serial, overlapped, interleaved}) == 3
    took = {name: simulate(step.planned(graph)).seconds for name, graph in step.RECIPES.items()}
    assert took["no clipping"] < took["deferred"] < took["clipping"]


def test_the_race_is_one_that_round_numbers_hide() -> None:
    bad, writes, reads = step.broken(step.planned(step.PLAIN))
    assert len(list(races(bad))) == 1
    for hardware, strikes in ((ROUND, False), (step.SLOW_BUS, True)):
        at = {e.op: e for e in simulate(bad, hardware).events}
        assert (at[writes.name].start < at[reads.name].end) == strikes


def test_the_answers_are_right() -> None:
    """Of the questions at the end: what shares nothing may change places, what shares a slot may not."""

    def exchanged(a: str, b: str) -> dict[str, list[int]]:
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(step.PLAIN):
            lanes.setdefault("all" if op.name == "load[0]" else op.kind, []).append(i)
        host = lanes["host"]
        m, n = (host.index(step.PLAIN.position[name]) for name in (a, b))
        host[m], host[n] = host[n], host[m]
        return lanes

    verify(build(step.PLAIN, exchanged("update[4]", "update[3]")))
    with pytest.raises(PlanError, match="deadlock"):
        build(step.PLAIN, exchanged("update[4]", "update[2]"))
