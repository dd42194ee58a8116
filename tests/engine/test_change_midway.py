"""Freezing, unfreezing, other rates, groups and optimizers between steps of one training: load(strict=False)."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from pairs import in_pairs
from safetensors.torch import load_file
from saved import refused
from small_models import Loss, norm_modules, regression
from threaded_ranks import on_every, programs_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zfunc
from zfunc.checkpoint.export import export_weights
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State

BATCH = regression()
PHASES: tuple[tuple[float, tuple[str, ...], str, int], ...] = (
    # learning rate, what is frozen, what is in eval mode, ranks
    (0.05, ("frozen",), "", 1),
    (0.02, ("frozen", "spectral"), "", 2),
    (0.03, ("batch",), "batch", 1),
    (0.02, ("frozen", "loss"), "", 1),
)
STEPS = 2  # of each
DECAY = 0.7


def modules_with(
    frozen: tuple[str, ...], still: str = "", buffers: dict[str, Tensor] | None = None
) -> list[tuple[str, nn.Module]]:
    modules = norm_modules()
    for name, m in modules:
        m.requires_grad_(name not in frozen).train(name != still)
        own = {k.removeprefix(f"{name}."): v for k, v in (buffers or {}).items() if k.startswith(f"{name}.")}
        m.load_state_dict(own, strict=False)
    return modules


def program(lr: float, frozen: tuple[str, ...], *of_modules: Any, **settings: Any) -> Program:
    segments = [zfunc.segment(name, m) for name, m in modules_with(frozen, *of_modules)]
    chosen = {"optimizer": zfunc.SGD(lr, momentum=0.9), "bucket_size": 300, "device": "cpu", **settings}
    return zfunc.compile(segments, **trained.adam_of(**{"precision": "fp32", **chosen}))


def values(made: Program, state: State) -> dict[str, Tensor]:
    return {**zfunc.params(made, state), **zfunc.buffers(made, state)}


def plain_training() -> list[dict[str, Tensor]]:
    """Values and averages after each phase. PyTorch's optimizer keeps the momentum of what stays, and forgets that
    of what is frozen; its averages are of all parameters, whether an update changes them or not."""
    modules, after = norm_modules(), list[dict[str, Tensor]]()
    average = AveragedModel(nn.ModuleDict(modules), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(nn.ModuleDict(modules))  # begins as the first weights
    by_name = {f"{name}.{k}": p for name, m in modules for k, p in m.named_parameters()}
    optimizer = torch.optim.SGD(by_name.values(), lr=0.0, momentum=0.9)
    step = 0
    for lr, frozen, still, _ in PHASES:
        optimizer.param_groups[0]["lr"] = lr
        for name, m in modules:
            m.train(name != still)
        for name, p in by_name.items():
            p.requires_grad_(name.partition(".")[0] not in frozen)
            if not p.requires_grad:
                optimizer.state.pop(p, None)
        for _ in range(STEPS):
            optimizer.zero_grad()
            x, y = BATCH(step)
            for _, m in modules[:-1]:
                x = m(x)
            modules[-1][1](x, y).backward()
            optimizer.step()
            average.update_parameters(nn.ModuleDict(modules))
            step += 1
        now = {f"{name}.{k}": v for name, m in modules for k, v in m.state_dict().items()}
        averages = {f"average {name}": p for name, p in average.module.named_parameters()}
        after.append({name: x.detach().clone() for name, x in (now | averages).items()})
    return after


def test_freezing_unfreezing_and_other_rates_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Of a moving average too; on any number of ranks, which have the same rows here."""
    got, plain = dict[str, Tensor](), plain_training()
    for n, (lr, frozen, still, world) in enumerate(PHASES):
        buffers = {k: v for k, v in got.items() if "running" in k or "tracked" in k}
        schedule = ("Serial", "Overlapped")[n % 2]
        make = partial(program, lr, frozen, still, buffers, schedule=schedule, ema=DECAY)
        programs = programs_of(world, make, BATCH(0))

        def phase(made: Program, n: int = n) -> dict[str, Tensor]:
            state = zfunc.load(tmp_path, made, strict=False) if n else zfunc.init(made)
            state, _ = trained.steps(made, state, BATCH, n * STEPS, (n + 1) * STEPS)
            assert state.step == (n + 1) * STEPS
            zfunc.save(tmp_path, made, state)
            averages = zfunc.params(made, state, ema=True)
            return values(made, state) | {f"average {name}": x for name, x in averages.items()}

        got |= on_every(programs, phase)[-1]
        torch.testing.assert_close(got, plain[n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kept", [{}, {"precision": "bf16", "moments": "8bit", "state_on": "device:0.5,host"}]
)
def test_what_stays_keeps_its_moments_and_averages_to_the_bit(tmp_path: Path, kept: dict[str, Any]) -> None:
    adam, more = zfunc.AdamW(0.01), {"ema": 0.9, **kept}
    before = program(0, ("frozen",), optimizer=adam, **more)
    state, _ = trained.steps(before, zfunc.init(before), BATCH, 0, 3)
    path = zfunc.save(tmp_path, before, state)
    groups = zfunc.groups(("loss.*", zfunc.AdamW(0.002)), zfunc.AdamW(0.005))
    after = program(0, ("spectral",), optimizer=groups, **more)
    with refused(r"'frozen\.0\.weight' is frozen in it, not.*strict=False"):
        zfunc.load(path, after)
    changed = zfunc.load(path, after, strict=False)
    for ema in (False, True):
        old, new = zfunc.params(before, state, ema=ema), zfunc.params(after, changed, ema=ema)
        for name, x in old.items():
            assert torch.equal(new[name], x), name
    back = program(0, ("frozen",), optimizer=adam, **more)
    again = zfunc.load(zfunc.save(tmp_path / "changed", after, changed), back, strict=False)
    for name, moments in moments_of(before, state).items():
        for kind, x in moments_of(back, again)[name].items():
            assert torch.equal(x, moments[kind] if not name.startswith("spectral") else torch.zeros_like(x))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_average_of_a_frozen_weight_is_evaluated_saved_exported_and_replaced(
    tmp_path: Path, precision: str
) -> None:
    """It moves toward the fp32 weights, which the device may have rounded."""
    before = program(0.05, ("frozen",), ema=DECAY, precision=precision)
    state, _ = trained.steps(before, zfunc.init(before), BATCH, 0, 2)
    average, weights = (zfunc.params(before, state, ema=ema) for ema in (True, False))
    made = program(0.05, ("frozen", "spectral"), ema=DECAY, precision=precision)
    state = zfunc.load(zfunc.save(tmp_path, before, state), made, strict=False)
    state, _ = trained.steps(made, state, BATCH, 2, 4)
    now = zfunc.params(made, state, ema=True)
    for name in (x for x in now if x.startswith(("frozen", "spectral"))):
        moved = torch.lerp(weights[name], average[name], DECAY**2)
        torch.testing.assert_close(now[name], moved, rtol=1e-6, atol=1e-7)
        assert torch.equal(average[name], weights[name]) == name.startswith("frozen")
    if precision == "fp32":
        again = zfunc.init(made, params={**now, **zfunc.buffers(made, state)})
        losses = zfunc.evaluate(made, state, BATCH(9), ema=True), zfunc.evaluate(made, again, BATCH(9))
        assert losses[0] == losses[1] != zfunc.evaluate(made, state, BATCH(9))
    state, metrics = zfunc.train_step(made, state, BATCH(4), save=tmp_path / "in a step")
    export_weights(metrics.saved.path, out := tmp_path / "average.safetensors", ema=True)
    loaded = zfunc.params(made, zfunc.load(tmp_path / "in a step", made), ema=True)
    assert all(torch.equal(x[name], value) for x in (loaded, load_file(out)) for name, value in now.items())
    now, name = zfunc.params(made, state, ema=True), "spectral.0.bias"
    state = zfunc.replace(made, state, {name: torch.ones_like(now[name])})
    assert torch.equal(zfunc.params(made, state, ema=True)[name], now[name])
    state, _ = zfunc.train_step(made, state, BATCH(5))
    expected = DECAY * now[name] + 1 - DECAY
    torch.testing.assert_close(zfunc.params(made, state, ema=True)[name], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("placed", "world"),
    in_pairs(
        [
            {},
            {"params_on": "host", "moments": "16bit", "stage": 3},
            {"state_on": "disk"},
            {"state_on": "disk", "params_on": "disk", "moments": "8bit", "stage": 3},
        ],
        [1, 2],
    ),
)
def test_thawed_weights_are_those_that_were_frozen_to_the_bit(
    tmp_path: Path, placed: dict[str, Any], world: int
) -> None:
    """Through steps in bf16 and saves: by the call, in a step, and by a swap space that is opened again."""
    (run := tmp_path / "run").mkdir()
    saved = tmp_path / "saved"
    if on_disk := "disk" in placed.get("state_on", ""):
        placed = {**placed, "swap": [run]}

    def make(*frozen: str, **settings: Any) -> Program:
        parts = {"a": nn.Linear(8, 16), "b": nn.Sequential(nn.Linear(16, 16), nn.GELU()), "loss": Loss(16)}
        segments = [zfunc.segment(k, m.requires_grad_(k not in frozen)) for k, m in parts.items()]
        return zfunc.compile(
            segments,
            **{"precision": "bf16", "bucket_size": 100, "device": "cpu", **trained.adam_of(**settings)},
        )

    def train(made: Program, source: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        state = zfunc.load(source, made, strict=source == run)
        held = zfunc.params(made, state)
        state, _ = trained.steps(made, state, BATCH, 2, 3)
        if on_disk:
            zfunc.save(run, made, state)
        state, _ = zfunc.train_step(made, state, BATCH(3), save=None if on_disk else saved)
        zfunc.save(saved, made, state)
        return held, zfunc.params(made, state)

    before = make()
    state, _ = trained.steps(before, zfunc.init(before), BATCH, 0, 2)
    path, weights = zfunc.save(tmp_path / "first", before, state), zfunc.params(before, state)
    kept = {name: x for name, x in weights.items() if not name.startswith("loss")}
    assert not any(torch.equal(x, x.bfloat16().float()) for x in kept.values())
    for source in (path, run if on_disk else saved):
        frozen = programs_of(world, partial(make, "a", "b", **placed), BATCH(0))
        for both in on_every(frozen, partial(train, source=source)):
            assert all(torch.equal(x[name], value) for x in both for name, value in kept.items())
    del frozen  # and its lock on the swap space
    for source in (saved, run) if on_disk else (saved,):
        thawed = zfunc.params(before, zfunc.load(source, before, strict=False))
        export_weights(source, out := source.with_suffix(".safetensors"))
        exported = load_file(out)
        assert all(torch.equal(x[name], value) for x in (thawed, exported) for name, value in kept.items())


def moments_of(made: Program, state: State) -> dict[str, dict[str, Tensor]]:
    """What is kept of each trained parameter beside its weights, by its elements."""
    found: dict[str, dict[str, Tensor]] = {}
    for bucket in made.layout.buckets:
        kept = state.buffers.state(bucket.index)
        for x in bucket.spans:
            at = slice(x.start - bucket.start, x.stop - bucket.start)
            found[x.name] = {k: kept[k][at] for k in ("exp_avg", "exp_avg_sq")}
    return found


def test_another_optimizer_begins_anew_which_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = program(0.05, ("frozen",))
    state, _ = trained.steps(before, zfunc.init(before), BATCH, 0, 2)
    path = zfunc.save(tmp_path, before, state)
    after = program(0, ("frozen",), optimizer=zfunc.AdamW(0.01))
    with refused("got optimizer state"):
        zfunc.load(path, after)
    with caplog.at_level(logging.WARNING, "zfunc"):
        changed = zfunc.load(path, after, strict=False)
        assert caplog.text.count("load: the moments of 'spectral.0.parametrizations.weight.original', ") == 1
        several = programs_of(2, partial(program, 0, ("frozen",), optimizer=zfunc.AdamW(0.01)))
        on_every(several, lambda made: zfunc.load(path, made, strict=False))
    (alone, of_two) = (x.rpartition(" and ")[2] for x in caplog.messages if "begin at 0" in x)
    assert alone == of_two == "4 more begin at 0"
    assert all(torch.equal(x, values(before, state)[name]) for name, x in values(after, changed).items())
    assert zfunc.train_step(after, changed, BATCH(2))[0].step == 3
