"""Trainings of FSDP2 and of Trainer, run here, are saved in their middle and go on in zfunc with their losses."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from foreign_files import (
    RATE,
    batch,
    program,
)
from forked import fork, played
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import zfunc
from zfunc.cli.commands.import_ import adapter_flags
from zfunc.cli.main import main
from zfunc.train.trainer.schedules import TrainerSchedule

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def two_ranks(work: Callable[[int, Path], None], out: Path) -> None:
    """Two processes, each with work(rank, out) in a group of gloo."""

    def rank(n: int) -> None:
        os.environ |= {"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": "2"}
        os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=n, world_size=2)
        work(n, out)
        dist.destroy_process_group()

    ranks = [fork(partial(rank, n)) for n in range(2)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(x, 0)[1]) != 0 for x in ranks))


def fsdp_run(out: Path) -> None:
    """A loop of one's own with FSDP 2, which saves in its middle."""
    two_ranks(fsdp_rank, out)


def fsdp_rank(rank: int, out: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    fully_shard(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), **RATE), []
    for n in range(5):
        if n == 3:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=out / "theirs")
        ids, targets = (x.view(2, 6)[rank] for x in batch(n))
        loss = nn.functional.cross_entropy(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / 2)
        losses.append(mean.item())
    (out / f"rank_{rank}.json").write_text(json.dumps(losses[3:]))


@pytest.mark.slow
def test_two_ranks_of_fsdp2_go_on_in_one_process_of_zfunc(tmp_path: Path) -> None:
    losses = json.loads((played(fsdp_run, tmp_path) / "rank_0.json").read_text())
    assert len([*(tmp_path / "theirs").glob("*.distcp")]) == 2
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "taken")]) == 0
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    own = zfunc.segments(model, batch(0), loss=nn.functional.cross_entropy)
    goes_on = program(own)
    state = zfunc.load(tmp_path / "taken", goes_on)
    for n, loss in enumerate(losses, 3):
        state, metrics = zfunc.train_step(goes_on, state, batch(n))
        assert metrics.loss == pytest.approx(loss, rel=2e-6)


# A Trainer's own run: FSDP 2 in two processes, which saves in its middle
LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
SHARDED = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
SHARDED |= {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
MIDDLE, END = 3, 6  # steps
ARGS = {"use_cpu": True, "report_to": [], "max_steps": END, "save_steps": MIDDLE, "logging_steps": 1}
ARGS |= {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "weight_decay": 0.1, "max_grad_norm": 1.0}


def trainer_run(out: Path, tied: str) -> None:
    """Two processes of a Trainer, their model in out/model and their run in out/run."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied == "tied")
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(out / "model")
    two_ranks(partial(trainer_rank, model), out)


def trained_by(model: Any, args: Any) -> tuple[Any, list[Any]]:
    """A Trainer after its run, and the token numbers of each step."""
    import transformers

    rows = torch.randint(0, 61, (24, 16), generator=torch.Generator().manual_seed(1))
    trainer = transformers.Trainer(model, args, train_dataset=[{"input_ids": x, "labels": x} for x in rows])
    seen, step = [], trainer.training_step

    def training_step(module: Any, inputs: Any, *more: Any) -> Any:
        seen.append(inputs["input_ids"].tolist())
        return step(module, inputs, *more)

    trainer.training_step = training_step
    trainer.train()
    return trainer, seen


def told_by(trainer: Any) -> list[Any]:
    """Loss and gradient norm of each step."""
    return [[x["loss"], x["grad_norm"]] for x in trainer.state.log_history if "loss" in x]


def trainer_rank(model: Any, rank: int, out: Path) -> None:
    import transformers
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    given = {"output_dir": str(out / "run"), "ddp_backend": "gloo", "fsdp": True, "fsdp_config": {**SHARDED}}
    args = transformers.TrainingArguments(**ARGS, **given, per_device_train_batch_size=2)
    assert args.device.type == "cpu"
    # Accelerate takes DDP for FSDP where all devices are CPUs; of several devices it does not ask which
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer, seen = trained_by(model, args)
    assert type(trainer.model_wrapped).__name__ == "FSDPLlamaForCausalLM"
    told = told_by(trainer)
    (out / f"rank_{rank}.json").write_text(json.dumps({"rows": seen, "told": told}))


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_a_trainer_with_fsdp_goes_on_in_one_process_of_zfunc(tied: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    out = played(trainer_run, tmp_path, tied)
    ranks = [json.loads((out / f"rank_{n}.json").read_text()) for n in (0, 1)]
    middle, end = (str(out / "run" / f"checkpoint-{n}") for n in (MIDDLE, END))
    assert main(["import", middle, "--hf", str(out / "model"), "--out", str(out / "taken")]) == 0
    assert (
        main(["import", end, "--out", str(out / "theirs")]) == 0
    )  # tied weights are found without the model
    steps = map(torch.tensor, joined(*(x["rows"] for x in ranks)))
    goes_on, state = gone_on(zfunc.hf.load(out / "model")[1], out / "taken", [*steps], ranks[0]["told"])
    theirs = dict(zfunc.weights(goes_on, zfunc.load(out / "theirs", goes_on), dtype="fp32"))
    for name, t in zfunc.weights(goes_on, state, dtype="fp32"):
        torch.testing.assert_close(t, theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def gone_on(segments: Any, taken: Path, steps: list[Tensor], told: list[Any]) -> tuple[Any, Any]:
    """The program and State after the Trainer's other steps, whose losses and gradient norms are the Trainer's."""
    rate = TrainerSchedule("linear", {}, lr=1e-2, warmup=0, total=END)
    own = {**RATE, "lr": rate, "betas": (0.9, 0.999), "decay": zfunc.matrices_only}
    batches = [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in steps]
    given = {"device": "cpu", "precision": "fp32", "clip_norm": 1.0, "optimizer": zfunc.AdamW(**own)}
    program = zfunc.compile(segments, example=batches[0], **given)
    state = zfunc.load(taken, program)
    assert state.step == MIDDLE
    for n in range(MIDDLE, END):
        state, metrics = zfunc.train_step(program, state, batches[n])
        assert [metrics.loss, metrics.grad_norm] == pytest.approx(told[n], rel=5e-6)
    return program, state


def joined(*ranks: Any) -> list[list[Any]]:
    return [[row for rank in step for row in rank] for step in zip(*ranks, strict=True)]


HEAD: dict[str, Any] = {"modules_to_save": ["lm_head"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft calls it
@pytest.mark.parametrize("lora", [{}, HEAD, None], ids=["adapters", "adapters and a head", "whole model"])
def test_a_trainer_of_one_process_goes_on_in_zfunc(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(tmp_path / "model")
    if lora is not None:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **lora)
        model = peft.get_peft_model(model, config)
    args = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4}
    trainer, seen = trained_by(model, transformers.TrainingArguments(**ARGS, **args))
    middle = tmp_path / "run" / f"checkpoint-{MIDDLE}"
    line = ["import", str(middle), "--out", str(tmp_path / "taken")]
    assert main(line) == 2  # moments have numbers alone
    assert main([*line, "--hf", str(tmp_path / "model")]) == 0
    segments = zfunc.hf.load(tmp_path / "model", lora=None if lora is None else middle)[1]
    gone_on(segments, tmp_path / "taken", [*map(torch.tensor, seen)], told_by(trainer))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({}, "--lora 4 --lora-alpha 8"),
        ({"lora_alpha": 6, "target_modules": ["v", "q"]}, "--lora 4 --lora-alpha 6 --lora-targets q,v"),
        ({"target_parameters": ["b", "a"]}, "--lora 4 --lora-alpha 8 --lora-target-parameters b,a"),
        ({"use_dora": True, "target_modules": ["q"]}, "--lora 4 --lora-alpha 8 --use-dora --lora-targets q"),
        ({"use_rslora": True, **HEAD}, "zfunc train has no option for modules_to_save, use_rslora: go on in"),
    ],
)
def test_the_options_that_go_on_with_adapters_are_told(
    lora: dict[str, Any], said: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=4, base_model_name_or_path="hub/model", **lora).save_pretrained(tmp_path)
    assert adapter_flags(tmp_path).startswith(said)
