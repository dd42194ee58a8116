"""`zfunc completion`: a script for bash, zsh or fish that completes commands, options and their values.

shtab makes the scripts from the parser: it knows all three shells, and its scripts start no Python at every key,
which on a cluster's network disks takes seconds. The values of an option are those that its Option lists.
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
FILES = {"FILE", "PATH"}  # metavars that stand for a file, or for a file or a folder
FOLDERS = {"FOLDER", "RUN", "CHECKPOINT"}

COMPLETION = {
    "shell": Option(
        "shell", "shell to print a script for", one_of(SHELLS), metavar="|".join(SHELLS), positional=True
    )
}


@frozen(kw_only=True)
class CompletionSettings:
    """A shell to print a script for."""

    shell: str

    def __attrs_post_init__(self) -> None:
        check_each(self, COMPLETION)


def completion_command(commands: Mapping[str, Command]) -> Command:
    """The command; `commands` are all that it completes, itself included."""

    def run_completion(settings: CompletionSettings) -> int:
        print(script(settings.shell, commands))
        return EXIT_OK

    return Command(
        "print a script that completes zfunc's commands in a shell",
        "Commands, options, values to choose from, files and folders. Where to put it is below.",
        CompletionSettings,
        COMPLETION,
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

    top, parsers = make_parser(commands)
    for name, parser in parsers.items():
        for action in parser._actions:
            option = commands[name].options.get(action.dest)
            if option is not None and isinstance(action.metavar, str):
                _complete(action, choices(action.metavar, option), place(action.metavar))
    return shtab.complete(top, shell=shell)


def choices(metavar: str, option: Option) -> tuple[str, ...]:
    """The words to choose from: those of the option, and those of its metavar that are not in capitals.

    >>> from zfunc.options import anything
    >>> choices("NAME|auto", Option("hardware", "which", anything, words=("h100", "h200")))
    ('h100', 'h200', 'auto')
    """
    return tuple(dict.fromkeys([*option.words, *(x for x in metavar.split("|") if not x.isupper())]))


def place(metavar: str) -> str:
    """The kind of path to complete: "file", which may be in a folder, "directory", or "".

    >>> place("NAME|FILE"), place("RUN"), place("N")
    ('file', 'directory', '')
    """
    kinds = set(metavar.split("|"))
    return "file" if kinds & FILES else "directory" if kinds & FOLDERS else ""


def _complete(action: argparse.Action, words: Sequence[str], kind: str) -> None:
    """Set the attributes of an argument that shtab reads."""
    import shtab

    target: Any = action
    if words and kind:
        target.complete = _words_or_paths(words, kind)
    elif words:
        target.choices = words
    elif kind:
        target.complete = getattr(shtab, kind.upper())


def _words_or_paths(words: Sequence[str], kind: str) -> dict[str, Any]:
    """A completion of both, which shtab does not have."""
    name = f"_zfunc_{kind}_or_{sha256(join(words).encode()).hexdigest()[:8]}"
    bash, zsh, fish = {
        "file": ("-f", "_files", "__fish_complete_path (commandline -ct)"),
        "directory": ("-d", "_files -/", "__fish_complete_directories"),
    }[kind]
    listed = " ".join(words)
    return {
        "bash": name,
        "zsh": name,
        "fish": f"{listed} ({fish})",
        "preamble": {
            "bash": f'{name}() {{\n  compgen -W {quote(listed)} -- "$1"\n  compgen {bash} -- "$1"\n}}\n',
            "zsh": f"{name}() {{\n  _alternative 'words:word:({listed})' 'paths:path:{zsh}'\n}}\n",
        },
    }
