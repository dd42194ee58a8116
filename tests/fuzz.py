"""Random models under random settings against plain PyTorch, a few steps each, as long as asked. Beside each some
random segments in tiles, against themselves on whole rows.

    python tests/fuzz.py --seconds 3600 --seed 1
    python tests/fuzz.py --cases 1 --seed 4711

Case `n` of seed `s` is case 0 of seed `s + n`, so that a failure is repeated by one command; that is printed, with
the smallest model and the fewest settings that still fail.

The invariant: in every case the gradient that reaches the optimizer is autograd's, unscaled and clipped, element by
element; where the model draws random numbers or updates are deferred, it is that of the same program that
recomputes, streams, traces and defers nothing, bit by bit. New memory is NaN.

SEGMENTS in tiles go with each case: those whose pieces keep tokens apart outside one attention are that of the row,
and all others are refused.
"""

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import plain
import torch
from attrs import evolve, field, frozen
from fuzz_models import WIDTH, Model, Rows, draw, draw_rows
from table import Scattered
from tile_law import in_tiles

import zfunc
from zfunc.engine.trace import vjp
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

STEPS = 3
SEGMENTS = 4  # in tiles, beside each model
SETTINGS: dict[str, list[Any]] = {
    "recompute": ["all", "none", "min-cut", "all,min-cut"],
    "precision": ["fp32", "fp32", "bf16", "fp16"],
    "micro_batches": [1, 1, 2, 3],
    "clip_norm": [None, None, 0.1, 1.0],
    "bucket_size": [10_000, 1, 70, 300],
    "stage": [2, 2, 1, 3],
    "params_on": ["device", "device", "host", "disk"],
    "activations_on": ["device", "device", "host", "host,device", "disk"],
    "state_on": ["host", "host", "device:0.5,host", "device", "disk", "host:0.5,disk"],
    "grads_on": ["host", "disk"],
    "commit_every": [1, 2],
    "order": ["by-device", "by-device", "horizontal", "vertical", 2],
    "persistent_params": [0, 0, 20, 100],
    "defer": [False, False, True],
    "schedule": ["Overlapped", "Serial", "Interleaved", "CriticalPath", Scattered(0), Scattered(1, 3)],
    "slots": [2, 1, 3],
}
OPTIMIZER: dict[str, list[Any]] = {"moments": ["fp32", "fp32", "16bit", "8bit"], "weight_decay": [0.01, 0.0]}
TOLERANCE = {"fp32": 3e-6, "16bit": 2.0**-7, "8bit": None}  # of the first moment; 8 bits are too few to tell


@frozen
class Case:
    """A model and what it is trained with; the first of each of SETTINGS is what is not said."""

    model: Model
    settings: dict[str, Any] = field(factory=dict[str, Any])


def case(seed: int) -> Case:
    """The case of a seed."""
    random = Random(seed)
    model = draw(random)
    settings = {name: random.choice(values) for name, values in {**SETTINGS, **OPTIMIZER}.items()}
    if settings["recompute"] == "none":
        settings["params_on"] = settings["activations_on"] = "device"
        settings["stage"] = min(settings["stage"], 2)
    if "disk" not in settings["state_on"]:
        settings |= {name: SETTINGS[name][0] for name in ("grads_on", "commit_every")}
        settings["params_on"] = settings["params_on"].replace("disk", "host")
    if settings["params_on"] != "device":
        settings["stage"] = 3
    if settings["stage"] == 1:
        settings["order"] = "by-device"
    return Case(model, {k: v for k, v in settings.items() if v != {**SETTINGS, **OPTIMIZER}[k][0]})


def segments(seed: int) -> list[Rows]:
    """The segments in tiles of a seed."""
    random = Random(seed)
    return [draw_rows(random) for _ in range(SEGMENTS)]


def run(given: Case | Rows) -> None:
    """Train it beside plain PyTorch. Raises where they differ, or where it does not train at all."""
    if isinstance(given, Rows):
        passed = in_tiles(given.module(), given.dtype, (2, given.tokens, WIDTH), given.tiles)
        assert passed == given.fits, "passed in tiles" if passed else "refused in tiles"
        return
    with TemporaryDirectory() as folder:
        _run_in(folder, given)


def _run_in(folder: str, given: Case) -> None:
    settings = {name: values[0] for name, values in {**SETTINGS, **OPTIMIZER}.items()} | given.settings
    tolerance = TOLERANCE[settings["moments"]]
    optimizer = plain.remembering(zfunc.AdamW(1e-2, **{name: settings.pop(name) for name in OPTIMIZER}))
    precision = settings["precision"] = _precision(given.model, settings["precision"])
    segments, parts, _ = given.model.built()
    if "disk" in settings["state_on"] + settings["activations_on"]:
        settings["swap"] = folder
    program = zfunc.compile(segments, optimizer=optimizer, device="cpu", **settings)
    scale = LossScale(2.0**7) if precision == "fp16" else None
    state = zfunc.init(program, seed=given.model.seed, loss_scale=scale)
    if not given.model.random and not settings["defer"]:
        plain.follow(program, state, parts, given.model.batch, steps=STEPS, tolerance=tolerance)
        return
    again = zfunc.compile(
        segments,
        optimizer=optimizer,
        device="cpu",
        **{
            **settings,
            "recompute": "none",
            "schedule": "Serial",
            "defer": False,
            "params_on": "device",
            "activations_on": "device",
            "state_on": "host",
            "grads_on": "host",
            "commit_every": 1,
            "swap": (),
            "stage": min(settings["stage"], 2),
        },
    )
    other = zfunc.init(again, seed=given.model.seed, loss_scale=scale)
    for i in range(STEPS):
        state, metrics = zfunc.train_step(program, state, given.model.batch(i))
        with patch.object(vjp, "joint_graph", side_effect=ValueError("not traced")):
            other, expected = zfunc.train_step(again, other, given.model.batch(i))
        assert repr(metrics.loss) == repr(expected.loss)
        assert repr(metrics.grad_norm) == repr(expected.grad_norm)
        if i % 2 == 0:
            state = zfunc.flush(program, state)
            ours, theirs = zfunc.params(program, state), zfunc.params(again, other)
            assert all(torch.equal(ours[name], x) for name, x in theirs.items()), "recomputing nothing"


def _precision(model: Model, precision: str) -> str:
    """The precision, or fp32 where torch itself has no kernels for it."""
    _, parts, values = model.built()
    names = {full for part in parts for full in part.names.values()}
    dtype = TORCH_DTYPES[precision]
    try:
        plain.gradient(parts, values, names, [model.batch(0)], dtype=dtype)
    except (RuntimeError, NotImplementedError):
        if precision == "fp32":
            raise
        return "fp32"
    return precision


def failure(given: Case | Rows) -> BaseException | None:
    """What is raised by a case, if anything."""
    try:
        run(given)
    except Exception as error:
        return error
    return None


def smaller(given: Case | Rows) -> Iterator[Case | Rows]:
    """Cases with one thing less."""
    if isinstance(given, Rows):
        fewer = [given.pieces[:i] + given.pieces[i + 1 :] for i in range(len(given.pieces))]
        yield from (evolve(given, pieces=pieces) for pieces in fewer if pieces)
        if given.dtype != torch.float32:
            yield evolve(given, dtype=torch.float32)
        return
    model = given.model
    for name in given.settings:
        yield evolve(given, settings={k: v for k, v in given.settings.items() if k != name})
    for s, pieces in enumerate(model.segments):
        if len(model.segments) > 1:
            segments, between = list(model.segments), list(model.between)
            del segments[s], between[s]
            yield evolve(given, model=evolve(model, segments=tuple(segments), between=tuple(between)))
        for i in range(len(pieces)):
            fewer = (*model.segments[:s], pieces[:i] + pieces[i + 1 :], *model.segments[s + 1 :])
            yield evolve(given, model=evolve(model, segments=fewer))
        if model.between[s] != "tensor":
            between = (*model.between[:s], "tensor", *model.between[s + 1 :])
            yield evolve(given, model=evolve(model, between=between))
    for ties in {model.ties[1:], ()} - {model.ties}:
        yield evolve(given, model=evolve(model, ties=ties))
    if model.tokens:
        yield evolve(given, model=evolve(model, tokens=False))


def shrunk(given: Case | Rows, error: BaseException) -> Case | Rows:
    """The smallest case found that fails with the same type of error."""
    while True:
        for less in smaller(given):
            failed_with = failure(less)
            if type(failed_with) is type(error):
                given = less
                break
        else:
            return given


def fuzz(seed: int, *, cases: int, seconds: float) -> list[str]:
    """What failed of so many cases, or of those there is time for; told as it comes."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    began, failed, number = time.monotonic(), list[str](), 0
    while number < cases and time.monotonic() - began < seconds:
        for given in (case(seed + number), *segments(seed + number)):
            if error := failure(given):
                least = shrunk(given, error)
                failed_with = failure(least) or error
                lines = "".join(traceback.format_exception(failed_with)[-4:])
                again = f"python tests/fuzz.py --cases 1 --seed {seed + number}"
                failed.append(f"{lines}seed {seed + number}: {least}\n  {again}")
                print(failed[-1], flush=True)
        number += 1
    print(f"{number} cases from seed {seed} in {time.monotonic() - began:.0f} s, {len(failed)} failed")
    return failed


def main() -> int:
    options = argparse.ArgumentParser(description="Random models and settings against plain PyTorch.")
    options.add_argument("--cases", type=int, default=10**9, help="how many at most (default: no end)")
    options.add_argument("--seconds", type=float, default=3600, help="bound on the time (default: 3600)")
    options.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the first case (default: the time)"
    )
    args = options.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("zfunc").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # of what is refused
    return 1 if fuzz(args.seed, cases=args.cases, seconds=args.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
