"""What `zfunc import` cannot take up is refused with what to do, and no code of a pickle runs unasked."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import (
    GROUPS,
    SAVED,
    classes_of_deepspeed,
    save_by_number,
    save_dcp,
    save_deepspeed,
    segments,
    trained,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import zfunc
from zfunc.checkpoint.import_run import import_run
from zfunc.cli.main import main
from zfunc.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Runs:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    with classes_of_deepspeed() as value:
        for x in ("fp16.loss_scaler.LossScaler", "zero.config.ZeroStageEnum"):
            value(f"runtime.{x}")
        value("utils.tensor_fragment.fragment_address")
        saved = torch.load(file, weights_only=False)
        change(saved)
        torch.save(saved, file)


def like_torchtitan(folder: Path) -> None:
    weights, moments = get_state_dict(*trained())
    renamed = dict(zip(weights, ["tok_embeddings.weight", *[*weights][1:]], strict=True))
    weights = {renamed[x]: t for x, t in weights.items()}
    moments["state"] = {renamed[x]: t for x, t in moments["state"].items()}
    for group in moments["param_groups"]:
        group["params"] = [renamed[x] for x in group["params"]]
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


def own(folder: Path) -> None:
    program = zfunc.compile(segments(), precision="fp32", device="cpu")
    zfunc.save(folder, program, zfunc.init(program))


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def without_moments(folder: Path) -> None:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    del moments["state"]["head.bias"]["exp_avg_sq"]
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


def without_moments_and_like_another(folder: Path) -> None:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    del moments["state"]["norm.bias"]
    state = {"model": {**weights, "norm.bias": weights["norm.weight"]}, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def with_one_more(folder: Path) -> None:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": {**weights, "tail.weight": torch.ones(3)}, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def of_another_shape(folder: Path) -> None:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    weights["base.weight"] = torch.ones(5, 6)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


def by_number(folder: Path) -> None:
    model, optimizer = trained()
    moments = {str(n): x for n, x in optimizer.state_dict()["state"].items()}
    dcp.save(
        {"model": model.state_dict(), "optimizer": {"state": moments}}, checkpoint_id=folder, no_dist=True
    )


def of_two_steps(folder: Path) -> None:
    model, optimizer = trained()
    optimizer.state[model.head.bias]["step"] += 1
    save_dcp(folder, model, optimizer)


def weights_alone(folder: Path) -> None:
    dcp.save({"model": trained()[0].state_dict()}, checkpoint_id=folder, no_dist=True)


def of_other_groups(folder: Path) -> None:
    model, optimizer = trained()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    save_by_number(folder, model, optimizer)


def without_zero(folder: Path) -> None:
    save_deepspeed(folder, *trained(), stage=1)
    edit(folder / MODEL, lambda saved: saved.update(param_shapes=None))


BNB = {"step": 3, "state1": torch.zeros(7, dtype=torch.uint8), "state2": torch.zeros(7, dtype=torch.uint8)}
RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
BAD: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], str]] = {
    "no moments": (
        without_moments,
        lambda _: None,
        "no exp_avg_sq of 'head.bias', expected exp_avg and.*: save the",
    ),
    "no moments, and like another": (
        without_moments_and_like_another,
        lambda _: None,
        "no exp_avg of 'norm.bias'",
    ),
    "a stranger": (
        with_one_more,
        lambda _: None,
        "'tail.weight', which the model does not have.*: name the model",
    ),
    "another shape": (
        of_another_shape,
        lambda _: None,
        r"'base.weight' of shape \[5, 6\], expected \[5, 5\]",
    ),
    "by number": (by_number, lambda _: None, "moments of '0', and weights such as .*get_state_dict"),
    "two steps": (of_two_steps, lambda _: None, "got step 3 of '.*' and 4 of 'head.bias', expected one"),
    "weights alone": (
        weights_alone,
        lambda _: None,
        "no step of an optimizer, expected .*: save the optimizer's",
    ),
    "torn DCP": (
        "dcp",
        lambda x: torn(x / "__0_0.distcp"),
        "__0_0.distcp: got .* expected .*copy the checkpoint",
    ),
    "torn metadata": ("dcp", lambda x: torn(x / ".metadata"), "got metadata that cannot be read .*: copy"),
    "code in metadata": (
        "dcp",
        lambda x: (x / ".metadata").write_bytes(pickle.dumps(Runs())),
        "builtins.print is no class of DCP's metadata",
    ),
    "no file of a rank": (
        "dcp",
        lambda x: (x / "__0_0.distcp").unlink(),
        "no such file, .*: copy the files of all",
    ),
    "torn ZeRO": ("zero 2", lambda x: torn(x / RANK_1), f"{RANK_1}: got no readable tensors"),
    "one rank of two": (
        "zero 2",
        lambda x: (x / RANK_1).unlink(),
        "states of 1 rank, expected those of 2: copy",
    ),
    "one rank of two, 3": (
        "zero 3",
        lambda x: (x / RANK_1).unlink(),
        "states of 1 rank, expected those of 2: copy",
    ),
    "no moment of a parameter": (
        "universal",
        lambda x: (x / "zero/head.bias/exp_avg.pt").unlink(),
        "no exp_avg of 'head.bias'",
    ),
    "no master of a parameter": (
        "universal",
        lambda x: (x / "zero/head.bias/fp32.pt").unlink(),
        "head.bias/fp32.pt: got no such file, expected the fp32 weights of each trained",
    ),
    "ZeRO without its last byte": (
        "zero 2",
        lambda x: cut_short(x / RANK_1),
        f"{RANK_1}: got no readable tensors.*: copy",
    ),
    "no optimizer in ZeRO": (
        "zero 3",
        lambda x: edit(x / RANK_1, lambda saved: saved.pop("optimizer_state_dict")),
        r"theirs: got records that have another form \(KeyError: 'optimizer_state_dict'\)",
    ),
    "no tensors in ZeRO": (
        "zero 3",
        lambda x: edit(
            x / RANK_1, lambda saved: saved["optimizer_state_dict"].update(fp32_flat_groups=[1, 2])
        ),
        f"{RANK_1}: got a group of int, expected a flat tensor of each group: copy",
    ),
    "a shape of no numbers": (
        "universal",
        lambda x: edit(
            x / MODEL, lambda saved: saved["param_shapes"][0].update({"head.bias": torch.ones(2, 2)})
        ),
        r"theirs: got records that have another form \(TypeError: .*\), expected those that its.*: copy",
    ),
    "a place of no number": (
        "zero 2",
        lambda x: edit(
            x / RANK_1,
            lambda saved: vars(
                saved["optimizer_state_dict"]["param_slice_mappings"][0]["embed.weight"]
            ).update(numel=None),
        ),
        r"theirs: got records that have another form \(TypeError: .*NoneType.*\), expected those",
    ),
    "ties in another form": (
        "zero 2",
        lambda x: edit(x / MODEL, lambda saved: saved.update(shared_params=torch.ones(2))),
        r"theirs: got records that have another form \(AttributeError: .*\), expected those",
    ),
    "code in ZeRO": (
        "zero 1",
        lambda x: edit(x / MODEL, lambda saved: saved.update(client=Runs())),
        "got a pickle of .*print.*: if you trust .*`allow_pickle`",
    ),
    "tensor parallel": (
        "zero 1",
        lambda x: (x / MODEL).rename(x / "mp_rank_01_model_states.pt"),
        "mp_rank_01_model_states.pt of tensor parallelism, expected a model that is not divided",
    ),
    "SGD": (
        "zero 1",
        lambda x: edit(
            x / RANK_1,
            lambda saved: saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg"),
        ),
        "no exp_avg of each group .*Adam and AdamW",
    ),
    "DeepSpeed without ZeRO": (without_zero, lambda _: None, "no ZeRO, expected stage 1, 2 or 3: .*weights"),
    "other groups": (of_other_groups, lambda _: None, r"groups of \[4, 1\] parameters, expected \[4\]"),
    "torn optimizer": (
        "trainer, one process",
        lambda x: torn(x / "optimizer.pt"),
        "optimizer.pt: got no readable tensors",
    ),
    "empty optimizer": (
        "trainer, one process",
        lambda x: (x / "optimizer.pt").write_bytes(b""),
        "optimizer.pt: got an empty file, expected one that torch.save wrote: copy the checkpoint again",
    ),
    "a pointer of git lfs": (
        "trainer, one process",
        lambda x: (x / "optimizer.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1"),
        "optimizer.pt: got a file that begins with b'version https://', expected one that torch.save wrote",
    ),
    "code in an old file": (
        "trainer, one process",
        lambda x: torch.save({"state": Runs()}, x / "optimizer.pt", _use_new_zipfile_serialization=False),
        "got a pickle of .*print.*: if you trust .*`allow_pickle`",
    ),
    "a pickle that torch reads by running it alone": (
        "trainer, one process",
        lambda x: torch.save({}, x / "optimizer.pt", _use_new_zipfile_serialization=False, pickle_protocol=4),
        "optimizer.pt: got a pickle of protocol 4, expected 2 or 3, .*: if you trust .*`allow_pickle`",
    ),
    "a torn file before torch 1.6": (
        "trainer, torch before 1.6",
        lambda x: (x / "optimizer.pt").write_bytes((x / "optimizer.pt").read_bytes()[:16]),
        "optimizer.pt: got no readable tensors .*: copy the checkpoint again",
    ),
    "torn weights": (
        "trainer, one process",
        lambda x: torn(x / "model.safetensors"),
        "model.safetensors: got a file that cannot be read .*: copy the checkpoint",
    ),
    "no weights": (
        "trainer, one process",
        lambda x: (x / "model.safetensors").unlink(),
        "got no weights, expected model.safetensors: copy",
    ),
    "no state": (
        "trainer, one process",
        lambda x: torch.save([1], x / "optimizer.pt"),
        "optimizer.pt: got a list, expected a dict, as its program saves it: copy",
    ),
    "no state in it": (
        "trainer, one process",
        lambda x: edit(x / "optimizer.pt", lambda saved: saved.pop("state")),
        r"optimizer.pt: got no state of Adam, expected what state_dict\(\)",
    ),
    "a step in words": (
        "trainer, one process",
        lambda x: edit(x / "optimizer.pt", lambda saved: saved["state"][0].update(step="three")),
        "theirs: got step 'three' of 'embed.weight', expected a number of updates: copy",
    ),
    "Adam in 8 bits": (
        "trainer, one process",
        lambda x: edit(x / "optimizer.pt", lambda saved: saved["state"].update(dict.fromkeys(range(4), BNB))),
        "optimizer.pt: got step, state1, state2 of a parameter, expected exp_avg and exp_avg_sq, .*: begin with",
    ),
    "moments that are no tensors": (
        "trainer, full state",
        lambda x: edit(x / "optimizer.bin", lambda saved: saved["state"]["head.bias"].update(exp_avg=1.0)),
        "optimizer.bin: got no state of Adam",
    ),
    "code beside moments": (
        "trainer, one process",
        lambda x: torch.save({"state": Runs()}, x / "optimizer.pt"),
        "got a pickle of .*print.*: if you trust .*`allow_pickle`",
    ),
    "a pointer to itself": (
        lambda x: x.mkdir() or (x / "latest").write_text("."),
        lambda _: None,
        "neither .metadata nor",
    ),
    "a pointer that is no text": (
        lambda x: x.mkdir() or (x / "latest").write_bytes(b"\xff\xfe\0"),
        lambda _: None,
        "neither .metadata nor",
    ),
    "a pointer of 5,000 letters": (
        lambda x: x.mkdir() or (x / "latest").write_text("a" * 5000),
        lambda _: None,
        "neither .metadata nor",
    ),
    "no complete one": (
        lambda x: [SAVED["zero 2"](x / f"global_step{n}", *trained()) for n in (3, 4)],
        lambda x: [file.unlink() for file in x.glob("*/*_model_states.pt")],
        "theirs: got no complete checkpoint, expected one: .*global_step4: got no file .*; .*global_step3: got no",
    ),
    "a pointer to a folder without files": (
        lambda x: (x / "global_step4").mkdir(parents=True) or (x / "latest").write_text("global_step4"),
        lambda _: None,
        "neither .metadata nor",
    ),
    "file": (
        lambda x: torch.save({}, x),
        lambda _: None,
        "theirs: got a file, .*: name the checkpoint's folder",
    ),
    "names of torchtitan": (
        like_torchtitan,
        lambda _: None,
        "theirs: got '.*' beside 'tok_embeddings.weight', expected a llama3 or qwen3 of torchtitan: pass segments",
    ),
    "one of zfunc": (
        own,
        lambda _: None,
        "theirs: got a checkpoint of zfunc, .*: go on from it as it is, by zfunc train --resume",
    ),
    "nothing": (
        lambda x: x.mkdir(),
        lambda _: None,
        "neither .metadata nor .* nor optimizer.pt.*: name the folder of one step",
    ),
}  # pyright: ignore


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_taken_up_is_refused_with_what_to_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, spoil, message = BAD[name]
    source, out = tmp_path / "theirs", tmp_path / "taken"
    if isinstance(make, str):
        SAVED[make](source, *trained())
    else:
        make(source)
    spoil(source)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        import_run(source, out, segments=segments(), groups=GROUPS)
    assert "executed" not in capsys.readouterr().out
    assert not out.exists() or not [*out.glob("step-*")]


def test_a_quantized_model_of_a_run_without_adapters_is_refused_with_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """zfunc import has no option for adapters: their configuration is in the run's folder."""
    transformers = pytest.importorskip("transformers")
    model, theirs = tmp_path / "model", tmp_path / "theirs"
    small: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(**small, num_attention_heads=2, num_key_value_heads=2)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config.save_pretrained(model)
    save_by_number(theirs, *trained())
    capsys.readouterr()
    assert main(["import", str(theirs), "--hf", str(model), "--out", str(tmp_path / "taken")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "which is quantized, for" in said
    assert (
        "without adapter_config.json, expected the model in 16 bits that training began with: name that"
        in said
    )
    assert "lora" not in said


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("a bug")])
def test_an_error_of_a_reader_is_none_of_the_files(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    SAVED["trainer, one process"](tmp_path / "theirs", *trained())
    monkeypatch.setattr("zfunc.checkpoint.trainer_files._by_name", fails)
    with pytest.raises(type(error), match="^a bug$"):
        import_run(tmp_path / "theirs", tmp_path / "taken", segments=segments(), groups=GROUPS)


def test_pickles_are_run_where_that_is_asked_for_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_deepspeed(tmp_path / "theirs", *trained(), stage=0)
    edit(tmp_path / "theirs" / MODEL, lambda saved: saved.update(client=Runs()))
    line = ["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "taken")]
    capsys.readouterr()
    assert main(line) == 2
    assert "add --allow-pickle" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="no exp_avg of 'norm.running_mean'.*name the model"):
        import_run(tmp_path / "theirs", tmp_path / "other", allow_pickle=True)
    assert "executed" in capsys.readouterr().out
    import_run(tmp_path / "theirs", tmp_path / "taken", segments=segments(), allow_pickle=True)
    with pytest.raises(ValueError, match="which holds files, expected a new folder"):
        import_run(tmp_path / "theirs", tmp_path / "taken", segments=segments(), allow_pickle=True)
