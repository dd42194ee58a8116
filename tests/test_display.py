"""How values print: in a line or two, whatever their size; and as pictures in a notebook."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from operator import attrgetter
from typing import Any

import pytest
from attrs import evolve, frozen
from small_models import MODELS

import zfunc
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Timeline
from zfunc.viz.notebook import curves


@frozen
class Made:
    """What is shown here, made by the first test that asks: other files need not wait for it to be collected."""

    segments: Any
    program: Any
    state: Any
    metrics: Any
    planned: Any


@cache
def made() -> Made:
    segments, batch = MODELS["odd sizes"]()
    program = zfunc.compile(segments, precision="fp32", device="cpu", clip_norm=1.0, example=batch(0))
    state, metrics = zfunc.train_step(program, zfunc.init(program), batch(0), trace=True)
    planned = zfunc.plan(segments, batch(0), hardware="rtx4090", schedule="auto")
    return Made(segments, program, state, metrics, planned)


PATHS = """program.plan program.plan.graph metrics.timeline program state metrics program.layout program.spec
    program.settings planned planned.step planned.profile planned.hardware program.optimizer program.schedule"""
VALUES: dict[str, Callable[[Made], Any]] = {
    **{path.rpartition(".")[2]: attrgetter(path) for path in PATHS.split()},
    "lane": lambda x: x.program.plan.lanes[0],
    "op": lambda x: max(x.program.plan.graph, key=lambda op: len(op.regions)),
    "region": lambda x: x.program.plan.graph.regions[0],
    "segment": lambda x: x.segments[0],
    "bucket": lambda x: x.program.layout.buckets[0],
    "suggestion": lambda x: x.planned.suggestions and x.planned.suggestions[0],
    "tried": lambda x: x.planned.tried[0],
    "groups": lambda _: zfunc.groups((zfunc.matrices_only, zfunc.Lion()), zfunc.AdamW()),
}
PICTURES = {"plan": "<img", "timeline": "<img", "program": "<img", "planned": "<img", "segment": "<table"}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_prints_in_a_few_lines(name: str) -> None:
    shown = repr(VALUES[name](made()))
    assert len(shown) <= 600, shown
    assert shown.count("\n") <= 5


class Balanced(HTMLParser):
    """Raises for a tag that another one closes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        self.open += [tag] if tag != "img" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def shown_in_a_notebook(value: Any) -> str:
    html = value._repr_html_()
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    assert "<style" not in html  # it would reach the notebook
    return html


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_shows_a_picture(name: str) -> None:
    assert PICTURES[name] in shown_in_a_notebook(VALUES[name](made()))


def test_a_long_step_has_no_picture_in_a_notebook() -> None:
    timeline = simulate(made().program.plan)
    assert "too long" in shown_in_a_notebook(Timeline(timeline.events * 200, "simulated"))


def test_metrics_are_curves_in_a_notebook() -> None:
    steps = [evolve(made().metrics, step=n, loss=1 / n) for n in range(1, 40)]
    html = shown_in_a_notebook(curves(steps))
    assert html.count("&lt;figure&gt;") == 3
    assert "gradient norm" in html


def test_in_jupyter_a_training_prints_lines_without_control_codes() -> None:
    """Jupyter runs a command with "!" at a terminal of its own, which does not obey them."""
    code = "from zfunc.cli.terminal import can_redraw; print(can_redraw())"
    for variables, expected in (({}, b"True"), ({"JPY_PARENT_PID": "1"}, b"False")):
        ours, theirs = pty.openpty()
        environment = {"TERM": "xterm", **os.environ, **variables}
        subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
        os.close(theirs)
        assert os.read(ours, 100).strip() == expected
        os.close(ours)
