"""Laws of an export: every weight exactly, in a file other programs read, whole or not there."""

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import saved
import torch
from bad_disks import stopped_everywhere, with_more_room
from forked import fork
from numpy_reference import split
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from saved import MODEL, content, refused, save

import zfunc.checkpoint.export as exporting
from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint.directory import locate_checkpoint
from zfunc.checkpoint.export import ExportedWeights, export_weights
from zfunc.checkpoint.manifest import Manifest, ParameterEntry, StateSlice, TrainingPosition
from zfunc.checkpoint.safetensors_file import ShardWriter, TensorInfo
from zfunc.core.dtypes import Precision
from zfunc.core.layout import Parameter
from zfunc.core.optimizer_state import FROZEN, AdamFormat, weight_buffers
from zfunc.optim.loss_scale import LossScale

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_moments = pytest.mark.parametrize("moments", get_args(AdamFormat))


def bits(name: str, moments: AdamFormat, numel: int) -> bytes:
    """What `save` wrote of a master, as float32."""
    if moments == "fp32":
        return content(name, "master", 4 * numel)
    high = np.frombuffer(content(name, "master_high", 2 * numel), np.uint16).astype(np.int64)
    low = np.frombuffer(content(name, "master_low", 2 * numel), np.int16)
    if moments == "fp32-split":
        high = high + np.signbit(np.frombuffer(content(name, "exp_avg_sq", 4 * numel), np.float32))
    return ((high * 65536 + low) % 2**32).astype(np.uint32).tobytes()


def keep_values(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> None:
    """Let `save` write these masters, of any moments; the other names, and all moments, stay what they are.

    But an fp32 exp_avg_sq is 0: its sign would belong to the master.
    """

    def written(name: str, kind: str, nbytes: int, salt: int = 0) -> bytes:
        if name not in values or not kind.startswith(("master", "exp_avg_sq")):
            return content(name, kind, nbytes, salt)
        x = np.asarray(values[name], np.float32).reshape(-1)
        if kind.startswith("exp_avg_sq"):
            return bytes(nbytes) if nbytes == x.nbytes else content(name, kind, nbytes, salt)
        halves = dict(zip(("master_high", "master_low"), split(x), strict=True))
        return {"master": x, **halves}[kind].tobytes()

    monkeypatch.setattr(saved, "content", written)


def as_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def not_written(out: Path) -> None:
    assert not [x for x in out.parent.iterdir() if out.name in x.name]


# --- what is in the file -------------------------------------------------------------------------------------


@every_moments
@pytest.mark.parametrize(("world", "bucket_size"), [(1, 10**6), (2, 200), (3, 64), (8, 1000)])
def test_every_weight_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: AdamFormat, world: int, bucket_size: int
) -> None:
    monkeypatch.setattr(exporting, "PIECE", 100)
    path = save(tmp_path, step=7, world=world, bucket_size=bucket_size, moments=moments)
    out = tmp_path / "a.safetensors"
    assert export_weights(path, out) == ExportedWeights(out, 3, out.stat().st_size, 7, "fp32")
    loaded = load_file(out)
    wanted = {p.name: p for segment in MODEL for p in segment}
    assert loaded.keys() == wanted.keys()
    for name, x in loaded.items():
        assert (tuple(x.shape), x.dtype) == (wanted[name].shape, torch.float32)
        assert as_bytes(x) == bits(name, moments, wanted[name].numel)
    with safe_open(out, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "7"}


@every_moments
@every_dtype
def test_weights_are_rounded_as_torch_rounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: AdamFormat, dtype: Precision
) -> None:
    """Subnormals, ties, infinities and NaN too; whichever they are, no value is lost to another one's."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(130) * 10.0 ** rng.integers(-9, 4, 130)).astype(np.float32)
    x[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-24, 2.0**-25, 1 + 2.0**-8]
    keep_values(monkeypatch, {"embed.weight": x})
    model = [[Parameter("embed.weight", (10, 13))]]
    out = tmp_path / "a.safetensors"
    export_weights(save(tmp_path, moments=moments, model=model), out, dtype=dtype)
    loaded, wanted = load_file(out)["embed.weight"], torch.from_numpy(x).view(10, 13).to(DTYPES[dtype])
    assert loaded.dtype == wanted.dtype
    torch.testing.assert_close(loaded, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(loaded.signbit() | loaded.isnan(), wanted.signbit() | wanted.isnan())


def test_one_of_2_to_the_17_differs_from_the_high_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values from 1.0 on whose high halves are even or odd, and below: ties are to even here."""
    x = np.arange(0x3F800000, 0x3F820000, dtype=np.uint32).view(np.float32)
    keep_values(monkeypatch, {"w": x})
    monkeypatch.setattr(saved, "CHUNK", 4096)
    model = [[Parameter("w", (1 << 17,))]]
    out = tmp_path / "a.safetensors"
    export_weights(save(tmp_path, moments="8bit", bucket_size=1 << 20, model=model), out, dtype="bf16")
    loaded = load_file(out)["w"]
    assert torch.equal(loaded, torch.from_numpy(x).to(torch.bfloat16))
    (differs,) = np.flatnonzero(loaded.view(torch.uint16).numpy() != split(x)[0])
    assert x.view(np.uint32)[differs] == 0x3F808000


@every_dtype
def test_frozen_parameters_are_converted_from_their_type(tmp_path: Path, dtype: Precision) -> None:
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    values = {k: torch.linspace(-3, 3, 150).to(t).view(5, 30) for k, t in kinds.items()}
    stored = {k: (TensorInfo(k, k, x.shape), as_bytes(x)) for k, x in values.items()}
    stored["nan"] = TensorInfo("nan", "F16", (1,)), b"\x01\x7c"  # a signalling one, which asks for a warning
    entries = [
        ParameterEntry(k, t.shape, False, {FROZEN: (StateSlice(0, t.numel, 0, k, 0),)})
        for k, (t, _) in stored.items()
    ]
    entries.append(ParameterEntry("empty", (0, 4), False, {FROZEN: ()}))
    pending = checkpoints.begin_checkpoint(tmp_path, 1)
    shard = saved.write_shard(pending.path / "a.safetensors", dict(stored.values()), saved.CHUNK)
    position = TrainingPosition(1, 1, 1, 0, LossScale())
    manifest = Manifest(1, "8bit", (shard,), tuple(entries), position, {}, {})
    out = tmp_path / "a.safetensors"
    export_weights(checkpoints.publish_checkpoint(pending, manifest), out, dtype=dtype)
    loaded = load_file(out)
    assert loaded["nan"].isnan().all()
    assert loaded.pop("empty").shape == (0, 4)
    for kind, x in values.items():
        assert torch.equal(loaded[kind], x.float().to(DTYPES[dtype]))


def test_a_tied_parameter_is_stored_once_and_loads(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 13)
            self.head = torch.nn.Linear(13, 10, bias=False)
            self.head.weight = self.embed.weight

    path = save(tmp_path, model=[[MODEL[0][0]], [Parameter("embed.weight", (10, 13))]])
    out = tmp_path / "a.safetensors"
    assert export_weights(path, out).parameters == 1
    model, other = Tied(), Tied()
    load_model(model, str(out))
    other.load_state_dict(load_file(out), strict=False)
    for loaded in (model, other):
        assert as_bytes(loaded.head.weight.detach()) == bits("embed.weight", "fp32", 130)


# --- what is too large, or no name ----------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "least"), [("fp16", 65520.0), ("bf16", 2.0**128 - 2.0**119)])
def test_a_weight_too_large_is_named_and_the_next_smaller_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: int, dtype: Precision, least: float
) -> None:
    """`least` becomes inf: halfway to what would be the next value."""
    x = np.full(130, sign * np.nextafter(np.float32(least), np.float32(0)))
    keep_values(monkeypatch, {"embed.weight": x})
    model, out = [[Parameter("embed.weight", (10, 13))]], tmp_path / "a.safetensors"
    export_weights(save(tmp_path / "fits", model=model), out, dtype=dtype)
    assert load_file(out)["embed.weight"].isfinite().all()
    for over in (least, 3.4e38):
        x[120], x[7:9] = sign * over, [np.inf, np.nan]
        path, again = save(tmp_path / f"over {over}", model=model, world=3), tmp_path / "b.safetensors"
        said = re.escape(
            f"'embed.weight': got a weight of {sign * over:g}, expected one that {dtype} can hold"
        )
        with pytest.raises(ValueError, match=said):
            export_weights(path, again, dtype=dtype)
        not_written(again)


def test_an_unknown_dtype_is_refused_with_the_nearest(tmp_path: Path) -> None:
    for dtype, near in (("bf61", "'bf16'"), ("float32", "'fp32'")):
        with pytest.raises(
            ValueError, match=rf"dtype: got .*, expected one of fp32, bf16, fp16 \(did you mean {near}\?\)"
        ):
            export_weights(save(tmp_path), tmp_path / "a.safetensors", dtype=dtype)  # pyright: ignore


def test_a_bad_file_name_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path, mine = save(tmp_path), tmp_path / "mine.safetensors"
    mine.write_text("mine")
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "unfinished-x.safetensors").write_text("another's")
    for name, message in {
        "mine.safetensors": "which exists, expected a new file",
        "dangling.safetensors": "which exists, expected a new file",
        "x.bin": "expected the name of a file that ends in .safetensors",
        "none/x.safetensors": "expected a file in an existing folder: make .*none",
        "x.safetensors": "but unfinished-x.safetensors exists: another export is writing it or was killed",
    }.items():
        with pytest.raises(ValueError, match=f"out: got .*{name}, {message}"):
            export_weights(tmp_path / "no checkpoint", tmp_path / name)
    assert mine.read_text() == "mine"
    assert (tmp_path / "unfinished-x.safetensors").read_text() == "another's"
    assert path.exists()


# --- which checkpoint -----------------------------------------------------------------------------------------


def test_a_checkpoint_a_folder_of_them_and_a_run_are_found(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    older, newer = (save(run / "checkpoints", step=step) for step in (4, 5))
    assert (
        locate_checkpoint(run) == locate_checkpoint(run / "checkpoints") == locate_checkpoint(newer) == newer
    )
    assert locate_checkpoint(older) == older
    assert export_weights(run, tmp_path / "a.safetensors").step == 5
    assert export_weights(older, tmp_path / "b.safetensors").step == 4
    renamed = older.rename(tmp_path / "best")
    assert locate_checkpoint(renamed) == renamed


def test_a_named_checkpoint_is_not_replaced_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, step=4)
    newest = save(tmp_path, step=5)
    (newest / "manifest.json").unlink()
    with caplog.at_level(logging.INFO, "zfunc"):
        assert export_weights(tmp_path, tmp_path / "a.safetensors").step == 4
    assert "step-00000004 is the newest complete one: " in caplog.messages[0]
    assert caplog.messages[1] == f"export: the weights of {tmp_path / 'step-00000004'} as fp32"
    with refused(r"step-00000005/manifest.json: got 'No such file"):
        export_weights(newest, tmp_path / "b.safetensors")


NOWHERE = {
    "missing": "/missing: got no such folder, expected a checkpoint, a folder of them, or a run",
    "empty": "/empty: got no checkpoint in it, expected a checkpoint",
    "file": "/file: got 'Not a directory' while looking for checkpoints: name a folder",
    "run": "/run/checkpoints: got no checkpoint in it",
    "killed": "/killed: got no checkpoint in it, expected a checkpoint",
    "others": "/others: got one of another program, .*: make one of zfunc of it, by zfunc import",
}


@pytest.mark.parametrize("kind", NOWHERE)
def test_a_place_without_checkpoints_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "others" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "others" / "checkpoint-7" / "optimizer.pt").touch()
    (tmp_path / "file").write_text("x")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "killed" / "unfinished-step-00000001-00000000").mkdir(parents=True)
    out = tmp_path / "a.safetensors"
    with refused(NOWHERE[kind]):
        export_weights(tmp_path / kind, out)
    not_written(out)


# --- whole or not there ---------------------------------------------------------------------------------------


@every_moments
def test_a_damaged_byte_is_named_and_leaves_no_file(tmp_path: Path, moments: AdamFormat) -> None:
    """Whichever of a weight's it is; one of a moment is none of the export's."""
    path, out = save(tmp_path, moments=moments), tmp_path / "a.safetensors"
    shard = checkpoints.open_checkpoint(path).manifest.shards[1]
    original = (file := path / shard.file).read_bytes()
    for tensor, begin in ((t, shard.begins[t.name]) for t in shard.tensors):
        broken = bytearray(original)
        broken[begin] ^= 1
        file.write_bytes(broken)
        if tensor.name.split("/")[1] not in weight_buffers(moments):
            export_weights(path, out)
            out.unlink()
            continue
        said = f"{file}: got other bytes than were written in '{tensor.name}', elements 0 to .* .bytes {begin} to "
        with refused(f"^{said}"):
            export_weights(path, out)
        not_written(out)
    file.write_bytes(original[:-1])
    with refused(f"{file}: got .* bytes, expected"):
        export_weights(path, out)


def test_stopped_before_any_operation_the_file_is_complete_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = save(tmp_path), tmp_path / "a.safetensors"
    export_weights(path, out)
    complete = out.read_bytes()

    def check() -> None:
        assert not (tmp_path / "unfinished-a.safetensors").exists()
        if out.exists():
            assert out.read_bytes() == complete
            out.unlink()

    check()
    functions = [(disk, name) for name in ("open_file", "read_all", "sync")]
    functions += [(os, name) for name in ("posix_fallocate", "fsync", "link", "unlink")]
    export = lambda _: export_weights(path, out)  # noqa: E731
    assert stopped_everywhere(monkeypatch, functions, export, check, killed=False) > 20


def killed(*given: Any, write: Any = ShardWriter.write_at) -> None:
    write(*given)
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_half_way_no_file_has_the_name(tmp_path: Path) -> None:
    path, out = save(tmp_path), tmp_path / "a.safetensors"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardWriter, "write_at", killed)
        pid = fork(lambda: export_weights(path, out))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(ValueError, match="but unfinished-a.safetensors exists: .* or was killed; delete it"):
        export_weights(path, out)
    (tmp_path / "unfinished-a.safetensors").unlink()
    assert export_weights(path, out).parameters == 3


def test_a_full_disk_is_named_and_no_file_is_left(small_disk: Path, tmp_path: Path) -> None:
    path, out = save(tmp_path / "from"), small_disk / "a.safetensors"
    refused = with_more_room(small_disk, lambda _: export_weights(path, out), check=lambda: not_written(out))
    assert refused
    assert all("unfinished-a.safetensors: got 'No space left on device' while" in x for x in refused)
    assert len(load_file(out)) == 3


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_file_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool, late: bool
) -> None:
    """Without hard links the complete one is renamed."""
    path, out, link = save(tmp_path), tmp_path / "a.safetensors", os.link

    def linked(source: Path, target: Path) -> None:
        if late:
            out.write_text("mine")
        if not links:
            raise OSError(95, "Operation not supported")
        link(source, target)

    monkeypatch.setattr(os, "link", linked)
    if late:
        with refused("a.safetensors: got 'File exists' while giving a file its name"):
            export_weights(path, out)
        assert out.read_text() == "mine"
    else:
        export_weights(path, out)
        assert len(load_file(out)) == 3
    assert not (tmp_path / "unfinished-a.safetensors").exists()
