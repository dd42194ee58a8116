"""What a shell completes after `zfunc`: a script for bash, zsh or fish, made from the parser of the command line.

shtab makes the scripts: it knows all three shells, and a script of its needs no Python at every key, which on a
cluster's network disks takes seconds.

The invariant: what is offered for an option is what its Option says it takes; nothing is listed here.
"""

import argparse
from collections.abc import Mapping, Sequence
from hashlib import sha256
from shlex import join, quote
from typing import Any

from attrs import frozen

from zfunc.cli.command import EXIT_OK, Command
from zfunc.cli.parser import make_parser
from zfunc.options import Option, check_each, one_of

SHELLS = ("bash", "zsh", "fish")
FILES = {"FILE", "PATH"}  # metavars that stand for a file, or for either
FOLDERS = {"FOLDER", "RUN", "CHECKPOINT"}

COMPLETION = {
    "shell": Option(
        "shell",
        "the one whose script is printed",
        one_of(SHELLS),
        metavar="|".join(SHELLS),
        positional=True,
    )
}


@frozen(kw_only=True)
class CompletionSettings:
    """A shell to print a script for."""

    shell: str

    def __attrs_post_init__(self) -> None:
        check_each(self, COMPLETION)


def script(shell: str, top: argparse.ArgumentParser, offered: Mapping[str, Mapping[str, Option]]) -> str:
    """The script that completes `top`; `offered` are the options of its commands. It adds to the parser's actions.

    Raises ValueError for a shell there is no script for.
    """
    import shtab

    one_of(SHELLS)("--shell", shell)
    for name, parser in _subparsers(top).items():
        for action in parser._actions:
            option = offered[name].get(action.dest)
            if option is not None and isinstance(action.metavar, str):
                _offer(action, choices(action.metavar, option), place(action.metavar))
    return shtab.complete(top, shell=shell)


def _subparsers(top: argparse.ArgumentParser) -> dict[str, Any]:
    """The parsers of its commands, by name."""
    return next(dict(a.choices) for a in top._actions if isinstance(a, argparse._SubParsersAction))


def choices(metavar: str, option: Option) -> tuple[str, ...]:
    """The words there are to choose from: those of the option, and what its metavar does not have in capitals.

    >>> from zfunc.options import anything
    >>> choices("NAME|auto", Option("hardware", "which", anything, words=("h100", "h200")))
    ('h100', 'h200', 'auto')
    """
    return tuple(dict.fromkeys([*option.words, *(x for x in metavar.split("|") if not x.isupper())]))


def place(metavar: str) -> str:
    """What of a disk is wanted: "file", which may well be in a folder, "directory", or "".

    >>> place("NAME|FILE"), place("RUN"), place("N")
    ('file', 'directory', '')
    """
    wanted = set(metavar.split("|"))
    return "file" if wanted & FILES else "directory" if wanted & FOLDERS else ""


def _offer(action: Any, words: Sequence[str], where: str) -> None:
    """Put it where shtab looks for it."""
    import shtab

    if words and where:
        action.complete = _either(words, where)
    elif words:
        action.choices = words
    elif where:
        action.complete = getattr(shtab, where.upper())


def _either(words: Sequence[str], where: str) -> dict[str, Any]:
    """Words, and files or folders: no completion of shtab's own is both."""
    name = f"_zfunc_{where}_or_{sha256(join(words).encode()).hexdigest()[:8]}"
    files, zsh, fish = {
        "file": ("-f", "_files", "__fish_complete_path (commandline -ct)"),
        "directory": ("-d", "_files -/", "__fish_complete_directories"),
    }[where]
    listed = " ".join(words)
    return {
        "bash": name,
        "zsh": name,
        "fish": f"{listed} ({fish})",
        "preamble": {
            "bash": f'{name}() {{\n  compgen -W {quote(listed)} -- "$1"\n  compgen {files} -- "$1"\n}}\n',
            "zsh": f"{name}() {{\n  _alternative 'words:word:({listed})' 'paths:path:{zsh}'\n}}\n",
        },
    }


def command_of(others: Mapping[str, Command]) -> Command:
    """The command itself, which completes the `others`, and itself once it is among them."""

    def run_completion(settings: CompletionSettings) -> int:
        offered = {name: command.options for name, command in others.items()}
        print(script(settings.shell, make_parser(others)[0], offered))
        return EXIT_OK

    return Command(
        "print a script that completes zfunc's commands in a shell",
        "Commands, options, values to choose from, files and folders. Where to put it is below.",
        CompletionSettings,
        COMPLETION,
        run_completion,
        (
            ("bash, in ~/.bashrc", "source <(zfunc completion bash)"),
            ("zsh, in ~/.zshrc, below compinit", 'eval "$(zfunc completion zsh)"'),
            ("fish, once", "zfunc completion fish > ~/.config/fish/completions/zfunc.fish"),
        ),
    )
