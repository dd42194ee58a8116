"""The deferred update: the plain recipe's bits at every step, whoever reads the state, and whatever fails."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from attrs import evolve
from pairs import in_pairs
from small_models import MODELS, bits, rows_of
from table import chain, spec, waiting
from threaded_ranks import on_every, programs_of
from trained import injecting, steps
from zfunc.schedules import Overlapped

import zfunc
from zfunc.core.graph import Graph
from zfunc.core.hardware import ROUND
from zfunc.core.memory_model import peak_memory
from zfunc.core.recipes import deferred, zero_offload
from zfunc.core.simulator import simulate
from zfunc.engine.program.program import Program
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.state.ownership import Ownership
from zfunc.engine.state.state import State
from zfunc.errors import DonatedStateError, ExecutionError, NonFiniteError, RankError

STEPS = 7
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32 in 2, clipped": {"precision": "fp32", "clip_norm": 0.55, "micro_batches": 2},
    "16 bits, one slot": {"clip_norm": 0.55, "moments": "16bit", "slots": 1},
    "8 bits in 3": {"clip_norm": 0.5, "moments": "8bit", "micro_batches": 3},
    "stage 1, partial": {"clip_norm": 0.55, "stage": 1, "micro_batches": 2, "state_on": "device:0.5,host"},
    "fp16": {"precision": "fp16"},
    "updated on the device": {"clip_norm": 0.55, "update_on": "device,host", "ema": 0.5},
}
SMALL = [name for name in MODELS if name not in ("tied GPT", "frozen below")]


def compiled(model: str, settings: str, *, defer: bool = True, **more: Any) -> tuple[Program, Any]:
    options = {"bucket_size": 3000 if "GPT" in model else 100, **SETTINGS[settings], **more}
    return trained.compiled(model, lr=zfunc.lr.linear_warmup(1e-2, 4), defer=defer, **options)


def start(program: Program) -> State:
    """With fp16 at a scale that overflows at first, and again when it has grown."""
    return zfunc.init(program, seed=1, loss_scale=zfunc.LossScale(scale=2.0**20, window=2, hysteresis=1))


def equal(a: State, b: State) -> bool:
    same = (a.step, a.batches, a.sequences, a.loss_scale) == (b.step, b.batches, b.sequences, b.loss_scale)
    return same and all(map(torch.equal, bits(a), bits(b)))


# --- what it computes ----------------------------------------------------------------------------------------

READS = ("nothing", "flush", "params", "nothing", "evaluate", "save")


@pytest.mark.parametrize(("settings", "model"), in_pairs(SETTINGS, SMALL))
def test_the_bits_are_the_plain_recipes_at_every_step(settings: str, model: str, tmp_path: Path) -> None:
    """Whoever reads the state between two steps, and if it is loaded again."""
    (plain, data), (late, _) = (compiled(model, settings, defer=x) for x in (False, True))
    expected, got = start(plain), start(late)
    for i in range(STEPS):
        before, saving = bits(expected), {"save": tmp_path / "meanwhile"} if i == 3 else {}
        expected, a = steps(plain, expected, data, i, i + 1)
        got, b = steps(late, got, data, i, i + 1, **saving)
        assert repr(a) == repr(b)
        if saving:
            assert all(map(torch.equal, bits(zfunc.load(tmp_path / "meanwhile", plain)), before))
        read = READS[(i + len(settings)) % len(READS)]
        if read == "flush":
            assert zfunc.flush(late, got) is got
            assert equal(got, expected)
        elif read == "params":
            values = zfunc.params(plain, expected)
            assert all(torch.equal(x, values[name]) for name, x in zfunc.params(late, got).items())
        elif read == "evaluate":
            assert zfunc.evaluate(late, got, data(99)) == zfunc.evaluate(plain, expected, data(99))
        elif read == "save":
            zfunc.save(tmp_path / str(i), late, got)
            assert equal(zfunc.load(tmp_path / str(i), plain), expected)
            got = zfunc.load(tmp_path / str(i), late)
    assert equal(zfunc.flush(late, got), expected)


def test_two_states_of_one_program_do_not_mix() -> None:
    program, data = compiled("odd sizes", "fp32 in 2, clipped")
    alone = [bits(zfunc.flush(program, steps(program, start(program), data, n, n + 3)[0])) for n in (0, 5)]
    states = [start(program), start(program)]
    for i in range(3):
        for n, first in enumerate((0, 5)):
            states[n], _ = steps(program, states[n], data, first + i, first + i + 1)
    for state, expected in zip(states, alone, strict=True):
        assert all(map(torch.equal, bits(zfunc.flush(program, state)), expected))


def test_a_state_is_read_under_inference_mode_and_by_two_threads_at_once() -> None:
    program, data = compiled("pairs", "fp32 in 2, clipped")
    state, _ = steps(program, start(program), data, 0, 2)
    with torch.inference_mode(), ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: zfunc.params(program, state), range(2))
        assert zfunc.evaluate(program, state, data(0)) > 0
    assert all(torch.equal(first[name], x) for name, x in second.items())
    steps(program, state, data, 2, 3)


def test_a_rank_that_reads_the_state_alone_is_told_as_are_the_others() -> None:
    batch = MODELS["odd sizes"]()[1]
    ranks = programs_of(2, lambda: compiled("odd sizes", "8 bits in 3")[0], rows_of(batch(0), 0, 2))

    def train(program: Program) -> str:
        state, _ = zfunc.train_step(program, start(program), rows_of(batch(0), program.ranks.rank, 2))
        with pytest.raises(RankError) as told:
            zfunc.params(program, state) if program.ranks.rank else zfunc.evaluate(program, state, batch(0))
        return str(told.value)

    for message in on_every(ranks, train):
        assert "got rank 0 in apply, rank 1 in params, expected all 2 ranks in the same call" in message


# --- what fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stage 1, partial", "updated on the device"])
def test_after_any_operation_that_fails_the_state_is_as_before_or_known_to_be_lost(name: str) -> None:
    """Lost if an update of the optimizer's state had begun and not ended: otherwise nothing is missed."""
    failing: list[str] = []

    def wrapped(verb: str) -> Callable[..., None]:
        def stage(op: Any, mem: Any, step: Any) -> None:
            STAGES[verb](op, mem, step)
            if op.name in failing:
                raise RuntimeError("here")

        return stage

    settings: Any = {"settings": name, "bucket_size": 700}
    plain, data = compiled("odd sizes", **settings, defer=False)
    reference = start(plain)
    after: list[list[torch.Tensor]] = []
    for i in range(4):
        reference, _ = steps(plain, reference, data, i, i + 1)
        after.append(bits(reference))
    program, _ = compiled("odd sizes", **settings, stages={verb: wrapped(verb) for verb in STAGES})
    on_device = {f"update_on_device[{b}]" for b in program.spec.resident}
    begun, _ = steps(program, start(program), data, 0, 2)
    for n, op in enumerate(program.plan.graph):
        state = deepcopy(begun)  # whose deferred update is made in each
        failing[:] = [op.name]
        with pytest.raises(ExecutionError, match="here"):
            zfunc.train_step(program, state, data(2))
        failing.clear()
        if op.verb in ("update", "state_to_host", "average") or op.name in on_device:
            with pytest.raises(DonatedStateError, match=rf"failed after {op.verb}\[\d+\] had begun"):
                zfunc.params(program, state)
            continue
        if n % 2:
            assert all(map(torch.equal, bits(zfunc.flush(program, state)), after[1])), op.name
        state, _ = steps(program, state, data, 2, 4)
        assert all(map(torch.equal, bits(zfunc.flush(program, state)), after[3])), op.name


def test_an_interrupt_after_the_last_operation_makes_no_update_twice() -> None:
    (plain, data), (program, _) = (compiled("odd sizes", "8 bits in 3", defer=x) for x in (False, True))
    expected, _ = steps(plain, start(plain), data, 0, 2)
    state, _ = steps(program, start(program), data, 0, 2)
    entered: list[int] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not Ownership.running.__wrapped__.__code__:
            return None
        entered.extend([0] * (event == "call"))
        if event == "line" and len(entered) == 2:  # the operations have ended
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            zfunc.flush(program, state)
    finally:
        sys.settrace(former)
    assert equal(zfunc.flush(program, state), expected)


def test_an_update_that_fails_when_the_state_is_read_is_told_and_loses_it() -> None:
    def update(op: Any, mem: Any, step: Any) -> None:
        if len(calls) == 1:
            raise RuntimeError("here")
        STAGES["update"](op, mem, step)

    calls: list[int] = []
    program, data = compiled("pairs", "fp32 in 2, clipped", stages={"update": update})
    state, _ = steps(program, start(program), data, 0, 1)
    calls.append(0)
    with pytest.raises(ExecutionError, match="here"):
        zfunc.params(program, state)
    with pytest.raises(DonatedStateError, match="params after step 1 failed after update"):
        zfunc.params(program, state)


@pytest.mark.parametrize("settings", ["16 bits, one slot", "fp16"])
def test_a_gradient_that_is_not_finite_is_never_applied(settings: str) -> None:
    """The step is refused, or skipped, after the update before it was made; as in the plain recipe."""
    seen = []
    for defer in (False, True):
        program, data = compiled("odd sizes", settings, defer=defer, stages=injecting(float("nan"), {3, 5}))
        state = zfunc.init(program, seed=1, loss_scale=zfunc.LossScale(scale=2.0, minimum=1.0, hysteresis=1))
        state, _ = steps(program, state, data, 0, 2)
        for i in range(2, 6):
            # In fp16 the first one lowers the scale to its minimum.
            if i == 4 or (i == 2 and settings != "fp16"):
                with pytest.raises(NonFiniteError, match="state is unharmed"):
                    zfunc.train_step(program, state, data(i))
            else:
                state, _ = steps(program, state, data, i, i + 1)
        seen.append(zfunc.flush(program, state))
    assert equal(*seen)


# --- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"clip_norm": None}, "defer: without clipping or fp16 no update waits: there is nothing to defer"),
        ({"state_on": "device"}, "defer: nothing is on the host: there is nothing to defer"),
    ],
)
def test_a_setting_that_has_no_effect_is_said(
    more: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="zfunc"):
        program, data = compiled("pairs", "8 bits in 3", **more)
    assert message in caplog.text
    state, _ = steps(program, start(program), data, 0, 2)
    assert state.buffers.owner.deferred is None
    plain, _ = compiled("pairs", "8 bits in 3", defer=False, **more)
    expected, _ = steps(plain, start(plain), data, 0, 2)
    assert equal(state, expected)


# --- what it buys and needs ----------------------------------------------------------------------------------


def test_forward_hides_the_host() -> None:
    step_spec = spec(chain(*[(256, 256)] * 8), bucket_size=256 * 256, barrier=True)
    recipes = {zero_offload: step_spec, deferred: waiting(step_spec)}
    slow = evolve(ROUND, rates={**ROUND.rates, "host": 1e9}, flops=1e7, latency=0.0)
    plain, late = (simulate(Overlapped()(Graph(r(x))), slow) for r, x in recipes.items())
    hidden = min(late.seconds_of("host"), sum(e.end - e.start for e in late.events if "forward" in e.op))
    assert late.seconds < plain.seconds - 0.7 * hidden


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_needs_no_more_memory(settings: str) -> None:
    plain, late = (compiled("pairs", settings, defer=x)[0] for x in (False, True))
    assert [x.nbytes for x in peak_memory(late.plan).values()] == [
        x.nbytes for x in peak_memory(plain.plan).values()
    ]
