"""A small model, a training of it in plain PyTorch, and its checkpoint as other programs write it.

Files of DeepSpeed have the layout of DeepSpeed 0.19.8: two ranks of it were run with gloo, for stages 1, 2 and 3,
with two groups of parameters and a frozen layer, and its `ds_to_universal` on 2 and 3. The readers gave the bits of
its zero_to_fp32 for stage 3, and of the source of universal files; 1 and 2 only in part.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zfunc

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
        torch_step(model, optimizer, batch(n))
    return model, optimizer


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, example: tuple[Tensor, Tensor]) -> float:
    loss = model(*example)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@cache
def segments() -> Any:
    """Of a new model: cut once, as it is the same one."""
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


def save_steps(folder: Path, model: Small, optimizer: Any) -> None:
    """A folder of steps, as torchtitan has it: an earlier one, the last, and one that was cut short."""
    (folder / "step-9").mkdir(parents=True)
    (folder / "step-9" / ".metadata").write_bytes(b"")
    save_dcp(folder / "step-10", model, optimizer)
    (folder / "step-11").mkdir()


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


def save_by_number(folder: Path, model: Small, optimizer: Any, *, zipped: bool = True) -> None:
    """What a Trainer of one process writes; before torch 1.6 in files that are not `zipped`."""
    folder.mkdir()
    save_file(
        {x: t for x, t in model.state_dict().items() if x != "head.weight"}, folder / "model.safetensors"
    )
    given: dict[str, Any] = {"_use_new_zipfile_serialization": zipped}
    torch.save(optimizer.state_dict(), folder / "optimizer.pt", **given)


def save_by_name(folder: Path, model: Small, optimizer: Any) -> None:
    """What a Trainer with FSDP and FULL_STATE_DICT writes."""
    folder.mkdir()
    weights, moments = get_state_dict(model, optimizer)
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save(moments, folder / "optimizer.bin")


def save_shards(folder: Path, model: Small, optimizer: Any) -> None:
    """What a Trainer with FSDP writes whose weights are too large for one file."""
    folder.mkdir()
    weights, moments = get_state_dict(model, optimizer)
    own = {x: t for x, t in weights.items() if x != "head.weight"}
    files = {x: f"model-0000{n % 2 + 1}-of-00002.safetensors" for n, x in enumerate(own)}
    for file in {*files.values()}:
        save_file({x: own[x] for x in own if files[x] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
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


def save_deepspeed(
    folder: Path, model: nn.Module, optimizer: Any, *, stage: int, ranks: int = 2, frozen: bool = True
) -> None:
    """A checkpoint of ZeRO with two groups, matrices and the rest; stage 0 makes a universal one. Without `frozen`,
    as DeepSpeed's `exclude_frozen_parameters` has it."""
    folder.mkdir(parents=True)
    named = {x: p.detach() for x, p in model.named_parameters() if p.requires_grad}
    state = {x: optimizer.state[p] for x, p in model.named_parameters() if p.requires_grad}
    kinds = {"fp32": named, **{k: {x: state[x][k] for x in named} for k in MOMENTS}}
    groups = [[x for x in named if named[x].ndim > 1], [x for x in named if named[x].ndim == 1]]
    groups = [x for x in groups if x]
    others = {x: p.detach() for x, p in model.named_parameters() if not p.requires_grad}
    saved_module = {x: t for x, t in model.state_dict().items() if frozen or x not in others}
    third = stage == 3
    for rank in range(ranks if third else 1):
        parts = {x: divided(t, ranks)[rank] for x, t in others.items()} if third else others
        empty = {x: t[:0] if third and x in named else t for x, t in saved_module.items()}
        saved = {
            "module": empty,
            "buffer_names": [x for x, _ in model.named_buffers()],
            "param_shapes": [{x: named[x].shape for x in group} for group in groups],
            "frozen_param_shapes": {x: t.shape for x, t in others.items()} if stage != 1 and frozen else None,
            "frozen_param_fragments": parts if stage != 1 and frozen else None,
            "shared_params": {"head.weight": "embed.weight"} if frozen else {},
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


def save_zero_steps(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """A folder of steps of DeepSpeed, without its file `latest`, of which the last is not the last by name."""
    for step, ranks in ((9, 1), (10, 2)):
        save_deepspeed(folder / f"global_step{step}", model, optimizer, stage=2, ranks=ranks)
    (folder / "global_step9" / "mp_rank_00_model_states.pt").unlink()


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
        "state": {
            n: {"step": torch.tensor(3.0), **{k: flats[k][n] for k in MOMENTS}} for n in range(len(groups))
        },
        "param_groups": [{"params": [n], "lr": 1e-2} for n in range(len(groups))],
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
    "dcp, of steps": save_steps,
    "trainer": save_trainer,
    "trainer, one process": save_by_number,
    "trainer, full state": save_by_name,
    "trainer, in shards": save_shards,
    "trainer, torch before 1.6": lambda *given: save_by_number(*given, zipped=False),
    "zero 2, without its pointer": save_zero_steps,
    "universal": lambda *given: save_deepspeed(*given, stage=0),
    **{f"zero {n}": lambda *given, n=n: save_deepspeed(*given, stage=n) for n in (1, 2, 3)},
}


GROUPS = [[x for x, p in Small().named_parameters() if p.requires_grad]]
