"""The command `zfunc`: arguments in, exit code out.

Exit codes: 0 for what was done as asked, also for a training that Ctrl-C ended after a whole step, with
checkpoint, evaluation, summary and sample, or SIGTERM, with checkpoint and summary; 1 for a failure while training
or to save its last step, where `zfunc doctor` finds something wrong, or `zfunc plan` no room; 2 for arguments, data
or a machine that will not do; 130 for a second Ctrl-C, which stops at once.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import attrs

import zfunc
from zfunc import commands
from zfunc.calibrate_settings import CALIBRATE, Calibrate
from zfunc.commands import DONE, FAILED, TrainingFailed
from zfunc.deepspeed import read
from zfunc.deepspeed.flags import merged
from zfunc.errors import nearest
from zfunc.options import Option, flag
from zfunc.plan_settings import PLAN, Planning
from zfunc.report_settings import REPORT, TOP, Report, Watch
from zfunc.settings import DOCTOR, DRAW, EXPORT, FINE_TUNING_LR, TRAIN, Doctor, Export, Settings, Sketch
from zfunc.terminal import printable

REFUSED, STOPPED = 2, 130
LINES = 20  # of an error, so that it fits on a screen


@attrs.frozen
class Command:
    """A command: its line of help, its settings and their options, what runs it, and what its help ends with."""

    told: str
    settings: type[Any]
    options: dict[str, Option]
    run: Callable[[Any], int]
    epilog: str | None = None


COMMANDS = {
    "train": Command(
        "train a GPT, by default of bytes on the sources of Python's standard library",
        Settings,
        TRAIN,
        commands.train,
        "Ctrl-C ends the training after the step under way, with checkpoint, evaluation, summary and sample (exit "
        "code 0); a second one stops at once (130). SIGTERM does so with checkpoint and summary alone (0). Other "
        "exit codes: 1 failed while training or to save the last step, 2 cannot start.",
    ),
    "draw": Command(
        "draw one step as it would run under a schedule; needs no GPU", Sketch, DRAW, commands.draw
    ),
    "plan": Command(
        "say whether a step fits, how long it takes, what bounds it and what would help; needs no GPU",
        Planning,
        PLAN,
        commands.plan,
        "Exit codes: 0 it fits, 1 it does not, 2 it cannot be planned.",
    ),
    "calibrate": Command(
        "measure this machine by training a few steps, and write a profile for zfunc plan and zfunc draw",
        Calibrate,
        CALIBRATE,
        commands.calibrate,
    ),
    "top": Command(
        "watch a run: loss, speed, cores, memory, host bandwidth, GPUs, lanes",
        Watch,
        TOP,
        commands.top,
        "It ends with the run, or at Ctrl-C (0).",
    ),
    "report": Command("show a run as one HTML page", Report, REPORT, commands.report),
    "export": Command(
        "write a checkpoint's weights as one safetensors file that other programs read",
        Export,
        EXPORT,
        commands.export,
    ),
    "doctor": Command(
        "say what this machine has for a step, what it reaches, and what is wrong",
        Doctor,
        DOCTOR,
        commands.doctor,
        "Exit codes: 0 nothing is wrong, 1 something is.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # what this locale cannot show
    try:
        args = _parsed(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as end:
        return int(end.code or DONE)
    try:
        command = COMMANDS[args.command]
        return command.run(_settings(command, args))
    except KeyboardInterrupt:
        return _complain(args, "stopped at once", STOPPED)
    except BrokenPipeError:  # who read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains
        return FAILED
    except TrainingFailed as error:
        return _complain(args, str(error), FAILED)
    except (ValueError, OSError, MemoryError) as error:
        return _complain(args, str(error), REFUSED)
    except Exception as error:
        return _complain(args, f"{type(error).__name__}: {error}", FAILED)


# --- arguments -------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are two lines instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to read on; exit code 2."""
        self.exit(REFUSED, f"{self.prog}: error: {message}\nSee {self.prog} --help\n")


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `zfunc`, and those of its commands by name."""
    top = Parser(
        "zfunc", description="Train models that are too big for their GPU, and draw how a step runs."
    )
    top.add_argument("--version", action="version", version=f"zfunc {zfunc.__version__}")
    parsers = top.add_subparsers(metavar="COMMAND", title="commands")
    made: dict[str, Parser] = {}
    for name, command in COMMANDS.items():
        words = [o.metavar for o in command.options.values() if o.positional]
        made[name] = parsers.add_parser(
            name,
            help=command.told,
            description=f"{command.told[0].upper()}{command.told[1:]}.",
            usage=" ".join(["zfunc", name, *words, "[options]"]),
            epilog=command.epilog,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=25),
            allow_abbrev=False,
        )
        _add(made[name], command.settings, command.options)
        made[name].add_argument("--debug", action="store_true", help="show the traceback of an error")
        made[name].set_defaults(command=name, prog=made[name].prog)
    return top, made


def _parsed(argv: list[str]) -> argparse.Namespace:
    top, made = parser()
    if not argv:
        top.print_help()
        raise SystemExit(REFUSED)
    if not argv[0].startswith("-") and argv[0] not in made:
        hint = nearest(argv[0], list(made))
        top.error(f"got the command {argv[0]!r}, expected one of {', '.join(made)}{hint}")
    args, rest = top.parse_known_args(argv)
    if not hasattr(args, "command"):
        top.error(f"got no command, expected one of {', '.join(made)}")
    if rest:
        known = [f for action in made[argv[0]]._actions for f in action.option_strings]
        hint = nearest(rest[0].partition("=")[0], known)
        made[argv[0]].error(f"got {rest[0]!r}, which is no option of this command{hint}")
    return args


def _add(to: Parser, settings: type[Any], options: dict[str, Option]) -> None:
    """An argument for every field, in its group, its default told in its help."""
    groups: dict[str, Any] = {}
    for f in attrs.fields(settings):
        option = options[f.name]
        group = groups.setdefault(option.group, None) or to.add_argument_group(option.group)
        groups[option.group] = group
        quiet = f.default in (None, attrs.NOTHING) or f.type is bool
        default = "" if quiet else f" (default: {f.default})"
        told: dict[str, Any] = {
            "help": (option.help + default).replace("%", "%%"),
            "default": argparse.SUPPRESS,
        }
        if f.type is bool:
            group.add_argument(flag(f.name), action="store_true", **told)
        else:
            kind = next((t for t in get_args(f.type) if t is not type(None)), f.type)
            told |= {"metavar": option.metavar or METAVARS[kind], "type": READERS[kind]}
            name = f.name if option.positional else flag(f.name)
            group.add_argument(name, **told)


def _settings(command: Command, args: argparse.Namespace) -> Any:
    """What was given as settings. Who gives only one of steps and seconds wants no bound by the other."""
    names = [f.name for f in attrs.fields(command.settings)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if "config" in given:
        given = merged(given, read(given["config"]), int(os.environ.get("WORLD_SIZE", "1")))
    if len(given.keys() & {"steps", "seconds"}) == 1:
        given = {"steps": None, "seconds": None, **given}
    if command.settings is Settings and "hf" in given:
        given = {"lr": FINE_TUNING_LR, **given}
    return command.settings(**given)


def _reader(kind: type, expected: str) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        try:
            return kind(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {word!r}, expected {expected}") from None

    return read


READERS: dict[Any, Callable[[str], Any]] = {
    int: _reader(int, "a whole number, such as 8"),
    float: _reader(float, "a number, such as 0.1 or 1e-3"),
    str: str,
    Path: lambda word: Path(word).expanduser(),
}
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME", Path: "PATH"}


# --- what surrounds a command ------------------------------------------------------------------------------


def _complain(args: argparse.Namespace, told: str, code: int) -> int:
    """Say it on one screen. With --debug, the traceback before it."""
    if args.debug:
        traceback.print_exc()
    lines = [printable(line) for line in (told.strip() or "no more is known; see --debug").splitlines()]
    if len(lines) > LINES and not args.debug:
        lines = [*lines[:LINES], f"... and {len(lines) - LINES} lines more, with --debug"]
    who = f"{args.prog}: rank {os.environ['RANK']}" if "RANK" in os.environ else args.prog
    lead = f"{who}: " if code == STOPPED else f"{who}: error: "
    print(lead + "\n".join(lines), file=sys.stderr, flush=True)
    return code
