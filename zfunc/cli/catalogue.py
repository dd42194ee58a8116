"""The commands of `zfunc`, in the order in which help lists them, and `zfunc completion`, which completes them all.

The tests parse the examples of each.
"""

from attrs import NOTHING, frozen

from zfunc.cli.commands import calibrate, doctor, draw, export, import_, plan, report, train
from zfunc.cli.parser import EXIT_OK, Command, make_parser
from zfunc.core.setting_values import GONE as GONE_SETTINGS
from zfunc.core.setting_values import OF_OPTIMIZER
from zfunc.options import flag, one_of, option

SHELLS = ("bash", "zsh", "fish")
FILES, FOLDERS = {"FILE", "PATH"}, {"FOLDER", "RUN", "CHECKPOINT"}  # metavars; a PATH may be of either


@frozen(kw_only=True)
class CompletionSettings:
    """Settings of `zfunc completion`: the shell to print a completion script for."""

    shell: str = option(
        NOTHING,
        "shell to print a script for",
        one_of(SHELLS),
        "|".join(SHELLS),
        group="shell",
        positional=True,
    )


def print_script(settings: CompletionSettings) -> int:
    """Run `zfunc completion`: print the shell's completion script, made by shtab; completing needs no Python.

    For an option's value the script offers the option's `words`, and lower-case words of its metavar
    ("auto|N").
    """
    import shtab

    top, parsers = make_parser(COMMANDS, everything=True)
    for name, parser in parsers.items():
        options = COMMANDS[name].options
        for action in (x for x in parser._actions if x.dest in options and x.metavar):
            kinds = str(action.metavar).split("|")
            typed = (x for x in kinds if not x.isupper())
            words = tuple(dict.fromkeys([*options[action.dest].words, *typed]))
            path = shtab.FILE if FILES & {*kinds} else shtab.DIRECTORY if FOLDERS & {*kinds} else None
            # shtab offers words or paths; one word beside paths is "auto", which is short.
            if path is not None and len(words) < 2:
                vars(action)["complete"] = path
            elif words:
                action.choices = words
    print(shtab.complete(top, shell=settings.shell))
    return EXIT_OK


COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "plan": plan.COMMAND,
    "draw": draw.COMMAND,
    "calibrate": calibrate.COMMAND,
    "report": report.COMMAND,
    "export": export.COMMAND,
    "import": import_.COMMAND,
    "doctor": doctor.COMMAND,
    "completion": Command(
        "print a script that completes zfunc's commands in a shell",
        "Commands, options, values to choose from, files and folders. Where to put it is below.",
        CompletionSettings,
        print_script,
        """
        # bash, in ~/.bashrc
        source <(zfunc completion bash)
        # zsh, in ~/.zshrc, below compinit
        eval "$(zfunc completion zsh)"
        # fish, once
        zfunc completion fish > ~/.config/fish/completions/zfunc.fish
        """,
    ),
}

GONE = {
    "top": "watch a running folder with zfunc report RUN --follow",
    **{flag(name): instead for name, instead in GONE_SETTINGS.items() if name not in OF_OPTIMIZER},
    **dict.fromkeys(
        ("--compute-tflops", "--device-gbs", "--d2h-gbs", "--h2d-gbs", "--host-gbs"),
        "name a profile with --hardware, and replace its figures by --with",
    ),
    "--log-style": "metrics.jsonl in the run folder has every step, and zfunc report RUN shows it",
    "--format": "the suffix of --out says it: .svg, .html, .json for a Chrome trace, .txt",
}
"""What to type instead of a command or an option of an earlier version."""

ELSEWHERE = {
    "--batch-size, sequences of a step over all ranks and micro-batches": (
        *("--per-device-train-batch-size", "--train-batch-size", "--global-batch-size", "--micro-batch-size"),
    ),
    "--clip": ("--max-grad-norm", "--gradient-clipping", "--clip-grad", "--clip-norm"),
    "--compile-segments": ("--torch-compile", "--compile"),
    "--config": ("--deepspeed", "--deepspeed-config"),
    "--data": ("--dataset", "--dataset-name", "--dataset-path", "--train-file", "--data-path"),
    "--epochs": ("--num-train-epochs", "--num-epochs"),
    "--eval-every": ("--eval-steps", "--eval-interval", "--eval-strategy"),
    "--hf FOLDER, of a model on this machine": ("--model", "--model-name-or-path", "--model-id"),
    "--keep": ("--save-total-limit",),
    "--lora": ("--lora-r", "--lora-rank", "--use-peft"),
    "--lora-targets": ("--lora-target-modules",),
    "--lr": ("--learning-rate",),
    "--lr-schedule": ("--lr-scheduler-type", "--lr-scheduler", "--lr-decay-style"),
    "--micro-batches, their number": ("--gradient-accumulation-steps", "--grad-accum"),
    "--optimizer": ("--optim",),
    "--out": ("--output-dir", "--output", "--save", "--save-dir"),
    "--pp": ("--pipeline-parallel", "--pipeline-parallel-size", "--pipeline-model-parallel-size"),
    "--precision bf16": ("--bf16",),
    "--precision fp16": ("--fp16",),
    "--recompute, which is all by default": ("--gradient-checkpointing", "--activation-checkpointing"),
    "--resume": ("--resume-from-checkpoint", "--load"),
    "--save-every": ("--save-steps", "--save-interval"),
    "--seq-length": ("--max-seq-length", "--max-seq-len", "--max-length", "--block-size", "--context-length"),
    "--stage": ("--zero-stage",),
    "--steps": ("--max-steps", "--train-iters", "--num-steps"),
    "--tensorboard, --wandb or --trackio": ("--report-to",),
    "--warmup": ("--warmup-steps", "--lr-warmup-iters", "--num-warmup-steps"),
    "--quantize nf4 with --lora 16": ("--load-in-4bit", "--qlora", "--use-bnb-nested-quant"),
    "--quantize int8 with --lora 16": ("--load-in-8bit",),
    "--state-on device:0.25,host; optimizer state is on the host by default": (
        *("--cpu-offload", "--offload-optimizer", "--optimizer-offload"),
    ),
    "--params-on host": ("--offload-param", "--offload-params", "--param-offload"),
    "torchrun --nproc-per-node N -m zfunc train, and --gpus N in a plan": (
        *("--ranks", "--nproc-per-node", "--num-processes", "--world-size", "--num-gpus"),
    ),
    "--pp or --devices: layers of several devices; no layer is divided": (
        *("--tensor-parallel", "--tensor-parallel-size", "--tensor-model-parallel-size", "--tp"),
    ),
}
"""What to type instead of options that other programs have for the same thing."""
FOREIGN = {name: instead for instead, names in ELSEWHERE.items() for name in names}
