"""A run of another program as readers of its checkpoint give it: tensors by the names of parameters.

Nothing is read before it is asked for, so a reader needs memory for the names alone.
"""

import errno
import pickle
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from attrs import field, frozen
from torch import Tensor

from zfunc.checkpoint.durable_files import os_errors_as, reject
from zfunc.errors import CheckpointError, refuse

MOMENTS = ("exp_avg", "exp_avg_sq")
# Files of torch.save: since 1.6, and before, by the pickle's protocol.
_BEGINS = b"PK", *(pickle.dumps(torch.serialization.MAGIC_NUMBER, n) for n in range(2, 6))
NEW_MOMENTS = "begin with new moments: train from the weights, which `hf` or zfunc.init(params=...) take"
_WRAPPERS = re.compile(
    r"^(module\.)+|\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
    r"|\.modules_to_save\.default\b|(?<=\.lora_[AB])\.default\b|(?<=\.lora_embedding_[AB])\.default\b"
    r"|(?<=\.lora_magnitude_vector)\.default(\.weight)?\b"  # of DoRA
)


class TornError(CheckpointError):
    """Files of another program's checkpoint are missing or damaged, as after a crash while it was saved."""


def torn(
    place: object, got: str, expected: str, do: str = "copy the checkpoint again, or take an earlier one"
) -> NoReturn:
    """Raise TornError: `place`, what was `got` there, what was `expected`, and what to `do`."""
    refuse(str(place), got, expected, do, TornError)


@frozen(eq=False)
class ForeignTensor:
    """A tensor of another program's checkpoint: its shape and dtype, and a function that reads it."""

    shape: tuple[int, ...] = field(converter=tuple[int, ...])
    dtype: torch.dtype
    read: Callable[[], Tensor]


@frozen(eq=False)
class ForeignRun:
    """A checkpoint of another program that trained with Adam or AdamW, under the model's names of parameters.

    `weights` includes module buffers; `moments` has exp_avg and exp_avg_sq of each parameter for which the
    files have them. `frozen` names the parameters known to be untrained; `tied` maps each further name of a
    tied tensor to its name in `weights`. `step` counts updates; `sequences`, the number trained on, is None
    if unknown.
    """

    place: Path
    step: int
    weights: Mapping[str, ForeignTensor]
    moments: Mapping[str, Mapping[str, ForeignTensor]]
    sequences: int | None = None
    frozen: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(factory=dict[str, str])

    @property
    def adapters(self) -> bool:
        """Whether the run's weights are adapters of peft, whose base weights may be missing in its files."""
        return any(is_adapter(x) for x in self.weights)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter of peft's LoRA."""
    return ".lora_" in name


def own_name(name: str) -> str:
    """The model's own name of a parameter, without the parts that wrappers of PyTorch add; for adapters, the
    name in files of peft.

    >>> own_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    >>> own_name("q_proj.lora_A.default.weight")
    'q_proj.lora_A.weight'
    """
    return _WRAPPERS.sub("", name)


def one_step(place: Path, steps: Iterable[tuple[str, Any]]) -> int:
    """The step that all of `steps`, pairs (name, step), agree on. Raises CheckpointError if two differ, one is no
    number or there is none; errors name `place`."""
    first: tuple[str, float] | None = None
    for name, saved in steps:
        try:
            step = float(saved)
        except (RuntimeError, TypeError, ValueError):
            got = f"step {saved!r:.99} of {name!r}"
            torn(place, got, "a number of updates")
        first = first or (name, step)
        if step != first[1] or not step.is_integer():
            got = f"step {first[1]:g} of {first[0]!r} and {step:g} of {name!r}"
            torn(place, got, "one whole number of updates for all parameters")
    if first is None:
        reject(place, "no step of an optimizer", "one for each parameter", "save the optimizer's state, too")
    return int(first[1])


@contextmanager
def reading_records(place: Path) -> Generator[None, None, None]:
    """A context that turns errors of taking apart what `place` has saved, by names, numbers and attributes that it
    lacks, into CheckpointError, with what to do."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        got = f"records that have another form ({type(error).__name__}: {error!s:.200})"
        torn(place, got, "those that its program saves")


@contextmanager
def reading_pickle(file: Path) -> Generator[None, None, None]:
    """A context that turns errors of reading the tensors of `file` into CheckpointError, with what to do."""
    try:
        with os_errors_as(file, "reading it"):
            yield
    except CheckpointError as error:  # EINVAL is of a file that ends too early, and is not the disk's
        if getattr(error.__cause__, "errno", 0) != errno.EINVAL:
            raise
        torn(file, "no readable tensors, as it ends too early", "whole ones")
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            do = "if you trust who wrote it and have its packages, add `allow_pickle`, which runs its code"
            reject(file, f"a pickle of {found[1]}", "tensors, numbers and texts alone", do)
        torn(file, f"no readable tensors ({error!s:.200})", "whole ones")
    except (RuntimeError, EOFError, ImportError, AttributeError, LookupError) as error:
        torn(file, f"no readable tensors ({error!s:.200})", "whole ones")


def load_pickle(
    file: Path, *, allow_pickle: bool, classes: Sequence[Any] = (), kinds: Sequence[type[Any]] = (dict,)
) -> Any:
    """Load the object, one of `kinds`, that torch.save wrote to `file`, with its tensors memory-mapped. Raises
    CheckpointError for another object, and unless `allow_pickle` for a pickle of anything but tensors, numbers,
    texts and `classes`."""
    with reading_pickle(file), torch.serialization.safe_globals([] if allow_pickle else [*classes]):
        with file.open("rb") as opened:
            first = opened.read(32)
        if not first.startswith(_BEGINS):
            got = f"a file that begins with {first[:16]!r}" if first else "an empty file"
            torn(file, got, "one that torch.save wrote")
        mmap = first.startswith(_BEGINS[0])  # files of torch before 1.6 are read whole
        if not mmap and (protocol := first[1]) > 3 and not allow_pickle:
            got, do = f"a pickle of protocol {protocol}", "if you trust who wrote it, add `allow_pickle`"
            reject(file, got, "2 or 3, which are read without running code", do)
        found = torch.load(file, map_location="cpu", mmap=mmap, weights_only=not allow_pickle)
    if not isinstance(found, (*kinds,)):
        expected = " or ".join(f"a {x.__name__}" for x in kinds)
        torn(file, f"a {type(found).__name__}", f"{expected}, as its program saves it")
    return found


def foreign_tensor(value: Tensor) -> ForeignTensor:
    """The ForeignTensor whose read returns `value`, a tensor in memory or memory-mapped."""
    return ForeignTensor(value.shape, value.dtype, partial(_itself, value))


def _itself(value: Tensor) -> Tensor:
    return value
