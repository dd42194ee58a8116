"""The command `zfunc`: arguments in, exit code out.

Exit codes: 0 for what was done as asked, also for a training that Ctrl-C ended after a whole step, with
checkpoint, evaluation, summary and sample, or SIGTERM, with checkpoint and summary; 1 for a failure while training
or to save its last step, or where `zfunc doctor` finds something wrong; 2 for arguments, data or a machine that
will not do; 130 for a second Ctrl-C, which stops at once.
"""

import argparse
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import attrs

import zfunc
from zfunc.errors import nearest
from zfunc.settings import AUTO, DRAW, EXPORT, TRAIN, Export, Option, Settings, Sketch, flag
from zfunc.terminal import interrupts, logged, printable, size

if TYPE_CHECKING:
    from zfunc.ranks import Ranks
    from zfunc.resuming import Start
    from zfunc.runs import Run

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 130
LINES = 20  # of an error, so that it fits on a screen
SUFFIXES = {".svg": "svg", ".json": "chrome"}


class TrainingFailed(Exception):  # noqa: N818
    """Training had begun when it failed; the cause is chained."""


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
        return args.run(args) or DONE
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


def train(args: argparse.Namespace) -> None:
    """`zfunc train`."""
    settings = train_settings(args)
    from zfunc.launch import launched  # torch comes with this: help and mistakes do not wait for it

    with launched() as ranks:
        (_follow if ranks.rank else _lead)(settings, ranks)


def _lead(settings: Settings, ranks: "Ranks") -> None:
    """As rank 0, which decides where to begin, and keeps and shows what happens."""
    from zfunc import resuming, runs

    with logged():
        with resuming.refusing(ranks):
            run = runs.create(settings.out, again=settings.resume == AUTO)
        try:
            with resuming.refusing(ranks):
                start = resuming.decide(run.path, settings)
            resuming.tell(ranks, start)
            failure = _train_and_show(settings, run, start)
        finally:
            run.close()
    if failure:
        raise TrainingFailed(f"the last step is not saved: {failure}\nWhat there is up to then: {run.path}")


def _follow(settings: Settings, ranks: "Ranks") -> None:
    """As any other rank."""
    from zfunc import resuming
    from zfunc.events import Saved
    from zfunc.job import prepare
    from zfunc.train import train as events

    with logged():
        start = resuming.hear(ranks)
        if start.over:
            return
        job, last = prepare(settings, cache=cache_folder()), None
        with interrupts(tell=False) as stop:
            for event in events(job, stop=stop, start=start):
                last = event if isinstance(event, Saved) else last
    if last is not None and last.failure:
        raise TrainingFailed(f"the last step is not saved: {last.failure}")


def _train_and_show(settings: Settings, run: "Run", start: "Start") -> str:
    """Returns why the last step is not saved, if it should be."""
    from zfunc import console, panel, runs
    from zfunc.events import Saved
    from zfunc.job import prepare
    from zfunc.train import train as events

    if start.line:
        print(printable(start.line), flush=True)
    if start.over:
        return ""
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    failure = ""
    try:
        job = prepare(settings, cache=cache_folder())
        with interrupts(tell=not live) as stop:
            shown = panel.living(run, job.unit, stop) if live else nullcontext(console.Plain(run, job.unit))
            with shown as screen:
                for event in events(job, stop=stop, start=start):
                    runs.record(run, event, job.unit)
                    screen.show(event)
                    failure = event.failure if isinstance(event, Saved) else failure
    except BaseException as error:
        runs.record_failure(run, error)
        if (
            not run.begun
            or not isinstance(error, Exception)
            or isinstance(error, ValueError | BrokenPipeError)
        ):
            raise
        raise TrainingFailed(f"{error}\nWhat there is up to then: {run.path}") from error
    return failure


def draw(args: argparse.Namespace) -> None:
    """`zfunc draw`."""
    sketch = Sketch(**_given(args, Sketch))
    suffix = sketch.out.suffix if sketch.out else ""
    if sketch.format is None and suffix not in ("", ".txt", ".md", *SUFFIXES):
        raise ValueError(
            f"--out: got {sketch.out}, expected a name that ends in .svg, .json or .txt: or say --format"
        )
    form = sketch.format or SUFFIXES.get(suffix, "text")
    if sketch.schedule == "all" and sketch.out is None and form != "text":
        raise ValueError(
            f"--schedule all: got --format {form} without --out, expected a file: add --out FILE"
        )
    from zfunc.runs import write_whole
    from zfunc.sketch import drawn, picture

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    pictures = {name: picture(one, form, width=max(60, columns)) for name, one in drawn(sketch).items()}
    if sketch.out is None:
        print("\n".join(pictures.values()), end="")
        return
    if form == "text":
        files = {sketch.out: "\n".join(pictures.values())}
    else:
        stem, many = sketch.out.stem, len(pictures) > 1
        files = {
            sketch.out.with_stem(f"{stem}-{name.lower()}") if many else sketch.out: text
            for name, text in pictures.items()
        }
    for path, text in files.items():
        try:
            write_whole(path, text)
        except OSError as error:
            raise ValueError(
                f"--out: got {path}, which cannot be written ({error.strerror}), expected a file in a folder "
                "that is there: name another"
            ) from error
        print(f"written: {path}")


def export(args: argparse.Namespace) -> None:
    """`zfunc export`."""
    asked = Export(**_given(args, Export))
    from zfunc.export import export as write

    with logged():
        done = write(args.checkpoint, asked.out, dtype=asked.dtype)
    told = f"{done.parameters} parameters of step {done.step} as {done.dtype}, {size(done.bytes)}"
    print(f"written: {done.path}: {told}")


def doctor(args: argparse.Namespace) -> int:
    """`zfunc doctor`."""
    from zfunc.doctor import examine, show, well

    checks = examine()
    show(checks, as_json=args.json)
    return DONE if well(checks) else FAILED


def train_settings(args: argparse.Namespace) -> Settings:
    """The settings of the arguments. Who gives only one of steps and seconds wants no bound by the other."""
    given = _given(args, Settings)
    if len(given.keys() & {"steps", "seconds"}) == 1:
        given = {"steps": None, "seconds": None, **given}
    return Settings(**given)


def cache_folder() -> Path:
    """Where gathered sources are kept from run to run: `$XDG_CACHE_HOME/zfunc`, or `~/.cache/zfunc`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache") / "zfunc"


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
    commands = top.add_subparsers(metavar="COMMAND", title="commands")
    texts = {
        "train": "train a GPT, by default of bytes on the sources of Python's standard library",
        "draw": "draw one step as it would run under a schedule; needs no GPU",
        "export": "write a checkpoint's weights as one safetensors file that other programs read",
        "doctor": "say what this machine has for a step, what it reaches, and what is wrong",
    }
    made = {
        name: commands.add_parser(
            name,
            help=told,
            description=f"{told[0].upper()}{told[1:]}.",
            usage=f"zfunc {name} [options]",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=25),
            allow_abbrev=False,
        )
        for name, told in texts.items()
    }
    _add(made["train"], Settings, TRAIN)
    _add(made["draw"], Sketch, DRAW)
    made["export"].usage = "zfunc export CHECKPOINT --out FILE [options]"
    made["export"].add_argument(
        "checkpoint",
        type=READERS[Path],
        metavar="CHECKPOINT",
        help="its folder; or a folder of them, or a run's, of which the newest complete one is taken",
    )
    _add(made["export"], Export, EXPORT)
    made["doctor"].add_argument("--json", action="store_true", help="as one JSON object, for programs")
    made["doctor"].epilog = "Exit codes: 0 nothing is wrong, 1 something is."
    for name, run in (("train", train), ("draw", draw), ("export", export), ("doctor", doctor)):
        made[name].set_defaults(run=run, prog=made[name].prog)
        made[name].add_argument("--debug", action="store_true", help="show the traceback of an error")
    made["train"].epilog = (
        "Ctrl-C ends the training after the step under way, with checkpoint, evaluation, summary and sample (exit "
        "code 0); a second one stops at once (130). SIGTERM does so with checkpoint and summary alone (0). Other "
        "exit codes: 1 failed while training or to save the last step, 2 cannot start."
    )
    return top, made


def _parsed(argv: list[str]) -> argparse.Namespace:
    top, commands = parser()
    if not argv:
        top.print_help()
        raise SystemExit(REFUSED)
    if not argv[0].startswith("-") and argv[0] not in commands:
        hint = nearest(argv[0], list(commands))
        top.error(f"got the command {argv[0]!r}, expected one of {', '.join(commands)}{hint}")
    args, rest = top.parse_known_args(argv)
    if not hasattr(args, "run"):
        top.error(f"got no command, expected one of {', '.join(commands)}")
    if rest:
        known = [f for action in commands[argv[0]]._actions for f in action.option_strings]
        hint = nearest(rest[0].partition("=")[0], known)
        commands[argv[0]].error(f"got {rest[0]!r}, which is no option of this command{hint}")
    return args


def _add(to: Parser, settings: type, options: dict[str, Option]) -> None:
    """An argument for every field, in its group, its default told in its help."""
    groups: dict[str, Any] = {}
    for f in attrs.fields(settings):
        option = options[f.name]
        group = groups.setdefault(option.group, None) or to.add_argument_group(option.group)
        groups[option.group] = group
        default = "" if f.default is None or f.type is bool else f" (default: {f.default})"
        told: dict[str, Any] = {
            "help": (option.help + default).replace("%", "%%"),
            "default": argparse.SUPPRESS,
        }
        if f.type is bool:
            group.add_argument(flag(f.name), action="store_true", **told)
        else:
            kind = next((t for t in get_args(f.type) if t is not type(None)), f.type)
            told["metavar"] = option.metavar or METAVARS[kind]
            group.add_argument(flag(f.name), type=READERS[kind], **told)


def _given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    return {f.name: getattr(args, f.name) for f in attrs.fields(settings) if hasattr(args, f.name)}


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
