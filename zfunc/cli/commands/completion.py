"""`zfunc completion`: a script for bash, zsh or fish that completes commands, options and their values.

shtab makes it from the parser: its scripts start no Python at every key, which on network disks takes seconds.
"""

from collections.abc import Mapping

from attrs import NOTHING, frozen

from zfunc.cli.command import EXIT_OK, Command
from zfunc.cli.parser import make_parser
from zfunc.options import check_each, one_of, option

SHELLS = ("bash", "zsh", "fish")
FILES = {"FILE", "PATH"}  # metavars that stand for a file, or for a file or a folder
FOLDERS = {"FOLDER", "RUN", "CHECKPOINT"}


@frozen(kw_only=True)
class CompletionSettings:
    """A shell to print a script for."""

    shell: str = option(
        NOTHING, "shell", "shell to print a script for", one_of(SHELLS), "|".join(SHELLS), positional=True
    )

    def __attrs_post_init__(self) -> None:
        check_each(self)


def completion_command(commands: Mapping[str, Command]) -> Command:
    """The command; `commands` are all that it completes, itself included."""

    def run_completion(settings: CompletionSettings) -> int:
        print(script(settings.shell, commands))
        return EXIT_OK

    return Command(
        "print a script that completes zfunc's commands in a shell",
        "Commands, options, values to choose from, files and folders. Where to put it is below.",
        CompletionSettings,
        run_completion,
        """
        # bash, in ~/.bashrc
        source <(zfunc completion bash)
        # zsh, in ~/.zshrc, below compinit
        eval "$(zfunc completion zsh)"
        # fish, once
        zfunc completion fish > ~/.config/fish/completions/zfunc.fish
        """,
    )


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """The script for a shell. An option offers its words, and what its metavar has that is not in capitals."""
    import shtab

    top, parsers = make_parser(commands, everything=True)
    for name, parser in parsers.items():
        options = commands[name].options
        for action in (x for x in parser._actions if x.dest in options and isinstance(x.metavar, str)):
            kinds = str(action.metavar).split("|")
            words = tuple(
                dict.fromkeys([*options[action.dest].words, *(x for x in kinds if not x.isupper())])
            )
            path = shtab.FILE if FILES & {*kinds} else shtab.DIRECTORY if FOLDERS & {*kinds} else None
            # shtab offers words or paths; one word beside paths is "auto", which is short.
            if path is not None and len(words) < 2:
                vars(action)["complete"] = path
            elif words:
                action.choices = words
    return shtab.complete(top, shell=shell)
