"""Command line to settings, and help: both derived from the fields of a command's settings and their options.

No command is known here, and no torch: help answers at once.
"""

import argparse
import platform
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NoReturn, get_args, get_origin

import attrs

import zfunc
from zfunc.cli.command import EXIT_USAGE, Command
from zfunc.options import GROUPS, Option, flag

WIDEST = 120  # columns of help; longer lines are hard to read
SIMILAR = 0.6  # how similar an unknown option and a known one have to be for a hint
LONGEST = 72  # characters of a clause in --help
EXPERTS = "for experts: zfunc plan --schedule auto chooses these sizes"
MAX_WORD = 120  # characters of a word that an error repeats

REWORDED = (  # argparse's errors, as got, expected, next action
    (r"argument (\S+): expected one argument", r"\1: got no value, expected one: write \1=VALUE"),
    (
        r"argument (\S+): ignored explicit argument (.+)",
        r"\1: got the value \2, expected none, as it is a switch: leave the value out",
    ),
    (r"the following arguments are required: (.+)", r"got no \1, expected one: name it after the command"),
    (r"argument (\S+): (.+)", r"\1: \2"),
)

NAMED = re.compile(
    r"(?<![^\s(])(?<!: got )([a-z_]+)=(True\b|'(\w[\w.-]*)'(?=[\s:,.)]|$)|(?=[\d'\"])(?!\S*[/:]))"
)
"""An argument and its value, a word or a number, or a switch: a word of its own, no path as in "out: got lr=3"."""
SUBJECT = re.compile(r"^(?:\w+(?:, \w+)*: )+")
"""What an error begins with: the settings, as in "data: tokenizer: got" or "steps, seconds: got"."""
QUOTED = re.compile(r"`([a-z_]+)(?:=([^`\s]+))?`")
"""A setting in backquotes, alone or with a value."""


class Help(argparse.HelpFormatter):
    """Help as wide as the terminal, up to a bound. Prose is wrapped; indented text, such as examples, is not."""

    def __init__(self, prog: str, **given: Any) -> None:
        columns = min(shutil.get_terminal_size().columns, WIDEST)
        super().__init__(prog, max_help_position=28, width=columns - 2, **given)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        filled = (
            p if "\n  " in p else fill(p, width, initial_indent=indent, break_on_hyphens=False)
            for p in paragraphs
        )
        return "\n\n".join(filled)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)  # flags stay whole

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):  # the commands alone, without a line above them
            return "".join(map(super()._format_action, action._get_subactions()))
        return super()._format_action(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are two lines instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where to read on; exit code 2."""
        for pattern, reworded in REWORDED:
            message, matches = re.subn(f"^{pattern}$", reworded, message, flags=re.DOTALL)
            if matches:
                break
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\nSee {self.prog} --help\n")


def version_line() -> str:
    """Versions of zfunc, torch and Python; torch's from pip's metadata, as importing it takes seconds."""
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    return f"zfunc {zfunc.__version__} ({torch}, Python {platform.python_version()})"


# --- settings as arguments -------------------------------------------------------------------------------


def make_parser(
    commands: Mapping[str, Command], *, everything: bool = False
) -> tuple[Parser, dict[str, Parser]]:
    """The parser of `zfunc`, and those of its commands by name. Help has the common options, or `everything`."""
    top = Parser(
        "zfunc",
        usage="zfunc COMMAND [options]",
        description="Train models that are too big for their GPU; plan, draw, watch and report how a step runs.",
        epilog="zfunc COMMAND --help lists the options of a command, with examples; --debug may stand before "
        "COMMAND or after it.",
        formatter_class=Help,
        add_help=False,
    )
    subparsers = top.add_subparsers(metavar="COMMAND", title="commands", prog="zfunc")
    parsers = {name: _add_command(subparsers, name, commands[name], everything) for name in commands}
    common = top.add_argument_group("help")
    shown = "show versions of zfunc, torch and Python, and end"
    common.add_argument("--version", action="version", version=version_line(), help=shown)
    _add_common(common)
    return top, parsers


def _add_command(subparsers: Any, name: str, command: Command, everything: bool) -> Parser:
    """With an argument for every field of its settings, in its group; last --help and --debug."""
    options, fields = command.options, attrs.fields_dict(command.settings)
    common = {name for name, option in options.items() if option.common}
    everything |= not common
    parser = subparsers.add_parser(
        name,
        help=command.summary,
        description=command.description,
        usage=" ".join(["zfunc", name, *(o.metavar for o in options.values() if o.positional), "[options]"]),
        epilog=command.epilog(everything=everything),
        formatter_class=Help,
        allow_abbrev=False,
        add_help=False,
    )
    groups: dict[str, Any] = {}
    for field in sorted(fields.values(), key=lambda f: GROUPS.index(options[f.name].group)):
        title = options[field.name].group if everything else "options"
        if title not in groups:
            groups[title] = parser.add_argument_group(title, EXPERTS if title == "buffers" else None)
        help = options[field.name].help if everything else first_clause(options[field.name].help)
        shown = with_flags(help, options) if everything or field.name in common else None
        _add_argument(groups[title], field, options[field.name], shown)
    more = parser.add_argument_group("help")
    if common:
        all_of_them = f"show all {len(options)} options, and all that there is to say of each"
        more.add_argument("--help-all", action="help", help=all_of_them)
    _add_common(more)
    parser.set_defaults(command=name, prog=parser.prog)
    return parser


def _add_common(group: Any) -> None:
    group.add_argument("-h", "--help", action="help", help="show this help, and end")
    debug = "show the traceback of an error"
    group.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug)


def _add_argument(group: Any, field: "attrs.Attribute[Any]", option: Option, help: str | None) -> None:
    """An option, with its help and its default if it has any."""
    given: dict[str, Any] = {
        "help": argparse.SUPPRESS if help is None else (help + _default(field)).replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    if field.type is bool:
        group.add_argument(flag(field.name), action="store_true", **given)
        return
    if get_origin(field.type) is tuple:
        given |= {"action": "append"}
    kind = next((t for t in get_args(field.type) if t is not type(None)), field.type)
    given |= {"metavar": option.metavar or METAVARS[kind], "type": READERS[kind]}
    if option.alone:
        given |= {"nargs": "?", "const": option.alone}
    if option.positional:
        group.add_argument(field.name, **given)
    else:
        group.add_argument(flag(field.name), dest=field.name, **given)


def first_clause(help: str) -> str:
    """The beginning of an option's help, up to where it explains.

    >>> first_clause("where the state lives: host, disk; the disk needs folders (default: host)")
    'where the state lives: host, disk'
    """
    clause = re.split(r"; | \(|\. |, (?=which|where|as|with|that)", help)[0]
    return clause if len(clause) <= LONGEST else clause[:LONGEST].rpartition(", ")[0] + ", ..."


def _default(field: "attrs.Attribute[Any]") -> str:
    """The default as help shows it; the help of an option itself explains None, and one that depends."""
    if field.default in (None, (), attrs.NOTHING) or field.type is bool or hasattr(field.default, "factory"):
        return ""
    text = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
    return f" (default: {text})"


def given_fields(settings: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `settings` that the command line has a value for."""
    return {f.name: getattr(args, f.name) for f in attrs.fields(settings) if hasattr(args, f.name)}


def _reader(kind: type, expected: str) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {shortened(word)!r}, expected {expected}") from None

    return read


def _path(word: str) -> Path:
    if not word or "\0" in word:
        raise argparse.ArgumentTypeError(
            f"got {shortened(word)!r}, expected the path of a file or folder: name it"
        )
    return Path(word).expanduser()


READERS: dict[Any, Callable[[str], Any]] = {
    int: _reader(int, "a whole number: pass such as 8"),
    float: _reader(float, "a number: pass such as 0.1 or 1e-3"),
    str: str,
    Path: _path,
}
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME", Path: "PATH"}


# --- errors ----------------------------------------------------------------------------------------------


def unknown_option(word: str, command: str, options: Mapping[str, Collection[str]]) -> str:
    """The error for a word that `command` does not take; `options` are the flags of each command."""
    got = shortened(word.partition("=")[0] if word.startswith("-") else word)
    if not word.startswith("-"):
        return f"got {got!r} where an option was expected: options begin with --"
    known = {name.lstrip("-"): name for name in options[command]}  # or any two are similar in their dashes
    if similar := get_close_matches(got.lstrip("-"), list(known), n=1, cutoff=SIMILAR):
        return f"got {got!r}, which is no option of this command (did you mean {known[similar[0]]!r}?)"
    others = [name for name, flags in options.items() if got in flags]
    where = f", but one of zfunc {' and zfunc '.join(others)}" if others else ""
    return f"got {got!r}, which is no option of this command{where}"


def as_typed(message: str, options: Mapping[str, Option]) -> str:
    """An error that names settings, with the flags of a command instead. Paths stay as they are.

    >>> from zfunc.options import anything
    >>> options = {"seq_length": Option("model", "tokens of a sequence", anything)}
    >>> as_typed("seq_length: got 0", options), as_typed("got 9 tokens for seq_length=16", options)
    ('--seq-length: got 0', 'got 9 tokens for --seq-length 16')
    >>> as_typed("out: got runs/seq_length=16/b, which exists: pass `seq_length`", options)
    'out: got runs/seq_length=16/b, which exists: pass --seq-length'
    """

    def typed(m: re.Match[str]) -> str:
        option = options.get(m[0])
        return m[0] if option is None else option.metavar if option.positional else flag(m[0])

    message = SUBJECT.sub(lambda m: re.sub(r"\w+", typed, m[0]), message)
    message = NAMED.sub(lambda m: _with_value(*m.groups()) if m[1] in options else m[0], message)
    return with_flags(message, options)


def _with_value(name: str, value: str, word: str | None) -> str:
    return flag(name) if value == "True" else f"{flag(name)} {word or ''}"


def with_flags(text: str, options: Mapping[str, Option]) -> str:
    """A text with the flags of a command for settings in backquotes, as `seq_length` or `seq_length=16`."""

    def typed(m: re.Match[str]) -> str:
        return f"{flag(m[1])} {m[2] or ''}".rstrip() if m[1] in options else m[0]

    return QUOTED.sub(typed, text)


def shortened(word: str) -> str:
    """A word as an error repeats it.

    >>> shortened("9" * 5000)[-20:]
    '9... (5,000 letters)'
    """
    return word if len(word) <= MAX_WORD else f"{word[:MAX_WORD]}... ({len(word):,} letters)"
