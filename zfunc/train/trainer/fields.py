"""The fields of the Trainer's classes, of fields.toml, and a file read by them: JSON, or YAML with PyYAML.

A field at its default says nothing, so a file may have all fields of an object. Checks, messages and
docs/trainer.md are derived from the table.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from zfunc.errors import SettingError, did_you_mean
from zfunc.train.deepspeed.keys import FATES, Key, read_file, read_value

TRAINER, SFT, DPO_CLASS = "TrainingArguments", "SFTConfig", "DPOConfig"
_TABLE = tomllib.loads(Path(__file__).with_name("fields.toml").read_text())
OLD_NAMES: Mapping[str, str] = _TABLE["old"]
OTHERS: Mapping[str, Mapping[str, str]] = {
    name: _TABLE[name] for name in ("axolotl", "accelerate", "another trainer of TRL")
}
"""Keys of other programs' files, which no Trainer has, each with what to use instead."""


def read_field(kind: str | list[Any], value: Any) -> Any:
    """`value` converted to `kind`, the type of a field; None for another type. YAML reads 1e-4 as a text, and no
    as False.

    >>> read_field("float 0..", "1e-4"), read_field("any", ["wandb"]), read_field(["no", "steps"], False)
    (0.0001, ['wandb'], 'no')
    """
    if kind == "any":
        return value
    if value is False and isinstance(kind, list) and "no" in kind:
        return "no"
    if isinstance(value, str) and isinstance(kind, str) and kind.startswith(("int", "float")):
        try:
            value = float(value)
        except ValueError:
            return None
    return read_value(kind, value)


def _field(name: str, row: dict[str, Any]) -> Key:
    (fate,) = (fate for fate in FATES if fate in row)
    note = row[fate].format_map(_TABLE["notes"])
    return Key(name, row["type"], row.get("default"), fate, note, row.get("sets", ""), row.get("as"))


CLASSES = {
    kind: {name: _field(name, row) for name, row in _TABLE[kind].items()}
    for kind in (TRAINER, SFT, DPO_CLASS)
}
CLASSES[TRAINER] |= {
    name: Key(name, "any", None, "ignored", "transformers 5 has removed it")
    for name in _TABLE["removed"]["names"]
}
"""The fields of each class; TRL's have those of TrainingArguments too."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = _TABLE["defaults"]


@frozen
class TrainerArgs:
    """Arguments of transformers' Trainer: `args[name]` is the value in a file, else the default."""

    source: str  # as errors name it
    kind: str  # of CLASSES
    file: Mapping[str, Any]  # fields that are not at their default

    def __getitem__(self, name: str) -> Any:
        """The value of field `name` in the file, else its default in the Trainer's class."""
        fields = fields_of(self.kind)
        return self.file.get(name, DEFAULTS.get(self.kind, {}).get(name, fields[name].default))

    def refused(self, name: str, got: Any, field: str) -> ValueError:
        """The error for a setting `name` whose value `got` contradicts field `field` of the file."""
        got = f"{got}, and {self.source} says {field} {self[field]}"
        return SettingError(name, got, "one of them", "leave one out")


def fields_of(kind: str) -> dict[str, Key]:
    """The fields of the arguments' class `kind`, such as SFTConfig, with those of TrainingArguments."""
    return {**CLASSES[TRAINER], **CLASSES[kind]}


def read_args(path: Path, *, dpo: bool = False) -> TrainerArgs:
    """The Trainer's arguments in a file, of the class whose fields the file has; with `dpo` of DPOConfig.

    Raises ValueError for a file of axolotl, accelerate or another trainer of TRL, for unknown fields, each with the
    nearest one, for values of another type, and for unsupported fields, with what to do instead.
    """
    written = _read(path)
    for old, name in OLD_NAMES.items():
        if old in written and name in written and written[old] != written[name]:
            raise ValueError(f"{path}: got {old!r} and {name!r}, expected one of the two: leave one out")
    values = {OLD_NAMES.get(name, name): value for name, value in written.items()}
    for program, keys in OTHERS.items():
        if lines := [f"{name}: {instead}" for name, instead in keys.items() if name in values]:
            raise ValueError(
                f"{path}: got a file of {program}, expected a Trainer's arguments: instead of its keys take\n"
                + "\n".join(lines)
            )
    own = {
        kind: values.keys() & (CLASSES[kind].keys() - CLASSES[TRAINER].keys()) for kind in (SFT, DPO_CLASS)
    }
    kind = DPO_CLASS if dpo or own[DPO_CLASS] - own[SFT] else SFT if own[SFT] else TRAINER
    args = TrainerArgs(str(path), kind, file := dict[str, Any]())
    wrong = [*_take(args, values, file)]
    if wrong:
        raise ValueError(f"{path}: " + "\n".join(wrong))
    return args


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        return read_file(path, ", or YAML called .yaml")
    import yaml

    try:
        text = path.expanduser().read_bytes()
        values, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"{path}: got {error.strerror!r}, expected a YAML or JSON file: pass one") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: got {' '.join(str(error).split())}, expected YAML: correct it") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: got a {type(values).__name__}, expected names with values: write them so")
    nodes: list[Any] = [node]  # and the objects in it: of two alike names YAML takes the last
    for node in nodes:
        names = [x.value for x, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if twice := next((x for n, x in enumerate(names) if x in names[:n]), None):
            raise ValueError(f"{path}: got {twice!r} twice, expected each name once: leave one out")
        nodes += [x for _, x in node.value if x not in nodes] if names else []
    return cast("dict[str, Any]", values)


def _take(args: TrainerArgs, values: Mapping[str, Any], file: dict[str, Any]) -> Iterator[str]:
    """Store in `file` the fields of `values` that differ from their default, None left out; yield an error
    text for each wrong one."""
    known = fields_of(args.kind)
    for name, value in values.items():
        if (field := known.get(name)) is None:
            near = did_you_mean(str(name), [*known])
            yield f"got the field {name!r}, which {args.kind} has not{near}: correct it"
        elif value in (None, f"<{name.upper()}>"):  # a token, as to_dict hides it
            continue
        elif (plain := read_field(field.type, value)) is None:
            hint = did_you_mean(str(value), field.type) if isinstance(field.type, list) else ""
            do = "write it into a file, and name that" if isinstance(value, dict) else "correct it"
            do = field.note if field.fate == "ignored" and isinstance(field.type, list) else do
            yield f"{name}: got {value!r}, expected {field.expected}{hint}: {do}"
        elif plain != args[name] and (plain or args[name]):
            if field.fate == "unsupported":
                yield f"{name}: got {value!r}, which is not supported: {field.note}"
            file[name] = plain
