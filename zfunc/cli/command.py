"""What every command has: settings with options, help, a function that runs it; and exit codes."""

from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from textwrap import indent
from typing import Any

from attrs import frozen

from zfunc.checkpoint.durable_files import replace_text
from zfunc.options import Option, options_of

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


@frozen
class Command:
    """A command: a line of help and more of it, its settings, whose fields are its options, and what runs it.

    `examples` are lines to type, each below a comment; `ending` says how the command ends. `run` returns its exit
    code.
    """

    summary: str
    details: str
    settings: type[Any]
    run: Callable[[Any], int]
    examples: str
    ending: str = ""

    @property
    def options(self) -> dict[str, Option]:
        """The options of its settings, by the names of the fields."""
        return options_of(self.settings)

    @property
    def description(self) -> str:
        """The beginning of its help."""
        return f"{self.summary[0].upper()}{self.summary[1:]}.\n\n{self.details}"

    def epilog(self, *, everything: bool) -> str:
        """The end of its help."""
        examples = f"examples:\n{indent(cleandoc(self.examples), '  ')}"
        return f"{examples}\n\n{self.ending}" if self.ending and everything else examples


def write_files(files: dict[Path, str], *, tell: bool = True) -> None:
    """Write each file, or replace it, and print its path if it is to `tell`."""
    for path, text in files.items():
        try:
            replace_text(path, text)
        except OSError as error:
            raise ValueError(
                f"out: got {path}, which cannot be written ({error.strerror}), expected a file in a folder "
                "that exists: name another"
            ) from error
        if tell:
            print(f"written: {path}")
