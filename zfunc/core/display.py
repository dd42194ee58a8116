"""How values print in a line or two, and tables of them as HTML."""

from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any, cast

import attrs

FIELD, WHOLE = 80, 400  # characters


def brief(value: Any, *names: str) -> str:
    """Text of `value` with the fields that differ from their defaults, or the fields `names`, cut short.

    >>> from attrs import frozen
    >>> @frozen
    ... class Job:
    ...     name: str
    ...     sizes: tuple[int, ...] = ()
    ...     rest: int = 0
    >>> brief(Job("a", tuple(range(100))), "sizes")
    'Job(sizes=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 2...))'
    """
    fields: tuple[Any, ...] = attrs.fields(cast("Any", type(value)))
    chosen = names or [f.name for f in fields if f.repr and getattr(value, f.name) != f.default]
    parts = [f"{name.lstrip('_')}={_cut(repr(getattr(value, name)), FIELD)}" for name in chosen]
    return _cut(f"{type(value).__name__}({', '.join(parts)})", WHOLE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]}...{text[-1]}"


def counted(number: int, noun: str) -> str:
    """A number of things as text: the number and the noun, in the plural unless the number is 1.

    >>> counted(1, "lane"), counted(2500, "operation"), counted(2, "micro-batch")
    ('1 lane', '2,500 operations', '2 micro-batches')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def html_table(
    head: Sequence[Any],
    rows: Iterable[Sequence[Any]],
    caption: str = "",
    kind: str = "",
    marked: Collection[str] = (),
) -> str:
    """An escaped HTML table of class `kind`; rows begin with a name, and those named in `marked` have class "set".

    >>> html_table([], [["<b>", 1]])
    '<table><tbody><tr><th scope="row">&lt;b&gt;</th><td>1</td></tr></tbody></table>'
    """
    mark, of = ' class="set"', f' class="{kind}"' * bool(kind)
    title = f"<caption>{escape(caption)}</caption>" * bool(caption)
    top = "".join(f"<th>{escape(str(x))}</th>" for x in head)
    lines = "".join(
        f'<tr{mark * (name in marked)}><th scope="row">{escape(str(name))}</th>'
        f"{''.join(f'<td>{escape(str(x))}</td>' for x in cells)}</tr>"
        for name, *cells in rows
    )
    first = f"<thead><tr>{top}</tr></thead>" * bool(head)
    return f"<table{of}>{title}{first}<tbody>{lines}</tbody></table>"
