"""A training of FSDP2, Trainer, torchtitan or DeepSpeed goes on in zfunc: the same bits, and the same next loss."""

import errno
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import (
    GROUPS,
    MOMENTS,
    RATE,
    SAVED,
    Small,
    batch,
    program,
    save_dcp,
    segments,
    torch_step,
    trained,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zfunc
from zfunc.checkpoint.dcp import export_dcp
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.import_run import find_run, import_run
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.cli.main import main
from zfunc.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("form", SAVED)
def test_a_run_from_elsewhere_goes_on_with_the_same_bits_and_the_same_loss(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    SAVED[form](tmp_path / "theirs", model, optimizer)
    own = segments()
    taken = import_run(tmp_path / "theirs", tmp_path / "taken", segments=own, groups=GROUPS)
    assert (taken.step, taken.sequences) == (3, 36 if form[0] in "uz" else 0)
    with CheckpointReader(open_checkpoint(taken.path)) as reader:
        for name, p in model.named_parameters():
            assert torch.equal(reader.weights(name, 0, p.numel()), p.detach().flatten()), name
            for kind in MOMENTS if p.requires_grad else ():
                found = reader.tensors([WantedSlice(kind, name, 0, p.numel())])[kind]
                assert torch.equal(found, optimizer.state[p][kind].flatten()), (name, kind)
    goes_on = program(own)
    state = zfunc.load(tmp_path / "taken", goes_on)
    for n in (3, 4):  # the second has what the first made of moments, step and buffers
        state, metrics = zfunc.train_step(goes_on, state, batch(n))
        assert metrics.loss == pytest.approx(torch_step(model, optimizer, batch(n)), rel=2e-6)


def test_the_command_says_which_step_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SAVED["dcp, of steps"](tmp_path / "theirs", *trained())
    (tmp_path / "theirs/step-11").rmdir()
    main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "taken")])
    assert "step-10, the last of 2 steps" in capsys.readouterr().out


PIECES, SHARD = "__0_0.distcp", "model-00002-of-00002.safetensors"
ZERO_1, OF_HEAD = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero/head.bias/fp32.pt"


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-99])


@pytest.mark.parametrize(
    ("form", "name", "spoil", "lacks"),
    [
        ("dcp", "step-", lambda x: torn(x / ".metadata"), "metadata that cannot be read"),
        ("dcp", "step-", lambda x: (x / ".metadata").unlink(), "has neither .metadata nor"),
        (
            "dcp",
            "step-",
            lambda x: (x / PIECES).unlink(),
            f"{PIECES}: got no such file, expected the one with",
        ),
        ("dcp", "step-", lambda x: torn(x / PIECES), rf"{PIECES}: got \d+ bytes, expected \d+ with"),
        ("trainer, one process", "checkpoint-", lambda x: torn(x / "optimizer.pt"), "no readable tensors"),
        (
            "trainer, in shards",
            "checkpoint-",
            lambda x: (x / SHARD).unlink(),
            f"got no {SHARD}, one of 2 shards",
        ),
        ("zero 2", "global_step", lambda x: torn(x / ZERO_1), f"{ZERO_1}: got no readable tensors"),
        ("zero 2", "global_step", lambda x: (x / ZERO_1).unlink(), "got optimizer states of 1 rank"),
        ("zero 3", "global_step", lambda x: (x / ZERO_1).unlink(), "got optimizer states of 1 rank"),
        ("universal", "global_step", lambda x: (x / OF_HEAD).unlink(), f"{OF_HEAD}: got no such file"),
    ],
)
def test_of_several_steps_the_last_complete_one_is_taken_and_what_later_ones_lack_is_said(
    form: str,
    name: str,
    spoil: Callable[[Path], None],
    lacks: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of our own checkpoints. That arguments are needed to open it does not make one incomplete."""
    for step in (9, 10, 11):
        SAVED[form](tmp_path / f"{name}{step}", *trained())
    assert find_run(tmp_path).folder.name == f"{name}11"
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    spoil(tmp_path / f"{name}11")
    (tmp_path / f"{name}12").mkdir()
    taken = find_run(tmp_path)
    assert taken.folder.name == f"{name}10"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    of_later = f"{name}10 is the last complete one: {tmp_path / name}12 has neither .metadata nor"
    assert of_later in warning
    assert re.search(lacks, warning.partition(of_later)[2])


@pytest.mark.parametrize("torn_ones", [(), ("3_universal",), ("3_universal", "3")])
def test_what_a_pointer_of_deepspeed_names_is_passed_over_if_it_is_torn(
    torn_ones: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, form in (("3_universal", "universal"), ("3", "zero 1"), ("2", "zero 1"), ("4", "zero 1")):
        SAVED[form](tmp_path / f"global_step{name}", *trained())
    (tmp_path / "global_step4" / ZERO_1).unlink()
    (tmp_path / "latest_universal").write_text("global_step3_universal")
    (tmp_path / "latest").write_text("global_step3\n")
    for name in torn_ones:
        (tmp_path / f"global_step{name}" / (OF_HEAD if "uni" in name else ZERO_1)).unlink()
    expected = ["global_step3_universal", "global_step3", "global_step2"][len(torn_ones)]
    assert find_run(tmp_path).files.name == expected
    said = caplog.text.partition(f"{expected} is the last complete one: ")[2]
    assert bool(said) == bool(torn_ones)
    assert re.findall(r"global_step(\w+)(?:: got optimizer states of 1|/\S+: got no such)", said) == [
        *torn_ones,
        *(["4"] if expected == "global_step2" else []),
    ]


@pytest.mark.parametrize("reads", ["read_text", "iterdir"])
def test_a_folder_or_pointer_that_cannot_be_read_is_named(
    reads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **given: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "global_step3").mkdir()
    (tmp_path / "latest").write_text("global_step3")
    monkeypatch.setattr(Path, reads, fails)
    with pytest.raises(
        CheckpointError, match=f"{tmp_path}.*: got 'Permission denied' .*: name a folder this"
    ):
        find_run(tmp_path)


def test_a_step_that_is_there_as_a_universal_checkpoint_too_is_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for form, name in (("zero 1", "global_step3"), ("universal", "global_step3_universal")):
        SAVED[form](tmp_path / name, *trained())
    with caplog.at_level("INFO", "zfunc"):
        assert find_run(tmp_path).files.name == "global_step3_universal"
    assert "the last of" not in caplog.text


def test_a_tied_weight_is_taken_once_where_no_model_says_so(tmp_path: Path) -> None:
    model = Small()
    model.norm, model.base = nn.Identity(), nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), **RATE)
    torch_step(model, optimizer, batch(0))
    save_dcp(tmp_path / "theirs", model, optimizer)
    assert import_run(tmp_path / "theirs", tmp_path / "taken").parameters == 2
    goes_on = program(zfunc.segments(model, batch(0)))
    state = zfunc.load(tmp_path / "taken", goes_on)
    loss = zfunc.train_step(goes_on, state, batch(1))[1].loss
    assert loss == pytest.approx(torch_step(model, optimizer, batch(1)), rel=2e-6)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),  # the moments of a split master, the master of the others
        *({"split_master": True}, {"moments": "16bit"}, {"moments": "8bit"}),
    ],
)
def test_an_exported_dcp_has_every_bit_and_goes_on_in_torch(settings: dict[str, Any], tmp_path: Path) -> None:
    ours = program(optimizer=zfunc.AdamW(**RATE, **settings))
    state = zfunc.init(ours, seed=3)
    for n in range(3):
        state, _ = zfunc.train_step(ours, state, batch(n))
    zfunc.save(tmp_path / "ours", ours, state)
    assert main(["export", str(tmp_path / "ours"), "--format", "dcp", "--out", str(tmp_path / "dcp")]) == 0
    model, optimizer = trained(1)
    weights, moments = get_state_dict(model, optimizer)
    del weights["head.weight"]  # it is tied
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    both = {"model": weights, "optimizer": moments}
    dcp.load(both, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=moments,
        options=StateDictOptions(strict=False),
    )
    exact = dict(zfunc.weights(ours, state, dtype="fp32"))
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), exact[name].view(p.shape)), name
        assert not p.requires_grad or optimizer.state[p]["step"] == 3
    # What is read again has the moments of the first, and goes on as torch does
    again = import_run(str(tmp_path / "dcp"), str(tmp_path / "again"), segments=segments())
    fp32 = program(optimizer=zfunc.AdamW(**RATE))
    with CheckpointReader(open_checkpoint(again.path)) as reader:
        for name, p in model.named_parameters():
            for kind in MOMENTS if p.requires_grad else ():
                found = reader.tensors([WantedSlice(kind, name, 0, p.numel())])[kind]
                assert torch.equal(found, optimizer.state[p][kind].flatten()), (name, kind)
    first, second = (zfunc.load(x, fp32) for x in (tmp_path / "ours", tmp_path / "again"))
    losses = [zfunc.train_step(fp32, x, batch(3))[1].loss for x in (first, second)]
    assert losses[0] == losses[1] == pytest.approx(torch_step(model, optimizer, batch(3)), rel=2e-6)


class FullDisk(io.BytesIO):
    """A file on a disk with room for its first write alone."""

    def write(self, data: Any) -> int:
        if self.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_full_disk_keeps_no_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = program()
    zfunc.save(tmp_path / "ours", ours, zfunc.init(ours))
    create = "torch.distributed.checkpoint.filesystem.FileSystem.create_stream"
    monkeypatch.setattr(create, lambda *_: FullDisk())  # of which torch.save makes a RuntimeError
    with pytest.raises(
        CheckpointError, match=r"/dcp: got 'No space left on device' while writing a DCP: free"
    ):
        export_dcp(tmp_path / "ours", tmp_path / "dcp")
    assert [x.name for x in tmp_path.iterdir()] == ["ours"]


def test_an_optimizer_without_both_moments_has_no_dcp(tmp_path: Path) -> None:
    ours = program(optimizer=zfunc.SGD(1e-2))
    zfunc.save(tmp_path / "ours", ours, zfunc.init(ours))
    with pytest.raises(ValueError, match="format: got 'embed.weight' with .*: export the weights alone"):
        export_dcp(tmp_path / "ours", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
