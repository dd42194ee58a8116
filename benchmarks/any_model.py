"""What does a model need that passes masks and states of an encoder on from block to block?

A T5 and a BERT are cut between their blocks and planned with activations on the device, on the host and on the
disk: as they are, where what many cuts have in common is there once, and as if each cut had its own. With an
accelerator it also trains two steps, and the last column says what the device held at most in the second.

    python -m benchmarks.any_model [--num-layers 12 --hidden-size 64 --json FILE_OR_FOLDER]
    python -m benchmarks.on_pretend benchmarks.any_model --device pretend
"""

import argparse
import gc
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import evolve
from torch import nn

import zfunc
from benchmarks.machine import make_parser, write
from zfunc.core.memory_model import peak_memory
from zfunc.core.plan import Plan
from zfunc.engine.program.program import Program, make_plan
from zfunc.engine.program.specialize import specialize
from zfunc.runtime.accelerator import on_accelerator, peak_bytes, pick_device, reset_peak

VOCABULARY = 64


def models(args: argparse.Namespace) -> dict[str, nn.Module]:
    """A T5 and a BERT of the sizes in `args`, without dropout, by name."""
    from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

    layers, width, heads = args.num_layers, args.hidden_size, args.num_attention_heads
    t5 = T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // heads,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    bert = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return {
        f"T5, {layers} and {layers} blocks": T5ForConditionalGeneration(t5),
        f"BERT, {layers} blocks": BertForSequenceClassification(bert),
    }


def batch_of(model: nn.Module, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Rows of tokens without padding, and what `model` takes as labels: tokens, or a class of each row."""
    ids = torch.randint(2, VOCABULARY, (args.batch_size, args.seq_length))
    labels = ids if hasattr(model, "encoder") else ids[:, 0] % 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def planned_bytes(plan: Plan, place: str) -> int:
    """Bytes that a step of `plan` needs on the device, has of activations on the host, or writes of them to the
    disk, as `place` says."""
    if place == "device":
        return peak_memory(plan)["device"].nbytes
    if place == "host":
        return sum(r.nbytes for r in plan.graph.regions if r.buffer in ("host_act", "host_shared"))
    return sum(op.nbytes for op in plan.graph if op.verb == "spill_act")


def held_bytes(program: Program, batch: Any) -> int:
    """Bytes that the accelerator of `program` holds at most in its second step."""
    gc.collect()
    before = torch.accelerator.memory_allocated(program.device)
    state, _ = zfunc.train_step(program, zfunc.init(program), batch)
    reset_peak(program.device)
    zfunc.train_step(program, state, batch)
    return peak_bytes(program.device) - before


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model and place of its activations: planned bytes, those if each cut had its own, and what a
    device held, or None."""
    device, rows = pick_device(args.device), list[dict[str, Any]]()
    settings: dict[str, Any] = {"precision": "fp32", "schedule": "Overlapped", "device": device}
    for name, model in models(args).items():
        batch = batch_of(model, args)
        segments = zfunc.segments(model, batch)
        for place in ("device", "host", "disk"):
            with TemporaryDirectory() as folder:
                swap = {"swap": [folder]} if place == "disk" else {}
                program = zfunc.compile(segments, activations_on=place, **swap, **settings)
                shaped = specialize(program, segments[-1].read_batch(batch))  # pyright: ignore
                costs = [evolve(cost, shared=(), passed_on=()) for cost in shaped.spec.costs]
                apart = make_plan(evolve(shaped.spec, costs=costs), program.schedule, program.recipe)
                once, own = (planned_bytes(plan, place) for plan in (shaped.whole, apart))
                held = held_bytes(program, batch) if place == "device" and on_accelerator(device) else None
            rows.append({"model": name, "place": place, "once": once, "own": own, "held": held})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """`rows` as a table of Markdown, in bytes."""
    lines = ["| | activations | once | each cut its own | times | held |", "|---|---|---|---|---|---|"]
    for x in rows:
        held = "" if x["held"] is None else f"{x['held']:,}"
        times = f"{x['own'] / x['once']:.2f}"
        lines.append(f"| {x['model']} | {x['place']} | {x['once']:,} | {x['own']:,} | {times} | {held} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    sizes = {"num_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "batch_size": 4, "seq_length": 64}
    p = make_parser(__doc__, **sizes)
    p.add_argument("--device", default="cpu")
    return p


def main() -> None:
    args = parser().parse_args()
    rows = measure(args)
    print(table(rows))
    write(args.json, "any-model", {"arguments": vars(args), "rows": rows})


if __name__ == "__main__":
    main()
