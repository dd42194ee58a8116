"""What train_step promises beyond the laws: loss scaling, randomness, failures that lose nothing, metrics."""

import copy
import gc
import math
import os
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Loss, WithEmpty, regression, rows_of
from threaded_ranks import on_every, programs_of
from torch import Tensor, nn
from trained import adam_of, compiled, injecting

import zfunc
import zfunc.engine.step.evaluate as evaluating
from zfunc.core.layout import Span
from zfunc.engine.program import specialize as specialize_module
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State
from zfunc.errors import DonatedStateError, ExecutionError, NonFiniteError, OutOfMemory
from zfunc.optim.by_name import CLASSES, make_optimizer
from zfunc.optim.loss_scale import UNSCALED, LossScale

# --- loss scaling ---------------------------------------------------------------------------------------


def overflowing(at: set[int], scale: float) -> tuple[Any, State, Any]:
    """A program whose gradient is inf in these steps, from 1."""
    program, data = compiled("odd sizes", precision="fp16", stages=injecting(math.inf, at))
    return program, zfunc.init(program, loss_scale=LossScale(scale)), data


def assert_has(program: Any, state: State, values: dict[str, Tensor]) -> None:
    assert all(torch.equal(v, values[k]) for k, v in zfunc.params(program, state).items())


def test_an_overflow_skips_the_step_and_changes_no_parameter() -> None:
    program, state, data = overflowing({1}, 2.0**8)
    before = zfunc.params(program, state)
    state, metrics = zfunc.train_step(program, state, data(0))
    assert metrics.skipped
    assert (state.step, state.batches) == (0, 1)
    assert_has(program, state, before)
    state, metrics = zfunc.train_step(program, state, data(0))
    assert not metrics.skipped
    assert state.step == 1


def test_the_scale_halves_after_the_hysteresis_and_fails_at_the_minimum() -> None:
    program, state, data = overflowing(set(range(1, 19)), 2.0**16)
    scales = []
    for i in range(17):
        state, _ = zfunc.train_step(program, state, data(i))
        scales.append(state.loss_scale.scale)
    assert scales == [2.0 ** (16 - i) for i in range(17)]  # the first is forgiven
    before = zfunc.params(program, state)
    with pytest.raises(NonFiniteError, match="already at its minimum"):
        zfunc.train_step(program, state, data(17))
    assert_has(program, state, before)


# --- failures lose nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_non_finite_loss_names_the_step_and_leaves_the_state_unharmed(clip: float | None) -> None:
    program, data = compiled("odd sizes", precision="bf16", clip_norm=clip, bucket_size=100)
    state = zfunc.init(program)
    state, _ = zfunc.train_step(program, state, data(0))
    before = zfunc.params(program, state)
    x, y = data(1)
    with pytest.raises(NonFiniteError, match="step 2: got a loss of nan"):
        zfunc.train_step(program, state, (x, torch.full_like(y, math.nan)))
    assert_has(program, state, before)
    state, metrics = zfunc.train_step(program, state, data(1))  # the same state goes on
    assert metrics.step == 2


@pytest.mark.parametrize(("clip", "outcome"), [(1.0, "unharmed"), (None, "this state is gone")])
def test_a_non_finite_gradient_is_refused_before_the_updates_only_with_clipping(
    clip: float | None, outcome: str
) -> None:
    stages = injecting(math.nan, {1})
    program, data = compiled("odd sizes", precision="bf16", clip_norm=clip, stages=stages)
    state = zfunc.init(program)
    with pytest.raises(NonFiniteError, match=f"step 1: got a gradient norm of nan.*{outcome}"):
        zfunc.train_step(program, state, data(0))
    if clip is None:
        with pytest.raises(DonatedStateError, match="gradient norm of nan"):
            zfunc.params(program, state)
    else:
        assert not any(p.isnan().any() for p in zfunc.params(program, state).values())


@pytest.mark.parametrize("schedule", ["Serial", "Overlapped"])
@pytest.mark.parametrize("verb", ["load", "backward", "to_host", "decide"])
def test_an_error_in_any_lane_surfaces_with_the_operation(verb: str, schedule: str) -> None:
    def broken(op: Any, mem: Any, step: Any) -> None:
        raise ZeroDivisionError("on purpose")

    program, data = compiled(clip_norm=1.0, schedule=schedule, stages={verb: broken})
    state = zfunc.init(program)
    (kind,) = {op.kind for op in program.plan.graph if op.verb == verb}
    lane = "serial" if schedule == "Serial" else kind
    with pytest.raises(ExecutionError, match=rf"{verb}.* on lane {lane}: .*on purpose") as caught:
        zfunc.train_step(program, state, data(0))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    zfunc.params(program, state)  # nothing had been updated: it is still good


def test_a_failure_in_the_middle_of_the_updates_ends_the_state() -> None:
    from zfunc.engine.stages.update_stages import update

    def broken(op: Any, mem: Any, step: Any) -> None:
        if op.index == (0,):
            raise ZeroDivisionError("on purpose")
        update(op, mem, step)

    program, data = compiled(bucket_size=2000, stages={"update": broken})
    state = zfunc.init(program)
    with pytest.raises(ExecutionError, match="on purpose"):
        zfunc.train_step(program, state, data(0))
    with pytest.raises(DonatedStateError, match="update"):
        zfunc.params(program, state)


def test_an_interrupt_stops_every_lane_and_leaves_the_state() -> None:
    def interrupted(op: Any, mem: Any, step: Any) -> None:
        raise KeyboardInterrupt

    program, data = compiled(clip_norm=1.0, stages={"global_norm": interrupted})
    state = zfunc.init(program)
    with pytest.raises(KeyboardInterrupt):
        zfunc.train_step(program, state, data(0))
    zfunc.params(program, state)


def test_too_little_memory_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = compiled()
    monkeypatch.setattr("zfunc.engine.program.program.available_host_bytes", lambda: 1000)
    monkeypatch.setattr("zfunc.engine.step.init.allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(OutOfMemory, match=r"init: needs [\d,]+ bytes of host memory, 1,000 are free"):
        zfunc.init(program)


def test_activations_that_do_not_fit_are_refused_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    program, data = compiled()
    state = zfunc.init(program)
    monkeypatch.setattr("zfunc.engine.program.program.available_host_bytes", lambda: 1000)
    with pytest.raises(OutOfMemory, match="train_step: needs .* more `micro_batches`"):
        zfunc.train_step(program, state, data(0))
    monkeypatch.undo()
    zfunc.train_step(program, state, data(0))


# --- randomness -----------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_seed_and_place_and_leaves_the_callers_generator() -> None:
    program, data = compiled("GPT with dropout", precision="fp32")

    def losses(seed: int) -> list[float]:
        state, seen = zfunc.init(program, seed=seed, params=initial), []
        for _ in range(2):
            torch.rand(3)  # what the caller draws does not matter
            state, m = zfunc.train_step(program, state, data(0))
            seen.append(m.loss)
        return seen

    initial = zfunc.params(program, zfunc.init(program))
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    state = zfunc.init(program)
    zfunc.train_step(program, state, data(0))
    assert torch.equal(torch.rand(4), expected)
    assert losses(1) == losses(1)
    assert losses(1)[0] != losses(2)[0]


def test_evaluation_has_no_dropout_and_changes_nothing() -> None:
    program, data = compiled("GPT with dropout", precision="fp32")
    state = zfunc.init(program)
    assert zfunc.evaluate(program, state, data(0)) == zfunc.evaluate(program, state, data(0))
    logits = zfunc.apply(program, state, data(0)[0])
    assert logits.shape == (12, 16, 64)
    assert logits.dtype == torch.float32


# --- metrics, lr, timelines -----------------------------------------------------------------------------


def test_metrics_have_the_learning_rate_of_their_step_and_the_loss_scale_stays() -> None:
    program, data = compiled(lr=zfunc.lr.linear_warmup(1e-2, 4))
    state, seen = zfunc.init(program), []
    for i in range(5):
        state, m = zfunc.train_step(program, state, data(i))
        seen.append(m.lr)
    assert seen == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert state.sequences == 60
    assert state.loss_scale.scale == UNSCALED.scale  # in bf16 it never grows


@pytest.mark.parametrize("schedule", ["Serial", "Overlapped", "Interleaved"])
def test_a_traced_step_times_every_operation_in_the_order_of_the_plan(schedule: str) -> None:
    program, data = compiled(schedule=schedule, bucket_size=2000)
    state, metrics = zfunc.train_step(program, zfunc.init(program), data(0), trace=True)
    timeline = metrics.timeline
    assert timeline is not None
    assert [e.op for e in timeline.events] == [
        program.plan.graph.ops[i].name for lane in program.plan.lanes for i in lane.ops
    ]
    end = {e.op: e.end for e in timeline.events}
    start = {e.op: e.start for e in timeline.events}
    for c in program.plan.graph.conflicts:
        before, after = (program.plan.graph.ops[i].name for i in (c.before, c.after))
        assert end[before] <= start[after]
    assert 0 < metrics.host_seconds < metrics.seconds
    _, untraced = zfunc.train_step(program, state, data(1))
    assert untraced.timeline is None


def test_nothing_keeps_a_dropped_state_alive() -> None:
    program, data = compiled()
    state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
    buffers = weakref.ref(state.buffers)
    del state
    gc.collect()
    assert buffers() is None


def test_a_step_makes_no_view_of_the_state_again_and_hashes_no_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With hundreds of parameters that takes longer than all else a step does in Python."""
    program, data = compiled()
    state, made = zfunc.init(program), list[str]()
    for i in range(2):
        state, _ = zfunc.train_step(program, state, data(i))
    before = {**state.buffers.memory}
    monkeypatch.setattr(Span, "__hash__", lambda _: made.append("hashed") or 0)
    for i in range(2):
        state, _ = zfunc.train_step(program, state, data(i))
    monkeypatch.undo()
    assert made == []
    after = state.buffers.memory
    assert {id(x) for x in after.values()} == {id(x) for x in before.values()}


def test_of_many_shapes_the_last_are_cached_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of a shape that was dropped is the same step: it is only traced again."""
    monkeypatch.setattr(specialize_module, "SHAPES", 2)
    program, _ = compiled("odd sizes", precision="fp32")
    traced: list[int] = []
    costed = specialize_module.traced_spec
    monkeypatch.setattr(
        specialize_module, "traced_spec", lambda *a: traced.append(len(a[1][0])) or costed(*a)
    )
    state = zfunc.init(program)
    for size in (4, 8, 4, 12, 4, 8, 16):
        state, _ = zfunc.train_step(program, state, regression(size)(0))
        assert len(program.cache.costs) <= 2
        assert len(program.cache.specialized) <= 4
    assert traced == [4, 8, 12, 8, 16]  # 4 was used in between
    (said,) = [r.getMessage() for r in caplog.records if "more than 2 shapes" in r.getMessage()]
    assert "Round lengths up" in said


# --- many slots, few slots: device gradient memory ------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 6, 18])
def test_device_gradient_memory_does_not_grow_with_depth(depth: int) -> None:
    """What is alive of gradients at any moment: the slots, and the gradients of one segment being packed."""
    from zfunc.engine.stages.stages import backward, pack

    alive: list[int] = []

    def watched(stage: Any) -> Any:
        def run(op: Any, mem: Any, step: Any) -> None:
            stage(op, mem, step)
            kept = sum(t.numel() for r, t in mem.items() if r.buffer == "grad_slot")
            loose = sum(g.numel() for r, grads in mem.items() if r.buffer == "grads" for g in grads.values())
            alive.append(kept + loose)

        return run

    torch.manual_seed(0)
    parts = [zfunc.segment(f"layer{i}", nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for i in range(depth)]
    segments = [*parts, zfunc.segment("loss", Loss(8))]
    stages = {"backward": watched(backward), "pack": watched(pack)}
    program = zfunc.compile(
        segments, device="cpu", bucket_size=128, schedule="Serial", precision="fp32", stages=stages
    )
    zfunc.train_step(program, zfunc.init(program), regression()(0))
    assert max(alive) == 2 * 128 + 72


# --- ties inside a segment, threads, structure ----------------------------------------------------------


class TiedInside(nn.Module):
    """One weight used by two layers, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight
        self.twice = self.once = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.once(torch.tanh(self.b(torch.tanh(self.a(x)))))))
        return (self.out(x).squeeze(-1) - targets).square().mean()


@pytest.mark.parametrize("recompute", ["all", "none", "min-cut"])
def test_ties_inside_a_segment_add_their_gradients_up(recompute: str) -> None:
    torch.manual_seed(0)
    module, batch = TiedInside(), regression(4)(0)
    loss = module(*batch)
    grads = torch.autograd.grad(loss, list(module.parameters()))
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    body = zfunc.segment("first", nn.Linear(8, 8, bias=False))  # so that the tied one may recompute
    alone = zfunc.compile([zfunc.segment("m", module)], precision="fp32", device="cpu")
    _, metrics = zfunc.train_step(alone, zfunc.init(alone), batch)
    assert metrics.grad_norm == pytest.approx(expected, rel=1e-5)
    assert metrics.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    after = zfunc.compile(
        [body, zfunc.segment("m", module)], precision="fp32", device="cpu", recompute=recompute
    )
    identity = {**zfunc.params(after, zfunc.init(after)), "first.weight": torch.eye(8)}
    _, both = zfunc.train_step(after, zfunc.init(after, params=identity), batch)
    assert both.loss == pytest.approx(metrics.loss, rel=1e-5)


def test_a_share_may_name_either_of_two_tied_inside() -> None:
    for short in ("a.weight", "b.weight"):
        tied = zfunc.segment("m", TiedInside(), share={short: "first.weight"})
        assert [p.name for p in tied.parameters].count("first.weight") == 1
        assert not any(p.name in ("m.a.weight", "m.b.weight") for p in tied.parameters)


def test_one_program_makes_one_step_at_a_time() -> None:
    program, data = compiled()
    state, other = zfunc.init(program), zfunc.init(program)
    for call in (lambda: zfunc.train_step(program, state, data(0)), lambda: zfunc.release(program, state)):
        with program.cache.busy, pytest.raises(RuntimeError, match="in a step already.*second program"):
            call()
    zfunc.train_step(program, state, data(0))
    zfunc.train_step(program, other, data(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_fork_after_a_step_is_refused() -> None:
    """It waited 20 minutes for threads that only its parent has. What needs none of them works there."""
    program, data = compiled()
    state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(10)
        told = []
        for refused in (zfunc.train_step, zfunc.evaluate):
            try:
                refused(program, state, data(1))
            except RuntimeError as error:
                told.append(str(error))
        told.append(f"{len(zfunc.params(program, state))} parameters")
        os.write(write, "\n".join(told).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        step, evaluation, parameters = pipe.read().split("\n")
    assert os.waitpid(child, 0)[1] == 0
    assert step == (
        f"train_step: got process {child}, a fork of process {os.getpid()} that has trained with this program; "
        "expected that process. Neither lanes nor OpenMP threads survive a fork. Fork before the first step, or "
        'start the child with multiprocessing.get_context("spawn")'
    )
    assert evaluation.startswith("apply: got process")
    assert parameters == f"{len(zfunc.params(program, state))} parameters"
    zfunc.train_step(program, state, data(1))


def test_an_interrupt_while_other_lanes_work_leaves_nothing_running() -> None:
    """The signal comes while the calling thread waits for a slow copy: no update may follow behind its back."""
    import time

    from zfunc.engine.stages.stages import STAGES

    def slow(op: Any, mem: Any, step: Any) -> None:
        time.sleep(0.2)
        STAGES["to_host"](op, mem, step)

    program, data = compiled(bucket_size=5000, slots=20, stages={"to_host": slow})
    state = zfunc.init(program)
    specialize_module.specialize(program, data(0))
    before = zfunc.params(program, state)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.15)
    with pytest.raises(KeyboardInterrupt):
        zfunc.train_step(program, state, data(0))
    try:
        kept = zfunc.params(program, state)
    except DonatedStateError:
        return  # an update had begun, and it says so
    time.sleep(1.0)
    assert all(torch.equal(v, before[k]) for k, v in kept.items())
    assert_has(program, state, before)


def test_batches_of_another_structure_are_planned_anew() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            y = x["a"] * self.w
            return torch.nn.functional.dropout(y, 0.5) if "drop" in x else y

    program = zfunc.compile(
        [zfunc.segment("drops", Drops()), zfunc.segment("loss", Loss(8))], precision="fp32", device="cpu"
    )
    x, y = regression(4)(0)
    state, _ = zfunc.train_step(program, zfunc.init(program), ({"a": x, "b": x}, y))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    zfunc.train_step(program, state, ({"a": x, "drop": x}, y))
    assert torch.equal(torch.rand(2), expected)  # the dropout was seen and seeded apart


def test_a_batch_that_was_computed_with_gradients_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A leaf may require a gradient, as that of an earlier loop."""
    program, data = compiled("odd sizes")
    state, (x, y) = zfunc.init(program), data(0)
    for inputs in (x.requires_grad_(), x * 2, x * 2):
        state, _ = zfunc.train_step(program, state, (inputs, y))
    (told,) = [r.getMessage() for r in caplog.records if "grad_fn" in r.getMessage()]
    assert "MulBackward0" in told


def test_neither_a_state_nor_a_program_is_pickled() -> None:
    import pickle

    program, _ = compiled()
    with pytest.raises(TypeError, match=r"zfunc\.params"):
        pickle.dumps(zfunc.init(program))
    for way in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"zfunc\.compile"):
            way(program)


# --- the caller's settings of torch ---------------------------------------------------------------------


def test_a_default_device_of_the_callers_changes_nothing(tmp_path: Path) -> None:
    """Whatever zfunc allocates says where: "meta" has no data, and would show."""
    other, data = compiled("odd sizes", moments="8bit")
    programs = programs_of(2, lambda: compiled("odd sizes")[0], rows_of(data(0), 0, 2))
    batches = [data(i) for i in range(3)]

    def trained(program: Program, device: str) -> dict[str, Tensor]:
        with torch.device(device):
            state = zfunc.init(program, seed=1)
            for batch in batches:
                state, _ = zfunc.train_step(program, state, rows_of(batch, program.ranks.rank, 2))
            zfunc.save(tmp_path / device, program, state)
            return zfunc.params(program, state)

    (plain, _), (values, _) = (
        on_every(programs, partial(trained, device=device)) for device in ("cpu", "meta")
    )
    assert all(torch.equal(values[name], plain[name]) for name in plain)
    with torch.device("meta"):
        resumed = zfunc.params(other, zfunc.load(tmp_path / "meta", other))  # in another format
    assert all(torch.equal(resumed[name], plain[name]) for name in plain)


# --- parameters without elements ------------------------------------------------------------------------


EMPTY_IN: dict[str, dict[str, Any]] = {
    "host": {"norms": True, "ema": 0.9, "micro_batches": 2, "clip_norm": 0.1},
    "device": {"state_on": "device"},
    "disk": {"state_on": "disk", "params_on": "disk", "grads_on": "disk", "stage": 3},
    "half on the disk": {"state_on": "host:0.5,disk", "slots": 1, "moments": "8bit"},
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=() if (n + p) % 4 == 0 else pytest.mark.slow)
        for (n, name), (p, place) in product(enumerate(CLASSES), enumerate(EMPTY_IN))
    ],
)
def test_parameters_without_elements_change_nothing(name: str, place: str, tmp_path: Path) -> None:
    """Beside others in a bucket, and with none but their like; in a checkpoint as well."""
    settings = {"device": "cpu", "bucket_size": 64, "precision": "fp32", **EMPTY_IN[place]}

    def weights(folder: Path, wrap: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        parts = [("first", wrap(nn.Linear(8, 8))), ("second", wrap(nn.Identity())), ("loss", Loss(8))]
        segments = [zfunc.segment(name, m) for name, m in parts]
        folder.mkdir()
        own = {"swap": [folder]} if "disk" in settings.get("state_on", "") else {}
        optimizer = make_optimizer(name, lr=0.01)
        make = partial(zfunc.compile, segments, **adam_of(optimizer=optimizer, **settings), **own)
        batch = regression()(0)

        def train(program: Program) -> State:
            state = zfunc.init(program, seed=1)
            for _ in range(2):
                state, _ = zfunc.train_step(program, state, batch)
                zfunc.save(folder, program, state)
                state = zfunc.load(folder, program)
            return state

        ranks = 2 if place == "disk" and name != "adafactor" else 1  # which updates parameters whole
        programs = programs_of(ranks, make, batch) if ranks > 1 else [make()]
        on_every(programs, train)
        del programs
        gc.collect()
        kept = {x: settings[x] for x in ("ema", "moments") if x in settings}
        alone = zfunc.compile(segments, device="cpu", **adam_of(optimizer=optimizer, **kept))
        return zfunc.params(alone, zfunc.load(folder, alone))

    got, expected = weights(tmp_path / "got", WithEmpty), weights(tmp_path / "expected", lambda m: m)
    assert sum(not x.numel() for x in got.values()) == 6
    full = {k.replace(".inner", ""): x for k, x in got.items() if x.numel()}
    assert full.keys() == expected.keys()
    assert all(torch.equal(x, full[k]) for k, x in expected.items())


@pytest.mark.parametrize("read", ["params", "apply", "evaluate", "weights"])
def test_what_is_read_while_a_step_begins_is_refused(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread: it would be weights of both States."""
    program, batch = compiled("tied GPT", precision="fp32")
    state, inputs = zfunc.init(program), batch(0)

    def step_before(function: Any) -> Any:
        def wrapper(*args: Any, **given: Any) -> Any:
            monkeypatch.undo()
            result = function(*args, **given)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(zfunc.train_step, program, state, inputs).result()
            return result

        return wrapper

    name = {"params": "parameter_weights", "weights": "gathered"}.get(read, "segment_weights")
    monkeypatch.setattr(evaluating, name, step_before(getattr(evaluating, name)))
    given = {"apply": (inputs[0],), "evaluate": (inputs,)}.get(read, ())
    with pytest.raises(DonatedStateError):
        dict(getattr(zfunc, read)(program, state, *given))
