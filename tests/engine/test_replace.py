"""`zfunc.replace`: weights that come from elsewhere in a run, with or without the moments of trained ones; and
`copy.deepcopy` of a State: two trainings that begin as one."""

import copy
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Loss, bits, regression
from threaded_ranks import on_every, programs_of
from torch import nn
from trained import adam_of

import zfunc
from zfunc.engine.state import state as states
from zfunc.errors import DonatedStateError, OutOfMemory
from zfunc.runtime.direct_io import DirectFile

BATCH = regression()
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "moments beside halves": {"precision": "bf16", "split_master": True},
    "16 bits": {"precision": "bf16", "moments": "16bit", "params_on": "host"},
    "8 bits": {"precision": "fp16", "moments": "8bit", "update_on": "device"},
    "Adafactor": {"optimizer": zfunc.Adafactor(0.1), "state_on": "device:0.5,host"},
    "deferred, with an average": {"defer": True, "clip_norm": 1.0, "ema": 0.5},
    "all on the disk": {
        **{
            "state_on": "disk",
            "params_on": "disk",
            "grads_on": "disk",
            "precision": "bf16",
            "moments": "16bit",
        },
    },
    "half on the disk, deferred": {
        **{"state_on": "host:0.5,disk", "defer": True, "clip_norm": 1.0, "commit_every": 9},
    },
    "8 bits on the disk": {"state_on": "disk", "params_on": "host", "precision": "bf16", "moments": "8bit"},
}


def modules(norm: Any = nn.BatchNorm1d) -> dict[str, nn.Module]:
    """A trained part, a frozen one, running statistics."""
    torch.manual_seed(0)
    frozen = nn.Linear(100, 16).requires_grad_(False)
    return {"body": nn.Sequential(nn.Linear(8, 100), norm(100)), "frozen": frozen, "loss": Loss(16)}


def compiled(swap: Path = Path(), **way: Any) -> Any:
    """A program; where the state's place is named without running statistics, which a swap space does not have."""
    split = way.pop("split_master", False)
    if "disk" in way.get("state_on", ""):
        (swap / "second").mkdir(parents=True, exist_ok=True)
        way["swap"] = [swap, swap / "second"]
    settings = {"optimizer": zfunc.AdamW(0.1, split_master=split), "precision": "fp32", **way}
    norm = nn.BatchNorm1d if "device" in way.get("state_on", "device") else nn.LayerNorm
    segments = [zfunc.segment(*x) for x in modules(norm).items()]
    return zfunc.compile(segments, device="cpu", bucket_size=300, **adam_of(**settings))


@pytest.mark.parametrize("name", WAYS)
def test_it_has_the_bits_of_a_state_that_began_so(name: str, tmp_path: Path) -> None:
    program = compiled(tmp_path / "swap", **WAYS[name])
    state = zfunc.init(program)
    values = {x: t * 1.1 + 1 / 3 for x, t in zfunc.params(program, state).items()}
    values |= {x: t + 2 for x, t in zfunc.buffers(program, state).items()}
    for i in range(3):
        state, _ = zfunc.train_step(program, state, BATCH(i))
    # 1. What it has already changes nothing, and the state that was given is gone.
    before, given = bits(zfunc.flush(program, state)), state
    state = zfunc.replace(program, state, zfunc.params(program, state))
    assert all(torch.equal(a, b) for a, b in zip(bits(state), before, strict=True))
    with pytest.raises(DonatedStateError, match="earlier train_step or replace consumed"):
        zfunc.train_step(program, given, BATCH(0))
    # 2. Without moments it is a new State but for its counters; with them, moments stay.
    other = compiled(tmp_path / "other", **WAYS[name])
    new = bits(zfunc.init(other, params=values))
    state = zfunc.replace(program, state, values, keep_moments=False)
    assert all(torch.equal(a, b) for a, b in zip(bits(state), new, strict=True))
    assert (state.step, state.batches) == (given.step, given.batches)
    # 3. On the disk it is committed.
    if (swap := program.cache.swap) is not None:
        swap.close()
        state = zfunc.load(tmp_path / "swap", program)
        assert (state.step, state.batches) == (given.step, given.batches)
        assert all(torch.equal(a, b) for a, b in zip(bits(state), new, strict=True))


CALLS = ("write", "sync", "extend")


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [x for x in WAYS if "disk" in x])
def test_a_drive_that_fails_anywhere_leaves_all_of_the_weights_or_none(
    name: str, every: int, tmp_path: Path
) -> None:
    """As a kill there does; the moments stay, and training goes on as in memory. By day at every second call."""
    way, in_memory = (
        WAYS[name],
        {k: x for k, x in WAYS[name].items() if k in ("precision", "moments", "clip_norm")},
    )
    program, plain = compiled(tmp_path, **way), compiled(**in_memory, state_on="host")
    state, like = zfunc.init(program), zfunc.init(plain)
    for i in range(2):
        state, like = (
            zfunc.train_step(program, state, BATCH(i))[0],
            zfunc.train_step(plain, like, BATCH(i))[0],
        )
    old = zfunc.params(program, zfunc.flush(program, state))
    zfunc.save(tmp_path, program, state)
    new = {x: (t * 1.1 + 1 / 3).bfloat16().float() for x, t in old.items()}
    seen = list[str]()
    for n in range(0, 999, every):
        calls = count()

        def failing(call: Any, n: int = n, calls: Any = calls) -> Any:
            def attempt(self: Any, *of: Any) -> None:
                if next(calls) >= n:
                    raise zfunc.errors.DiskError("the drive is gone")
                call(self, *of)

            return attempt

        with (
            pytest.MonkeyPatch.context() as patch,
            suppress(zfunc.errors.DiskError, zfunc.errors.CheckpointError),
        ):
            for call in CALLS:
                patch.setattr(DirectFile, call, failing(getattr(DirectFile, call)))
            zfunc.replace(program, state, new)
        program.cache.swap.close()
        program = compiled(tmp_path, **way)
        state = zfunc.load(tmp_path, program)
        got = zfunc.params(program, state)
        (which,) = (x for x, all_of in (("old", old), ("new", new)) if same(got, all_of))
        seen.append(which)
        if next(calls) <= n:
            break
        if which == "new":
            state = zfunc.replace(program, state, old)
    assert (seen[0], seen[-1], len(seen) > 9 // every) == ("old", "new", True)
    like = zfunc.replace(plain, like, new)
    for i in range(2, 4):
        state, a = zfunc.train_step(program, state, BATCH(i))
        like, b = zfunc.train_step(plain, like, BATCH(i))
        assert repr(a.loss) == repr(b.loss)
    assert same(zfunc.params(program, state), zfunc.params(plain, like))


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(got[x], t) for x, t in expected.items())


def test_a_trained_weight_and_a_teacher_move_as_in_torch() -> None:
    program, plain = compiled(optimizer=zfunc.AdamW(0.1, eps=1e-2)), nn.ModuleDict(modules())
    state = zfunc.init(program)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.1, eps=1e-2, weight_decay=0.01)
    for i in range(6):
        state, _ = zfunc.train_step(program, state, BATCH(i))
        optimizer.zero_grad()
        x, targets = BATCH(i)
        plain["loss"](plain["frozen"](plain["body"](x)), targets).backward()
        optimizer.step()
        given = {
            x: torch.lerp(t, torch.ones_like(t), 0.1) for x, t in plain.state_dict().items() if "loss" in x
        }
        given["frozen.weight"] = plain["body"][0].weight.detach()[:16].repeat(1, 13)[:, :100]
        plain.load_state_dict(given, strict=False)
        state = zfunc.replace(program, state, given)
    for x, value in zfunc.params(program, state).items():
        torch.testing.assert_close(value, plain.state_dict()[x], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", [{}, WAYS["half on the disk, deferred"]], ids=["in memory", "on the disk"])
def test_ranks_replace_together(way: dict[str, Any], tmp_path: Path) -> None:
    """Slices of parameters, and parameters that each has whole."""
    programs = programs_of(2, lambda: compiled(tmp_path, stage=3, **way))
    states = on_every(programs, zfunc.init)
    alone = compiled(tmp_path / "alone", **way)
    values = {x: t * 1.1 + 1 / 3 for x, t in zfunc.params(alone, zfunc.init(alone)).items()}
    states = on_every(programs, lambda program, state: zfunc.replace(program, state, values), states)
    got = on_every(programs, zfunc.params, states)
    assert all(torch.equal(own[x], t) for own in got for x, t in values.items())


@pytest.mark.parametrize("way", [{}, {"state_on": "disk"}, WAYS["all on the disk"]], ids=str)
def test_a_frozen_weight_that_is_kept_in_fp32_too_is_another_there(
    way: dict[str, Any], tmp_path: Path
) -> None:
    wide = compiled(state_on="host")
    zfunc.save(tmp_path / "wide", wide, zfunc.init(wide))
    program = compiled(tmp_path / "swap", **{"state_on": "host", **way, "precision": "bf16"})
    state = zfunc.load(tmp_path / "wide", program)
    given = {"frozen.weight": torch.full((16, 100), 1 / 3)}
    state = zfunc.replace(program, state, given)
    zfunc.save(tmp_path / "saved", program, state)
    assert same(zfunc.params(wide, zfunc.load(tmp_path / "saved", wide)), given)
    assert same(zfunc.params(program, state), given)


def test_what_it_cannot_do_is_refused(tmp_path: Any) -> None:
    program = compiled()
    state = zfunc.init(program)
    with pytest.raises(
        ValueError, match="got 'body.1', which the program does not have.*, expected names of"
    ):
        zfunc.replace(program, state, {"body.1": torch.ones(1)})
    with pytest.raises(ValueError, match="expected \\(16, 100\\): reshape it"):
        zfunc.replace(program, state, {"frozen.weight": torch.ones(16)})
    zfunc.train_step(program, state, BATCH(0))


# --- a copy of a State -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [x for x in WAYS if "disk" not in x])
def test_a_copy_and_its_source_train_apart_each_as_if_alone(name: str) -> None:
    """In turns, on equal and on other batches; each with the bits of a training that was never copied."""

    def alone(batches: list[int]) -> list[torch.Tensor]:
        program = compiled(**WAYS[name])
        state = zfunc.init(program, seed=1)
        for i in batches:
            state, _ = zfunc.train_step(program, state, BATCH(i))
        return bits(zfunc.flush(program, state))

    program = compiled(**WAYS[name])
    state = zfunc.init(program, seed=1)
    for i in range(2):
        state, _ = zfunc.train_step(program, state, BATCH(i))
    pair = [state, copy.deepcopy(state)]  # a deferred update is still to be made in both
    for turn in ([2, 2], [3, 4], [5, 6]):
        pair = [zfunc.train_step(program, x, BATCH(i))[0] for x, i in zip(pair, turn, strict=True)]
    for x, batches in zip(pair, ([0, 1, 2, 3, 5], [0, 1, 2, 4, 6]), strict=True):
        got = bits(zfunc.flush(program, x))
        assert all(torch.equal(a, b) for a, b in zip(got, alone(batches), strict=True))


def test_a_copy_is_that_of_a_plain_model_and_its_optimizer() -> None:
    program = compiled(optimizer=zfunc.AdamW(0.1, weight_decay=0.0))
    state = zfunc.init(program)
    parts, own = modules(), {**zfunc.params(program, state), **zfunc.buffers(program, state)}
    for name, m in parts.items():
        m.load_state_dict({k.removeprefix(f"{name}."): v for k, v in own.items() if k.startswith(f"{name}.")})
    model = nn.ModuleDict(parts)
    plain = (
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1, weight_decay=0.0),
    )

    def step(plain: Any, state: Any, i: int) -> tuple[Any, Any]:
        (model, optimizer), (x, y) = plain, BATCH(i)
        loss = model["loss"](model["frozen"](model["body"](x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state, metrics = zfunc.train_step(program, state, (x, y))
        assert metrics.loss == pytest.approx(loss.item(), rel=1e-4)
        return plain, state

    plain, state = step(plain, state, 0)
    other = copy.deepcopy(plain), copy.deepcopy(state)
    for i in (1, 2, 3):
        plain, state = step(plain, state, i)
        other = step(*other, i + 7)


def test_a_copy_is_refused_on_the_disk_where_memory_has_no_room_and_of_a_used_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("all on the disk", "half on the disk, deferred"):
        with pytest.raises(ValueError, match="deepcopy: got a state of which the disk has a part"):
            copy.deepcopy(zfunc.init(compiled(tmp_path / name, **WAYS[name])))
    program = compiled()
    state = zfunc.init(program)
    after, _ = zfunc.train_step(program, state, BATCH(0))
    with pytest.raises(DonatedStateError, match="deepcopy: got a state that an earlier"):
        copy.deepcopy(state)
    with pytest.raises(ValueError, match="deepcopy: got a released state"):
        copy.deepcopy(zfunc.release(program, after))
    zfunc.params(program, after)
    with pytest.raises(TypeError, match=r"copy\.deepcopy\(state\) is a second one"):
        copy.copy(after)
    nbytes = sum(getattr(x, "flat", x).nbytes for x in after.buffers.memory.values())
    monkeypatch.setattr(states, "available_host_bytes", lambda: nbytes - 1)
    with pytest.raises(OutOfMemory, match=f"needs {nbytes:,} bytes of host memory, {nbytes - 1:,} are free"):
        copy.deepcopy(after)
    monkeypatch.setattr(states, "available_host_bytes", lambda: nbytes)
    copy.deepcopy(after)
