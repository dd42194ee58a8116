"""The commands there are: what each is for, its settings, and the examples of its help.

The invariant: every example is a command line that parses; the tests try them.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from attrs import frozen

import zfunc
from zfunc.cli import commands
from zfunc.cli.calibrate import CALIBRATE, CalibrateSettings
from zfunc.cli.commands import EXIT_OK
from zfunc.cli.completion import COMPLETION, Completion, script
from zfunc.cli.draw_settings import DRAW, DrawSettings
from zfunc.cli.parser import Help, Parser, add_common, add_options
from zfunc.cli.plan_settings import PLAN, PlanSettings
from zfunc.cli.report_settings import (
    DOCTOR,
    EXPORT,
    REPORT,
    TOP,
    DoctorSettings,
    ExportSettings,
    ReportSettings,
    TopSettings,
)
from zfunc.options import Option
from zfunc.train.settings import TRAIN, TrainSettings


@frozen
class Command:
    """A command: its line of help, what more there is to tell, its settings and their options, and what runs it.

    `examples` are pairs of what it is for and what to type; `ends` says how it ends.
    """

    told: str
    more: str
    settings: type[Any]
    options: dict[str, Option]
    run: Callable[[Any], int]
    examples: tuple[tuple[str, str], ...]
    ends: str = ""

    @property
    def description(self) -> str:
        """What its help begins with."""
        return f"{self.told[0].upper()}{self.told[1:]}.\n\n{self.more}"

    @property
    def epilog(self) -> str:
        """What its help ends with."""
        lines = (f"  # {what}\n  {typed}" for what, typed in self.examples)
        return "\n\n".join(["examples:\n" + "\n".join(lines), *([self.ends] if self.ends else [])])


def _complete(asked: Completion) -> int:
    """`zfunc completion`: here, because it is about all commands."""
    offered = {name: command.options for name, command in COMMANDS.items()}
    print(script(asked.shell, parser()[0], offered))
    return EXIT_OK


COMMANDS = {
    "train": Command(
        "train a GPT, or a Hugging Face model",
        "Without options: a small GPT, of bytes, on the sources of Python's standard library, in 3 minutes on 2 "
        "cores. What is chosen for you is printed. A terminal shows a live panel, a pipe gets lines.",
        TrainSettings,
        TRAIN,
        commands.run_train,
        (
            (
                "on your texts, with a checkpoint every 200 steps",
                "zfunc train --data texts --steps 1000 --save-every 200 --out run",
            ),
            (
                "go on where that stopped, or begin if it never began",
                "zfunc train --data texts --steps 1000 --out run --resume auto",
            ),
            (
                "fine-tune a Hugging Face model from a local folder",
                "zfunc train --hf model --data pairs.jsonl --seq-length 512 --steps 500",
            ),
            ("on two GPUs", "torchrun --nproc-per-node 2 -m zfunc train --data texts"),
        ),
        "Ctrl-C ends the training after the step under way, with checkpoint, evaluation, summary and sample (exit "
        "code 0); one in the middle of an evaluation ends that too; a second one stops at once (130). SIGTERM and "
        "SIGHUP end it with checkpoint and summary alone (0). Other exit codes: 1 failed while training or to save "
        "the last step, 2 cannot start.",
    ),
    "plan": Command(
        "say whether a step fits, how long it takes, and what would help",
        "Nothing is allocated and no GPU is needed: the step is simulated on a hardware profile.",
        PlanSettings,
        PLAN,
        commands.run_plan,
        (
            (
                "10 billion parameters on one V100",
                "zfunc plan --num-layers 50 --hidden-size 4096 --num-attention-heads 32 \\\n"
                "      --seq-length 1024 --vocab-size 50257 --batch-size 10",
            ),
            (
                "the fastest settings that fit eight H100s",
                "zfunc plan --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 \\\n"
                "      --vocab-size 50257 --hardware h100 --world 8 --schedule auto",
            ),
            (
                "the most layers that fit this machine",
                "zfunc plan --hidden-size 1024 --data texts --hardware machine.toml --max",
            ),
        ),
        "Exit codes: 0 it fits, 1 it does not, 2 it cannot be planned.",
    ),
    "draw": Command(
        "draw one step: when each operation runs, on which lane",
        "Nothing is allocated and no GPU is needed. With --compare, the step that a run measured.",
        DrawSettings,
        DRAW,
        commands.run_draw,
        (
            ("as text, under every schedule", "zfunc draw --schedule all"),
            ("as a page to look into, on a V100", "zfunc draw --hardware v100-32gb --out step.html"),
            (
                "what a run measured, beside what was planned for this machine",
                "zfunc draw --compare run --hardware machine.toml",
            ),
        ),
    ),
    "calibrate": Command(
        "measure this machine into a hardware profile",
        "It trains a few steps of the model of the options, so choose one like yours; zfunc plan and zfunc draw "
        "take the profile as --hardware.",
        CalibrateSettings,
        CALIBRATE,
        commands.run_calibrate,
        (
            (
                "with a model of 12 layers",
                "zfunc calibrate --num-layers 12 --hidden-size 768 --num-attention-heads 12",
            ),
            ("with the disk that checkpoints go to", "zfunc calibrate --folder runs --out machine.toml"),
            ("the network too, between two GPUs", "torchrun --nproc-per-node 2 -m zfunc calibrate"),
        ),
    ),
    "top": Command(
        "watch a run: loss, speed, cores, memory, GPUs, lanes",
        "The run goes on undisturbed: only its folder is read. GPUs are shown where nvidia-ml-py is installed.",
        TopSettings,
        TOP,
        commands.run_top,
        (
            ("until it ends", "zfunc top runs/20261121-050604"),
            ("what there is to see now", "zfunc top runs/20261121-050604 --once"),
        ),
        "It ends with the run, or at Ctrl-C (exit code 0).",
    ),
    "report": Command(
        "show a run as one HTML page",
        "Curves, memory against the plan, the measured step, settings, machine, checkpoints; the page needs no "
        "script and no other file.",
        ReportSettings,
        REPORT,
        commands.run_report,
        (
            ("into the run's folder", "zfunc report runs/20261121-050604"),
            ("into a file of its own", "zfunc report runs/20261121-050604 --out report.html"),
        ),
    ),
    "export": Command(
        "write a checkpoint's weights for other programs",
        "As one safetensors file; or, with --hf, as a folder that from_pretrained loads.",
        ExportSettings,
        EXPORT,
        commands.run_export,
        (
            ("the newest checkpoint of a run", "zfunc export run --out weights.safetensors"),
            (
                "one of them, in bf16",
                "zfunc export run/checkpoints/step-00001000 --dtype bf16 \\\n      --out weights.safetensors",
            ),
            ("a fine-tuned Hugging Face model", "zfunc export run --hf model --out tuned"),
        ),
    ),
    "doctor": Command(
        "say what this machine has for a step, and what is wrong",
        "It measures for a few seconds: threads, memory, the host's bandwidth and the Adam kernel, pinned memory, "
        "GPUs.",
        DoctorSettings,
        DOCTOR,
        commands.run_doctor,
        (("for a person", "zfunc doctor"), ("for a program", "zfunc doctor --json")),
        "Exit codes: 0 nothing is wrong, 1 something is.",
    ),
    "completion": Command(
        "print a script that completes zfunc's commands in a shell",
        "Commands, options, values to choose from, files and folders. Where to put it is below.",
        Completion,
        COMPLETION,
        _complete,
        (
            ("bash, in ~/.bashrc", "source <(zfunc completion bash)"),
            ("zsh, in ~/.zshrc, below compinit", 'eval "$(zfunc completion zsh)"'),
            ("fish, once", "zfunc completion fish > ~/.config/fish/completions/zfunc.fish"),
        ),
    ),
}


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


def parser() -> tuple[Parser, dict[str, Parser]]:
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
    made = {name: _subparser(parsers, name, command) for name, command in COMMANDS.items()}
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
        help=command.told,
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
