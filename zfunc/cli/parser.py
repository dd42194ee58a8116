"""What a command is; command line to settings, and help, both from the fields of its settings and their options.

No command is known here, and no torch: help answers at once.
"""

import argparse
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Generator, Mapping
from importlib import metadata
from inspect import cleandoc
from pathlib import Path
from textwrap import fill, indent, wrap
from typing import Any, NoReturn, get_args, get_origin

import attrs
from attrs import frozen

import zfunc
from zfunc.checkpoint.durable_files import replace_text
from zfunc.errors import write
from zfunc.options import GROUPS, Option, flag, options_of

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
WIDEST = 120  # columns of help; longer lines are hard to read
LONGEST = 72  # characters of a clause in --help
EXPERTS = "for experts: zfunc plan --schedule auto chooses these sizes"

REWORDED = {  # argparse's errors, as got, expected, next action
    r"argument (\S+): expected one argument": r"\1: got no value, expected one: write \1=VALUE",
    r"argument (\S+): ignored explicit argument (.+)": r"\1: got the value \2, expected none of a switch",
    r"argument (\S+): invalid int value: (.+)": r"\1: got \2, expected a whole number: pass such as 8",
    r"argument (\S+): invalid float value: (.+)": r"\1: got \2, expected a number: pass such as 0.1",
    r"the following arguments are required: (.+)": r"got no \1, expected one: name it after the command",
    r"argument (\S+): (.+)": r"\1: \2",
}
QUOTES = "'", '"'  # around a text in a repr
QUOTED = re.compile(r"`([a-z_]+)(?:=([^`\s]+))?`")
"""A setting in backquotes, alone or with a value: the mark of one in help, lines of the log and errors."""


@frozen
class Command:
    """A command of `zfunc`: its help, the settings class whose fields are its options, and its function.

    `examples` are lines to type, each below a comment; `ending` says how the command ends.
    """

    summary: str
    details: str
    settings: type[Any]
    run: Callable[[Any], int]
    examples: str
    ending: str = ""

    @property
    def options(self) -> dict[str, Option]:
        """The options of the command's settings, by the names of the fields."""
        return options_of(self.settings)


def write_file(path: Path, text: str) -> None:
    """Write the file `path`, or replace it, and print its path."""
    replace_text(path, text)
    print(f"written: {path}")


class UsageError(ValueError):
    """A command line that cannot be parsed; the error names the help of `prog`."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(f"{message}\nSee {prog} --help")
        self.prog = prog


class Help(argparse.HelpFormatter):
    """Formatter of help, as wide as the terminal up to a bound. Prose is wrapped; indented text is not."""

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

    def _iter_indented_subactions(self, action: Any) -> Generator[argparse.Action]:
        # Not indented: Python 3.14 counts the indent of commands, which stand without a line above them.
        yield from getattr(action, "_get_subactions", tuple)()

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):  # the commands alone, without a line above them
            return "".join(map(super()._format_action, self._iter_indented_subactions(action)))
        return super()._format_action(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, worded as zfunc's errors, instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message about the command line."""
        for pattern, reworded in REWORDED.items():
            message, matches = re.subn(f"^{pattern}$", reworded, message, flags=re.DOTALL)
            if matches:
                break
        raise UsageError(self.prog, message)


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
    """The parser of `zfunc`, and its commands' parsers by name. Help lists common options, all if `everything`."""
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
    """Add a command's parser, an argument for each field of its settings; help shows all with `everything`."""
    options, fields = command.options, attrs.fields(command.settings)
    common = {name for name, option in options.items() if option.common}
    everything |= not common
    parser = subparsers.add_parser(
        name,
        help=command.summary,
        description=f"{command.summary[0].upper()}{command.summary[1:]}.\n\n{command.details}",
        usage=" ".join(["zfunc", name, *(o.metavar for o in options.values() if o.positional), "[options]"]),
        epilog=f"examples:\n{indent(cleandoc(command.examples), '  ')}",
        formatter_class=Help,
        allow_abbrev=False,
        add_help=False,
    )
    if everything and command.ending:
        parser.epilog = f"{parser.epilog}\n\n{command.ending}"
    groups: dict[str, Any] = {}
    for field in sorted(fields, key=lambda f: GROUPS.index(options[f.name].group)):
        option = options[field.name]
        title = option.group if everything else "options"
        if title not in groups:
            groups[title] = parser.add_argument_group(title, EXPERTS if title == "buffers" else None)
        help = with_flags(option.help if everything else first_clause(option.help), options)
        shown = everything or option.common
        _add_argument(groups[title], field, option, help + _default(field) if shown else None)
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
    """Add the argument of one option with its help text; where the help is None the argument is hidden."""
    given: dict[str, Any] = {"help": argparse.SUPPRESS if help is None else help.replace("%", "%%")}
    if not option.positional:
        given |= {"dest": field.name, "required": field.default is attrs.NOTHING}
    kind = next((t for t in get_args(field.type) if t is not type(None)), field.type)
    if field.type is bool:
        given["action"] = "store_true"
    else:  # a file whose content is the setting is typed as its path
        read = READERS[Path if isinstance(kind, str) else kind]
        given |= {"metavar": option.metavar or METAVARS[kind], "type": read}
    if get_origin(field.type) is tuple:
        given["action"] = "append"
    if option.alone:
        given |= {"nargs": "?", "const": option.alone}
    name = field.name if option.positional else flag(field.name)
    group.add_argument(name, default=argparse.SUPPRESS, **given)


def _path(word: str) -> Path:
    """The path typed as `word`; of one without a name, such as ".", the absolute path. Refuses ""."""
    if not word:
        raise argparse.ArgumentTypeError("got '', expected the path of a file or folder: name it")
    path = Path(word).expanduser()
    return path if path.name else path.absolute()


READERS: dict[Any, Callable[[str], Any]] = {
    **{kind: kind for kind in (int, float, str)},
    Path: _path,
}
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME", Path: "PATH"}


def first_clause(help: str) -> str:
    """The beginning of an option's help, up to the first explanation, for the short form of --help.

    >>> first_clause("where the state lives: host, disk; the disk needs folders (default: host)")
    'where the state lives: host, disk'
    """
    clause = re.split(r"; | \(|\. |, (?=which|where|as|with|that)", help)[0]
    return clause if len(clause) <= LONGEST else clause[:LONGEST].rpartition(", ")[0] + ", ..."


def _default(field: "attrs.Attribute[Any]") -> str:
    """The text " (default: x)" for an option's help; "" for a bool, and for a default that is an object."""
    if field.type is bool or not isinstance(field.default, str | int | float | Path):
        return ""
    return f" (default: {f'{field.default:g}' if isinstance(field.default, float) else field.default})"


# --- errors ----------------------------------------------------------------------------------------------


def in_flags(text: str, options: Mapping[str, Option]) -> str:
    """An error's `text`, as `marked` returns it, with a command's flags for the settings in it; the rest stays.

    >>> from zfunc.errors import SettingError, marked, setting
    >>> from zfunc.options import anything
    >>> options = {x: Option("offload", "", anything) for x in ("swap", "state_on", "norms")}
    >>> error = SettingError("swap", f"norms=1 with {setting('state_on', 'disk')}", "one", "pass `swap`")
    >>> in_flags(marked(error), options), in_flags(setting("swap", "a b"), options)
    ('--swap: got norms=1 with --state-on disk, expected one: pass --swap', "--swap 'a b'")
    """

    def written(name: str, value: str | None) -> str:
        if name not in options:
            return name if value is None else f"{name}={value}"
        typed = options[name].metavar if options[name].positional else flag(name)
        if value in (None, "True"):
            return typed
        return f"{typed} {shlex.quote(value[1:-1]) if value[0] in QUOTES else value}"

    return with_flags(write(text, written), options)


def with_flags(text: str, options: Mapping[str, Option]) -> str:
    """`text` with settings in backquotes, such as `seq_length` or `seq_length=16`, as flags of a command."""

    def typed(m: re.Match[str]) -> str:
        return f"{flag(m[1])} {m[2] or ''}".rstrip() if m[1] in options else m[0]

    return QUOTED.sub(typed, text)
