"""Curves over steps as SVG inside a page: of 3 steps or of 100,000, and as light to read.

The size of a chart is bounded, whatever the number of steps. Of many points that share a place, the highest and the
lowest are drawn, so no spike is lost; a point that is not a number is a gap. Colours are the page's, by class.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate, groupby, pairwise
from typing import Literal

from attrs import frozen

from zfunc.viz.legend import axis_ticks

Points = tuple[tuple[int, float | None], ...]
PLACES = 240  # along a chart, at most
SMOOTH = 50  # a smoothed curve is the mean over so many-th a part of the steps
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560.0, 210.0, 76.0, 14.0, 10.0, 26.0


@frozen
class Curve:
    """Points by step. "spread" shows the range at each place, "line" the mean, "dots" each, "limit" is dashed."""

    name: str
    form: Literal["spread", "line", "dots", "limit"]
    points: Points


@frozen
class Chart:
    """Curves on one pair of axes. `text` formats a value; round values are multiples of `unit`."""

    title: str
    curves: tuple[Curve, ...]
    text: Callable[[float], str]
    unit: float = 1.0
    from_zero: bool = False
    marks: tuple[int, ...] = ()  # steps with a tick on the axis
    mark_name: str = ""


@frozen
class PlotPoint:
    """The points of a curve that share a place: the first and last step, lowest, mean and highest value."""

    first: int
    last: int
    values: tuple[float, float, float] | None  # None: a gap

    @property
    def middle(self) -> float:
        """Between the first step and the last."""
        return (self.first + self.last) / 2


def smoothed(points: Points) -> Points:
    """Each point as the mean of those around it, a fiftieth of all of them; gaps stay gaps.

    >>> smoothed(((1, 2.0), (2, None), (3, 4.0)))
    ((1, 2.0), (2, None), (3, 4.0))
    """
    half = len(points) // (2 * SMOOTH)
    sums = [0.0, *accumulate(y or 0.0 for _, y in points)]
    counts = [0, *accumulate(int(y is not None) for _, y in points)]

    def mean(n: int) -> float:
        a, b = max(0, n - half), min(len(points), n + half + 1)
        return (sums[b] - sums[a]) / (counts[b] - counts[a])

    return tuple((x, None if y is None else mean(n)) for n, (x, y) in enumerate(points))


def placed(points: Points, span: tuple[int, int]) -> list[PlotPoint]:
    """The points by place, in order."""
    first, last = span
    each = max(1, -(-(last - first + 1) // PLACES))  # steps of a place
    return [_place(list(group)) for _, group in groupby(points, lambda p: (p[0] - first) // each)]


def _place(group: Sequence[tuple[int, float | None]]) -> PlotPoint:
    ys = [y for _, y in group if y is not None]
    return PlotPoint(group[0][0], group[-1][0], (min(ys), sum(ys) / len(ys), max(ys)) if ys else None)


def chart_figure(chart: Chart, span: tuple[int, int]) -> str:
    """The chart over the steps of `span`, first and last, with its title and legend, as HTML."""
    keys = [(curve.form, curve.name) for curve in chart.curves]
    keys += [("mark", chart.mark_name)] if chart.marks else []
    legend = "".join(f'<span class="key {form}">{escape(name)}</span>' for form, name in keys)
    head = f"<figcaption><h2>{escape(chart.title)}</h2>{legend}</figcaption>"
    return f"<figure>{head}{_chart_svg(chart, span)}</figure>"


def _chart_svg(chart: Chart, span: tuple[int, int]) -> str:
    curves = [(curve, placed(curve.points, span)) for curve in chart.curves]
    values = [v for _, places in curves for p in places if p.values for v in p.values]
    if not values:
        return '<p class="dim">no figures</p>'
    frame = _Frame.around(values, span, from_zero=chart.from_zero)
    return "".join(
        [
            f'<svg class="chart" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
            f'aria-label="{escape(chart.title, quote=True)}">',
            *_axes(chart, frame),
            *(shape for curve, places in curves for shape in _shapes(curve, places, frame)),
            *_marks(chart, frame),
            *_tooltips(chart, curves, frame),
            "</svg>",
        ]
    )


@frozen
class _Frame:
    """Places of steps and values, in px."""

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
        width = _WIDTH - _LEFT - _RIGHT
        if self.last == self.first:
            return _LEFT + width / 2
        return _LEFT + width * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (self.high - value) / (self.high - self.low)


def _axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for value in axis_ticks(frame.low, frame.high, 4, chart.unit):
        y = frame.y(value)
        yield f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{_WIDTH - _RIGHT:g}"/>'
        label = escape(chart.text(value))
        yield f'<text class="label" text-anchor="end" x="{_LEFT - 8:g}" y="{y + 4:.1f}">{label}</text>'
    steps = [frame.first]
    if frame.last > frame.first:
        steps = [round(x) for x in axis_ticks(frame.first, frame.last, 5) if abs(x - round(x)) < 1e-6]
    for step in steps:
        x = frame.x(step)
        anchor = "end" if x > _WIDTH - 40 else "middle"
        yield f'<text class="label" text-anchor="{anchor}" x="{x:.1f}" y="{bottom + 18:g}">{step:,}</text>'


def _shapes(curve: Curve, places: list[PlotPoint], frame: _Frame) -> Iterator[str]:
    if curve.form == "dots":
        for p in places:
            if p.values:
                x, y = frame.x(p.middle), frame.y(p.values[1])
                yield f'<circle class="dots" r="3" cx="{x:.1f}" cy="{y:.1f}"/>'
        return
    for has_values, group in groupby(places, lambda p: p.values is not None):
        if has_values:
            yield f'<path class="{curve.form}" d="{_path(curve, list(group), frame)}"/>'


def _path(curve: Curve, places: list[PlotPoint], frame: _Frame) -> str:
    """A line through the means, or along the highest and back along the lowest."""
    if curve.form != "spread":
        return _through(places, 1, frame)
    highest, lowest = _through(places, 2, frame), _through(places[::-1], 0, frame)
    return f"{highest}L{lowest[1:]}"


def _through(places: Iterable[PlotPoint], which: int, frame: _Frame) -> str:
    points = [f"{frame.x(p.middle):.1f} {frame.y(p.values[which]):.1f}" for p in places if p.values]
    return f"M{'L'.join(points)}" + ("h0" if len(points) == 1 else "")


def _marks(chart: Chart, frame: _Frame) -> Iterator[str]:
    """A tick on the axis for the marks of each pixel."""
    bottom = _HEIGHT - _BOTTOM
    for x, group in groupby(chart.marks, lambda step: round(frame.x(step))):
        steps = list(group)
        which = f"step {steps[0]:,}" if len(steps) == 1 else f"{len(steps):,} steps from {steps[0]:,}"
        label = escape(f"{chart.mark_name}: {which}")
        yield f'<path class="mark" d="M{x} {bottom - 9:g}V{bottom:g}"><title>{label}</title></path>'


def _tooltips(chart: Chart, curves: list[tuple[Curve, list[PlotPoint]]], frame: _Frame) -> Iterator[str]:
    """The values of every place, without a script."""
    readings: dict[int, tuple[PlotPoint, list[str]]] = {}
    for curve, places in curves:
        for p in places:
            key = round(frame.x(p.middle))
            readings.setdefault(key, (p, []))[1].append(f"{curve.name}: {_reading(p, curve, chart.text)}")
    keys = sorted(readings)
    middles = [(a + b) / 2 for a, b in pairwise(keys)]
    for key, left, right in zip(keys, [_LEFT, *middles], [*middles, _WIDTH - _RIGHT], strict=True):
        place, lines = readings[key]
        steps = f"{place.first:,}" if place.first == place.last else f"{place.first:,} to {place.last:,}"
        label = escape("\n".join([f"step {steps}", *lines]))
        size = f'width="{max(0.0, right - left):.1f}" height="{_HEIGHT - _TOP - _BOTTOM:g}"'
        yield f'<rect class="reading" x="{left:.1f}" y="{_TOP:g}" {size}><title>{label}</title></rect>'


def _reading(place: PlotPoint, curve: Curve, text: Callable[[float], str]) -> str:
    if place.values is None:
        return "not a number"
    low, mean, high = place.values
    return f"{text(low)} to {text(high)}" if curve.form == "spread" and high > low else text(mean)
