"""What a plan's page suggests can be typed, and does what the page says of it."""

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import starmap
from random import Random
from typing import Any

import pytest

from zfunc.cli.catalogue import COMMANDS
from zfunc.cli.commands.plan import PlannedModel, PlanSettings, plan_model, plan_text
from zfunc.cli.parser import make_parser
from zfunc.errors import SettingError
from zfunc.options import as_flag
from zfunc.planner.plan_step import KNEE, SOLD
from zfunc.planner.profile import replace_figures


def _nothing(*_: Any, **_more: Any) -> tuple[()]:
    return ()


PARSER = make_parser(COMMANDS)[1]["plan"]


def planned(flags: str, advice: bool = False) -> PlannedModel:
    given = {
        x: value
        for x, value in vars(PARSER.parse_args(flags.split())).items()
        if x in COMMANDS["plan"].options
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in () if advice else ("suggest", "_beyond_settings"):
            patch.setattr(f"zfunc.planner.plan_step.{name}", _nothing)
        return plan_model(PlanSettings(**given))


def check_typed(flags: str) -> PlannedModel:
    """Each suggestion, typed behind the flags, gives the step that the page says."""
    answer = planned(flags, advice=True)
    for x in answer.planned.suggestions:
        typed, effect = " ".join(starmap(as_flag, x.changes.items())), x.effect
        new = planned(f"{flags} {typed}").planned
        assert (new.step_seconds, new.memory) == (x.step.seconds, x.step.memory), typed
        assert new.fits == (answer.planned.fits or effect.startswith("fits, ")), typed
        if times := re.fullmatch(r"([\d.]+) times the tokens/s", effect):
            gain = new.tokens_per_second / answer.planned.tokens_per_second
            assert gain == pytest.approx(float(times[1]), rel=0.01)
        if "with_" in x.changes:
            check_bought(new, x.changes["with_"])
        elif not answer.planned.fits:
            check_needed(flags, x.changes)
    return answer


def check_needed(flags: str, changes: Mapping[str, Any]) -> None:
    """Without one of `changes` the step does not fit, or the others are refused."""
    for name in changes:
        others = " ".join(as_flag(x, value) for x, value in changes.items() if x != name)
        with suppress(SettingError):
            assert not planned(f"{flags} {others}").planned.fits, name


def check_bought(p: Any, figure: str) -> None:
    """One size smaller is not enough."""
    place, _, nbytes = figure.partition("=")
    sold: dict[str, tuple[float, ...]] = {**SOLD}
    smaller = [size for size in sold[place.removeprefix("bytes.")] if size < float(nbytes)]
    for size in smaller[-1:]:
        less = replace_figures(p.profile, {place: size})
        assert less.hardware(p.step.settings.precision, p.world, p.devices).lacking(p.step.memory), figure


def drawn(seed: int) -> str:
    """A job, more or less too large for its machine."""
    draw = Random(seed)
    hidden, world = draw.choice([256, 512, 1024]), draw.choice([1, 1, 1, 2])
    flags = f"--num-layers {draw.choice([2, 4, 8])} --hidden-size {hidden} --num-attention-heads 8 --seq-length 256"
    flags += f" --vocab-size 5000 --batch-size {world * draw.choice([1, 4, 8])} --world {world}"
    flags += f" --hardware {draw.choice(['rtx4090', 'h100', 'rtx4090x8'])} --bucket-size 10000000"
    flags += f" --with bytes.context=1e6 --with bytes.device={10 ** draw.uniform(7.8, 8.8):.3g}"
    flags += f" --with bytes.host={world * 10 ** draw.uniform(8.0, 9.2):.3g}"
    return flags + draw.choice(
        ["", "", " --params-on host --stage 3", " --activations-on host", " --moments 8bit"]
    )


FEW = (14, 16, 35)


@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(x, marks=pytest.mark.slow) for x in range(60) if x not in FEW)]
)
def test_where_a_search_finds_a_plan_that_fits_so_does_the_advice(seed: int) -> None:
    flags = drawn(seed)
    p = check_typed(flags).planned
    if not p.fits and planned(f"{flags} --schedule auto").planned.fits:
        assert any(x.step.fits and not {"with_", "hardware"} & x.changes.keys() for x in p.suggestions)


def test_where_drives_bound_a_step_a_larger_batch_is_advised() -> None:
    flags = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 256 --vocab-size 5000"
    p = check_typed(f"{flags} --batch-size 2 --hardware rtx4090 --state-on disk --params-on host").planned
    assert p.disk is not None
    assert p.disk.busy > 1
    assert [x for x in p.suggestions if x.changes.get("batch_size", 0) >= 8]


BATCHES = {  # a small job and its machine, and the batch that is advised
    "the host updates": ("--hidden-size 1024 --seq-length 64 --batch-size 1", 16),
    "the device is always busy": ("--hidden-size 4096 --seq-length 256 --batch-size 2 --state-on device", 32),
    "and full": (
        "--hidden-size 2048 --seq-length 256 --batch-size 1 --state-on device --with bytes.device=2.75e9",
        16,
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_larger_batch_is_advised_where_and_as_it_gains_most(name: str) -> None:
    """No other micro-batches, and no farther place, make it faster by more than the next batch has to gain."""
    job, batch_size = BATCHES[name]
    flags = f"{job} --num-layers 2 --num-attention-heads 16 --vocab-size 5000 --hardware h100"
    flags += " --with bytes.context=1e6"
    p = check_typed(flags).planned
    (advised,) = (x for x in p.suggestions if "batch_size" in x.changes)
    assert advised.changes["batch_size"] == batch_size
    for parts in (1, 4, 16):
        for places in ("", "--activations-on host", "--activations-on host --params-on host"):
            other = planned(f"{flags} --batch-size {batch_size} --micro-batches {parts} {places}").planned
            assert not other.fits or other.step_seconds * KNEE > advised.step.seconds


@pytest.mark.parametrize(
    ("given", "bought"),
    [
        ("--with bytes.host=5e8", "host=1.6e10: fits, [0-9.]+ MiB of host memory short: 16 GB"),
        (
            "--state-on disk --with bytes.disk=1e8",
            "disk=1e12: fits, [0-9.]+ GiB of disk memory short: 1,000 GB",
        ),
    ],
)
def test_the_memory_that_one_would_buy_is_named(given: str, bought: str) -> None:
    flags = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 256 --vocab-size 5000"
    answer = check_typed(f"{flags} --batch-size 2 --hardware rtx4090 {given}")
    assert not answer.planned.fits
    assert re.search(f"--with bytes.{bought}", plan_text(answer))


def test_lengths_beside_the_most_are_of_whole_tiles() -> None:
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 100 --batch-size 1 --tiles 3"
    )
    answer = planned(f"{flags} --hardware h100 --with bytes.context=1e6 --with bytes.device=5e6 --max length")
    assert len(answer.knee) > 1
    assert all(tokens % 3 == 0 for tokens, _ in answer.knee)
    said = "; ".join(f"{tokens:,}: {speed:,.0f}" for tokens, speed in answer.knee)
    assert f"\n  tokens/s by tokens of a sequence: {said}\n" in plan_text(answer)
    assert answer.knee[-1] == (answer.settings.seq_length, answer.planned.tokens_per_second)
