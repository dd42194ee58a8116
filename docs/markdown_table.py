"""Markdown, as the scripts of this folder write it."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], ruler: str = "---") -> str:
    """A table; `ruler` aligns all columns but the first."""
    rulers = ["---", *[ruler] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rulers, *rows))


def code(names: Iterable[str]) -> str:
    """Names as code spans."""
    return ", ".join(f"`{name}`" for name in names)
