"""The command `zfunc`: arguments in, exit code out.

Exit codes: 0 for what was done as asked, also for a training that Ctrl-C ended after a whole step, with
checkpoint, evaluation, summary and sample, or SIGTERM or SIGHUP, with checkpoint and summary; 1 for a failure while
training or to save its last step, where `zfunc doctor` finds something wrong, or `zfunc plan` no room; 2 for
arguments, data or a machine that will not do; 130 for a second Ctrl-C, which stops at once.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from zfunc import errors
from zfunc.cli.catalogue import COMMANDS
from zfunc.cli.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, Command
from zfunc.cli.commands.train import TrainingFailed
from zfunc.cli.parser import ALIKE, as_typed, given_fields, make_parser, shortened, unknown
from zfunc.cli.terminal import printable
from zfunc.errors import did_you_mean
from zfunc.runtime.thread_budget import world_size
from zfunc.train.settings import FINE_TUNING_LR, TrainSettings

LINES, LETTERS = 20, 1000  # of an error, and of a line of it, so that it fits on a screen
NO_MEMORY = "got no memory for it from the system, expected some: make the model or the batch smaller"
FAULT = "\nThis is a fault of zfunc itself: please report it, with what --debug shows"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    _ready_streams()
    args = argparse.Namespace(prog="zfunc", debug="--debug" in words)
    try:
        code = _run(words, args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain(args, "stopped at once", EXIT_INTERRUPTED)
    except BrokenPipeError:  # who read the output has left
        _drop_output()
        return EXIT_FAILED
    except TrainingFailed as error:
        return _complain(args, str(error), EXIT_FAILED)
    except MemoryError as error:
        return _complain(args, str(error) or NO_MEMORY, EXIT_USAGE)
    except (ValueError, OSError, ImportError) as error:
        return _complain(args, _told(error), EXIT_FAILED if _of_no_file(error) else EXIT_USAGE)
    except Exception as error:
        fault = (
            "" if type(error).__module__ == errors.__name__ else FAULT
        )  # those are about what was asked for
        return _complain(args, f"{type(error).__name__}: {error}{fault}", EXIT_FAILED)


def _run(words: list[str], args: argparse.Namespace) -> int:
    """What `words` ask for. `args` gets them, also if it fails later."""
    try:
        _parse(words, args)
    except SystemExit as end:  # help, or an error that is told
        return int(end.code or EXIT_OK)
    command = COMMANDS[args.command]
    return command.run(_settings(command, args))


def _parse(words: list[str], args: argparse.Namespace) -> None:
    """Into `args`. Exits for help, and for what is no command line."""
    top, made = make_parser(COMMANDS)
    if not words:
        top.print_help()
        raise SystemExit(EXIT_USAGE)
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in made:
        hint = did_you_mean(name, list(made), cutoff=ALIKE)
        top.error(f"got the command {shortened(name)!r}, expected one of {', '.join(made)}{hint}")
    _, rest = top.parse_known_args(words, args)
    if name is None and rest:
        top.error(f"got {shortened(rest[0])!r}, which is no option of zfunc itself: begin with a command")
    if name is None:
        top.error(f"got no command, expected one of {', '.join(made)}: name one")
    if rest:
        flags = {n: [f for a in p._actions for f in a.option_strings] for n, p in made.items()}
        made[name].error(unknown(rest[0], name, flags))


def _settings(command: Command, args: argparse.Namespace) -> Any:
    """What was given as settings. Who gives only one of steps and seconds wants no bound by the other."""
    got = given_fields(command.settings, args)
    if "config" in got:
        got = _configured(got)
    if len(got.keys() & {"steps", "seconds"}) == 1:
        got = {"steps": None, "seconds": None, **got}
    if command.settings is TrainSettings and "hf" in got:
        got = {"lr": FINE_TUNING_LR, **got}
    return command.settings(**got)


def _configured(got: dict[str, Any]) -> dict[str, Any]:
    """The options beside a DeepSpeed configuration."""
    from zfunc.train.deepspeed.cli_merge import merge_flags
    from zfunc.train.deepspeed.reader import read_config_file

    try:
        return merge_flags(got, read_config_file(got["config"]), world_size())
    except (ValueError, OSError) as error:
        told = str(error)
        raise ValueError(told if told.startswith("--") else f"--config: {told}") from error


# --- what surrounds a command ------------------------------------------------------------------------------


def _ready_streams() -> None:
    """What this locale cannot show is shown as '?'; a stream that the caller has closed goes nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """What cannot be written is not tried once more, or the flush at exit complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_no_file(error: Exception) -> bool:
    """Whether the system has refused something else than a path that was given, such as a full disk to print to."""
    return isinstance(error, OSError) and error.errno is not None and error.filename is None


def _told(error: Exception) -> str:
    """What to say of an error; the system's own, and Python's, say neither what was expected nor what to do."""
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        if _of_no_file(error):
            return f"got {error.strerror!r} while printing or writing, expected room: free some, or print elsewhere"
        return (
            f"{os.fsdecode(error.filename)}: got {error.strerror!r} from the system, expected to be let: look at "
            "the path and its permissions"
        )
    if isinstance(error, ModuleNotFoundError) and error.name and str(error).startswith("No module named"):
        package = error.name.partition(".")[0]
        return f"got no package {package!r}, expected it to be installed: pip install {package}"
    return str(error)


def _complain(args: argparse.Namespace, told: str, code: int) -> int:
    """Say it on one screen. With --debug, the traceback before it."""
    if args.debug:
        traceback.print_exc()
    if "command" in args:
        told = as_typed(told, COMMANDS[args.command].options)
    lines = [printable(line) for line in (told.strip() or "no more is known; see --debug").splitlines()]
    if not args.debug:
        lines = [line if len(line) <= LETTERS else f"{line[:LETTERS]}..." for line in lines]
        if len(lines) > LINES:
            lines = [*lines[:LINES], f"... and {len(lines) - LINES} lines more, with --debug"]
    who = f"{args.prog}: rank {os.environ['RANK']}" if "RANK" in os.environ else args.prog
    lead = f"{who}: " if code == EXIT_INTERRUPTED else f"{who}: error: "
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    print(lead + "\n".join(lines), file=sys.stderr, flush=True)
    return code
