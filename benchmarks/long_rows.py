"""Rows of many tokens through layers of Llama 3 8B: device memory and time of a step, by the number of tiles.

    python -m benchmarks.long_rows --rows 65536x1,65536x16,262144x64 --json benchmarks/results

One row is a batch. Activations wait on the host. Losses of one length are compared: they have the same weights.
`--kernels` runs each row with what torch chooses, without cuDNN's attention, or with deterministic kernels: these
give the same bits each time, so `deterministic,deterministic` shows whether they do.
"""

import argparse
import time
from itertools import product
from typing import Any

import torch

import zfunc
from benchmarks.machine import make_parser, write
from zfunc.engine.program.specialize import specialize
from zfunc.runtime.accelerator import accelerator_type, peak_bytes, pick_device, reset_peak

GIB = 1 << 30


def model(args: argparse.Namespace) -> Any:
    """Layers of Llama 3 8B with a vocabulary of `args`, or smaller layers if `args` has other sizes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 7 // 2,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=max(1, args.num_attention_heads // 4),
        vocab_size=args.vocab_size,
        max_position_embeddings=1 << 22,
        rope_theta=500_000.0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measure(args: argparse.Namespace, segments: Any, tokens: int, tiles: int, kernels: str) -> dict[str, Any]:
    """Train on a row of `tokens` tokens in `tiles` tiles, by attention `kernels`; returns seconds and
    bytes."""
    device = pick_device(args.device)
    row = torch.randint(args.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(tokens))
    batch = row[:, :-1], row[:, 1:]
    start = time.perf_counter()
    result: dict[str, Any] = {"tokens": tokens, "tiles": tiles, "kernels": kernels}
    torch.backends.cuda.enable_cudnn_sdp(kernels != "flash")
    try:
        program = zfunc.compile(
            segments,
            optimizer=zfunc.AdamW(lr=1e-4),
            precision=args.precision,
            clip_norm=1.0,
            tiles=tiles,
            activations_on="host",
            deterministic=kernels == "deterministic",
            device=device,
            example=batch,
        )
        result["planned_device_bytes"] = specialize(program, batch).memory["device"].nbytes
        state = zfunc.init(program)
        result["setup_seconds"] = time.perf_counter() - start
        reset_peak(device)
        losses, seconds = list[float](), list[float]()
        for _ in range(args.warmup + 1):
            state, metrics = zfunc.train_step(program, state, batch)
            losses.append(metrics.loss)
            seconds.append(metrics.seconds)
        return {**result, "losses": losses, "seconds": seconds[-1], "device_bytes": peak_bytes(device)}
    except (zfunc.errors.OutOfMemory, torch.OutOfMemoryError, RuntimeError) as error:
        return {**result, "error": str(error).splitlines()[0][:300]}


def parser() -> argparse.ArgumentParser:
    p = make_parser(
        __doc__, num_layers=2, hidden_size=4096, num_attention_heads=32, vocab_size=32_768, warmup=1
    )
    p.add_argument("--rows", default="65536x1,65536x16,262144x64", help="TOKENSxTILES, comma separated")
    p.add_argument("--kernels", default="default", help="of default, flash, deterministic; comma separated")
    p.add_argument("--precision", default="bf16")
    p.add_argument("--device", default=accelerator_type() or "cpu")
    return p


def main() -> None:
    args = parser().parse_args()
    segments = zfunc.hf.segments(model(args))
    results: list[dict[str, Any]] = []
    for text, kernels in product(args.rows.split(","), args.kernels.split(",")):
        tokens, tiles = map(int, text.split("x"))
        r = measure(args, segments, tokens, tiles, kernels)
        results.append(r)
        measured = r.get("error") or (
            f"{r['seconds']:.2f} s a step, {r['device_bytes'] / GIB:.2f} GiB, "
            f"planned {r['planned_device_bytes'] / GIB:.2f}, loss {r['losses'][-1]:.5f}"
        )
        print(f"{tokens:>9,} tokens in {tiles:>3} tiles, {kernels}: {measured}", flush=True)
    name = f"long-rows-{args.num_layers}x{args.hidden_size}-{args.precision}"
    write(args.json, name, {"arguments": vars(args), "rows": results})


if __name__ == "__main__":
    main()
