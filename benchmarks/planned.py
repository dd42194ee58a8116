"""Steps of different shapes, planned with this machine's profile and measured, each in a process of its own.

    zfunc calibrate --out machine.toml                      # make gpu does
    python -m benchmarks.planned --set ten --hardware machine.toml --json benchmarks/results

The jobs are data (`benchmarks/planned.toml`). Planned is what `zfunc.plan` says before anything is allocated;
measured are steps with random weights. `docs/published.md` has the newest results as rows of our own.
"""

import argparse
import json
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import zfunc
from benchmarks.apart import Row, about, each_apart, leave, run_apart, synchronized, timed
from benchmarks.machine import make_parser, write
from benchmarks.side_by_side import source, with_drawn
from benchmarks.step import CLIP, stepping
from docs.markdown_table import table
from zfunc.engine.trace.segment import Segment
from zfunc.models import hf
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.runtime.accelerator import accelerator_type, pick_device

JOBS = Path(__file__).with_suffix(".toml")
PUBLISHED = Path(__file__).with_name("published.toml")
VOCABULARY = 50_257  # of a GPT
RESULTS = Path(__file__).with_name("results")
HEADS = (
    "step",
    "model",
    "batch",
    "measured",
    "planned",
    "planned / measured",
    "device, GB: measured",
    "planned",
)


@cache
def models() -> dict[str, dict[str, Any]]:
    """The sizes of each model that a job or a published row may name."""
    return tomllib.loads(PUBLISHED.read_text())["models"] | tomllib.loads(JOBS.read_text())["model"]


def jobs(name: str) -> dict[str, dict[str, Any]]:
    """The jobs of the set `name`, by title."""
    return tomllib.loads(JOBS.read_text())["sets"][name]


def described(config: dict[str, Any], lora: Any = None) -> tuple[Segment, ...]:
    """The segments of a Hugging Face model with `config`, without memory, for rows of up to 2^23 tokens."""
    from transformers import AutoConfig

    auto: Any = AutoConfig
    return hf.describe(auto.for_model(**config, max_position_embeddings=1 << 23), lora=lora)[1]


def made(job: dict[str, Any]) -> tuple[tuple[Segment, ...], int, int]:
    """The segments of a job's model, without memory, the number of its layers, and of its vocabulary."""
    config = dict(models()[job["model"]])
    if config.pop("gpt", False):
        config |= {"num_layers": job.get("layers", config["num_layers"])}
        return gpt_segments(GPTConfig(VOCABULARY, job["length"], **config)), config["num_layers"], VOCABULARY
    from zfunc.models.hf.adapters import lora_config

    layers = job.get("layers", config["num_hidden_layers"])
    lora = lora_config(job["lora"]) if "lora" in job else None
    return described(config | {"num_hidden_layers": layers}, lora), layers, config["vocab_size"]


def measure(job: dict[str, Any], args: argparse.Namespace) -> Row:
    """The planned and the measured step of a job; its row."""
    segments, layers, vocabulary = made(job)
    given: dict[str, Any] = {
        "precision": job.get("precision", "bf16"),
        "clip_norm": CLIP,
        **job.get("way", {}),
    }
    optimizer = zfunc.AdamW(lr=1e-5, moments=job.get("moments", "fp32"))
    shape = job["rows"], job["length"]
    meta = torch.empty(shape, dtype=torch.int64, device="meta")
    plan = zfunc.plan(
        segments, (meta, meta), optimizer=optimizer, hardware=str(args.hardware), advice=False, **given
    )
    row: Row = {
        "planned_seconds": plan.step_seconds,
        "planned_memory": dict(plan.memory),
        "bound": plan.bound,
        "lacking": dict(plan.lacking),
        "parameters": plan.step.spec.layout.num_parameters,
    }
    device = pick_device(args.device)
    tokens = torch.randint(vocabulary, (shape[0], shape[1] + 1), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1], tokens[:, 1:]
    segments = with_drawn(segments, layers, source(args))
    start = synchronized()
    program = zfunc.compile(segments, optimizer=optimizer, device=device, example=batch, **given)
    step = stepping(program)
    row["setup_seconds"] = synchronized() - start
    row |= timed(step, [batch] * (args.warmup + args.turns), warmup=args.warmup, device=device)
    row |= {"tokens": shape[0] * shape[1], "time_ratio": row["planned_seconds"] / row["seconds"]}
    if planned := row["planned_memory"].get("device"):
        row["memory_ratio"] = planned / row["device_bytes"] if "device_bytes" in row else None
    return row


def table_rows(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a table's row for each job's result: tokens a second, and peaks of the device."""
    for x in rows:
        job = x["job"]
        batch = f"{job['rows']} x {job['length']:,}"
        model = job["model"] + (f", {job['layers']} layers" if "layers" in job else "")
        if "error" in x:
            yield (x["name"], model, batch, x["error"][:80].replace("|", "/"), "", "", "", "")
            continue
        peak = f"{x['device_bytes'] / 1e9:.2f}" if "device_bytes" in x else ""
        yield (
            x["name"],
            model,
            batch,
            f"{x['tokens'] / x['seconds']:,.0f}",
            f"{x['tokens'] / x['planned_seconds']:,.0f}",
            f"{x['time_ratio']:.2f}",
            peak,
            f"{x['planned_memory'].get('device', 0) / 1e9:.2f}",
        )


def own_steps(folder: Path) -> str:
    """Our own steps for docs/published.md: a table for each set and machine with results in `folder`, the newest;
    without any, nothing."""
    newest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("planned-*.json"), key=lambda x: x.stem[-10:]):
        if "toy" not in path.name:
            newest[path.stem[:-11]] = json.loads(path.read_text())["results"] | {"file": path.name}
    parts = ["## Our own steps"] if newest else []
    for of in newest.values():
        card = of["about"]
        parts.append(
            f"Tokens a second on one {card['accelerator']} beside {card['cores']} cores, torch {card['torch']}, "
            f"planned with the profile that `zfunc calibrate` wrote there (`benchmarks/results/{of['file']}`)."
        )
        parts.append(table(HEADS, table_rows(of["rows"])))
    return "\n\n".join(parts)


def profile_of(given: Path) -> Path:
    """The profile `given`, or if it is not there the newest of its machine, in its folder or with our results."""
    if given.is_file():
        return given
    found = [x for folder in (RESULTS, given.parent) for x in folder.glob(f"{given.stem[:-11]}-*.toml")]
    found.sort(key=lambda x: x.stem)
    if not found:
        raise SystemExit(f"--hardware: got {given}, which is not there, expected what zfunc calibrate wrote")
    print(f"planned with {found[-1]}, as {given.name} is not there")
    return found[-1]


def parser() -> argparse.ArgumentParser:
    p = make_parser(__doc__, turns=4, warmup=2)
    p.add_argument("--set", default="ten", help="of planned.toml")
    p.add_argument("--only", help="titles of jobs, separated by ';' (default: all)")
    p.add_argument("--hardware", type=Path, help="a profile of this machine", required=True)
    p.add_argument("--device", default=accelerator_type() or "cpu")
    p.add_argument("--limit", type=float, default=120.0, help="seconds of a job")
    p.add_argument("--seconds", type=float, default=450.0, help="of all jobs")
    p.add_argument("--alone", metavar="TITLE", help="measure this one, in this process")
    return p


def main() -> None:
    args = parser().parse_args()
    of = jobs(args.set)
    if args.alone:
        leave(measure(of[args.alone], args))
        return
    args.hardware = profile_of(args.hardware)
    rows: list[Row] = []
    titles = [x.strip() for x in args.only.split(";")] if args.only else [*of]

    def run(title: str, limit: float) -> Row:
        words = ["--set", args.set, "--hardware", str(args.hardware.resolve()), "--device", args.device]
        words += ["--turns", str(args.turns), "--warmup", str(args.warmup), "--alone", title]
        return run_apart("benchmarks.planned", words, device=args.device, limit=limit)

    def keep(row: Row) -> None:
        rows.append({**row, "job": of[row["name"]]})
        cells = next(table_rows(rows[-1:]))
        print(f"{cells[0]:40}" + " ".join(f"{x:>12}" for x in cells[1:]), flush=True)
        write(args.json, f"planned-{args.set}", {"arguments": vars(args), "about": about(), "rows": rows})

    print(f"{'tokens/s, and GB of the device':40}" + " ".join(f"{x:>12}" for x in HEADS[1:]))
    each_apart(titles, run, seconds=args.seconds, limit=args.limit, keep=keep)
    if any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
