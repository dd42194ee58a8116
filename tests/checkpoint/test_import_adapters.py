"""Adapters of peft, sharded or in one file, go on in zfunc over a base that is not in their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import MOMENTS, RATE, save_deepspeed
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import zfunc
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.cli.main import main

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft calls it
]
LLAMA = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}


def save_sharded(folder: Path, model: Any, optimizer: Any) -> None:
    """What Accelerate's save_fsdp_model(adapter_only=True) and save_fsdp_optimizer write."""
    moments = get_state_dict(model, optimizer)[1]
    weights = peft.get_peft_model_state_dict(model)
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": moments}, checkpoint_id=folder / "optimizer_0", no_dist=True)


def save_whole(folder: Path, model: Any, optimizer: Any) -> None:
    """A loop of one's own with FSDP2: the base is in the files."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


def save_one(folder: Path, model: Any, optimizer: Any) -> None:
    """What a Trainer of one process writes."""
    save_file(peft.get_peft_model_state_dict(model), folder / "adapter_model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def save_zero(folder: Path, model: Any, optimizer: Any, stage: int) -> None:
    """What a Trainer with DeepSpeed writes: save_checkpoint(exclude_frozen_parameters=True)."""
    save_deepspeed(folder / "global_step3", model, optimizer, stage=stage, frozen=False)
    (folder / "latest").write_text("global_step3")


FORMS: dict[str, Any] = {
    "FSDP": (save_sharded, {}),
    "FSDP, DoRA": (save_sharded, {"use_dora": True}),
    "FSDP2 with its base": (save_whole, {}),
    "one process, DoRA": (save_one, {"use_dora": True}),
    "ZeRO 2, DoRA": (lambda *given: save_zero(*given, stage=2), {"use_dora": True}),
    "ZeRO 3": (lambda *given: save_zero(*given, stage=3), {}),
}


# Its form has "FSDP, DoRA", its adapters those of others.
@pytest.mark.parametrize("form", [pytest.param(x, marks=[pytest.mark.slow] * (x == "FSDP")) for x in FORMS])
def test_adapters_go_on_with_the_same_bits_and_the_same_loss(form: str, tmp_path: Path, capsys: Any) -> None:
    save, given = FORMS[form]
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    base.save_pretrained(tmp_path / "model")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **given)
    model = peft.get_peft_model(base, config)
    own = [p for p in model.parameters() if p.requires_grad]
    groups = [own] if save is not save_one else [own, []]  # a Trainer has one without decay
    optimizer = torch.optim.AdamW([{"params": x} for x in groups], **RATE)

    def step(n: int) -> float:
        x = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(n))
        loss = model(input_ids=x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for n in range(3):
        step(n)
    (theirs := tmp_path / "theirs").mkdir()
    save(theirs, model, optimizer)
    line = ["import", str(theirs), "--out", str(tmp_path / "taken"), "--hf", str(tmp_path / "model")]
    capsys.readouterr()
    for wrong in (line, line[:-2]) if save is not save_one else ():
        assert main(wrong) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "got adapters of peft, expected their configuration and their base" in said
        assert "write adapter_config.json into the folder" in said
        assert "pass --hf" in said
    model.peft_config["default"].save_pretrained(theirs)
    assert main(line) == 0
    taken = next((tmp_path / "taken").glob("step-*"))
    with CheckpointReader(open_checkpoint(taken)) as reader:
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert torch.equal(reader.weights(name, 0, p.numel()), p.detach().flatten()), name
            for kind in MOMENTS if p.requires_grad else ():
                found = reader.tensors([WantedSlice(kind, name, 0, p.numel())])[kind]
                assert torch.equal(found, optimizer.state[p][kind].flatten()), (name, kind)
    x = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(3))
    segments = zfunc.hf.load(tmp_path / "model", lora=theirs)[1]
    program = zfunc.compile(segments, example={"input_ids": x, "labels": x}, device="cpu", precision="fp32")
    state = zfunc.load(tmp_path / "taken", program)
    _, metrics = zfunc.train_step(program, state, {"input_ids": x, "labels": x})
    assert metrics.loss == pytest.approx(step(3), rel=2e-6)
    if save is save_one:  # the base alone may be missing
        left = load_file(file := theirs / "adapter_model.safetensors")
        save_file({name: t for name, t in left.items() if "lora_B" not in name}, file)
        assert main([*line[:3], str(tmp_path / "again"), *line[4:]]) == 2
        assert "lora_B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '{"r": 4',
            "adapter_config.json: got what peft does not read .*, expected a LoraConfig of peft: copy it",
        ),
        ("[]", "got what peft does not read .TypeError: .*, expected a LoraConfig"),
        ('{"peft_type": "magic"}', "got what peft does not read .KeyError: 'magic'"),
        ('{"peft_type": "VERA"}', "got a VeraConfig, expected a LoraConfig"),
        ('{"peft_type": "LORA", "r": "x"}', "lora.r: got 'x', expected a whole number of at least 1"),
    ],
)
def test_a_folder_whose_configuration_is_no_loras_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    config = transformers.LlamaConfig(**LLAMA)
    with pytest.raises(ValueError, match=reason):
        zfunc.hf.describe(config, lora=tmp_path)
