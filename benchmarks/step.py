"""A whole training step: zfunc against plain PyTorch and, if it is installed, DeepSpeed with CPU offload.

The same model, data, precision and update; the contestants take turns in one run, and their losses are compared
too. Figures are medians of ratios, turn by turn, with the quarter of the turns that is below and above; on a GPU
also absolute times. Where memory lies decides up to 3 % of a contestant's time for as long as a process lives:
`--processes` repeats the turns in as many.

    python -m benchmarks.step [--num-layers 6 --hidden-size 256 ...] [--json FILE_OR_FOLDER]

With `--recompute all,none,min-cut` it compares zfunc's default with its counterpart instead, each in turn: blocks
checkpointed in PyTorch for "all", and nothing for "none" and "min-cut".

With `--outside LAYERS,...` it times instead what `train_step` does outside the executor, for tiny models of as many
layers: Python that should not grow with the number of parameters.
"""

import argparse
import gc
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from attrs import define, field
from torch.utils.checkpoint import checkpoint

import zfunc
from benchmarks.machine import SMALL_GPT, describe, make_parser, quarters, ratios, write
from zfunc.core.optimizer_state import Moments
from zfunc.engine.program.program import Program
from zfunc.engine.trace.segment import Segment
from zfunc.models.gpt import modules
from zfunc.models.gpt_config import GPTConfig
from zfunc.runtime.accelerator import accelerator_type

LR, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Contestant = Callable[[tuple[torch.Tensor, torch.Tensor]], float]
# For a process that no launcher started: without these DeepSpeed asks MPI, if there is one.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}
ZERO_2 = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu"},
    "contiguous_gradients": True,
    "overlap_comm": True,
}


def built(config: GPTConfig) -> list[tuple[str, torch.nn.Module]]:
    torch.manual_seed(0)
    return list(modules(config))


def zfunc_program(
    config: GPTConfig,
    args: argparse.Namespace,
    segments: Sequence[Segment] | None = None,
    moments: Moments = "fp32",
    **settings: Any,
) -> Program:
    """A program of zfunc under `settings`, of `segments`, or of the modules of `config`."""
    if segments is None:
        tied = {"out.weight": "embed.tok.weight"}
        segments = [zfunc.segment(n, m, share=tied if n == "head" else None) for n, m in built(config)]
    return zfunc.compile(
        segments,
        optimizer=zfunc.AdamW(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, moments=moments),
        precision=args.precision,
        clip_norm=CLIP,
        micro_batches=args.micro_batches,
        device=args.device,
        **settings,
    )


def with_zfunc(config: GPTConfig, args: argparse.Namespace, **settings: Any) -> Contestant:
    """A contestant: a function that trains one step with zfunc under `settings`."""
    return stepping(zfunc_program(config, args, **settings))


def stepping(program: Program) -> Contestant:
    """A contestant: a function that trains one step of `program`, from a new State on."""
    states = [zfunc.init(program)]

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        states[0], metrics = zfunc.train_step(program, states[0], batch)
        return metrics.loss

    return step


class Whole(torch.nn.Module):
    """The GPT as one nn.Module, for plain PyTorch; blocks under activation checkpointing if
    `checkpointed`."""

    def __init__(self, config: GPTConfig, *, checkpointed: bool = True) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.parts = torch.nn.ModuleDict(built(config))
        self.tie()

    def tie(self) -> None:
        """Share the token embedding with the output projection; again after a move, which may copy it."""
        self.parts["head"].out.weight = self.parts["embed"].tok.weight

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        *body, head = self.parts.values()
        x = body[0](x)
        for block in body[1:]:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return head(x, targets)


def with_torch(config: GPTConfig, args: argparse.Namespace, *, checkpointed: bool = True) -> Contestant:
    """A contestant: a step of plain PyTorch with checkpointed blocks, clip_grad_norm_ and fused AdamW."""
    model = Whole(config, checkpointed=checkpointed).to(args.device, DTYPES[args.precision])
    model.tie()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        total = 0.0
        for x, y in zip(*(t.chunk(args.micro_batches) for t in batch), strict=True):
            loss = model(x.to(args.device), y.to(args.device)) / args.micro_batches
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def set_ranks() -> None:
    """Set the variables that a launcher sets, for one process, unless a launcher started this one."""
    if "RANK" not in os.environ:
        os.environ.update(ALONE)


def deepspeed_alone() -> Any:
    """The module `deepspeed`, for one process unless a launcher started it, with as many threads as before."""
    threads = torch.get_num_threads()
    set_ranks()
    import deepspeed

    torch.set_num_threads(threads)
    return deepspeed


def with_deepspeed(
    config: GPTConfig,
    args: argparse.Namespace,
    model: torch.nn.Module | None = None,
    zero: Mapping[str, Any] = ZERO_2,
) -> Contestant:
    """A contestant: one step of DeepSpeed on `model`, or on that of `config`, with its settings `zero`: stage 2
    with the optimizer offloaded to the CPU."""
    settings = {
        "train_micro_batch_size_per_gpu": args.batch_size // args.micro_batches,
        "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": args.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {**zero},
    }
    engine, *_ = deepspeed_alone().initialize(model=model or Whole(config), config=settings)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        total = 0.0
        for x, y in zip(*(t.chunk(args.micro_batches) for t in batch), strict=True):
            loss = engine(x.to(engine.device), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / args.micro_batches
        return total

    return step


def contestants(config: GPTConfig, args: argparse.Namespace) -> dict[str, Callable[[], Contestant]]:
    """Functions, by contestant's name, that build the contestant and thereby allocate its memory."""
    ours = lambda **settings: partial(with_zfunc, config, args, **settings)  # noqa: E731
    chosen: dict[str, Callable[[], Contestant]] = {"torch": partial(with_torch, config, args)}
    for schedule in ("Serial", "Overlapped", "Interleaved"):
        chosen[f"zfunc {schedule}"] = ours(schedule=schedule)
    chosen["zfunc deferred"] = ours(defer=True)
    chosen["zfunc min-cut"] = ours(recompute="min-cut")
    if args.compile_segments:
        chosen["zfunc compiled"] = ours(compile_segments=True)
    if torch.device(args.device).type == "cuda":  # which alone has graphs
        chosen["zfunc graphs"] = ours(compile_segments="reduce-overhead")
    if args.device != "cpu" and find_spec("deepspeed"):
        chosen["DeepSpeed"] = partial(with_deepspeed, config, args)
    return chosen


def counterparts(
    config: GPTConfig, args: argparse.Namespace
) -> tuple[dict[str, str], dict[str, Callable[[], Contestant]]]:
    """The contestants: zfunc in each mode of `recompute`, and PyTorch. Returns each one's PyTorch
    counterpart, and builders."""
    modes = args.recompute.split(",")
    other = {mode: "torch" if mode == "all" else "torch, all kept" for mode in modes}
    chosen: dict[str, Callable[[], Contestant]] = {
        name: partial(with_torch, config, args, checkpointed=name == "torch") for name in other.values()
    }
    chosen |= {f"zfunc {mode}": partial(with_zfunc, config, args, recompute=mode) for mode in modes}
    return {**{name: name for name in other.values()}, **{f"zfunc {x}": other[x] for x in modes}}, chosen


@define
class Trial:
    """One contestant's seconds and losses by step, or the text of the error with which it failed."""

    seconds: list[float] = field(factory=list)
    cpu_seconds: list[float] = field(factory=list)  # of all threads of this process
    losses: list[float] = field(factory=list)
    error: str = ""

    def turn(self, step: Contestant, batch: tuple[torch.Tensor, torch.Tensor], *, counts: bool) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        self.losses.append(step(batch))
        if counts:
            self.seconds.append(time.perf_counter() - start)
            self.cpu_seconds.append(time.process_time() - cpu_start)

    def add(self, other: "Trial") -> None:
        """Append the turns that another process measured."""
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.losses += other.losses
        self.error = self.error or other.error


def made_batches(args: argparse.Namespace, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A list of `count` batches, four different ones in rotation."""
    generator = torch.Generator().manual_seed(1)
    shape = (args.batch_size, args.seq_length + 1)
    tokens = [torch.randint(args.vocab_size, shape, generator=generator) for _ in range(4)]
    return [(tokens[turn % 4][:, :-1], tokens[turn % 4][:, 1:]) for turn in range(count)]


def measure(args: argparse.Namespace, build: dict[str, Callable[[], Contestant]]) -> dict[str, Trial]:
    """The Trial of each contestant, by name, from `--processes` processes, one after the other."""
    if args.processes == 1:
        return measure_here(args, build)
    trials = {name: Trial() for name in build}
    for _ in range(args.processes):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            for name, trial in process.submit(measure_here, args, build).result().items():
                trials[name].add(trial)
    return trials


def measure_here(args: argparse.Namespace, build: dict[str, Callable[[], Contestant]]) -> dict[str, Trial]:
    """The Trial of each contestant in this process. Contestants take turns, or with `--apart` run one after
    the other: then each has the memory to itself, and an error does not end the others, but drift of the
    machine hits them unequally. One that cannot be built is noted with its error in both."""
    batches = made_batches(args, args.warmup + args.turns)
    trials = {name: Trial() for name in build}
    if args.apart:
        for name, trial in trials.items():
            try:
                step = build[name]()
                for turn, batch in enumerate(batches):
                    trial.turn(step, batch, counts=turn >= args.warmup)
            except Exception as error:
                trial.error = f"{type(error).__name__}: {error}"
            step = None
            gc.collect()
            print(f"measured: {name}{trial.error and ', which failed: ' + trial.error}", flush=True)
    else:
        running = dict[str, Contestant]()
        for name, make in build.items():
            try:
                running[name] = make()
            except Exception as error:
                trials[name].error = f"{type(error).__name__}: {error}"
        for turn, batch in enumerate(batches):
            for name, step in running.items():
                trials[name].turn(step, batch, counts=turn >= args.warmup)
    return trials


def row(name: str, trial: Trial, plain: Trial) -> dict[str, Any]:
    if trial.error:
        return {"name": name, "error": trial.error}
    result: dict[str, Any] = {"name": name, "seconds": median(trial.seconds)}
    if not plain.error:
        differences = [abs(a - b) for a, b in zip(trial.losses, plain.losses, strict=True)]
        result |= {
            "ratio_to_torch": ratios(trial.seconds, plain.seconds),
            "quarters": quarters(trial.seconds, plain.seconds),
            "cpu_ratio_to_torch": ratios(trial.cpu_seconds, plain.cpu_seconds),
            "largest_loss_difference": max(differences),
        }
    return result


def outside(num_layers: int, turns: int) -> tuple[int, list[float]]:
    """The number of parameters, and for each turn the seconds that train_step spends outside the executor."""
    config = GPTConfig(
        vocab_size=64, seq_length=8, num_layers=num_layers, hidden_size=16, num_attention_heads=2
    )
    tied = {"out.weight": "embed.tok.weight"}
    segments = [zfunc.segment(n, m, share=tied if n == "head" else None) for n, m in built(config)]
    program = zfunc.compile(segments, precision="fp32", clip_norm=CLIP, device="cpu")
    state, seconds = zfunc.init(program), list[float]()
    tokens = torch.randint(config.vocab_size, (2, config.seq_length + 1))
    for _ in range(turns):
        start = time.perf_counter()
        state, metrics = zfunc.train_step(program, state, (tokens[:, :-1], tokens[:, 1:]))
        seconds.append(time.perf_counter() - start - metrics.seconds)
    return len({p.name for s in segments for p in s.parameters}), seconds[3:]  # warm


def print_outside(sizes: str, turns: int) -> None:
    print(f"{'layers':>8}{'parameters':>12}{'best ms':>10}{'median ms':>11}  of a step outside the executor")
    for num_layers in map(int, sizes.split(",")):
        parameters, seconds = outside(num_layers, turns)
        best, middle = (1e3 * of(seconds) for of in (min, median))
        print(f"{num_layers:>8}{parameters:>12}{best:>10.2f}{middle:>11.2f}")


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__, **SMALL_GPT, micro_batches=1, vocab_size=256)
    p.add_argument("--precision", choices=list(DTYPES), default="fp32")
    p.add_argument("--device", default=accelerator_type() or "cpu")
    p.add_argument("--turns", type=int, default=15)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--processes", type=int, default=1, help="repeat the turns in so many processes")
    p.add_argument(
        "--recompute", metavar="all,none,min-cut", help="zfunc's default against its counterpart instead"
    )
    p.add_argument("--compile-segments", action="store_true")
    p.add_argument(
        "--apart", action="store_true", help="one contestant after the other, each alone in memory"
    )
    p.add_argument(
        "--outside", metavar="LAYERS,...", help="time what a step does outside the executor instead"
    )
    return p


def config_of(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
    )


def main() -> None:
    args = parser().parse_args()
    if args.outside:
        print_outside(args.outside, args.turns)
        return
    config = config_of(args)
    names, build = {}, contestants(config, args)
    if args.recompute:
        names, build = counterparts(config, args)
    trials = measure(args, build)
    results = [row(name, trial, trials[names.get(name, "torch")]) for name, trial in trials.items()]
    machine = describe()
    on_gpu = args.device != "cpu"
    print(
        f"{config}, batch {args.batch_size}, {args.precision}, on {machine['accelerator'] if on_gpu else machine}"
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    print(
        f"{'':20} {'of torch':>9} {'from':>6} {'to':>6} {'cpu time':>9} {'loss diff':>10}"
        + (f" {'seconds':>9}" if on_gpu else "")
    )
    for r in results:
        if "error" in r:
            print(f"{r['name']:20} {r['error']}")
            continue
        seconds = f" {r['seconds']:9.4f}" if on_gpu else ""
        keys = "ratio_to_torch", "cpu_ratio_to_torch", "largest_loss_difference"
        of_torch, of_cpu, difference = (r.get(key, math.nan) for key in keys)
        low, high = r.get("quarters", (math.nan, math.nan))
        print(
            f"{r['name']:20} {of_torch:9.3f} {low:6.3f} {high:6.3f} {of_cpu:9.3f} {difference:10.1e}{seconds}"
        )
    if not on_gpu:
        for r in results:
            r.pop("seconds", None)  # on a shared CPU only the ratios mean anything
    name = f"step-{args.num_layers}x{args.hidden_size}-{args.precision}"
    write(args.json, name, {"arguments": vars(args), "rows": results})


if __name__ == "__main__":
    main()
