"""The commands of `zfunc`, in the order in which help lists them. The tests parse the examples of each."""

from zfunc.cli.command import Command
from zfunc.cli.commands import calibrate, completion, doctor, draw, export, plan, report, top, train

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "plan": plan.COMMAND,
    "draw": draw.COMMAND,
    "calibrate": calibrate.COMMAND,
    "top": top.COMMAND,
    "report": report.COMMAND,
    "export": export.COMMAND,
    "doctor": doctor.COMMAND,
}
COMMANDS["completion"] = completion.completion_command(COMMANDS)
