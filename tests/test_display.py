"""How values print: in a line or two, whatever their size; and as pictures in a notebook."""

import os
import pty
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from run_folders import STEPS, written
from small_models import MODELS

import zfunc
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Timeline
from zfunc.train.history import read_history
from zfunc.viz.notebook import curves

SEGMENTS, BATCH = MODELS["odd sizes"]()
PROGRAM = zfunc.compile(SEGMENTS, precision="fp32", device="cpu", clip_norm=1.0, example=BATCH(0))
STATE, METRICS = zfunc.train_step(PROGRAM, zfunc.init(PROGRAM), BATCH(0), trace=True)
PLANNED = zfunc.plan(SEGMENTS, BATCH(0), hardware="rtx4090", schedule="auto")
GRAPH = PROGRAM.plan.graph
VALUES: dict[str, Any] = {
    "plan": PROGRAM.plan,
    "graph": GRAPH,
    "lane": PROGRAM.plan.lanes[0],
    "op": max(GRAPH, key=lambda op: len(op.regions)),
    "region": GRAPH.regions[0],
    "timeline": METRICS.timeline,
    "program": PROGRAM,
    "segment": SEGMENTS[0],
    "state": STATE,
    "metrics": METRICS,
    "layout": PROGRAM.layout,
    "bucket": PROGRAM.layout.buckets[0],
    "spec": PROGRAM.spec,
    "settings": PROGRAM.settings,
    "planned": PLANNED,
    "planned step": PLANNED.step,
    "suggestion": PLANNED.suggestions and PLANNED.suggestions[0],
    "tried": PLANNED.tried[0],
    "profile": PLANNED.profile,
    "hardware": PLANNED.hardware,
    "optimizer": PROGRAM.optimizer,
    "groups": zfunc.groups((zfunc.matrices_only, zfunc.Lion()), zfunc.AdamW()),
    "schedule": PROGRAM.schedule,
}
PICTURES = {"plan": "<img", "timeline": "<img", "program": "<img", "planned": "<img", "segment": "<table"}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_prints_in_a_few_lines(name: str) -> None:
    shown = repr(VALUES[name])
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
    assert PICTURES[name] in shown_in_a_notebook(VALUES[name])


def test_a_long_step_has_no_picture_in_a_notebook() -> None:
    timeline = simulate(PROGRAM.plan)
    assert "too long" in shown_in_a_notebook(Timeline(timeline.events * 200, "simulated"))


def test_metrics_and_runs_are_curves_in_a_notebook(tmp_path: Path) -> None:
    steps = [evolve(METRICS, step=n, loss=1 / n) for n in range(1, 40)]
    html = shown_in_a_notebook(curves(steps))
    assert html.count("&lt;figure&gt;") == 3
    assert "gradient norm" in html
    assert "<iframe" in shown_in_a_notebook(read_history(written(tmp_path, STEPS)))


def test_in_jupyter_a_training_prints_lines_without_control_codes() -> None:
    """Jupyter runs a command with "!" at a terminal of its own, which does not obey them."""
    code = "from zfunc.cli.terminal import shows_panels; print(shows_panels())"
    for variables, expected in (({}, b"True"), ({"JPY_PARENT_PID": "1"}, b"False")):
        ours, theirs = pty.openpty()
        environment = {"TERM": "xterm", **os.environ, **variables}
        subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
        os.close(theirs)
        assert os.read(ours, 100).strip() == expected
        os.close(ours)
