"""Write the tables of the pages in `TABLES` from the code: `python docs/make_tables.py`."""

import json
import re
from pathlib import Path

from attrs import fields
from markdown_table import table

from zfunc.core.setting_values import HELP
from zfunc.core.settings import named_settings
from zfunc.engine.stages.metrics import Metrics
from zfunc.train.deepspeed.keys import KEYS, OLD_NAMES, Key
from zfunc.train.trainer.fields import CLASSES, OTHERS

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- python docs/make_tables.py writes from here -->", "<!-- to here -->"
OTHER_FILES = (
    "### Other files\n\nOf axolotl, Accelerate or TRL's other trainers; an error says what else to use."
)
HEADS = ("key", "DeepSpeed's default", "in zfunc")


def settings_table() -> str:
    """A row for each setting of a step."""
    rows = ((f"`{f.name}`", f"`{_default(f.default)}`", f.metadata[HELP]) for f in named_settings().values())
    return table(("setting", "default", "meaning"), rows)


def _default(value: object) -> str:
    return f"{value:_}" if type(value) is int else repr(value).replace("'", '"')


def key_tables() -> str:
    """A table for every block of a DeepSpeed configuration, keys of one text in a row, and one of old names."""
    blocks: dict[str, list[Key]] = {}
    for key in KEYS.values():
        blocks.setdefault(key.name.partition(".")[0] if key.block else "", []).append(key)
    old = table(("in a file", "read as"), ((f"`{old}`", f"`{new}`") for old, new in OLD_NAMES.items()))
    return "\n\n".join([*(_block(name, keys) for name, keys in blocks.items()), f"### Old names\n\n{old}"])


def field_tables() -> str:
    """A table for each class of a Trainer's arguments, fields of one text in a row, then for other programs."""
    heads = ("field", "default", "in zfunc")
    tables = [_block(name, [*fields.values()], heads) for name, fields in CLASSES.items()]
    for program, keys in OTHERS.items():
        rows = ((f"`{name}`", instead) for name, instead in keys.items())
        tables.append(table((f"a key of {program}", "instead"), rows))
    return "\n\n".join([*tables[: len(CLASSES)], OTHER_FILES, *tables[len(CLASSES) :]])


def _block(name: str, keys: list[Key], heads: tuple[str, str, str] = HEADS) -> str:
    heading = f"### `{name}`" if name else "### At the top level"
    alike: dict[str, list[Key]] = {}
    for key in keys:
        alike.setdefault(_in_zfunc(key), []).append(key)
    rows = (
        (", ".join(f"`{key.name.removeprefix(f'{name}.')}`" for key in same), _default_in_file(same), text)
        for text, same in alike.items()
    )
    return f"{heading}\n\n{table(heads, rows)}"


def _default_in_file(keys: list[Key]) -> str:
    """DeepSpeed's default of the keys of a row; empty where they have none, or not the same."""
    (default, *others) = {json.dumps(key.default) for key in keys}
    return "" if others or default == "null" else f"`{default}`"


def _in_zfunc(key: Key) -> str:
    ignored = "no effect" if "." in key.name or key.name in KEYS else f"no effect: {key.note}"
    return {"supported": key.note, "ignored": ignored, "unsupported": f"refused: {key.note}"}[key.fate]


def metrics_table() -> str:
    """A row for each field of what a step returns, by the docstring of its class."""
    said = re.findall(r"- `(\w+)`: (.+?)\.\n(?= *(?:- |$))", f"{Metrics.__doc__}\n", re.S)
    meaning = {name: " ".join(text.split()) for name, text in said}
    return table(("`metrics`", "what it is"), ((f"`{f.name}`", meaning[f.name]) for f in fields(Metrics)))


TABLES = {
    "settings.md": settings_table,
    "deepspeed.md": key_tables,
    "trainer.md": field_tables,
    "quickstart.md": metrics_table,
}


def with_tables(name: str) -> str:
    """The page of that name with its tables as they are now, between the two marks."""
    before, _, rest = (FOLDER / name).read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{TABLES[name]()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in TABLES:
        (FOLDER / name).write_text(with_tables(name))
        print(f"written: {name}")
