"""Words of a command line into settings, and the help that tells of them.

The invariant: what a command takes is the fields of its settings, each with its Option; no command is known here.
No torch: help answers at once.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NoReturn, get_args

import attrs

import zfunc
from zfunc.cli.command import EXIT_USAGE, Command
from zfunc.options import GROUPS, Option, flag

WIDEST = 120  # columns of help; longer lines are hard to read
ALIKE = 0.6  # how much an unknown option has to be like a known one to be told
SHOWN = 120  # characters of a word that are repeated in an error

SAID = (  # what argparse says: as got, expected, next action
    (r"argument (\S+): expected one argument", r"\1: got no value, expected one: write \1=VALUE"),
    (
        r"argument (\S+): ignored explicit argument (.+)",
        r"\1: got the value \2, expected none, as it is a switch: leave the value out",
    ),
    (r"the following arguments are required: (.+)", r"got no \1, expected one: name it after the command"),
    (r"argument (\S+): (.+)", r"\1: \2"),
)

NAMED = re.compile(r"(?<![^\s(])(?<!: got )([a-z_]+)=(?=[\d'\"])(?!\S*[/:])")
"""An argument and its value in an error: a word of its own, which is no path, as there is in "--out: got lr=3"."""


class Help(argparse.HelpFormatter):
    """Help as wide as the terminal, up to a bound. Prose is wrapped; what is indented, such as examples, is not."""

    def __init__(self, prog: str, **given: Any) -> None:
        columns = min(shutil.get_terminal_size().columns, WIDEST)
        super().__init__(prog, max_help_position=28, width=columns - 2, **given)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        filled = (
            part if "\n  " in part else fill(part, width, initial_indent=indent, break_on_hyphens=False)
            for part in parts
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
        """Say what is wrong and where to read on; exit code 2."""
        for said, meant in SAID:
            message, found = re.subn(f"^{said}$", meant, message, flags=re.DOTALL)
            if found:
                break
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\nSee {self.prog} --help\n")


def add_options(to: Parser, settings: type[Any], options: Mapping[str, Option]) -> None:
    """An argument for every field, in its group, its default told in its help; last --help and --debug."""
    fields = attrs.fields_dict(settings)
    used = {option.group for option in options.values()}
    for group in sorted(used, key=lambda name: GROUPS.index(name) if name in GROUPS else len(GROUPS)):
        made = to.add_argument_group(group)
        for name, field in fields.items():
            if options[name].group == group:
                _add(made, field, options[name])
    add_common(to.add_argument_group("help"))


def add_common(to: Any) -> None:
    """What every command takes."""
    to.add_argument("-h", "--help", action="help", help="show this help, and end")
    told = "show the traceback of an error"
    to.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=told)


def _add(to: Any, f: "attrs.Attribute[Any]", option: Option) -> None:
    told: dict[str, Any] = {
        "help": (option.help + _default(f)).replace("%", "%%"),
        "default": argparse.SUPPRESS,
    }
    if f.type is bool:
        to.add_argument(flag(f.name), action="store_true", **told)
        return
    kind = next((t for t in get_args(f.type) if t is not type(None)), f.type)
    told |= {"metavar": option.metavar or METAVARS[kind], "type": READERS[kind]}
    to.add_argument(f.name if option.positional else flag(f.name), **told)


def _default(f: "attrs.Attribute[Any]") -> str:
    """What help tells of it. Of a switch there is none to tell; None is told by the option's help itself."""
    if f.default in (None, attrs.NOTHING) or f.type is bool:
        return ""
    return f" (default: {f.default:g})" if isinstance(f.default, float) else f" (default: {f.default})"


def given_fields(settings: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `settings` that the command line has a value for."""
    return {f.name: getattr(args, f.name) for f in attrs.fields(settings) if hasattr(args, f.name)}


def unknown(word: str, command: str, options: Mapping[str, Collection[str]]) -> str:
    """What to say of a word that `command` does not take; `options` are the flags of each command."""
    got = shortened(word.partition("=")[0] if word.startswith("-") else word)
    if not word.startswith("-"):
        return f"got {got!r} where an option was expected: options begin with --"
    known = {name.lstrip("-"): name for name in options[command]}  # or any two are alike in their dashes
    if alike := get_close_matches(got.lstrip("-"), list(known), n=1, cutoff=ALIKE):
        return f"got {got!r}, which is no option of this command (did you mean {known[alike[0]]!r}?)"
    others = [name for name, flags in options.items() if got in flags]
    where = f", but one of zfunc {' and zfunc '.join(others)}" if others else ""
    return f"got {got!r}, which is no option of this command{where}"


def as_typed(told: str, options: Mapping[str, Option]) -> str:
    """An error that names the arguments of a call, with the flags of a command instead. Paths stay as they are.

    >>> from zfunc.options import anything
    >>> options = {"seq_length": Option("model", "tokens of a sequence", anything)}
    >>> as_typed("seq_length: got 0", options), as_typed("got 9 tokens for seq_length=16", options)
    ('--seq-length: got 0', 'got 9 tokens for --seq-length 16')
    >>> as_typed("--out: got runs/seq_length=16/b, which is there", options)
    '--out: got runs/seq_length=16/b, which is there'
    """
    lead, colon, rest = told.partition(": ")
    if colon and lead in options:
        told = f"{options[lead].metavar if options[lead].positional else flag(lead)}: {rest}"
    return NAMED.sub(lambda m: f"{flag(m[1])} " if m[1] in options else m[0], told)


def shortened(word: str) -> str:
    """A word as an error repeats it.

    >>> shortened("9" * 5000)[-20:]
    '9... (5,000 letters)'
    """
    return word if len(word) <= SHOWN else f"{word[:SHOWN]}... ({len(word):,} letters)"


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


class _Version(argparse.Action):
    """Prints versions, and ends. torch's is read from what pip has noted: importing torch takes seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        try:
            torch = f"torch {metadata.version('torch')}"
        except metadata.PackageNotFoundError:
            torch = "no torch"
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"zfunc {zfunc.__version__} ({torch}, Python {python})")
        parser.exit()


def make_parser(commands: Mapping[str, Command]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of `zfunc`, and those of its commands by name."""
    top = Parser(
        "zfunc",
        usage="zfunc COMMAND [options]",
        description="Train models that are too big for their GPU; plan, draw, watch and report how a step runs.",
        epilog="zfunc COMMAND --help tells the options of a command, with examples; --debug may stand before "
        "COMMAND or after it.",
        formatter_class=Help,
        add_help=False,
    )
    parsers = top.add_subparsers(metavar="COMMAND", title="commands", prog="zfunc")
    made = {name: _subparser(parsers, name, command) for name, command in commands.items()}
    common = top.add_argument_group("help")
    common.add_argument(
        "--version", action=_Version, nargs=0, help="show versions of zfunc, torch and Python, and end"
    )
    add_common(common)
    return top, made


def _subparser(to: Any, name: str, command: Command) -> Parser:
    words = [o.metavar for o in command.options.values() if o.positional]
    made = to.add_parser(
        name,
        help=command.summary,
        description=command.description,
        usage=" ".join(["zfunc", name, *words, "[options]"]),
        epilog=command.epilog,
        formatter_class=Help,
        allow_abbrev=False,
        add_help=False,
    )
    add_options(made, command.settings, command.options)
    made.set_defaults(command=name, prog=made.prog)
    return made
