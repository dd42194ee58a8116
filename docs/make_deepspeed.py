"""Write the tables of docs/deepspeed.md from the code: `python docs/make_deepspeed.py`. Prose stays as it is."""

import json
from pathlib import Path
from typing import Any

from zfunc.train.deepspeed.keys import KEYS, OLD_NAMES, Key

PAGE = Path(__file__).with_name("deepspeed.md")
BEGIN, END = "<!-- python docs/make_deepspeed.py writes from here -->", "<!-- to here -->"


def with_key_tables(page: str) -> str:
    """The page with a new table. Raises ValueError for a page without the two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"got a page without {BEGIN} and {END}, expected both, a line each: add them")
    return f"{before}{BEGIN}\n\n{_key_tables()}\n{END}{after}"


def _key_tables() -> str:
    """A table for every top-level block, with its keys in order, and one of old names."""
    parts: dict[str, list[Key]] = {}
    for key in KEYS.values():
        parts.setdefault(key.name.partition(".")[0] if key.block else "", []).append(key)
    sections = [_section(part, keys) for part, keys in parts.items()]
    old = [f"| `{name}` | `{new.key}` |" for name, new in OLD_NAMES.items()]
    return "\n".join([*sections, "### Old names", "", "| in a file | read as |", "|---|---|", *old, ""])


def _section(part: str, keys: list[Key]) -> str:
    head = f"### `{part}`" if part else "### At the top level"
    prefix = f"{part}." if part else ""
    rows = [
        f"| `{key.name.removeprefix(prefix)}` | {_default(key.default)} | {_in_zfunc(key)} |" for key in keys
    ]
    return "\n".join([head, "", "| key | DeepSpeed's default | in zfunc |", "|---|---|---|", *rows, ""])


def _default(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _in_zfunc(key: Key) -> str:
    if key.exceptions:
        values = ", ".join(f"`{json.dumps(value)}`" for value in key.exceptions)
        return f"{key.note}. {values} is refused: {key.instead}"
    return {"supported": "", "ignored": "no effect: ", "unsupported": "refused: "}[key.fate] + key.note


if __name__ == "__main__":
    PAGE.write_text(with_key_tables(PAGE.read_text()))
    print(f"written: {PAGE}")
