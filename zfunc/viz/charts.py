"""Curves over steps as SVG inside a page: of 3 steps or of 100,000, and as light to read.

A chart has at most PLACES places along it, whatever the number of steps. Of the points that share a place the mean
is drawn over the range from lowest to highest, so no spike is lost; a point that is not a number is a gap. Colours
are the page's, by class.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Literal

from attrs import frozen

from zfunc.units import format_bytes
from zfunc.viz.legend import axis_ticks

Points = tuple[tuple[int, float | None], ...]
PLACES = 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 76.0, 546.0, 10.0, 184.0  # edges of the plot in px, in a picture of 560 x 210


@frozen
class Curve:
    """A curve of a chart: values by step, as a "line" through the mean of steps that share pixels, or as "dots"."""

    name: str
    form: Literal["line", "dots"]
    points: Points


@frozen
class Chart:
    """A chart: curves over steps on one pair of axes. `text` formats a value of a curve."""

    title: str
    curves: tuple[Curve, ...]
    text: Callable[[float], str]
    from_zero: bool = False
    marks: tuple[int, ...] = ()  # steps with a tick on the axis
    mark_name: str = ""


@frozen
class PlotPoint:
    """Points of a curve drawn as one: first and last step; lowest, mean and highest value, None if all are gaps."""

    first: int
    last: int
    values: tuple[float, float, float] | None  # None: a gap


def placed(points: Points, span: tuple[int, int]) -> dict[int, PlotPoint]:
    """Merge points that share pixels into PlotPoints, by place: the index of a run of steps from span[0]."""
    each = max(1, -(-(span[1] - span[0] + 1) // PLACES))
    places: dict[int, PlotPoint] = {}
    for place, group in groupby(points, lambda point: (point[0] - span[0]) // each):
        steps, values = zip(*group, strict=True)
        ys = [y for y in values if y is not None]
        of_ys = (min(ys), sum(ys) / len(ys), max(ys)) if ys else None
        places[place] = PlotPoint(steps[0], steps[-1], of_ys)
    return places


def chart_figure(chart: Chart, span: tuple[int, int]) -> str:
    """The chart over the steps of `span`, first and last, with its title and legend, as HTML."""
    keys = [(curve.form, curve.name) for curve in chart.curves]
    keys += [("mark", chart.mark_name)] if chart.marks else []
    legend = "".join(f'<span class="key {form}">{escape(name)}</span>' for form, name in keys)
    head = f"<figcaption><h2>{escape(chart.title)}</h2>{legend}</figcaption>"
    return f"<figure>{head}{_chart_svg(chart, span)}</figure>"


def _chart_svg(chart: Chart, span: tuple[int, int]) -> str:
    curves = [(curve, placed(curve.points, span)) for curve in chart.curves]
    values = [v for _, places in curves for p in places.values() if p.values for v in p.values]
    if not values:
        return '<p class="dim">no figures</p>'
    frame = _Frame.around(values, span, from_zero=chart.from_zero)
    name = escape(chart.title, quote=True)
    return "".join(
        [
            f'<svg class="chart" viewBox="0 0 560 210" role="img" aria-label="{name}">',
            *_axes(chart, frame),
            *(shape for curve, places in curves for shape in _shapes(curve, list(places.values()), frame)),
            *_marks(chart, frame),
            *_tooltips(chart, curves, frame),
            "</svg>",
        ]
    )


@frozen
class _Frame:
    """The axes of a chart: steps and values at the edges of the plot, and the px of any step or value."""

    first: int
    last: int
    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], span: tuple[int, int], *, from_zero: bool) -> "_Frame":
        low, high = min(values), max(values)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        return cls(*span, low if from_zero and low == 0 else low - room, high + room)

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return _LEFT + (_RIGHT - _LEFT) * share

    def y(self, value: float) -> float:
        return _TOP + (_BOTTOM - _TOP) * (self.high - value) / (self.high - self.low)

    def through(self, places: Sequence[PlotPoint], which: int) -> str:
        """SVG path data of a line through the lowest (`which` 0), mean (1) or highest (2) values of `places`."""
        return "L".join(
            f"{self.x((p.first + p.last) / 2):.1f} {self.y(p.values[which]):.1f}" for p in places if p.values
        )


def _axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    units = (1 << 30, 1 << 20, 1 << 10) if chart.text is format_bytes else ()  # of round numbers
    unit = next((float(u) for u in units if frame.high >= u), 1.0)
    for value in axis_ticks(frame.low, frame.high, 4, unit):
        y = frame.y(value)
        yield f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_RIGHT:g}"/>'
        label = escape(chart.text(value))
        yield f'<text class="label" text-anchor="end" x="{_LEFT - 8:g}" y="{y + 4:.1f}">{label}</text>'
    steps = [frame.first]
    if frame.last > frame.first:
        steps = [round(x) for x in axis_ticks(frame.first, frame.last, 5) if abs(x - round(x)) < 1e-6]
    for step in steps:
        x = frame.x(step)
        anchor = "end" if x > _RIGHT - 26 else "middle"
        yield f'<text class="label" text-anchor="{anchor}" x="{x:.1f}" y="{_BOTTOM + 18:g}">{step:,}</text>'


def _shapes(curve: Curve, places: Sequence[PlotPoint], frame: _Frame) -> Iterator[str]:
    for has_values, group in groupby(places, lambda p: p.values is not None):
        shown = list(group)
        if not has_values:
            continue
        if curve.form == "line" and any(p.last > p.first for p in shown):
            lowest = frame.through(shown[::-1], 0)
            yield f'<path class="spread" d="M{frame.through(shown, 2)}L{lowest}"/>'
        if curve.form == "line" and len(shown) > 1:
            yield f'<path class="line" d="M{frame.through(shown, 1)}"/>'
            continue
        for x, y in (frame.through([p], 1).split() for p in shown):
            yield f'<circle class="{curve.form}" r="3" cx="{x}" cy="{y}"/>'


def _marks(chart: Chart, frame: _Frame) -> Iterator[str]:
    """Yield SVG ticks on the axis of steps for the chart's marked steps; marks on one pixel share a tick."""
    for x, group in groupby(chart.marks, lambda step: round(frame.x(step))):
        steps = list(group)
        which = f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps):,} steps from {steps[0]:,}"
        label = escape(f"{chart.mark_name}: {which}")
        yield f'<path class="mark" d="M{x} {_BOTTOM - 9:g}V{_BOTTOM:g}"><title>{label}</title></path>'


def _tooltips(chart: Chart, curves: list[tuple[Curve, dict[int, PlotPoint]]], frame: _Frame) -> Iterator[str]:
    """Tooltips with the values of all `curves`, one for each PlotPoint's steps, as SVG that needs no script."""
    places = {place: point for _, points in curves for place, point in points.items()}
    half = (_RIGHT - _LEFT) / max(2, 2 * max(places))
    for place, p in places.items():
        readings = (f"{c.name}: {_reading(points[place], chart)}" for c, points in curves if place in points)
        steps = f"{p.first:,}" if p.first == p.last else f"{p.first:,} to {p.last:,}"
        label = escape("\n".join([f"step {steps}", *readings]))
        size = f'width="{2 * half:.1f}" height="{_BOTTOM - _TOP:g}"'
        left = frame.x((p.first + p.last) / 2) - half
        yield f'<rect class="reading" x="{left:.1f}" y="{_TOP:g}" {size}><title>{label}</title></rect>'


def _reading(point: PlotPoint, chart: Chart) -> str:
    if point.values is None:
        return "not a number"
    low, mean, high = map(chart.text, point.values)
    return mean if point.first == point.last else f"{mean}, from {low} to {high}"
