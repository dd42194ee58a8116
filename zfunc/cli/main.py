"""The command `zfunc`: arguments in, exit code out.

Exit codes: 0 for success, also for a training that Ctrl-C ended after a whole step, with checkpoint, evaluation,
summary and sample, or SIGTERM or SIGHUP, with checkpoint and summary; 1 for a failure while training or to save its
last step, where `zfunc doctor` finds something wrong, or where `zfunc plan` says that it does not fit; 2 for bad
arguments, bad data or an unsuitable machine; 130 for a second Ctrl-C, which stops at once.
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from zfunc import errors
from zfunc.cli.catalogue import COMMANDS, FOREIGN, GONE
from zfunc.cli.commands.train import TrainingFailed
from zfunc.cli.parser import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    Command,
    UsageError,
    in_flags,
    make_parser,
)
from zfunc.cli.terminal import printable
from zfunc.core.display import counted
from zfunc.errors import SETTING_ERRORS, did_you_mean, marked, refuse, setting
from zfunc.options import flag
from zfunc.runtime.memory_limits import address_limit
from zfunc.runtime.thread_budget import world_size
from zfunc.train.settings import TrainSettings
from zfunc.units import format_bytes

MAX_LINES, MAX_LETTERS = 20, 900  # of an error, and of a line of it, so that it fits on a screen
SIMILAR = 0.6  # how similar an unknown command or option and a known one have to be for a hint
OUT_OF_MEMORY = "got no memory, expected more: make the model, the batch or the largest document smaller"
BUG = "\nThis is a bug in zfunc: please report it, with the output of --debug"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `zfunc` that `argv`, by default sys.argv, names, and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    _prepare_streams()
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads GNU OpenMP, which reads it once
        # By default a thread spins for milliseconds at every barrier: beside busy processes most of a step is that.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    args = argparse.Namespace(prog="zfunc", debug="--debug" in words)
    try:
        _parse(words, args)
        command = COMMANDS[args.command]
        code = command.run(_settings(command, args))
        sys.stdout.flush()
        return code
    except SystemExit as end:  # after help
        return int(end.code or EXIT_OK)
    except KeyboardInterrupt as interrupt:
        return _print_error(args, str(interrupt) or "stopped at once", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of the output has left
        _discard_output()
        return EXIT_FAILED
    except TrainingFailed as error:
        return _print_error(args, marked(error), EXIT_FAILED)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        args.prog = error.prog if isinstance(error, UsageError) else args.prog
        code = EXIT_FAILED if _without_path(error) else EXIT_USAGE
        return _print_error(args, _message(error), code)
    except Exception as error:
        bug = "" if type(error).__module__ == errors.__name__ else BUG
        return _print_error(args, f"{type(error).__name__}: {marked(error)}{bug}", EXIT_FAILED)


def _parse(words: list[str], args: argparse.Namespace) -> None:
    """Parse the words of a command line into `args`. Exits after help; raises UsageError."""
    top, parsers = make_parser(COMMANDS, everything="--help-all" in words)
    if not words:
        top.print_help()
        raise SystemExit(EXIT_USAGE)
    name = next((word for word in words if not word.startswith("-")), None)
    known, which = f"expected one of {', '.join(parsers)}", f"zfunc {name}" if name in parsers else "zfunc"
    if name is not None and name not in parsers:
        hint = did_you_mean(name, list(parsers), cutoff=SIMILAR)
        gone = f", which is gone: {GONE[name]}" if name in GONE else f", {known}{hint}"
        raise UsageError(which, f"got the command {name!r}{gone}")
    _, rest = top.parse_known_args(words, args)
    if name is None and not rest:
        raise UsageError(which, f"got no command, {known}: name one")
    if rest:
        actions = parsers[name]._actions if name else []
        raise UsageError(which, _unknown(rest[0], which, {x for a in actions for x in a.option_strings}))


def _unknown(word: str, which: str, flags: set[str]) -> str:
    """The error message for `word`, which command `which` with these `flags` does not take."""
    got = word.partition("=")[0]
    if not word.startswith("-"):
        return f"got {word!r} where an option was expected: options begin with --"
    if got in GONE:
        return f"got the option {got!r}, which is gone: {GONE[got]}"
    instead = FOREIGN.get(alike := got.replace("_", "-"), alike)
    if instead.startswith("torchrun") or instead.replace(",", " ").split()[0] in flags:
        return f"got {got!r}, which is no option of {which}: write {instead}"
    # Without their dashes, in which any two are alike.
    similar = did_you_mean(got.strip("-"), [x[2:] for x in flags if x[:2] == "--"], cutoff=SIMILAR)
    hint = similar.replace("'", "'--", 1)
    others = ", ".join(name for name, x in COMMANDS.items() if got in map(flag, x.options))
    return f"got {got!r}, which is no option of {which}{hint}{others and f', but of zfunc {others}'}"


def _settings(command: Command, args: argparse.Namespace) -> Any:
    """The settings object of a command, from the flags in `args` and the files of settings that flags name."""
    given = {name: getattr(args, name) for name in command.options if name in args}
    world, usual, fields = max(1, world_size() // given.get("pp", 1)), dict[str, Any](), dict[str, str]()
    if "trainer_args" in given:
        from zfunc.train.trainer.mapping import with_trainer_args

        found = with_trainer_args(given, world)
        given, usual, fields = found.said, found.usual, found.fields
    if "config" in given:
        from zfunc.train.deepspeed.mapping import with_config

        given = with_config(given, world)
    given = {**usual, **given}
    if command.settings is TrainSettings:
        given = {**_length(given), **given}
    try:
        return command.settings(**given)
    except SETTING_ERRORS as error:  # under the name that stands in the file
        raise type(error)([fields.get(x, x) for x in error.names], *error.args[1:]) from error


def _length(given: dict[str, Any]) -> dict[str, Any]:
    """Defaults by name that differ from the usual if flags `given` bound the training (`steps` None), or have
    `hf` without a bound (`steps` None, `epochs` 1)."""
    if {"steps", "epochs"} <= given.keys():
        got = f"{given['epochs']:g} with {setting('steps', given['steps'])}"
        refuse("epochs", got, "one of them", "leave one out")
    if given.keys() & {"steps", "epochs", "seconds"}:
        return {"steps": None}
    return {"steps": None, "epochs": 1.0} if "hf" in given else {}


# --- streams and errors ----------------------------------------------------------------------------------


def _prepare_streams() -> None:
    """Print "?" for what this locale cannot show; discard the output to a stream that the caller has closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Send stdout, whose reader is gone, to the null device with what is buffered: the flush at exit would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _without_path(error: Exception) -> bool:
    """Whether `error` is an OSError without a path, such as that of a full disk to which stdout is redirected."""
    return isinstance(error, OSError) and error.errno is not None and error.filename is None


def _message(error: Exception) -> str:
    """The text of `error`, settings marked for `in_flags`; for an OSError or a missing package it says what
    to do."""
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        if _without_path(error):
            return f"got {error.strerror!r} while printing or writing: free some space, or print elsewhere"
        return f"{os.fsdecode(error.filename)}: {error.strerror}: check the path and its permissions"
    if isinstance(error, ModuleNotFoundError) and error.name and str(error).startswith("No module named"):
        package = error.name.partition(".")[0]
        return f"package {package!r} is not installed: pip install {package}"
    return marked(error)


def _print_error(args: argparse.Namespace, message: str, code: int) -> int:
    """Print an error's marked message on one screen with the flags of the command, and return its exit code; with
    --debug the traceback first, and every line."""
    if args.debug and not isinstance(sys.exc_info()[1], UsageError):
        traceback.print_exc()
    message = in_flags(
        message.strip() or OUT_OF_MEMORY, COMMANDS[args.command].options if "command" in args else {}
    )
    if (most := address_limit()) is not None and re.search("memory|new thread", message):
        message += f"\nRLIMIT_AS gives this process {format_bytes(most)} of addresses: raise it by ulimit -v"
    lines = [*map(printable, message.splitlines())]
    if not args.debug:
        lines = [line if len(line) <= MAX_LETTERS else f"{line[:MAX_LETTERS]}..." for line in lines]
        if len(lines) > MAX_LINES:
            more = counted(len(lines) - MAX_LINES, "line")
            lines = [*lines[:MAX_LINES], f"... and {more} more, with --debug"]
    rank = f": rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    level = "" if code == EXIT_INTERRUPTED else "error: "
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    print(f"{args.prog}{rank}: {level}" + "\n".join(lines), file=sys.stderr, flush=True)
    return code
