"""What every command has: settings with options, help, a function that runs it; and exit codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from zfunc.checkpoint.durable_files import replace_text
from zfunc.options import Option

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


@frozen
class Command:
    """A command: a line of help and more of it, its settings and their options, and what runs it.

    `examples` are pairs of a purpose and what to type; `ending` says how the command ends. `run` returns an exit
    code.
    """

    summary: str
    details: str
    settings: type[Any]
    options: dict[str, Option]
    run: Callable[[Any], int]
    examples: tuple[tuple[str, str], ...]
    ending: str = ""

    @property
    def description(self) -> str:
        """The beginning of its help."""
        return f"{self.summary[0].upper()}{self.summary[1:]}.\n\n{self.details}"

    @property
    def epilog(self) -> str:
        """The end of its help."""
        lines = (f"  # {purpose}\n  {typed}" for purpose, typed in self.examples)
        return "\n\n".join(["examples:\n" + "\n".join(lines), *([self.ending] if self.ending else [])])


def write_files(files: dict[Path, str]) -> None:
    """Write each file, or replace it, and print its path."""
    for path, text in files.items():
        try:
            replace_text(path, text)
        except OSError as error:
            raise ValueError(
                f"--out: got {path}, which cannot be written ({error.strerror}), expected a file in a folder "
                "that exists: name another"
            ) from error
        print(f"written: {path}")
