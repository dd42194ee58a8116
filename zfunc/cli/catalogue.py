"""The commands of `zfunc`, in the order in which help lists them. The tests parse the examples of each."""

from zfunc.cli.command import Command
from zfunc.cli.commands import calibrate, completion, doctor, draw, export, plan, report, train
from zfunc.core.settings import GONE as GONE_SETTINGS

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "plan": plan.COMMAND,
    "draw": draw.COMMAND,
    "calibrate": calibrate.COMMAND,
    "report": report.COMMAND,
    "export": export.COMMAND,
    "doctor": doctor.COMMAND,
}
COMMANDS["completion"] = completion.completion_command(COMMANDS)

GONE = {
    "top": "watch a running folder with zfunc report RUN --follow",
    **dict.fromkeys(
        ("--compute-tflops", "--device-gbs", "--d2h-gbs", "--h2d-gbs", "--host-gbs"),
        "name a profile with --hardware, and replace its figures by --with TABLE.KEY=VALUE",
    ),
    **{f"--{name}".replace("_", "-"): instead for name, instead in GONE_SETTINGS.items()},
    "--log-style": "metrics.jsonl in the run folder has every step, and zfunc report RUN shows it",
}
"""What to type instead of a command or an option of an earlier version."""
