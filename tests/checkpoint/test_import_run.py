"""A training of FSDP2, Trainer, torchtitan or DeepSpeed goes on in zfunc: the same bits, and the same next loss.

Files of DeepSpeed are written here, in the layout of DeepSpeed 0.19.8: two ranks of it were run with gloo, for
stages 1, 2 and 3, with two groups of parameters and a frozen layer, and its `ds_to_universal` on 2 and 3. The
readers gave the bits of its zero_to_fp32 for stage 3, and of the source of universal files; 1 and 2 only in part.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import fork, played
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zfunc
from zfunc.checkpoint.dcp import export_dcp
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.import_run import import_run
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.cli.commands.import_ import adapter_flags
from zfunc.cli.main import main
from zfunc.errors import CheckpointError
from zfunc.train.trainer.schedules import TrainerSchedule

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MOMENTS = ("exp_avg", "exp_avg_sq")
RATE: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Small(nn.Module):
    """A model with a tied weight, a frozen one and buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.base(self.norm(self.embed(ids))))
        return nn.functional.cross_entropy(self.head(x), targets)


def batch(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 7, (2, 12), generator=torch.Generator().manual_seed(n))
    return ids[0], ids[1]


def trained(steps: int = 3) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **RATE)
    for n in range(steps):
        torch_step(model, optimizer, n)
    return model, optimizer


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> float:
    loss = model(*batch(n))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def segments() -> Any:
    return zfunc.segments(Small(), batch(0))


def program(own: Any = None, **settings: Any) -> Any:
    given: dict[str, Any] = {
        "device": "cpu",
        "precision": "fp32",
        "optimizer": zfunc.AdamW(**RATE),
        **settings,
    }
    return zfunc.compile(own or segments(), example=batch(0), **given)


# --- files of the other programs --------------------------------------------------------------------------------


def save_dcp(
    folder: Path, model: Small, optimizer: Any, *, flat: bool = False, key: str = "optimizer"
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {**weights, key: moments, "train_state": {"step": torch.tensor(3)}} if flat else None
    state = state or {"model": {f"module._orig_mod.{x}": t for x, t in weights.items()}, key: moments}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def save_tied(folder: Path, model: Small, optimizer: Any) -> None:
    """With moments by the other name of a tied weight, as another order of the modules has them."""
    weights, moments = get_state_dict(model, optimizer)
    states = moments["state"]
    states["head.weight"] = states.pop("embed.weight")  # pyright: ignore
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


def save_trainer(folder: Path, model: Small, optimizer: Any) -> None:
    """What Accelerate's save_fsdp_model and save_fsdp_optimizer write."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": moments}, checkpoint_id=folder / "optimizer_0", no_dist=True)


def save_by_number(folder: Path, model: Small, optimizer: Any) -> None:
    """What a Trainer of one process writes."""
    folder.mkdir()
    save_file(
        {x: t for x, t in model.state_dict().items() if x != "head.weight"}, folder / "model.safetensors"
    )
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def save_by_name(folder: Path, model: Small, optimizer: Any) -> None:
    """What a Trainer with FSDP and FULL_STATE_DICT writes."""
    folder.mkdir()
    weights, moments = get_state_dict(model, optimizer)
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save(moments, folder / "optimizer.bin")


@contextmanager
def classes_of_deepspeed() -> Iterator[Callable[..., Any]]:
    """A function that makes values of DeepSpeed's classes, which need not be installed, to be pickled."""
    made: dict[str, Any] = {}

    def value(path: str, **attributes: Any) -> Any:
        module, _, name = f"deepspeed.{path}".rpartition(".")
        if path not in made:
            for n in range(module.count(".") + 1):
                parent = module.rsplit(".", n)[0]
                sys.modules.setdefault(parent, ModuleType(parent))
            made[path] = type(name, (), {"__module__": module})
            setattr(sys.modules[module], name, made[path])
        x = made[path]()
        vars(x).update(attributes)
        return x

    before = {*sys.modules}
    try:
        yield value
    finally:
        for module in {*sys.modules} - before:
            del sys.modules[module]


def save_deepspeed(folder: Path, model: Small, optimizer: Any, *, stage: int, ranks: int = 2) -> None:
    """A checkpoint of ZeRO with two groups, matrices and the rest; stage 0 makes a universal one."""
    folder.mkdir(parents=True)
    named = {x: p.detach() for x, p in model.named_parameters() if p.requires_grad}
    state = {x: optimizer.state[p] for x, p in model.named_parameters() if p.requires_grad}
    kinds = {"fp32": named, **{k: {x: state[x][k] for x in named} for k in MOMENTS}}
    groups = [[x for x in named if named[x].ndim > 1], [x for x in named if named[x].ndim == 1]]
    frozen = {x: p.detach() for x, p in model.named_parameters() if not p.requires_grad}
    third = stage == 3
    for rank in range(ranks if third else 1):
        parts = {x: divided(t, ranks)[rank] for x, t in frozen.items()} if third else frozen
        empty = {x: t[:0] if third and x in named else t for x, t in model.state_dict().items()}
        saved = {
            "module": empty,
            "buffer_names": [x for x, _ in model.named_buffers()],
            "param_shapes": [{x: named[x].shape for x in group} for group in groups],
            "frozen_param_shapes": {x: t.shape for x, t in frozen.items()} if stage != 1 else None,
            "frozen_param_fragments": parts if stage != 1 else None,
            "shared_params": {"head.weight": "embed.weight"},
            **{"skipped_steps": 1, "global_steps": 4, "global_samples": 36, "dp_world_size": ranks},
        }
        prefix = f"zero_pp_rank_{rank}_" if third else ""
        torch.save(saved, folder / f"{prefix}mp_rank_00_model_states.pt")
    if stage == 0:
        for x in named:
            (folder / "zero" / x).mkdir(parents=True)
            for kind, values in kinds.items():
                torch.save({"param": values[x], "cat_dim": 0}, folder / "zero" / x / f"{kind}.pt")
        return
    for rank in range(ranks):
        with classes_of_deepspeed() as value:
            states = zero_states(kinds, groups, rank, ranks, value, third=third)
            torch.save(
                {"optimizer_state_dict": states, "ds_version": "0.19.8"},
                folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )


def zero_states(
    kinds: Any, groups: Any, rank: int, ranks: int, value: Callable[..., Any], *, third: bool
) -> dict[str, Any]:
    flats: dict[str, list[Tensor]] = {}
    places: list[dict[str, Any]] = [{} for _ in groups]
    for kind, values in kinds.items():
        flats[kind] = []
        for n, group in enumerate(groups):
            if third:
                flats[kind].append(torch.cat([divided(values[x], ranks)[rank] for x in group]))
                continue
            flat = torch.cat([values[x].flatten() for x in group])
            size, at = -(-len(flat) // (2 * ranks)) * 2, 0  # aligned to twice the ranks
            first, padding = rank * size, torch.zeros(2 * ranks * size)
            own = torch.cat([flat, padding])[first : first + size]
            flats[kind].append(own if kind != "fp32" else own[: max(0, len(flat) - first)])
            for x in group:
                start, stop = max(at, first), min(at + values[x].numel(), first + size)
                if start < stop:
                    place = {"numel": stop - start, "start": start - first}
                    places[n][x] = value("utils.tensor_fragment.fragment_address", **place)
                at += values[x].numel()
    inner = {
        "state": {n: {"step": torch.tensor(3.0), **{k: flats[k][n] for k in MOMENTS}} for n in range(2)},
        "param_groups": [{"params": [n], "lr": 1e-2} for n in range(2)],
    }
    common = {"loss_scaler": value("runtime.fp16.loss_scaler.LossScaler", cur_scale=1.0)}
    if third:
        own = {"fp32_flat_groups": flats["fp32"], "optimizer_state_dict": inner, "partition_count": ranks}
        return {**common, **own}
    own = {"single_partition_of_fp32_groups": flats["fp32"], "base_optimizer_state": inner}
    return {**common, **own, "partition_count": [ranks, ranks], "param_slice_mappings": places}


def divided(t: Tensor, ranks: int) -> list[Tensor]:
    size = -(-t.numel() // ranks)
    return [*torch.cat([t.flatten(), torch.zeros(ranks * size - t.numel())]).split(size)]


SAVED: dict[str, Callable[[Path, Small, Any], None]] = {
    "dcp": save_dcp,
    "dcp flattened": lambda *given: save_dcp(*given, flat=True),
    "dcp, optim": lambda *given: save_dcp(*given, key="optim"),
    "dcp, tied otherwise": save_tied,
    "trainer": save_trainer,
    "trainer, one process": save_by_number,
    "trainer, full state": save_by_name,
    "universal": lambda *given: save_deepspeed(*given, stage=0),
    **{f"zero {n}": lambda *given, n=n: save_deepspeed(*given, stage=n) for n in (1, 2, 3)},
}


GROUPS = [[x for x, p in Small().named_parameters() if p.requires_grad]]


# --- the same bits, and the same next loss -----------------------------------------------------------------------


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
        assert metrics.loss == pytest.approx(torch_step(model, optimizer, n), rel=2e-6)


def test_a_tied_weight_is_taken_once_where_no_model_says_so(tmp_path: Path) -> None:
    model = Small()
    model.norm, model.base = nn.Identity(), nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), **RATE)
    torch_step(model, optimizer, 0)
    save_dcp(tmp_path / "theirs", model, optimizer)
    assert import_run(tmp_path / "theirs", tmp_path / "taken").parameters == 2
    goes_on = program(zfunc.segments(model, batch(0)))
    state = zfunc.load(tmp_path / "taken", goes_on)
    loss = zfunc.train_step(goes_on, state, batch(1))[1].loss
    assert loss == pytest.approx(torch_step(model, optimizer, 1), rel=2e-6)


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
        ({"use_rslora": True, **HEAD}, "zfunc train has no option for modules_to_save, use_rslora: go on in"),
    ],
)
def test_the_options_that_go_on_with_adapters_are_told(
    lora: dict[str, Any], said: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=4, base_model_name_or_path="hub/model", **lora).save_pretrained(tmp_path)
    assert adapter_flags(tmp_path).startswith(said)


@pytest.mark.parametrize("settings", [{}, {"split_master": True}, {"moments": "16bit"}, {"moments": "8bit"}])
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
    again = import_run(tmp_path / "dcp", tmp_path / "again", segments=segments())
    fp32 = program(optimizer=zfunc.AdamW(**RATE))
    with CheckpointReader(open_checkpoint(again.path)) as reader:
        for name, p in model.named_parameters():
            for kind in MOMENTS if p.requires_grad else ():
                found = reader.tensors([WantedSlice(kind, name, 0, p.numel())])[kind]
                assert torch.equal(found, optimizer.state[p][kind].flatten()), (name, kind)
    first, second = (zfunc.load(x, fp32) for x in (tmp_path / "ours", tmp_path / "again"))
    losses = [zfunc.train_step(fp32, x, batch(3))[1].loss for x in (first, second)]
    assert losses[0] == losses[1] == pytest.approx(torch_step(model, optimizer, 3), rel=2e-6)


# --- what is refused ---------------------------------------------------------------------------------------------


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


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


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
    "torn metadata": ("dcp", lambda x: torn(x / ".metadata"), "metadata: got none that can be read .*: copy"),
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
        "states of 1 ranks, expected those of 2: copy",
    ),
    "one rank of two, 3": (
        "zero 3",
        lambda x: (x / RANK_1).unlink(),
        "states of 1 ranks, expected those of 2: copy",
    ),
    "no moment of a parameter": (
        "universal",
        lambda x: (x / "zero/head.bias/exp_avg.pt").unlink(),
        "no exp_avg of 'head.bias'",
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
        r"optimizer.pt: got no state of Adam, expected what state_dict\(\)",
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


def test_an_optimizer_without_both_moments_has_no_dcp(tmp_path: Path) -> None:
    ours = program(optimizer=zfunc.SGD(1e-2))
    zfunc.save(tmp_path / "ours", ours, zfunc.init(ours))
    with pytest.raises(ValueError, match="format: got 'embed.weight' with .*: export the weights alone"):
        export_dcp(tmp_path / "ours", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
