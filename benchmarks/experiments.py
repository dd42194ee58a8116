"""What a GPU does where the pretend device cannot show it, one experiment at a time, beside what is expected.

    python -m benchmarks.experiments attention --device cuda --json benchmarks/results

`attention`: fused kernels of tiles against torch in fp32, where scores are far below 0. `workspace`: memory that
the backward of attention takes beside its results. `threads`: evaluations in two threads at once, and graphs of a
device in a second thread. `rates`: the host's sweep and copies, in a cache and beyond it. `launches`: kernels that
one small step launches. `updates`: updates on the device, by one kernel and in
torch's operations, and page-locking of host memory.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import zfunc
from benchmarks.machine import SMALL_GPT, gpt, make_parser, write
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import MOMENTS, STATE_FORMATS
from zfunc.engine.program import fit_to_memory
from zfunc.engine.rows import tile_attention
from zfunc.engine.rows.keys import DeviceKeys
from zfunc.engine.rows.tile_attention import Attended, Pair, View, attend_tile, pull_tile
from zfunc.optim import rules_in_cuda
from zfunc.optim import updates as updates_module
from zfunc.runtime.accelerator import (
    accelerator_type,
    allocated_bytes,
    peak_bytes,
    pick_device,
    reset_peak,
)
from zfunc.runtime.host_memory import alloc_host
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

Row = dict[str, Any]


def attention(args: argparse.Namespace) -> Iterator[Row]:
    """Pairs of a tile with the tile before. Expected: finite everywhere, within 2e-2 of the largest; cuDNN may give
    NaN where 128 does not divide the tile, and is not taken there."""
    for size in (64, 128):
        for tile in map(int, args.tiles.split(",")):
            q, k, v, g = (torch.randn(1, n, tile, size, device=args.device) for n in (8, 2, 2, 8))
            q[..., 0], k[..., 0] = 1.0, -120.0 * size**0.5  # every log-sum-exp is about -120
            view = View(tile, size**-0.5)
            expected = pulled(tile_attention._InTorch, Pair(q, k, v, view, (0, tile)), g)
            half = Pair(*(x.to(args.dtype) for x in (q, k, v)), view, (0, tile))
            kernels = {tile_attention._kernel(half)}
            if args.device.type == "cuda":
                kernels = {tile_attention._OnCuda, tile_attention._OnCudnn}
            for kernel in kernels:
                found = pulled(kernel, half, g.to(args.dtype))
                pairs = zip(found, expected, strict=True)
                apart = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs]
                taken = kernel is tile_attention._kernel(half)
                yield {"kernel": kernel.__name__, "tile": tile, "head": size, "taken": taken, "apart": apart}


def pulled(kernel: Any, pair: Pair, cotangent: Tensor) -> list[Tensor]:
    """The output of attention `kernel` on `pair`, and the gradients of queries, keys and values."""
    out, lse = kernel.forward(pair)
    return [out, *kernel.backward(pair, cotangent, Attended(pair.q, pair.view, out, lse))]


def workspace(args: argparse.Namespace) -> Iterator[Row]:
    """The last tile of a row of documents. Expected: room for keys and values as if each query head had its own,
    where heads of keys are fewer, and no more than a tenth beside."""
    for keys in (args.heads, max(1, args.heads // 4)):
        tokens, tile, size = args.tokens, args.tokens // 16, args.head_size
        k, v = (torch.randn(1, keys, tokens, size, device=args.device, dtype=args.dtype) for _ in "kv")
        q, g = (torch.randn(1, args.heads, tile, size, device=args.device, dtype=args.dtype) for _ in "qg")
        row = DeviceKeys((k, v))
        row.start_sums()
        first = torch.arange(tokens - tile, tokens, device=args.device) // 1000 * 1000
        attended = attend_tile(q, row, View(tokens - tile, size**-0.5, first[None]))
        torch.accelerator.synchronize()
        before = allocated_bytes(args.device)
        reset_peak(args.device)
        pull_tile(g, attended, row)
        torch.accelerator.synchronize()
        expanded = 2 * tokens * args.heads * size * g.element_size() * (keys < args.heads)
        taken = peak_bytes(args.device) - before
        yield {"tokens": tokens, "key_heads": keys, "bytes": taken, "expanded_keys": expanded}


def small_step(args: argparse.Namespace, **settings: Any) -> tuple[Any, Any, Any]:
    """A program of a small GPT, its State and a batch."""
    tokens = torch.randint(256, (args.batch_size, args.seq_length + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    given = {"precision": args.precision, "device": args.device, "bucket_size": 1 << 18}
    program = zfunc.compile(gpt(args), example=batch, **given, **settings)
    return program, zfunc.init(program), batch


def threads(args: argparse.Namespace) -> Iterator[Row]:
    """Expected: every loss that of one thread. Graphs of a device in a second thread run, or are refused."""
    program, state, batch = small_step(args)
    one = zfunc.evaluate(program, state, batch)
    found: list[str] = []

    def evaluated() -> None:
        try:
            others = {str(zfunc.evaluate(program, state, batch)) for _ in range(args.turns)}
            found.extend(others - {str(one)})
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:300])

    in_threads(evaluated, evaluated)
    yield {"what": "two threads evaluate", "others": found}

    def graphs() -> None:
        try:
            program, state, batch = small_step(args, compile_segments="reduce-overhead")
            zfunc.train_step(program, state, batch)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}"[:300])

    if args.device.type == "cuda":
        told: list[str] = []
        in_threads(graphs)
        yield {"what": "graphs in a second thread", "torch": torch.__version__, "others": told}


def in_threads(*calls: Callable[[], None]) -> None:
    """Run the functions `calls` at the same time, each in its own thread, and wait for all."""
    started = [threading.Thread(target=call) for call in calls]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def rates(args: argparse.Namespace) -> Iterator[Row]:
    """Expected: the sweep of few elements faster than memory, as a cache has them; of many at memory's rate."""
    for elements in (args.elements >> 4, args.elements):
        assert hasattr(fit_to_memory, "MEASURED")
        fit_to_memory.MEASURED = elements
        sweep, copies = fit_to_memory.measured_rates(args.device)
        yield {"elements": elements, "sweep": sweep, "copies": copies}


def launches(args: argparse.Namespace) -> Iterator[Row]:
    """Expected, of a step of 6 layers of 768: 400 to 600, of them 124 for sums of squares on the device."""
    for schedule in ("Serial", "Overlapped"):
        program, state, batch = small_step(args, schedule=schedule, clip_norm=1.0)
        for _ in range(3):
            state, metrics = zfunc.train_step(program, state, batch)
        row: Row = {"schedule": schedule, "seconds": metrics.seconds}
        if args.device.type == "cuda":
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
                zfunc.train_step(program, state, batch)
            events = [e for e in profile.key_averages() if "Launch" in e.key]
            row["launches"] = {e.key: e.count for e in events}
            row["launching_seconds"] = sum(e.cpu_time_total for e in events) / 1e6
        elif args.device.type == "pretend":
            controls = torch.get_device_module(args.device).controls
            before = controls.launches()
            zfunc.train_step(program, state, batch)
            row["launches"] = controls.launches() - before
        yield row


def updates(args: argparse.Namespace) -> Iterator[Row]:
    """Expected, of 1 G parameters, in one kernel of the rule and in operations of torch, with equal bits:
    0.013 and 0.17 s in fp32, less than 0.1 and 0.6 s with 8 bits; 3 to 8 s to lock 32 GiB of host memory."""
    decision = StepDecision(False, 1.0, 1, zfunc.AdamW().factors(1))
    for moments in MOMENTS:
        optimizer = zfunc.AdamW(moments=moments)
        kinds = STATE_FORMATS[optimizer.state_format(0)]
        grad = torch.randn(args.elements, device=args.device)
        out, seconds, ends = torch.empty_like(grad, dtype=torch.bfloat16), dict[str, float](), list[Any]()
        found = list[Any]()

        def compiled(*args: Any, found: list[Any] = found) -> Any:
            found.append(rules_in_cuda.device_kernel(*args))
            return found[-1]

        for way, kernel in (("kernel", compiled), ("torch", lambda *_: None)):
            state = {
                x.name: torch.zeros(x.numel(args.elements), dtype=TORCH_DTYPES[x.dtype], device=args.device)
                for x in kinds
            }
            with patch.object(updates_module, "device_kernel", kernel):
                for _ in range(3):  # the first compiles
                    torch.accelerator.synchronize()
                    start = time.perf_counter()
                    optimizer.device_update(state, grad, decision, group=0, out=out)
                    torch.accelerator.synchronize()
                    seconds[way] = time.perf_counter() - start
            ends.append([*state.values(), out.clone()])
        yield {
            **{"moments": moments, "elements": args.elements, "seconds": seconds},
            "compiled": found[-1] is not None,
            "equal_bits": all(map(torch.equal, *ends)),
        }
        del state, grad, out, ends
    start = time.perf_counter()
    pinned = alloc_host(int(args.pinned_gib * (1 << 28)), torch.float32, pinned_for=args.device)
    yield {"pinned_bytes": pinned.nbytes, "seconds": time.perf_counter() - start}


EXPERIMENTS = {x.__name__: x for x in (attention, workspace, threads, rates, launches, updates)}


def parser() -> argparse.ArgumentParser:
    p = make_parser(
        __doc__, **SMALL_GPT, turns=200, tokens=131_072, heads=32, head_size=128, elements=1 << 26
    )
    p.add_argument("experiment", choices=EXPERIMENTS)
    p.add_argument("--device", default=accelerator_type() or "cpu")
    p.add_argument("--precision", default="bf16")
    p.add_argument("--tiles", default="64,192,261,512")
    p.add_argument("--pinned-gib", type=float, default=32.0)
    return p


def main() -> None:
    args = parser().parse_args()
    arguments = vars(args).copy()
    args.device, args.dtype = pick_device(args.device), torch.bfloat16
    torch.manual_seed(0)
    rows: list[Row] = []
    expected = " ".join((EXPERIMENTS[args.experiment].__doc__ or "").split())
    try:
        for row in EXPERIMENTS[args.experiment](args):
            rows.append(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    finally:  # what was measured before an error counts
        print(expected)
        results = {"arguments": arguments, "expected": expected, "rows": rows}
        write(args.json, f"experiment-{args.experiment}", results)


if __name__ == "__main__":
    main()
