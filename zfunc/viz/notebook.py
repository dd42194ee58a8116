"""Plans, timelines and curves as a notebook shows them.

A picture is an image, and curves are a frame, so that their styles do not reach the notebook, nor its styles them.
"""

from base64 import b64encode
from collections.abc import Iterable
from html import escape
from math import isfinite
from typing import Any

from attrs import frozen

from zfunc.core.hardware import ROUND
from zfunc.core.plan import Plan
from zfunc.core.simulator import simulate
from zfunc.core.timeline import Timeline
from zfunc.viz.charts import Chart, Curve, Points, chart_figure
from zfunc.viz.timeline_svg import svg
from zfunc.viz.web_page import web_file

STYLE = (
    "body { padding: 0 } .charts { grid-template-columns: repeat(3, 1fr); margin: 0 } .key { display: none }"
)
MOST_DRAWN = 3000  # operations of a picture that is worth its bytes; `zfunc draw` writes pages for more


@frozen
class Picture:
    """A picture as HTML, which a notebook shows."""

    html: str

    def __repr__(self) -> str:
        return f"Picture({len(self.html):,} characters of HTML)"

    def _repr_html_(self) -> str:
        return self.html


def plan_html(plan: Plan) -> str:
    """The plan as HTML with a picture of its simulation on round numbers; no picture for a long plan."""
    return timeline_html(simulate(plan), plan, f"One step, on {ROUND.name}")


def timeline_html(timeline: Timeline, plan: Plan | None = None, title: str = "One step") -> str:
    """The timeline as HTML with a picture, with arrows if the plan is known; no picture for a long timeline."""
    if len(timeline.events) > MOST_DRAWN:
        return f"<p>{escape(repr(timeline))}: too long for a notebook; zfunc draw shows it as a page</p>"
    return image(svg(timeline, plan=plan, title=title, width=1000))


def image(picture: str) -> str:
    """An SVG file as an HTML image element with its data in it."""
    data = b64encode(picture.encode()).decode()
    return f'<img style="max-width: 100%" alt="one step" src="data:image/svg+xml;base64,{data}">'


def curves(metrics: Iterable[Any]) -> Picture:
    """Charts of loss, gradient norm and learning rate over steps, from the `Metrics` of each `train_step`.

    >>> curves([])
    Picture(15 characters of HTML)
    """
    rows = list(metrics)
    figures = {
        "loss": [m.loss for m in rows],
        "gradient norm": [m.grad_norm for m in rows],
        "learning rate": [m.lr for m in rows],
    }

    def points(values: list[float]) -> Points:
        return tuple((m.step, y if isfinite(y) else None) for m, y in zip(rows, values, strict=True))

    return Picture(curves_html({name: points(values) for name, values in figures.items()}))


def curves_html(curves: dict[str, Points]) -> str:
    """HTML with a chart for each curve, side by side, by the curve's name."""
    steps = [step for points in curves.values() for step, _ in points]
    if not steps:
        return "<p>no steps</p>"
    span = min(steps), max(steps)
    charts = [
        Chart(name, (Curve(name, "line", points),), lambda value: f"{value:.4g}")
        for name, points in curves.items()
    ]
    style = f"<style>{web_file('report.css')}{STYLE}</style>"
    page = f'{style}<div class="charts">{"".join(chart_figure(x, span) for x in charts)}</div>'
    return f'<iframe srcdoc="{escape(page)}" width="100%" height="190" style="border: 0"></iframe>'
