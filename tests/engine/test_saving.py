"""A State to a checkpoint and back: to the bit, whatever reads it, whenever it is written, whatever goes wrong."""

import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import saved as checkpoint_of
import torch
import trained
from bad_disks import full_once
from saved import refused
from small_models import MODELS, flats
from threaded_ranks import on_every, programs_of
from torch import Tensor
from trained import steps

import zfunc
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.manifest import FILE, Slice, slices_of, stored_kinds
from zfunc.checkpoint.reader import CheckpointReader
from zfunc.checkpoint.safetensors_file import TensorInfo
from zfunc.core.optimizer_state import FROZEN
from zfunc.engine.program.program import Program
from zfunc.engine.state import restore as loading
from zfunc.engine.state.state import State
from zfunc.errors import CheckpointError
from zfunc.optim.formats import unpack_moments
from zfunc.runtime.fault_injection import Jitter


def compiled(model: str, **settings: Any) -> tuple[Program, Callable[[int], Any]]:
    return trained.compiled(model, lr=zfunc.lr.linear_warmup(1e-3, 4), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        {"precision": "bf16", "state_on": "device:0.5,host"},
        {"precision": "fp32"},
    ],
)
def test_a_split_master_beside_fp32_moments_is_the_same_training(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Through a checkpoint to the other format too. All weights are ties, which the first step leaves so."""
    losses, values = [], []
    for split in (False, True):
        how: dict[str, Any] = {"lr": lambda step: 1e-3 * (step > 1), "bucket_size": 1000, **settings}
        (program, data), (other, _) = (
            trained.compiled("tied GPT", split_master=x, **how) for x in (split, not split)
        )
        given = zfunc.params(program, zfunc.init(program, seed=5))
        ties = {
            name: (x.view(torch.int32) & -(1 << 16) | 1 << 15).view(torch.float32)
            for name, x in given.items()
        }
        state, seen = steps(program, zfunc.init(program, params=ties), data, 0, 2)
        zfunc.save(tmp_path / str(split), program, state)
        state, later = steps(other, zfunc.load(tmp_path / str(split), other), data, 2, 4)
        for p in (program, other):
            assert p.layout.state_format == p.optimizer.state_format()
        losses.append(repr(seen + later))
        values.append(flats(state, "params") | zfunc.params(other, state))
    assert other.layout.state_format == "fp32"
    assert losses[0] == losses[1]
    assert all(torch.equal(x, values[1][name]) for name, x in values[0].items())


@pytest.mark.parametrize("moments", ["fp32", "16bit", "8bit"])
@pytest.mark.parametrize("saved", ["fp32", "16bit", "8bit"])
def test_any_program_loads_what_any_other_saved(saved: str, moments: str, tmp_path: Path) -> None:
    """Weights to the bit; moments too where they are of one kind or a wider one, else rounded."""
    program, data = compiled("odd sizes", precision="fp32", moments=saved)
    state, _ = steps(program, zfunc.init(program, seed=5), data, 0, 3)
    zfunc.save(tmp_path, program, state)
    other, _ = compiled("odd sizes", precision="bf16", moments=moments, bucket_size=200, schedule="Serial")
    loaded = zfunc.load(tmp_path, other)
    weights = zfunc.params(other, loaded)
    for name, value in zfunc.params(program, state).items():
        assert torch.equal(weights[name], value), name
    back, _ = compiled("odd sizes", precision="fp32", moments=saved)
    zfunc.save(tmp_path / "back", other, loaded)
    again = zfunc.load(tmp_path / "back", back)
    kept = flats(state, "state")
    assert all(torch.equal(x, weights[name]) for name, x in zfunc.params(back, again).items())
    for name, x in flats(again, "state").items():
        if name.startswith("master") or moments == saved or (saved, moments) == ("16bit", "fp32"):
            assert torch.equal(x, kept[name]), name
    if (saved, moments) == ("8bit", "fp32"):  # a block may get another scale, for the same values
        before, after = (unpack_moments(x, "8bit") for x in (kept, flats(again, "state")))
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
    if (saved, moments) == ("fp32", "16bit"):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                flats(again, "state")[name], flats(state, "state")[name], rtol=2**-7, atol=0
            )
    steps(other, loaded, data, 3, 5)


def test_two_ranks_load_it_too_and_one_reads_what_they_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts smaller than a parameter, and of slices that begin in one."""
    monkeypatch.setattr(loading, "PART", 64)
    program, data = compiled("odd sizes", precision="bf16", bucket_size=200)
    state, _ = steps(program, zfunc.init(program, seed=5), data, 0, 1)
    path = zfunc.save(tmp_path / "fp32", program, state)
    stored = open_checkpoint(path).manifest.shards[0].by_name
    assert all(stored[f"{x.name}/master"].shape == x.shape for x in program.layout.spans)
    for moments in ("16bit", "8bit", "fp32"):
        make = partial(compiled, "odd sizes", precision="fp32", moments=moments)
        one, _ = make()
        alone = zfunc.load(path, one)
        ranks = programs_of(2, lambda make=make: make(bucket_size=300)[0])
        shares = on_every(ranks, partial(zfunc.load, path))
        path, _ = on_every(ranks, partial(zfunc.save, tmp_path / f"{moments} of two"), shares)
        together = kept(*zip(ranks, shares, strict=True))
        again = kept((one, zfunc.load(path, one)))
        for what, x in kept((one, alone)).items():
            assert torch.equal(together[what], x), what
            assert torch.equal(again[what], x), what


def kept(*loaded: tuple[Program, State]) -> dict[tuple[str, str], Tensor]:
    """What all ranks together have of every parameter, by its name and the kind of its state."""
    pieces: dict[tuple[str, str], list[Tensor]] = {}
    for program, state in loaded:
        ranks, layout = program.ranks, program.layout
        slices = [*slices_of(layout, stored_kinds(layout, {}), ranks.rank, ranks.world)]
        if not ranks.rank:  # each has all of these
            frozen = stored_kinds(layout, {x.index: "fp32" for x in layout.frozen_buckets})
            slices += (x for x in slices_of(layout, frozen, 0, 1) if x.kind == FROZEN)
        for x in slices:
            pieces.setdefault((x.parameter, x.kind), []).append(loading.slice_memory(state.buffers, x))
    return {what: torch.cat(x) for what, x in pieces.items()}


def test_8_bit_moments_have_a_name_with_a_number(tmp_path: Path) -> None:
    path = checkpoint_of.save(tmp_path, moments="8bit")
    assert json.loads((path / FILE).read_text())["moments"] == "8bit-2"


def test_extra_and_the_optimizer_are_saved_and_changed_settings_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program, _ = compiled("odd sizes", precision="fp32")
    path = zfunc.save(tmp_path, program, zfunc.init(program), extra={"epoch": 3, "notes": ["a", None]})
    manifest = json.loads((path / FILE).read_text())
    assert manifest["extra"] == {"epoch": 3, "notes": ["a", None]}
    assert manifest["optimizer"]["betas"] == [0.9, 0.999]
    with caplog.at_level(logging.WARNING, logger="zfunc"):
        zfunc.load(path, program)
        assert not caplog.records
        zfunc.load(path, compiled("odd sizes", precision="fp32", clip_norm=1.0)[0])
    assert "clip_norm None is now 1.0" in caplog.text


# --- what goes wrong ----------------------------------------------------------------------------------------


def saved(tmp_path: Path, count: int = 2) -> tuple[Program, State, Any]:
    """A program that has saved its first steps."""
    program, data = compiled("odd sizes", precision="fp32")
    state = zfunc.init(program)
    for i in range(count):
        state, _ = zfunc.train_step(program, state, data(i), save=tmp_path)
    return program, state, data


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    other, _ = compiled("frozen below", precision="fp32")
    with refused(r"step-00000001: got a checkpoint of another model: it has no '"):
        zfunc.load(tmp_path, other)


def test_a_flipped_byte_is_named_and_the_checkpoint_before_is_loaded_instead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program, _, _ = saved(tmp_path)
    newest = tmp_path / "step-00000001"
    shard = next(newest.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 4
    shard.write_bytes(raw)
    with refused(rf"{shard.name}: got other bytes .* in '.*', elements \d+ to \d+"):
        zfunc.load(newest, program)
    with caplog.at_level(logging.WARNING, logger="zfunc"):
        assert zfunc.load(tmp_path, program).step == 0
    assert "step-00000000 is loaded instead of a later one" in caplog.text
    assert shard.name in caplog.text
    os.truncate(next((tmp_path / "step-00000000").glob("*.safetensors")), 100)
    with refused("other bytes"):
        zfunc.load(tmp_path, program)


def test_a_digit_that_has_changed_in_the_manifest_is_seen(tmp_path: Path) -> None:
    program, _, _ = saved(tmp_path)
    path = tmp_path / "step-00000001" / FILE
    path.write_text(path.read_text().replace('"batches":1', '"batches":7'))
    with refused(r"manifest.json.checksum: got \d+"):
        zfunc.load(path.parent, program)
    assert zfunc.load(tmp_path, program).step == 0
    (tmp_path / "step-00000000").rename(tmp_path / "step-00000009")
    with refused("manifest of step 0, expected that of the folder's name"):
        zfunc.load(tmp_path / "step-00000009", program)


@pytest.mark.parametrize("extra", [{"path": os.fsdecode(b"a\xff")}, {"loss": float("nan")}, {"when": Path()}])
def test_extra_that_is_not_json_is_refused_before_anything_is_written(
    extra: dict[str, Any], tmp_path: Path
) -> None:
    program, data = compiled("odd sizes", precision="fp32")
    state = zfunc.init(program)
    with pytest.raises((CheckpointError, TypeError), match="extra"):
        zfunc.train_step(program, state, data(0), save=zfunc.Save(tmp_path / "a", extra=extra))
    with pytest.raises((CheckpointError, TypeError), match="extra"):
        zfunc.save(tmp_path / "a", program, state, extra=extra)
    assert not (tmp_path / "a").exists()
    steps(program, state, data, 0, 1)


def test_a_fixed_loss_scale_is_restored(tmp_path: Path) -> None:
    program, _ = compiled("odd sizes", precision="fp16")
    scale = zfunc.LossScale(scale=1.0, window=0)
    zfunc.save(tmp_path, program, zfunc.init(program, loss_scale=scale))
    assert zfunc.load(tmp_path, program).loss_scale == scale
    other, _ = compiled("odd sizes", precision="bf16")
    zfunc.save(tmp_path / "bf16", other, zfunc.init(other))
    assert zfunc.load(tmp_path / "bf16", program).loss_scale == zfunc.LossScale()


def test_without_the_latest_pointer_a_checkpoint_is_still_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, state, data = saved(tmp_path)
    write_durably = disk.write_durably

    def refused(path: Path, raw: bytes) -> None:
        if path.name == "latest":
            raise CheckpointError(f"{path}: got 'No space left on device'")
        write_durably(path, raw)

    monkeypatch.setattr(disk, "write_durably", refused)
    for step in (2, 3):
        state, m = zfunc.train_step(program, state, data(step), save=zfunc.Save(tmp_path, keep=1))
        assert m.saved is not None
        assert m.saved.path == tmp_path / f"step-{step:08d}"
    assert "step-00000003 is saved, but not synced to the disk" in caplog.text
    assert sorted(x.name for x in tmp_path.iterdir()) == ["latest", "step-00000003"]
    assert zfunc.load(tmp_path, program).step == 3


def test_a_folder_that_cannot_be_written_stops_nothing_but_the_save(tmp_path: Path) -> None:
    program, state, data = saved(tmp_path)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with refused("file"):
            zfunc.save(folder, program, state)
        with refused("file"):
            zfunc.train_step(program, state, data(2), save=folder)
    state, m = zfunc.train_step(program, state, data(2), save=tmp_path)
    assert m.saved is not None
    assert m.saved.path == tmp_path / "step-00000002"


@pytest.mark.parametrize("at", [2, 5, 12])
def test_a_disk_that_fills_up_is_reported_and_the_step_goes_on(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, state, data = saved(tmp_path)
    names = sorted(x.name for x in tmp_path.iterdir())
    write_all = disk.write_all
    monkeypatch.setattr(disk, "write_all", full_once(write_all, at))
    after, m = zfunc.train_step(program, state, data(2), save=tmp_path)
    assert m.saved is not None
    assert m.saved.path is None
    assert "No space left on device" in m.saved.failure
    assert ".safetensors" in m.saved.failure
    assert "none was saved of step 2" in caplog.text
    monkeypatch.undo()
    assert sorted(x.name for x in tmp_path.iterdir()) == names
    assert zfunc.load(tmp_path, program).step == 1
    assert after.step == 3
    monkeypatch.setattr(disk, "write_all", full_once(write_all, at))
    with refused("No space left"):
        zfunc.save(tmp_path, program, after)


def test_a_step_that_is_refused_saves_nothing_and_harms_nothing(tmp_path: Path) -> None:
    program, data = compiled("odd sizes", precision="fp32", clip_norm=1.0)
    state, _ = steps(program, zfunc.init(program), data, 0, 2)
    inputs, targets = data(2)
    for seed in range(6):  # whatever is late: what publishes it waits for the decision
        with pytest.raises(zfunc.NonFiniteError):
            zfunc.train_step(
                program, state, (inputs, targets * float("nan")), save=tmp_path, jitter=Jitter(seed, 2e-3)
            )
        assert [x.name for x in tmp_path.iterdir()] == []
    zfunc.train_step(program, state, (inputs, targets), save=tmp_path)
    assert zfunc.load(tmp_path, program).step == 2


def test_a_used_state_is_not_saved(tmp_path: Path) -> None:
    program, data = compiled("odd sizes", precision="fp32")
    state = zfunc.init(program)
    zfunc.train_step(program, state, data(0))
    with pytest.raises(zfunc.errors.DonatedStateError, match="save"):
        zfunc.save(tmp_path, program, state)
    other, _ = compiled("odd sizes", precision="fp32")
    with pytest.raises(ValueError, match="another program"):
        zfunc.save(tmp_path, other, zfunc.init(program))
    assert not list(tmp_path.iterdir())
    with refused("expected a checkpoint"):
        zfunc.load(tmp_path, other)


# --- memory -----------------------------------------------------------------------------------------------------

PEAK = """
import sys
from pathlib import Path
from types import FrameType
import torch, zfunc
from torch import nn
from zfunc.core.memory_model import initial_memory, peak_memory
from zfunc.runtime.host_memory import give_back_freed

torch.set_num_threads(1)
folder, saved, loaded = sys.argv[1:]

class Loss(nn.Module):
    def forward(self, x, targets):
        return (x.float().mean() - targets.float().mean()).square()

with torch.device("meta"):
    layers = [(f"layer{i}", nn.Linear(2048, 2048)) for i in range(3)]
segments = [*(zfunc.segment(n, m) for n, m in layers), zfunc.segment("loss", Loss())]

def program(moments, bucket_size):
    optimizer = zfunc.AdamW(moments=moments)
    return zfunc.compile(segments, optimizer=optimizer, precision="bf16", device="cpu", bucket_size=bucket_size)

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

def forget():
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again

with torch.device("meta"):
    small = [zfunc.segment("small", nn.Linear(2, 2)), segments[-1]]
zfunc.init(zfunc.compile(small, precision="bf16", device="cpu"))  # imports what materializes a module
give_back_freed()
p = program(saved, 5_000_000)
params = {f"{n}.{k}": torch.zeros(v.shape) for n, m in layers for k, v in m.named_parameters()}
forget()
before = status("VmRSS")
state = zfunc.init(p, params=params)
at_init = status("VmHWM") - before
planned = [sum(peak.nbytes for peak in x.values()) for x in (initial_memory(p.spec), peak_memory(p.plan))]
del params
forget()
before = status("VmRSS")
zfunc.save(folder, p, state)
saving = status("VmHWM") - before
del p, state
p = program(loaded, 6_000_000)
forget()
state = zfunc.load(folder, p)
loading = status("VmHWM") - status("VmRSS")
kept = sum(x.nbytes for r, x in state.buffers.memory.items() if r.role == "state")
print(saving / kept, loading / kept, at_init / max(planned))
"""


@pytest.mark.parametrize(
    ("saved", "loaded"), [("fp32", "fp32"), pytest.param("8bit", "16bit", marks=pytest.mark.slow)]
)
def test_saving_and_loading_take_no_more_than_a_tenth_of_the_state_beside_it(
    saved: str, loaded: str, tmp_path: Path
) -> None:
    """Peaks of a process that has 12.6 million parameters, over what it holds afterwards; that of `init`, over the
    larger of its own and a step's in the plan."""
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), saved, loaded],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    saving, loading, at_init = map(float, ran.stdout.split())
    assert -0.01 < saving < 0.1
    assert 0 <= loading < 0.1
    assert 0.8 < at_init < 1.05


def test_a_rate_that_ends_with_the_training_is_saved_after_the_last_step(tmp_path: Path) -> None:
    rates = [1e-3, 2e-3]
    segments, data = MODELS["odd sizes"]()
    adam = zfunc.AdamW(
        lr=lambda step: rates[step - 1], betas=lambda step: [(0.9, 0.99), (0.8, 0.99)][step - 1]
    )
    program = zfunc.compile(segments, optimizer=adam, device="cpu", precision="fp32")
    state = zfunc.init(program, seed=1)
    for i in range(2):
        state, _ = zfunc.train_step(program, state, data(i))
    kept = zfunc.save(tmp_path, program, state)
    optimizer = json.loads((kept / "manifest.json").read_text())["optimizer"]
    assert (optimizer["lr"], optimizer["betas"]) == (2e-3, [0.8, 0.99])


def test_a_slice_is_read_in_parts_into_another_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins inside a parameter, as a rank's does."""
    monkeypatch.setattr(loading, "PART", 64)
    program, _ = compiled("odd sizes", precision="fp32")
    path = zfunc.save(tmp_path, program, zfunc.init(program, seed=5))
    wanted = Slice("back.weight", 0, "master", 30, 200, 0, TensorInfo("x", "F32", (170,)))
    into = iter([straight := torch.zeros(170), converted := torch.zeros(170, dtype=torch.float64)])
    monkeypatch.setattr(loading, "slice_memory", lambda *_: next(into))
    with CheckpointReader(open_checkpoint(path)) as reader:
        loading._fill(reader, zfunc.init(program).buffers, [wanted, wanted])
    assert straight.count_nonzero() > 100
    assert torch.equal(converted, straight.double())


# Python 3.12 runs a trace after a folder is opened for `with` and before `with` guards it.
@pytest.mark.filterwarnings("ignore:unclosed scandir:ResourceWarning")
def test_an_interrupt_at_any_line_of_a_save_leaves_nothing_unfinished(tmp_path: Path) -> None:
    """And the program saves afterwards. Interrupted are lines that make, name and delete a checkpoint."""
    program, batch = compiled("tied GPT", precision="fp32")
    state, _ = zfunc.train_step(program, zfunc.init(program), batch(0))
    zfunc.save(tmp_path / "whole", program, state)  # what is made once has been made

    def save_until(last: int) -> int:
        lines = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if event == "call":
                return trace if frame.f_code.co_filename.endswith("directory.py") else None
            lines += event == "line"
            if lines == last and event == "line":
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            zfunc.save(tmp_path / "cut", program, state)
        finally:
            sys.settrace(None)
        return lines

    every = save_until(0)
    assert every > 30
    for line in range(1, every, max(1, every // 12)):
        try:
            save_until(line)
        except (KeyboardInterrupt, CheckpointError):
            gc.collect()
        assert not [x for x in os.listdir(tmp_path / "cut") if x.startswith(disk.UNFINISHED)], line
    assert zfunc.load(zfunc.save(tmp_path / "after", program, state), program).step == state.step
