"""What can go wrong in a step, as types one can catch. Bad arguments are ValueError and TypeError; those about
settings have fields, from which Python and the command line each write a text of their own."""

import errno
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


class PlanError(ValueError):
    """A recipe or plan that cannot run or would change the result. The message shows the plan, its fault marked."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient is inf or NaN, and no loss scale can help; the message says what the State holds now."""


class OutOfMemory(MemoryError):  # noqa: N818
    """A plan needs more memory than the machine has; raised before anything is allocated."""


class DonatedStateError(RuntimeError):
    """A State that was handed to train_step was used again."""


class UndeclaredAccess(RuntimeError):  # noqa: N818
    """In debug mode: an operation's code accessed a memory region that the operation did not declare."""


class ExecutionError(RuntimeError):
    """A plan's operation raised an exception, the cause; the message names the operation and its lane."""


class RankError(RuntimeError):
    """Ranks differ in what must be equal on all, or a rank is gone; raised on every rank that still runs."""


class LaneTimeout(RuntimeError):  # noqa: N818
    """A lane waited longer than its time limit; the message names the awaited operation and its lane."""


class AbandonedCalls(KeyboardInterrupt):
    """An interrupt did not wait for a drive that hangs: reads or writes still run, and the State is lost."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or a read one is damaged or incomplete; the message names file and place."""


class DiskError(OSError):
    """A file cannot be created, read or written; the message names file and bytes. `errno` is the system's code."""


_NEXT = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "name a folder this user may use",
    errno.EPERM: "name a folder this user may use",
    errno.ENOTDIR: "name a folder, or move the file of that name",
    errno.EEXIST: "name another one, or move the existing file",
    errno.EISDIR: "move the folder of that name",
    errno.ELOOP: "replace the link by the file: links are not followed",
    errno.EIO: "check the disk, and use another",
}


def _explained(
    kind: type[Exception], path: Path, doing: str, advice: Mapping[int, str], error: OSError
) -> Exception:
    code = error.errno or 0
    next_action = advice.get(code) or _NEXT.get(code, "check the disk and the folder's owner")
    explained = kind(f"{path}: got {(error.strerror or str(error))!r} while {doing}: {next_action}")
    if isinstance(explained, OSError):
        explained.errno = error.errno
    return explained


@contextmanager
def explain_os_errors(
    kind: type[Exception], path: Path, doing: str, advice: Mapping[int, str]
) -> Generator[None, None, None]:
    """Turn an OSError in the block into a `kind` naming `path`, what failed (`doing`) and the errno's `advice`."""
    try:
        yield
    except DiskError as error:  # says all that
        if kind is DiskError:
            raise
        raise kind(str(error)) from error
    except OSError as error:
        raise _explained(kind, path, doing, advice, error) from error


_MARK = "\x02"  # around a setting in a marked text: no repr of a value has it, and it is no white space


def setting(name: str, value: object) -> str:
    """The text "name=value" of a setting, between invisible marks by which `write` finds the setting again.

    >>> error = SettingError("swap", "none", f"a folder with {setting('state_on', 'disk')}", "pass one")
    >>> str(error), error.expected
    ("swap: got none, expected a folder with state_on='disk': pass one", "a folder with state_on='disk'")
    """
    return f"{_MARK}{name}={value!r}{_MARK}"


class Message(str):
    """An error message in which settings read as in Python, "name=value"; `marked` is its text with the marks
    that `setting` put around them."""

    marked: str

    def __new__(cls, marked: str) -> "Message":
        """Make a message from `marked`, a text with marks around its settings; the message has no marks."""
        self = super().__new__(cls, marked.replace(_MARK, ""))
        self.marked = marked
        return self


def message_of(names: str | Sequence[str], got: str, expected: str = "", do: str = "") -> Message:
    """The sentence about `names`, settings or files: what the error got, what it expected, and what to do.

    >>> message_of((), "attention with dropout", "it without", f"use {setting('tiles', 1)}")
    'got attention with dropout, expected it without: use tiles=1'
    """
    names = (names,) if isinstance(names, str) else names
    subject = (
        ", ".join(f"{_MARK}{x}{_MARK}" if x.isidentifier() else x for x in names) + ": " if names else ""
    )
    return Message(f"{subject}got {got}{expected and f', expected {expected}'}{do and f': {do}'}")


def marked(error: BaseException) -> str:
    """The message of `error`, with marks around its settings, as `setting` makes them, if it has settings."""
    text = error.message if isinstance(error, _OfSettings) else next(iter(error.args), None)
    return text.marked if isinstance(text, Message) else str(error)


def about(name: str, error: BaseException) -> Message:
    """The message of an error that setting `name` caused, preceded by that name.

    >>> str(about("hf", ValueError("model: got no config.json")))
    'hf: model: got no config.json'
    """
    return Message(f"{_MARK}{name}{_MARK}: {marked(error)}")


def write(text: str, written: Callable[[str, str | None], str]) -> str:
    """Replace each marked setting in `text` by `written(name, value)`: value a repr, None for a name alone.

    >>> write(f"use {setting('tiles', 1)}", lambda name, value: f"--{name} {value}")
    'use --tiles 1'
    """
    parts = text.split(_MARK)
    for i in range(1, len(parts), 2):
        name, has_value, value = parts[i].partition("=")
        parts[i] = written(name, value if has_value else None)
    return "".join(parts)


class _OfSettings:
    """The fields of an error about settings, all text: their `names`, what was `got`, what is `expected` and
    what to `do`. Settings that the texts mention, marked by `setting`, read "name=value" in the fields."""

    def __init__(self, names: str | Sequence[str], got: str, expected: str = "", do: str = "") -> None:
        super().__init__(names, got, expected, do)  # pyright: ignore  # of an exception
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.got, self.expected, self.do = map(Message, (got, expected, do))
        self.message = message_of(names, got, expected, do)

    def __str__(self) -> str:
        return str(self.message)


class SettingError(_OfSettings, ValueError):
    """A setting has an invalid value, alone or beside another setting: `names`, `got`, `expected`, `do`."""


class SettingTypeError(_OfSettings, TypeError):
    """A setting has a value of an invalid type; the error has the fields of SettingError."""


SETTING_ERRORS = SettingError, SettingTypeError


def refuse(
    names: str | Sequence[str],
    got: str,
    expected: str = "",
    do: str = "",
    kind: type[Exception] = SettingError,
    *,
    cause: Exception | None = None,
) -> NoReturn:
    """Raise a `kind`, from `cause`, about `names`: the value got, the values expected, and what to do."""
    fields = names, got, expected, do
    raise (kind(*fields) if issubclass(kind, _OfSettings) else kind(message_of(*fields))) from cause


def refuse_unknown(
    name: str, known: Sequence[str], do: str = "pass one of them", *, near: bool = True
) -> NoReturn:
    """Raise a SettingTypeError about `name`, which is none of the settings `known`, with the nearest if `near`.

    >>> refuse_unknown("etas", ["lr", "betas"])
    Traceback (most recent call last):
    zfunc.errors.SettingTypeError: etas: got an unknown setting, expected one of lr, betas (did you mean 'betas'...
    """
    like = did_you_mean(name, [*known]) if near else ""
    refuse(name, "an unknown setting", f"one of {', '.join(known)}{like}", do, SettingTypeError)


def install(extra: str) -> str:
    """The pip commands that install zfunc's extra `extra` from a clone or a wheel of it: no registry has zfunc.

    >>> install("hf")
    'pip install -e ".[hf]" in a clone of zfunc (or with its wheel, pip install "FILE.whl[hf]")'
    """
    return f'pip install -e ".[{extra}]" in a clone of zfunc (or with its wheel, pip install "FILE.whl[{extra}]")'


USE_ANOTHER = "use another checkpoint, or start anew in another folder"  # instead of a damaged one


def did_you_mean(got: str, known: list[str], *, cutoff: float = 0.4) -> str:
    """` (did you mean 'x'?)` for the known name nearest to `got`; "" if no name is as similar as `cutoff` (0 to 1).

    >>> did_you_mean("fp61", ["fp32", "fp16"])
    " (did you mean 'fp16'?)"
    """
    from difflib import get_close_matches

    match = get_close_matches(got, known, n=1, cutoff=cutoff)
    return f" (did you mean {match[0]!r}?)" if match else ""
