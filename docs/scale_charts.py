"""Charts of docs/scale.md as SVG, readable on light and on dark pages, drawn without a plotting library.

The invariant: the same figures give the same bytes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from attrs import frozen

STYLE = """<style>
svg { --page: #ffffff; --ink: #1f2328; --dim: #656d76; --line: #d8dee4;
  --c0: #1f6fc5; --c1: #c2571a; --c2: #3d8f5f; --c3: #8a4fbf; --c4: #b8860b; --c5: #8b949e; }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --ink: #e6edf3; --dim: #9198a1; --line: #30363d;
    --c0: #6cb2ff; --c1: #ff9d5c; --c2: #6fcf97; --c3: #c79bff; --c4: #e8c14e; --c5: #848d97; }
}
text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; }
.dim { fill: var(--dim); }
.page { fill: var(--page); }
.grid { stroke: var(--line); }
.curve { fill: none; stroke-width: 2; }
.dashed { stroke-dasharray: 5 4; stroke-width: 1.5; }
</style>
"""
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 58, 160, 42, 44, 330
COLORS = 6


@frozen
class Axes:
    """A panel: worlds from left to right, each twice the last; values from `low` to `high` upwards.

    `inset` is kept free at both ends, for bars.
    """

    left: float
    width: float
    worlds: tuple[int, ...]
    low: float
    high: float
    log: bool = False
    inset: float = 0.0

    def x(self, world: float) -> float:
        """Where a world is."""
        first, last = math.log2(self.worlds[0]), math.log2(self.worlds[-1])
        width = self.width - 2 * self.inset
        return self.left + self.inset + width * (math.log2(world) - first) / (last - first)

    def y(self, value: float) -> float:
        """Where a value is; below the axis there is nothing."""
        low, high, value = self.low, self.high, max(value, self.low)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - low) / (high - low)

    def frame(self, ticks: Mapping[float, str], title: str) -> Iterator[str]:
        """Title, grid and what it says at its edges."""
        yield text(self.left, 22, title, "title")
        for value, label in ticks.items():
            yield line(self.left, self.y(value), self.left + self.width, self.y(value))
            yield text(self.left - 8, self.y(value) + 4, label, "dim", "end")
        for world in self.worlds:
            yield text(self.x(world), HEIGHT - BOTTOM + 18, f"{world:,}", "dim", "middle")
        yield text(self.left + self.width / 2, HEIGHT - 8, "ranks", "dim", "middle")


def lines(
    series: Mapping[str, Mapping[int, float]], title: str, ticks: Mapping[float, str], *, log: bool = False
) -> str:
    """A curve a series, named at its right end; one whose name begins with "room" is dashed and grey."""
    worlds = next(iter(series.values()))
    high = max(*ticks, *(value for values in series.values() for value in values.values()))
    axes = Axes(LEFT + 10, 620, tuple(worlds), min(ticks), high, log)
    color = 0
    parts = list(axes.frame(ticks, title))
    ends: list[tuple[float, str, int]] = []
    for name, values in series.items():
        limit = name.startswith("room")
        shade = COLORS - 1 if limit else color % (COLORS - 1)
        color += not limit
        points = " ".join(f"{axes.x(w):.1f},{axes.y(v):.1f}" for w, v in values.items())
        dashed = " dashed" if limit else ""
        parts.append(f'<polyline class="curve{dashed}" stroke="var(--c{shade})" points="{points}"/>')
        ends.append((axes.y(values[max(values)]), name, shade))
    parts += _names(axes.left + axes.width + 8, ends)
    return svg(LEFT + 630 + RIGHT, parts)


def _names(x: float, ends: list[tuple[float, str, int]]) -> Iterator[str]:
    """The names of curves at their ends, moved apart where they would overlap."""
    below = -math.inf
    for y, name, shade in sorted(ends):
        below = max(y, below + 15)
        yield text(x, below + 4, name, color=f"var(--c{shade})")


def bars(panels: Mapping[str, Mapping[int, Mapping[str, float]]], kinds: Sequence[str]) -> str:
    """For each world a bar of shares, one panel beside the other, with one legend."""
    width, gap = 340, 60
    parts: list[str] = []
    for n, (title, of) in enumerate(panels.items()):
        axes = Axes(LEFT + 16 + n * (width + gap), width, tuple(of), 0, 1, inset=18)
        parts += axes.frame({0: "0", 0.25: "25 %", 0.5: "50 %", 0.75: "75 %", 1: "100 %"}, title)
        parts += _stacks(axes, of, kinds)
    x = LEFT + 16 + len(panels) * (width + gap) - 20
    for n, kind in enumerate(kinds):
        y = TOP + 12 + 22 * n
        parts += [rect(x, y, 12, 12, n), text(x + 18, y + 10, kind)]
    return svg(int(x) + 100, parts)


def _stacks(axes: Axes, of: Mapping[int, Mapping[str, float]], kinds: Sequence[str]) -> Iterator[str]:
    wide = min(b - a for a, b in pairwise(map(axes.x, axes.worlds))) * 0.8
    for world, shares in of.items():
        at = 0.0
        for n, kind in enumerate(kinds):
            top, bottom = axes.y(at + shares.get(kind, 0.0)), axes.y(at)
            yield rect(axes.x(world) - wide / 2, top, wide, bottom - top, n)
            at += shares.get(kind, 0.0)


def by_world(worlds: Iterable[int], value: Callable[[int], float]) -> dict[int, float]:
    """A series: a value for each world."""
    return {world: value(world) for world in worlds}


def svg(width: int, parts: Iterable[str]) -> str:
    """A whole picture."""
    size = f'width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}"'
    body = "\n".join([f'<rect class="page" width="{width}" height="{HEIGHT}"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{STYLE}{body}\n</svg>\n'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", color: str = "") -> str:
    """Words at a place; `kind` is a class of STYLE."""
    style = f' style="fill: {color}"' if color else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{style}>{words}</text>'


def line(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line of the grid."""
    return f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def rect(x: float, y: float, width: float, height: float, color: int) -> str:
    """A filled box."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} style="fill: var(--c{color})"/>'
