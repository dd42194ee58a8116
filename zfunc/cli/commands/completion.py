"""`zfunc completion`: a script for bash, zsh or fish that completes commands, options and their values.

shtab makes the scripts from the parser: it knows all three shells, and its scripts start no Python at every key,
which on a cluster's network disks takes seconds. The values of an option are those that its Option lists.
"""

from collections.abc import Mapping
from typing import Any, cast

from attrs import NOTHING, frozen

from zfunc.cli.command import EXIT_OK, Command
from zfunc.cli.parser import make_parser
from zfunc.options import Option, check_each, one_of, option

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
    """The script for a shell."""
    import shtab

    top, parsers = make_parser(commands, everything=True)
    for name, parser in parsers.items():
        for action in parser._actions:
            known, target = commands[name].options.get(action.dest), cast("Any", action)
            if known is None or not isinstance(action.metavar, str):
                continue
            words, kinds = choices(action.metavar, known), set(action.metavar.split("|"))
            path = shtab.FILE if kinds & FILES else shtab.DIRECTORY if kinds & FOLDERS else None
            # shtab offers words or paths; one word beside paths is "auto", which is short.
            if path is not None and len(words) < 2:
                target.complete = path
            elif words:
                target.choices = words
    return shtab.complete(top, shell=shell)


def choices(metavar: str, option: Option) -> tuple[str, ...]:
    """The words to choose from: those of the option, and those of its metavar that are not in capitals.

    >>> from zfunc.options import anything
    >>> choices("NAME|auto", Option("hardware", "which", anything, words=("h100", "h200")))
    ('h100', 'h200', 'auto')
    """
    return tuple(dict.fromkeys([*option.words, *(x for x in metavar.split("|") if not x.isupper())]))
