"""A table of cells, some of them coloured, as a picture: as text for a terminal and as an SVG file."""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from course.law import Picture

COLOURS = {"wrong": "#f06b48", "right": "#569c7d", "kept": "#98defc", "lost": "#d98c8c", "dim": "#9198a1"}
ROW, LETTER, GAP = 22, 7.3, 14  # pixels
STYLE = """<style>
svg { --page: #ffffff; --ink: #1f2328; --dim: #656d76; --line: #d8dee4; }
@media (prefers-color-scheme: dark) { svg { --page: #0d1117; --ink: #e6edf3; --dim: #9198a1; --line: #30363d; } }
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: var(--ink); white-space: pre; }
.title { font: 600 15px ui-sans-serif, system-ui, Helvetica, Arial, sans-serif; }
.on { fill: #10151b; }
.head { fill: var(--dim); }
</style>"""


class Cell(NamedTuple):
    """The text of a cell, and its colour by a word of COLOURS; "" for none."""

    text: str
    colour: str = ""


Row = Sequence[Cell | str]


def table(title: str, head: Sequence[str], rows: Sequence[Row], gap: int = 2) -> Picture:
    """A picture of `rows` of cells below column names `head`; in its text, `gap` blanks separate columns."""
    cells = [[x if isinstance(x, Cell) else Cell(x) for x in row] for row in rows]
    widths = [max(len(x[n].text) for x in [[*map(Cell, head)], *cells]) for n in range(len(head))]
    lines = [title, *(_line([x.text for x in row], widths, gap) for row in [[*map(Cell, head)], *cells])]
    return Picture("\n".join(lines), _svg(title, head, cells, widths, gap))


def _line(texts: Sequence[str], widths: Sequence[int], gap: int) -> str:
    return (" " * gap).join(x.ljust(width) for x, width in zip(texts, widths, strict=True)).rstrip()


def _svg(title: str, head: Sequence[str], cells: list[list[Cell]], widths: list[int], gap: int) -> str:
    between = GAP if gap else 0
    lefts = [20 + sum(w * LETTER + between for w in widths[:n]) for n in range(len(widths))]
    width = round(max(lefts[-1] + widths[-1] * LETTER + 20, len(title) * 9.2 + 40))
    height = 64 + ROW * len(cells) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        STYLE,
        f'<rect width="{width}" height="{height}" rx="8" fill="var(--page)"/>',
        f'<text class="title" x="20" y="28">{escape(title)}</text>',
        *(
            f'<text class="head" x="{x:.1f}" y="54">{escape(t)}</text>'
            for x, t in zip(lefts, head, strict=True)
        ),
    ]
    for n, row in enumerate(cells):
        y = 64 + ROW * n
        for x, letters, cell in zip(lefts, widths, row, strict=True):
            if cell.colour:
                parts.append(
                    f'<rect x="{x - 3:.1f}" y="{y}" width="{letters * LETTER + 6:.1f}" height="{ROW - 3}" rx="3" '
                    f'fill="{COLOURS[cell.colour]}"/>'
                )
            on = ' class="on"' if cell.colour else ""
            parts.append(f'<text{on} x="{x:.1f}" y="{y + 14}">{escape(cell.text)}</text>')
    return "\n".join([*parts, "</svg>\n"])
