"""One GPT on one device under zfunc and its peers, each in a process of its own: speed, peaks of memory, losses.

All train from the same weights (`drawn`, numbers of bf16) on the same batches: AdamW with fp32 masters, products
in bf16, clipped, blocks recomputed in backward. What fails or is not installed is noted with its error, and the
rest go on. Results are written after each contestant; a later run of others adds to the file of the day.

    python -m benchmarks.side_by_side --size 1.3b --json benchmarks/results [--contestants "zfunc,DeepSpeed ZeRO-2"]
    python -m benchmarks.side_by_side --size largest --json benchmarks/results   # each at the host's limit
    python -m benchmarks.side_by_side --page    # the table and the plot of docs/benchmarks.md, from the results

DeepSpeed and torchao are no dependencies: benchmarks/gpu_wheels.sh.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn

from benchmarks.apart import ROOT, Row, about, each_apart, leave, run_apart, timed
from benchmarks.machine import make_parser, result_path, write
from benchmarks.step import (
    BETAS,
    CLIP,
    DTYPES,
    LR,
    WEIGHT_DECAY,
    ZERO_2,
    Contestant,
    Whole,
    config_of,
    made_batches,
    set_ranks,
    stepping,
    with_deepspeed,
    zfunc_program,
)
from zfunc.engine.program.specialize import specialize
from zfunc.engine.trace.segment import Segment
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import num_parameters
from zfunc.runtime.accelerator import accelerator_type

WIDE = {"seq_length": 1024, "vocab_size": 50257}
SIZES: dict[str, dict[str, int]] = {
    "1.3b": {**WIDE, "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16},
    "2.7b": {**WIDE, "num_layers": 32, "hidden_size": 2560, "num_attention_heads": 32},
    # as many layers as fit the host, for each contestant its own
    "largest": {**WIDE, "num_layers": 0, "hidden_size": 4096, "num_attention_heads": 32},
    "toy": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "seq_length": 64,
        "vocab_size": 256,
    },
}
EXTENSIONS = ROOT / "build/torch_extensions"  # that DeepSpeed builds: its CPU Adam, half a minute
Job = argparse.Namespace


# --- the same weights for all -----------------------------------------------------------------------------


def drawn(name: str, shape: Sequence[int], *, num_layers: int, device: torch.device) -> Tensor:
    """The initial value of a parameter, fp32 with numbers of bf16, by its name: as GPT-2 draws, on the device."""
    short = name.rpartition(".")[2]
    if short == "bias" or "lora_B" in name:
        return torch.zeros(*shape, device=device)
    if len(shape) == 1:
        return torch.ones(*shape, device=device)
    residual = any(part in name for part in ("attn_out", "down", "o_proj"))
    std = 0.02 / math.sqrt(2 * num_layers) if residual else 0.02
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    return torch.empty(*shape, device=device).normal_(0, std, generator=generator).bfloat16().float()


def filled(job: Job, dtype: torch.dtype) -> Whole:
    """The GPT on the host in `dtype`, with the weights of `drawn`; there is no second copy of them."""
    config = config_of(job)
    with torch.device("meta"):
        model = Whole(config).to(dtype)
    model.to_empty(device="cpu").tie()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = name.removeprefix("parts.")
            parameter.copy_(drawn(own, parameter.shape, num_layers=config.num_layers, device=source(job)))
    return model


def with_drawn(segments: Sequence[Segment], num_layers: int, device: torch.device) -> list[Segment]:
    """`segments` with initial values of `drawn`, made one segment at a time."""

    def initial(of: Segment, *_: int) -> dict[str, Tensor]:
        own = (p for p in of.parameters if p.name not in of.shared)
        return {p.name: drawn(p.name, p.shape, num_layers=num_layers, device=device).cpu() for p in own}

    return [evolve(s, initial=partial(initial, s)) for s in segments]


def source(job: Job) -> torch.device:
    """Where numbers are drawn: on a GPU, where that takes no time, else on the CPU; other numbers on each."""
    return torch.device(job.device if torch.device(job.device).type == "cuda" else "cpu")


# --- contestants ------------------------------------------------------------------------------------------


def ours(job: Job, **settings: Any) -> tuple[Contestant, Row]:
    """zfunc under `settings`, and what its plan says of memory."""
    segments = with_drawn(gpt_segments(config_of(job)), job.num_layers, source(job))
    batch = made_batches(job, 1)[0]
    program = zfunc_program(config_of(job), job, segments, recompute="all", example=batch, **settings)
    memory = specialize(program, batch).memory
    planned = {tier: peak.nbytes for tier, peak in memory.items()}
    return stepping(program), {"planned": planned, "settings": str(program.settings)}


def alone(job: Job) -> torch.device:
    """Begin a process group of this process alone, without a port; returns the peers' device."""
    device = torch.device(job.device)
    set_ranks()
    os.environ.update({"DS_SKIP_CUDA_CHECK": "1", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)})
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # there may be no other
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        torch.accelerator.set_device_index(device.index or 0)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def deepspeed(job: Job, **zero: Any) -> tuple[Contestant, Row]:
    """DeepSpeed under its settings `zero`, on the host's weights in bf16, as it is given a pretrained model."""
    alone(job)
    for lock in EXTENSIONS.rglob("lock"):  # of a build that was killed: torch waits for it for ever
        lock.unlink()
    return with_deepspeed(config_of(job), job, filled(job, DTYPES[job.precision]), zero), {}


def fsdp2(job: Job, *, offload: bool) -> tuple[Contestant, Row]:
    """FSDP2 with fp32 parameters, their gradients and AdamW on the host, or all on the device.

    The root has the embedding and the head, which share a weight; each block is a group of its own.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    device = alone(job)
    given: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[job.precision]),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy(),
    }
    model = filled(job, torch.float32)
    for name, part in model.parts.items():
        if name.startswith("block"):
            fully_shard(part, **given)
    fully_shard(model, **given)
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(batch: tuple[Tensor, Tensor]) -> float:
        loss = model(*(x.to(device) for x in batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, {}


def torchao(job: Job, *, masters: str) -> tuple[Contestant, Row]:
    """torchao's CPUOffloadOptimizer over torch's fused AdamW. Its weights on the host have the type of those on the
    device: "fp32" computes under autocast and moves twice the bytes; "bf16" has no fp32 masters, as torchtune's
    recipes use it.

    It copies gradients during backward, before their norm is known, so the host's copies are scaled.
    """
    from torchao.optim import CPUOffloadOptimizer

    device = torch.device(job.device)
    model = filled(job, DTYPES[masters]).to(device)
    model.tie()
    optimizer: Any = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    cast = torch.autocast(device.type, DTYPES[job.precision], enabled=masters != job.precision)

    def step(batch: tuple[Tensor, Tensor]) -> float:
        here = [x.to(device) for x in batch]
        with cast:
            loss = model(*here)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        scale = min(1.0, CLIP / (float(norm) + 1e-6))  # and all copies are there
        torch.accelerator.synchronize()
        if scale < 1:
            torch._foreach_mul_([x.grad for x in optimizer.param_d2h_map.values()], scale)
            small = [p.grad for group in optimizer.d_param_groups for p in group["params"]]
            if small:
                torch._foreach_mul_(small, scale)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, {}


def pinned(nbytes: float) -> float:
    """Bytes of host memory that torch page-locks for one tensor: a power of two."""
    return float(1 << (int(nbytes) - 1).bit_length())


def of_blocks(nbytes: float) -> float:
    """Bytes that torch page-locks for `nbytes` of blocks, a tensor each: of the 12 parts of a block's weights
    three, those of queries, keys and values, are one tensor, which takes the room of four."""
    return nbytes * 13 / 12


@frozen
class Way:
    """A contestant: the function that builds it, with its settings, and the bytes of host memory that it takes for
    a number of parameters, by arithmetic."""

    build: Callable[[Job], tuple[Contestant, Row]]
    host_bytes: Callable[[float], float]
    package: str | None = None


ZERO_3 = {
    **ZERO_2,
    "stage": 3,
    "offload_param": {"device": "cpu", "pin_memory": True},
}
# Host bytes, of zfunc as planned (tests/test_side_by_side.py): masters, moments and waiting gradients, or what 8
# and 16 bits have of them. DeepSpeed stage 2: fp32 masters and gradients and the 16-bit copy page-locked, each a
# single tensor; moments. Stage 3: masters, moments, gradients in parts of 1e9 page-locked, parameters by block, and
# a buffer of 16-bit gradients. FSDP2: fp32 parameters and gradients page-locked by block; moments. torchao:
# parameters and gradients page-locked by block, moments of their type.
WAYS: dict[str, Way] = {
    "zfunc": Way(ours, lambda n: 14 * n),
    "DeepSpeed ZeRO-2": Way(
        partial(deepspeed, **ZERO_2), lambda n: 2 * pinned(4 * n) + pinned(2 * n) + 8 * n, "deepspeed"
    ),
    "DeepSpeed ZeRO-3": Way(
        partial(deepspeed, **ZERO_3),
        lambda n: 12 * n + n / 1e9 * pinned(4e9) + of_blocks(2 * n) + pinned(2 * n),
        "deepspeed",
    ),
    "FSDP2": Way(partial(fsdp2, offload=True), lambda n: of_blocks(8 * n) + 8 * n),
    "zfunc 8bit": Way(partial(ours, moments="8bit"), lambda n: 8.032 * n),
    "zfunc defer": Way(partial(ours, defer=True), lambda n: 14 * n),
    "torchao bf16": Way(partial(torchao, masters="bf16"), lambda n: of_blocks(4 * n) + 4 * n, "torchao"),
    "zfunc params on host": Way(partial(ours, params_on="host"), lambda n: 14 * n),
    "zfunc update_on auto": Way(partial(ours, update_on="auto"), lambda n: 14 * n),
    "zfunc 8bit defer": Way(partial(ours, moments="8bit", defer=True), lambda n: 8.032 * n),
    "zfunc 16bit": Way(partial(ours, moments="16bit"), lambda n: 10 * n),
    "torchao fp32": Way(partial(torchao, masters="fp32"), lambda n: of_blocks(8 * n) + 8 * n, "torchao"),
    "FSDP2 on the device": Way(partial(fsdp2, offload=False), lambda n: 4 * n),
}
# Each a minute or more: what answers most comes first.
AT_LARGEST = "zfunc 8bit,DeepSpeed ZeRO-3,FSDP2,zfunc,DeepSpeed ZeRO-2"


def layers_of(name: str, job: Job) -> int:
    """The layers of the largest model that contestant `name` holds in `job.host_gb` of host memory."""

    def needs(layers: int) -> float:
        return WAYS[name].host_bytes(num_parameters(config_of(evolved(job, num_layers=layers))))

    layers = 1
    while needs(layers + 1) <= job.host_gb * 1e9 and layers < 200:
        layers += 1
    return layers


def evolved(job: Job, **changes: Any) -> Job:
    """A copy of the arguments `job` with `changes`."""
    return argparse.Namespace(**{**vars(job), **changes})


# --- measuring --------------------------------------------------------------------------------------------


def measure(name: str, job: Job) -> Row:
    """Train contestant `name` in this process; returns the row of its result."""
    way, start = WAYS[name], time.perf_counter()
    if job.size == "largest":
        job = evolved(job, num_layers=layers_of(name, job))
    if way.build is not ours and getattr(way.build, "func", None) is not ours and job.device == "pretend":
        job = evolved(job, device="cpu")  # which peers know
    device = torch.device(job.device)
    step, said = way.build(job)
    init_seconds = time.perf_counter() - start
    row = timed(step, made_batches(job, job.steps), warmup=job.warmup, device=device)
    return {
        **said,
        "parameters": num_parameters(config_of(job)),
        "num_layers": job.num_layers,
        "device": str(device),
        "tokens_per_second": job.batch_size * job.seq_length / row["seconds"],
        "init_seconds": init_seconds,
        **row,
        "versions": about(),
    }


def missing(name: str) -> str | None:
    """What contestant `name` needs and is not installed."""
    from importlib.util import find_spec

    package = WAYS[name].package
    return None if package is None or find_spec(package) else f"{package} is not installed"


def compared(rows: Sequence[Row], tolerance: float) -> str:
    """Give each row its largest difference in loss from the first that ran, relative; returns what they say."""
    ran = [row for row in rows if "losses" in row]
    ran = [row for row in ran if row["parameters"] == ran[0]["parameters"]]
    if len(ran) < 2:
        return "losses: nothing to compare"
    for row in ran:
        pairs = zip(row["losses"], ran[0]["losses"], strict=True)
        row["loss_difference"] = largest(abs(a - b) / abs(b) for a, b in pairs)
    apart = [row["name"] for row in ran if not row["loss_difference"] <= tolerance]
    most = largest(row["loss_difference"] for row in ran)
    text = f"losses of {len(ran)} contestants, {len(ran[0]['losses'])} steps: within {most:.1e}"
    text += f" of {ran[0]['name']}'s"
    return text + (f"; NOT within {tolerance:g}: {', '.join(apart)}" if apart else f", allowed {tolerance:g}")


def largest(values: Iterable[float]) -> float:
    """The largest of `values`; NaN if one is."""
    return max(values, key=lambda x: (math.isnan(x), x))


# --- tables -----------------------------------------------------------------------------------------------

PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- python -m benchmarks.side_by_side --page writes from here -->", "<!-- to here -->"
HEADS = ("", "parameters", "tokens/s", "a step, s", "device, GB", "host, GB", "last loss")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a table's row, for the result of a contestant."""
    if "error" in row:
        return (row["name"], "", "", "", "", "", row["error"].partition(" | ")[0][:80].replace("|", "/"))
    return (
        row["name"],
        f"{row['parameters'] / 1e9:.2f} B",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['seconds']:.3f}",
        f"{row['device_bytes'] / 1e9:.1f}" if "device_bytes" in row else "",
        f"{row['host_used_bytes'] / 1e9:.1f}",
        f"{row['losses'][-1]:.4f}",
    )


def stored(folder: Path) -> dict[str, dict[str, Any]]:
    """The newest results of each size in `folder`, by size, without toys."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("side-by-side-*.json"), key=lambda x: x.stem[-10:]):
        results = json.loads(path.read_text())["results"]
        found[results["arguments"]["size"]] = {**results, "file": path.name}
    return {size: found[size] for size in SIZES if size in found and size != "toy"}


def page(results: dict[str, dict[str, Any]]) -> str:
    """The generated part of docs/benchmarks.md: a table for each size; without results, nothing."""
    from docs.markdown_table import table

    parts: list[str] = []
    for size, of in results.items():
        card, job = of["about"], job_of(argparse.Namespace(**of["arguments"]))
        held = f"the largest that {job.host_gb:g} GB of host memory hold" if size == "largest" else size
        parts.append(
            f"A GPT, {held}: {job.batch_size} x {job.seq_length:,} tokens a step, "
            f"{job.precision}, clipped, blocks recomputed, on one {card['accelerator']} beside "
            f"{card['cores']} cores (`benchmarks/results/{of['file']}`). L{of['compared'][1:]}."
        )
        parts.append(table(HEADS, map(cells, of["rows"])))
    if parts:
        parts.insert(0, "## Beside its peers on a GPU")
        parts.append("![Tokens a second and peaks of memory, by contestant](side_by_side.svg)")
    return "\n\n".join(parts)


def with_page(text: str, before: str) -> str:
    """`before`, the text of docs/benchmarks.md, with `text` in place of its generated part."""
    first, _, rest = before.partition(BEGIN)
    middle = f"\n{text}\n\n" if text else ""
    return f"{first}{BEGIN}\n{middle}{END}{rest.partition(END)[2]}"


def plot(results: dict[str, dict[str, Any]], path: str) -> None:
    """Write a plot to `path`: of each contestant the tokens a second, and its peaks of device and host."""
    from benchmarks.plots import COLORS, figure, save

    fig, axes = figure(2, title="One GPT under zfunc and its peers")
    rows = [(size, row) for size, of in results.items() for row in of["rows"] if "error" not in row]
    fig.set_size_inches(10, 1.2 + 0.22 * len(rows))
    names = [f"{row['name']}, {size}" for size, row in rows]
    colors = [COLORS["fp32"] if row["name"].startswith("zfunc") else COLORS["deepspeed"] for _, row in rows]
    at = range(len(rows))
    axes[0].barh(at, [row["tokens_per_second"] for _, row in rows], color=colors)
    axes[0].set_yticks(at, labels=names)
    axes[0].set_xlabel("tokens a second")
    device = [row.get("device_bytes", 0) / 1e9 for _, row in rows]
    axes[1].barh(at, device, color=COLORS["16bit"], label="device")
    host = [row["host_used_bytes"] / 1e9 for _, row in rows]
    axes[1].barh(at, host, left=device, color=COLORS["skeleton"], label="host")
    axes[1].set_yticks(at, labels=[""] * len(rows))
    axes[1].set_xlabel("peak memory, GB")
    axes[1].legend(frameon=False, fontsize=7)
    for ax in axes:
        ax.invert_yaxis()
    save(fig, path)


# --- the command ------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__, batch_size=8, steps=20, warmup=5)
    p.add_argument("--size", choices=[*SIZES], default="1.3b")
    for name in SIZES["toy"]:
        p.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of that of the size")
    p.add_argument(
        "--contestants",
        help=f"of {', '.join(WAYS)} (default: all; of the largest {AT_LARGEST})",
    )
    p.add_argument("--precision", choices=list(DTYPES), default="bf16")
    p.add_argument("--device", default=accelerator_type() or "cpu")
    p.add_argument("--host-gb", type=float, default=118.0, help="of host memory, for the largest (of 137)")
    p.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        help="of losses: bf16 in another order, 8-bit moments",
    )
    p.add_argument("--limit", type=float, default=150.0, help="seconds of a contestant")
    p.add_argument("--seconds", type=float, default=450.0, help="of all contestants")
    p.add_argument("--alone", metavar="CONTESTANT", help="measure this one, in this process")
    p.add_argument("--page", action="store_true", help="write docs/benchmarks.md and docs/side_by_side.svg")
    return p


def job_of(args: argparse.Namespace) -> Job:
    """The arguments with the sizes of `args.size` where none is given, and what `benchmarks.step` asks of them."""
    given = {name: getattr(args, name) or size for name, size in SIZES[args.size].items()}
    if args.size == "largest":
        given["num_layers"] = args.num_layers or 1
    return evolved(args, **given, micro_batches=1)


def words_of(args: argparse.Namespace, name: str) -> Iterator[str]:
    """The words of the command that measures contestant `name` as `args` say."""
    for key, value in vars(args).items():
        if value is not None and key not in ("alone", "contestants", "json", "limit", "seconds", "page"):
            yield from (f"--{key.replace('_', '-')}", str(value))
    yield from ("--alone", name)


def main() -> None:
    args = parser().parse_args()
    if args.page:
        results = stored(ROOT / "benchmarks/results")
        PAGE.write_text(with_page(page(results), PAGE.read_text()))
        if results:
            plot(results, str(PAGE.with_name("side_by_side.svg")))
        return
    if args.alone:
        leave(measure(args.alone, job_of(args)))
        return
    default = AT_LARGEST if args.size == "largest" else ",".join(WAYS)
    names = [x.strip() for x in (args.contestants or default).split(",")]
    if unknown := set(names) - {*WAYS}:
        raise SystemExit(
            f"--contestants: got {', '.join(sorted(unknown))}, expected some of {', '.join(WAYS)}"
        )
    label = f"side-by-side-{args.size}"
    rows = [row for row in earlier(args.json, label, vars(args)) if row["name"] not in names]
    said = ""

    def keep(row: Row) -> None:
        nonlocal said
        rows.append(row)
        said = compared(rows, args.tolerance)
        name, *others = cells(row)
        print(f"{name:21}" + " ".join(f"{cell:>10}" for cell in others), flush=True)
        write(args.json, label, {"arguments": vars(args), "about": about(), "compared": said, "rows": rows})

    def run(name: str, limit: float) -> Row:
        if lacks := missing(name):
            return {"error": lacks}
        return run_apart("benchmarks.side_by_side", [*words_of(args, name)], device=args.device, limit=limit)

    each_apart(names, run, seconds=args.seconds, limit=args.limit, keep=keep)
    print(said)
    if "NOT" in said:
        raise SystemExit(1)


def earlier(folder: str | None, label: str, arguments: dict[str, Any]) -> list[Row]:
    """The rows that a run of today with the same arguments left in `folder`."""
    path = result_path(folder, label) if folder else None
    if path is None or not path.is_file():
        return []
    found = json.loads(path.read_text())["results"]
    left_out = ("contestants", "seconds", "limit", "json")
    same = all(found["arguments"].get(k) == v for k, v in arguments.items() if k not in left_out)
    return found["rows"] if same else []


if __name__ == "__main__":
    main()
