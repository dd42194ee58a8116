"""What a plan reads of a Hugging Face model, kept on the disk: the next plan of it needs no torch and no trace.

A file has one answer: what a config describes, or what a batch costs. Its name is the hash of the question, which
includes everything that the answer depends on. If a file is missing, damaged or of another question, the answer is
computed again and the file replaced. The latest MOST files stay. ZFUNC_CACHE=off turns this off.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from attrs import astuple, field, frozen

from zfunc.checkpoint.durable_files import atomic_replace, read_small
from zfunc.checkpoint.strict_json import Count, Text, parse_json, render, to_plain
from zfunc.core.layout import Parameter
from zfunc.core.spec import StepSpec
from zfunc.engine.trace.pass_options import pass_options
from zfunc.errors import CheckpointError
from zfunc.planner.cost_model import StepCosts, Tracer

VARIABLE, OFF = "ZFUNC_CACHE", "off"
SOURCES = Path(__file__).parent.parent
MOST, LIMIT = 256, 4 << 20  # files, and bytes of one
T = TypeVar("T")


def cache_folder() -> Path:
    """The folder of zfunc's caches, kept from run to run: `$XDG_CACHE_HOME/zfunc`, or `~/.cache/zfunc`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache") / "zfunc"


@cache
def code_digest(folder: Path, *packages: str) -> str:
    """Hash of the code that a cached result depends on: versions of Python and `packages`, sources in `folder`."""
    digest = hashlib.sha256(sys.version.encode())
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{name} {metadata.version(name)}".encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size}".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(question: Sequence[Any], answer: Callable[[], T], kind: type[T]) -> T:
    """The result of `answer()`, of type `kind`, cached on the disk; read from there for an equal `question`."""
    if os.environ.get(VARIABLE) == OFF:
        return answer()
    asked = json.dumps([*question, code_digest(SOURCES, "torch", "transformers", "peft")])
    name = hashlib.sha256(asked.encode()).hexdigest()
    path = cache_folder() / "costs" / f"{name}.json"
    with suppress(OSError, ValueError, TypeError, LookupError, CheckpointError):
        digest, _, raw = read_small(path, LIMIT).partition(b"\n")
        found = parse_json(raw, str(path)).entries()
        if digest == hashlib.sha256(raw).hexdigest().encode() and found["question"].value == name:
            return found["answer"].read(kind)
    result = answer()
    raw = render({"question": name, "answer": to_plain(result)})
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_replace(path, mode=0o600) as file:
            file.write(hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw)
        for old in sorted(path.parent.iterdir(), key=lambda x: x.lstat().st_mtime_ns)[:-MOST]:
            old.unlink()
    return result


@frozen
class ModelFacts:
    """Facts of a Hugging Face model that a plan needs beside costs; parameters, buffer bytes by segment.

    `longest` is the most tokens that a sequence may have, None if the model's config does not limit that.
    """

    architecture: Text
    num_layers: Count
    hidden_size: Count
    vocab_size: Count
    constant_bytes: Count
    buffer_bytes: tuple[Count, ...] = field(converter=tuple[int, ...])
    parameters: tuple[tuple[Parameter, ...], ...] = field(converter=tuple[tuple[Parameter, ...], ...])
    longest: Count | None = None

    @property
    def owned(self) -> list[Parameter]:
        """Every parameter of the model; tied parameters once."""
        return [*{p.name: p for own in reversed(self.parameters) for p in own}.values()]


def kept_trace(asked: Sequence[Any], trace: Tracer) -> Tracer:
    """A Tracer that calls `trace` only for costs that are not on disk; `asked` identifies the model and batch."""

    def costs(spec: StepSpec, on_gpu: bool, grouped: bool) -> StepCosts:
        settings = spec.settings
        kinds = settings.precision, settings.fp32_params, settings.micro_batches
        question = *asked, *kinds, *(astuple(x.priced) for x in pass_options(spec)), on_gpu, grouped
        return kept(question, lambda: trace(spec, on_gpu, grouped), StepCosts)

    return costs
