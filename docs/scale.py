"""Print the tables of docs/scale.md, and the figures its text states: `python docs/scale.py`, or `make scale`.

Every cell is one step planned with `zfunc.plan`; a cell in brackets does not fit. Some minutes on two cores.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import evolve, frozen
from markdown_table import table

import zfunc
from benchmarks.planned import models
from zfunc.cli.commands.plan import PlannedModel, PlanSettings, plan_model
from zfunc.core.critical_path import bound_seconds, critical_path_of, largest_shares
from zfunc.core.graph import Graph, Op
from zfunc.core.hardware import Hardware
from zfunc.core.plan import Plan, build
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig, num_parameters
from zfunc.options import as_flag
from zfunc.planner.planned import Planned
from zfunc.planner.profile import load_profile, replace_figures
from zfunc.units import format_bytes

TOKENS, WORLDS = 1024, tuple(2**n for n in range(11))  # of a sequence; ranks
LARGE = {"bucket_size": 500_000_000}


@frozen
class Case:
    """A GPT on a machine; every rank has `rows` sequences."""

    num_layers: int
    hidden_size: int
    num_heads: int
    profile: str
    precision: str
    rows: int

    @property
    def config(self) -> GPTConfig:
        """The model."""
        return GPTConfig(50_257, TOKENS, self.num_layers, self.hidden_size, self.num_heads)

    @property
    def name(self) -> str:
        """Model and machine in words."""
        return f"{num_parameters(self.config) / 1e9:.0f} B, {self.profile}"


H100 = Case(50, 4096, 32, "h100", "bf16", 8)
V100 = evolve(H100, profile="v100-32gb", precision="fp16")
GH200 = evolve(H100, profile="gh200")
H200 = Case(80, 8192, 64, "h200", "bf16", 2)
CASES = (H100, V100, GH200, H200)
FEW = (1, 8, 64, 1024)
COLUMNS = [(c, n) for c, worlds in ((H100, FEW), (V100, (16, 1024)), (H200, (8, 1024))) for n in worlds]


@frozen
class NormsApart:
    """Overlapped, with the sums of squares on a lane of their own, so that backward does not wait for them."""

    def __call__(self, graph: Graph) -> Plan:
        """A lane a kind, `square_sum` apart."""
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            lanes.setdefault("norms" if op.verb == "square_sum" else op.kind, []).append(i)
        return build(graph, lanes)


CHANGES: dict[str, dict[str, Any]] = {
    "Serial": {"schedule": "Serial"},
    "Interleaved": {"schedule": "Interleaved"},
    "CriticalPath": {"schedule": "CriticalPath"},
    "Search, of schedules": {"schedule": "Search"},
    "squares on a lane of their own": {"schedule": NormsApart()},
    "no clipping, Overlapped": {"clip_norm": None},
    "no clipping, Interleaved": {"clip_norm": None, "schedule": "Interleaved"},
    "no clipping, CriticalPath": {"clip_norm": None, "schedule": "CriticalPath"},
    "deferred": {"defer": True},
    "half of the state on the device": {"state_on": "device,host"},
    "8bit moments": {"moments": "8bit"},
    "buckets of 500 M": LARGE,
    "nothing recomputed": {"recompute": "none"},
    "4 micro-batches, stage 2": {"times": 4, "micro_batches": 4},
    "4 micro-batches, stage 1": {"times": 4, "micro_batches": 4, "stage": 1},
    "as much state on the device as fits (its share)": {"state_on": "device:auto,host"},
    "all that a search finds": {"schedule": "auto"},
}
ZERO_3: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 3, parameters on the host": {"stage": 3, "params_on": "host"},
    "stage 2, as much state on the device as fits (its share)": {"state_on": "device:auto,host"},
    "stage 3, as much state on the device as fits (its share)": {"stage": 3, "state_on": "device:auto,host"},
    "4 times the sequences, stage 2": {"times": 4},
    "4 times the sequences, stage 3": {"times": 4, "stage": 3},
    "the same, activations on the host": {"times": 4, "stage": 3, "activations_on": "host"},
}
ALL_ON_HOST = {"params_on": "host", "activations_on": "host", "defer": True}
STREAMED: dict[str, dict[str, Any]] = {  # flags of zfunc plan, beside those of TEXT
    "40 B": {"num_layers": 50, "hidden_size": 8192, "batch_size": 10, "hardware": "v100-32gb", **ALL_ON_HOST},
    "65 B": {"num_layers": 80, "hidden_size": 8192, "batch_size": 10, "hardware": "h200", **ALL_ON_HOST},
    "70 B": {
        **{"num_layers": 87, "hidden_size": 8192, "batch_size": 10, "hardware": "h200", **ALL_ON_HOST},
        "recompute": "min-cut",
    },
    "120 B": {
        **{"num_layers": 148, "hidden_size": 8192, "batch_size": 10, "hardware": "h200", **ALL_ON_HOST},
        "moments": "8bit",
    },
    "8 B": {
        **{"num_layers": 40, "hidden_size": 4096, "batch_size": 32, "hardware": "rtx4090", **ALL_ON_HOST},
        **{"moments": "8bit", "with_": ("bytes.host=1.28e11",)},
    },
}
UPDATES: dict[str, tuple[Case, int, dict[str, float]]] = {  # a case, its ranks, and figures of its node
    "gh200": (GH200, 1, {}),
    "h100, 56 cores a GPU": (H100, 2, {"count.devices": 2}),
    "h100, 14 cores a GPU": (H100, 8, {}),
    "h100, 4 cores a GPU": (H100, 8, {"count.cores": 32}),
    "h100, 4 cores in all": (H100, 1, {"count.cores": 4}),
}
UPDATED: dict[str, dict[str, Any]] = {
    "": {},
    "deferred": {"defer": True},
    "8bit moments": {"moments": "8bit"},
}
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
LLAMA_3_8B = BENCHMARKS / "llama-3-8b.json"
ENCODED: dict[
    str, dict[str, Any]
] = {  # models of benchmarks/published.toml, and flags of zfunc plan beside those of ADAPTED
    "llama-3-8b": {"seq_length": 512, "with_": ("bytes.device=4.29e9",)},
    "qwen3-32b": {"seq_length": 1024, "with_": ("bytes.device=6.44e9",)},
    "llama-3-70b": {"seq_length": 512},
}
ADAPTED: dict[str, Any] = {
    **{"hardware": "rtx4090", "batch_size": 1, "lora": 16, "quantize": "nf4"},
    **{"params_on": "host", "activations_on": "host"},
}
LONG: tuple[
    dict[str, Any], ...
] = (  # rows of LLAMA_3_8B, one a step; the most that fits where no length is said
    {"hardware": "h100", "seq_length": 500_000, "tiles": 32},
    {"hardware": "h100", "seq_length": 1 << 20, "tiles": 64},
    {"hardware": "h100", "tiles": "auto", "max": "length"},
    {"hardware": "h100", "tiles": "auto", "max": "length", "keys_on": "host"},
    {"hardware": "h200", "seq_length": 1 << 21, "tiles": 128},
    {"hardware": "h200", "seq_length": 4_000_000, "tiles": 250},
    {"hardware": "h200", "seq_length": 4_000_000, "tiles": 250, "activations_on": "disk"},
    {"hardware": "h200", "tiles": "auto", "max": "length", "activations_on": "disk"},
    {"hardware": "h200", "tiles": "auto", "max": "length", "activations_on": "disk", "keys_on": "host"},
)
# Products with sums in fp16, and attention at the rate that it has.
FP16_SUMS = ("flops_per_s.fp16=3.303e14", "reached.fp16=0.95", "reached.attention=0.335")
PIPELINE: dict[str, Any] = {  # flags of zfunc plan: 256 rows of LLAMA_3_8B, as the published runs have
    **{
        "hardware": "rtx4090x8",
        "precision": "fp16",
        "with_": FP16_SUMS,
        "seq_length": 2048,
        "batch_size": 256,
    },
    **{"devices": 8, "micro_batches": 64, "update_on": "device"},
}
ROUND_PIPE = "RoundPipe:17,16/7,6,6,6,6,3"
STREAMS = {"params_on": "host", "activations_on": "host", "update_on": "host"}
PIPELINES: tuple[dict[str, Any], ...] = (
    {"order": "OneFOneB"},
    {"order": "OneFOneB:5,4,4,4,4,5,5,3"},
    {"order": "Interleaved1F1B:3,2,2,2,2,2,2,2,2,2,2,2,2,3,3,1"},
    {"order": ROUND_PIPE, **STREAMS},
    {"order": ROUND_PIPE, **STREAMS, "compile_segments": True},
    {"devices": 1, **STREAMS},
    {"devices": 1, **STREAMS, "compile_segments": True},
)
TEXT = {"seq_length": TOKENS, "vocab_size": 50_257}
NETWORKS: dict[str, dict[str, Any]] = {
    "a rank's own port alone": {"network": "one port"},
    "the protocol Simple alone": {"network": "Simple"},
    "buckets of 50 M": {"bucket_size": 50_000_000},
    "buckets of 500 M": LARGE,
}


def hardware(case: Case, world: int, network: str = "all ports") -> Hardware:
    """The hardware of one of `world` ranks.

    "all ports": a collective uses those of a node together, because NCCL's rings enter a node by every port; it is
    never faster than inside the node. "one port": a rank has its own alone. "Simple": all ports, and of NCCL's
    protocols the one that every network has.
    """
    profile = load_profile(case.profile)
    on = profile.hardware(case.precision, world)
    if network == "one port" and world > profile.value("count", "devices"):
        port = profile.reached("bytes_per_s", "network_between_nodes")
        share = port / on.rates["network"]
        others = [(seconds, share * rate) for seconds, rate in on.collectives]
        return evolve(on, rates={**on.rates, "network": port}, collectives=others)
    return evolve(on, collectives=()) if network == "Simple" else on


@cache
def segments(case: Case) -> tuple[zfunc.Segment, ...]:
    """The model on the meta device."""
    return gpt_segments(case.config)


@cache
def planned(
    case: Case, world: int, network: str = "all ports", times: int = 1, rows: int = 0, **changes: Any
) -> Planned:
    """A step, with clipping unless `changes` say otherwise; of `rows` sequences a rank, or `times` the case's."""
    tokens = torch.empty(((rows or case.rows) * times, TOKENS), dtype=torch.int64, device="meta")
    settings: dict[str, Any] = {"clip_norm": 1.0, "precision": case.precision} | changes
    on, own = hardware(case, world, network), zfunc.AdamW(moments=settings.pop("moments", "fp32"))
    batch, how = (tokens, tokens), {"hardware": on, "world": world, "advice": False, "optimizer": own}
    return zfunc.plan(segments(case), batch, **how, **settings)


def per_gpu(step: Planned, world: int) -> float:
    """Tokens a second and GPU."""
    return step.tokens_per_second / world


def shares(step: Planned) -> dict[str, float]:
    """The shares of the critical path, by kind."""
    seconds = step.step.total(lambda x: bound_seconds(critical_path_of(x.plan, x.timeline)))
    return {str(kind): share for kind, share in largest_shares(seconds).items()}


def gain(now: Planned, before: Planned) -> str:
    """How many more tokens a second: "+12 %", in brackets if it does not fit."""
    percent = round(100 * (now.tokens_per_second / before.tokens_per_second - 1))
    words = f"{percent:+d} %" if percent else "0 %"
    return words if now.fits else f"({words})"


def by_world(cell: Callable[[Case, int], str]) -> str:
    """A table of all cases by the number of ranks."""
    rows = ([f"{n:,}", *(cell(c, n) for c in CASES)] for n in WORLDS)
    return table(["ranks", *(c.name for c in CASES)], rows, "---:")


def weak_scaling() -> str:
    """Tokens a second and GPU, and the share of what one rank alone reaches."""

    def cell(case: Case, world: int) -> str:
        now, one = per_gpu(planned(case, world), world), per_gpu(planned(case, 1), 1)
        return f"{now:,.0f} · {100 * now / one:.0f} %"

    return by_world(cell)


def bounds() -> str:
    """The parts of the critical path of those steps, in percent."""

    def cell(case: Case, world: int) -> str:
        parts = shares(planned(case, world)).items()
        return ", ".join(f"{kind} {100 * share:.0f}" for kind, share in parts if share >= 0.045)

    return by_world(cell)


def needs() -> str:
    """Time of a step, and what one rank needs of each tier."""

    def row(case: Case, world: int) -> Iterator[str]:
        now, room = planned(case, world), hardware(case, world).memory
        yield from (case.name if world == 1 else "", f"{world:,}", f"{now.step_seconds:.2f}")
        yield from (f"{now.tokens_per_second:,.0f}", f"{now.tflops:.0f}")
        yield f"{now.memory['device'] / 2**30:.1f} of {room['device'] / 2**30:.0f}"
        yield f"{(now.memory['host'] + now.memory['pinned']) / 2**30:.1f} of {room['host'] / 2**30:,.0f}"
        yield "yes" if now.fits else "no"

    heads = ["", "ranks", "step, s", "tokens/s in all", "TFLOP/s a GPU", "device, GiB", "pinned + host, GiB"]
    return table([*heads, "fits"], ([*row(case, n)] for case in CASES for n in FEW), "---:")


def gains(
    changes: dict[str, dict[str, Any]],
    columns: Sequence[tuple[Case, int]],
    first: str = "*tokens/s a GPU, Overlapped*",
) -> str:
    """Tokens a second with each change, against the plain step."""

    def cell(case: Case, world: int, change: dict[str, Any]) -> str:
        now = planned(case, world, **change)
        fits = change.get("state_on") == "device:auto,host"
        share = f" ({now.step.settings.share_of_state('device'):g})" if fits else ""
        return gain(now, planned(case, world)) + share

    rows = [[first, *(f"{per_gpu(planned(c, n), n):,.0f}" for c, n in columns)]]
    rows += ([name, *(cell(c, n, change) for c, n in columns)] for name, change in changes.items())
    return table(["", *(f"{c.name}: {n:,}" for c, n in columns)], rows, "---:")


def sliced() -> str:
    """Device memory of the same steps, with parameters whole and in slices."""
    columns = [(case, n) for case in (H100, H200) for n in FEW[1:]]

    def cell(case: Case, world: int, changes: dict[str, Any]) -> str:
        return f"{planned(case, world, **changes).memory['device'] / 2**30:.1f}"

    rows = [
        [name, *(cell(case, n, changes) for case, n in columns)]
        for name, changes in {"stage 2": {}, **ZERO_3}.items()
    ]
    return table(["device, GiB", *(f"{c.name}: {n:,}" for c, n in columns)], rows, "---:")


@cache
def streamed(name: str) -> PlannedModel:
    """A row of STREAMED, planned as `zfunc plan` does."""
    flags = STREAMED[name]
    return plan_model(PlanSettings(num_attention_heads=flags["hidden_size"] // 128, **TEXT, **flags))


def larger_than_the_device() -> str:
    """Steps whose parameters do not fit their device."""

    def row(name: str) -> Iterator[str]:
        step = streamed(name).planned
        flags = {key.rstrip("_"): value for key, value in STREAMED[name].items()}
        shape = flags.pop("num_layers"), flags.pop("hidden_size")
        machine, rows = flags.pop("hardware"), flags.pop("batch_size")
        override = [f"--with {x}" for x in flags.pop("with", ())]
        yield f"{name}: {shape[0]} x {shape[1]:,}"
        yield f"{rows} x {TOKENS:,}"
        yield f"`{' '.join(['--hardware ' + machine, *(as_flag(k, v) for k, v in flags.items()), *override])}`"
        yield f"{step.step_seconds:.1f}"
        yield f"{step.memory['device'] / 2**30:.1f}"
        yield f"{(step.memory['pinned'] + step.memory['host']) / 1e9:,.0f}"
        yield "yes" if step.fits else "no"

    heads = ["layers", "tokens", "flags", "step, s", "device, GiB", "pinned + host, GB", "fits"]
    return table(heads, ([*row(name)] for name in STREAMED), "---:")


def encoded_bases() -> str:
    """Adapters over frozen weights in 4 bits on the host, on cards of 4, 6 and 24 GB with the RTX 4090's rates."""

    def row(folder: str, name: str) -> Iterator[str]:
        config = Path(folder, f"{name}.json")
        config.write_text(json.dumps(models()[name]))
        now = plan_model(PlanSettings(hf_config=config, **ADAPTED, **ENCODED[name])).planned
        yield name
        yield f"1 x {now.tokens:,}"
        yield f"{now.memory['device'] / 2**30:.1f} of {now.hardware.memory['device'] / 2**30:.1f}"
        yield f"{(now.memory['pinned'] + now.memory['host']) / 1e9:,.0f}"
        yield from (f"{now.step_seconds:.2f}", f"{now.tokens_per_second:,.0f}")
        kind, share = next(iter(shares(now).items()))
        yield f"{kind} {100 * share:.0f} %" if now.fits else "does not fit"

    heads = ["model", "tokens", "device, GiB", "pinned + host, GB", "step, s", "tokens/s", "bound by"]
    with TemporaryDirectory() as folder:
        return table(heads, [[*row(folder, name)] for name in ENCODED], "---:")


def long_rows() -> str:
    """Full fine-tuning of Llama-3-8B on one long row."""

    def row(flags: dict[str, Any]) -> Iterator[str]:
        given = {"activations_on": "host", "params_on": "host", "batch_size": 1, "precision": "bf16", **flags}
        answer = plan_model(PlanSettings(hf_config=LLAMA_3_8B, **given))
        now, settings = answer.planned, answer.planned.step.settings
        yield now.hardware.name.partition(" ")[0] + " (the most)" * ("max" in flags)
        yield from (f"{now.tokens:,}", f"{settings.tiles:,}", settings.activations_on, settings.keys_on)
        yield f"{now.memory['device'] / 2**30:.1f} of {now.hardware.memory['device'] / 2**30:.1f}"
        yield f"{(now.memory['pinned'] + now.memory['host']) / 1e9:,.0f}"
        yield f"{now.memory['disk'] / 1e9:,.0f}"
        yield from (f"{now.step_seconds:,.0f}", f"{1 / now.step_seconds:.6f}")
        yield from (f"{now.tokens_per_second:,.0f}", f"{now.tflops:.0f}")
        kind, share = next(iter(shares(now).items()))
        yield f"{kind} {100 * share:.0f} %" if now.fits else "does not fit"

    heads = ["card", "tokens", "tiles", "activations on", "keys on"]
    heads += ["device, GiB", "pinned + host, GB", "disk, GB"]
    heads += ["step, s", "steps/s", "tokens/s", "TFLOP/s", "bound by"]
    return table(heads, ([*row(flags)] for flags in LONG), "---:")


def pipelines() -> str:
    """Llama-3-8B on eight RTX 4090, and on one of them."""

    def row(flags: dict[str, Any]) -> Iterator[str]:
        now = plan_model(PlanSettings(hf_config=LLAMA_3_8B, **{**PIPELINE, **flags})).planned
        settings, moved = now.step.settings, now.bus_bytes
        yield f"`{settings.order}`" if now.devices > 1 else "one device"
        yield from (f"{now.devices}", settings.params_on, "yes" if settings.compile_segments else "no")
        places = [x for x in now.memory if x.startswith("device")]
        yield f"{max(now.memory[x] for x in places) / 2**30:.1f}"
        yield f"{max(x for bus, x in moved.items() if bus.startswith('d2h')) / 1e9:,.0f}"
        yield from (f"{now.step_seconds:.1f}", f"{100 * now.bubble:.0f} %", f"{now.tokens_per_second:,.0f}")
        yield "yes" if now.fits else "no"

    heads = ["order", "devices", "parameters on", "compiled", "largest device, GiB"]
    heads += ["most from a device, GB", "step, s", "bubble", "tokens/s", "fits"]
    return table(heads, ([*row(flags)] for flags in PIPELINES), "---:")


def updates() -> str:
    """Seconds of a step with its updates on the host, on the device, and where "auto" has them."""

    def cells(name: str, change: dict[str, Any]) -> Iterator[str]:
        case, world, figures = UPDATES[name]
        on = replace_figures(load_profile(case.profile), figures).hardware(case.precision, world)
        for place in ("host", "device", "auto"):
            tokens = torch.empty((case.rows, TOKENS), dtype=torch.int64, device="meta")
            settings = {"clip_norm": 1.0, "precision": case.precision, "update_on": place, **change}
            batch = tokens, tokens
            how = {"optimizer": zfunc.AdamW(moments=settings.pop("moments", "fp32")), "advice": False}
            now = zfunc.plan(segments(case), batch, hardware=on, world=world, **how, **settings)
            chosen = f" ({now.settings['update_on']})" if place == "auto" else ""
            yield f"{now.step_seconds:.2f}{chosen}" if now.fits else f"({now.step_seconds:.2f})"

    rows = (
        [", ".join(filter(None, (name, change))), *cells(name, changes)]
        for name in UPDATES
        for change, changes in UPDATED.items()
    )
    return table(["step of 10 B, s", "host", "device", "auto"], rows, "---:")


def strong_scaling() -> str:
    """1,024 sequences for all ranks together, in micro-batches of 8 at most."""
    heads = ["ranks", "sequences a rank"]
    for case in (H100, V100):
        heads += [f"{case.name}: step, s", "tokens/s a GPU", "speed-up", "bound by"]

    def step(case: Case, world: int) -> Planned:
        return planned(case, world, rows=1024 // world, micro_batches=max(1, 1024 // world // 8))

    def row(world: int) -> Iterator[str]:
        yield from (f"{world:,}", f"{1024 // world}")
        for now, first in ((step(case, world), step(case, 16)) for case in (H100, V100)):
            kind, share = next(iter(shares(now).items()))
            yield from (f"{now.step_seconds:.2f}", f"{per_gpu(now, world):,.0f}")
            yield from (f"{first.step_seconds / now.step_seconds:.1f}", f"{kind} {100 * share:.0f} %")

    return table(heads, ([*row(n)] for n in (16, 64, 128, 256, 512, 1024)), "---:")


def figures() -> Iterator[str]:
    """What the text states beside the tables."""
    full = evolve(H200, num_layers=86)
    for case in (H200, full):
        yield f"{case.name}: device {format_bytes(planned(case, 1024).memory['device'])}"
    for case in (H100, V100, GH200):
        profile = load_profile(case.profile)
        reached = profile.value("reached", case.precision)
        on = hardware(case, 1024)
        rate, empty = on.rates["network"], on.seconds(Op("all_gather", (), "network"))
        yield (
            f"{case.name}: arithmetic {reached:.0%}, network {rate / 1e9:.0f} GB/s, {empty * 1e3:.1f} ms to start "
            "a collective of 1,024 ranks"
        )
    for case in (H100, H200):
        now = planned(case, 1024)
        events = now.timeline.events
        compute = sum(e.seconds for e in events if e.kind == "compute")
        after = now.step_seconds - max(e.end for e in events if e.op.startswith("backward"))
        idle, end = 0.0, 0.0
        for e in sorted((e for e in events if e.lane == "compute"), key=lambda e: e.start):
            idle += max(0.0, e.start - end) if e.op.startswith("square_sum") else 0.0
            end = e.end
        gathered = 2 * num_parameters(case.config) / hardware(case, 1024).rates["network"]
        yield (
            f"{case.name}, 1,024 ranks: compute {compute:.2f} s, parameters gathered once more {gathered:.2f} s, "
            f"after backward {after:.2f} s, waiting for square_sum {idle:.2f} s, d2h busy {now.lanes['d2h']:.1%}"
        )
    both = planned(H200, 1024, schedule=NormsApart(), **LARGE)
    yield f"{H200.name}: squares apart and large buckets {gain(both, planned(H200, 1024))}"
    yield f"{H100.name}: nothing recomputed {format_bytes(planned(H100, 1024, recompute='none').memory['device'])}"
    for profile in ("h100", "h200"):
        case = evolve(H200, profile=profile)
        layers = range(40, 100)
        too_many = bisect_left(
            layers, True, key=lambda n, c=case: not planned(evolve(c, num_layers=n), 1024).fits
        )
        yield f"layers of 8,192 that fit on {profile}: {layers[too_many - 1]}"


def main() -> None:
    """Print everything."""
    torch.set_num_threads(1)
    network = [(case, n) for case in (H100, V100, H200) for n in (32, 256, 1024)]
    for part in (weak_scaling, bounds, needs, lambda: gains(CHANGES, COLUMNS)):
        print(part(), "\n", flush=True)
    print(gains(NETWORKS, network, "*tokens/s a GPU, as above*"), "\n")
    print(strong_scaling(), "\n")
    print(larger_than_the_device(), "\n")
    print(encoded_bases(), "\n")
    print(long_rows(), "\n")
    print(pipelines(), "\n", flush=True)
    print(updates(), "\n")
    print(
        gains(ZERO_3, [(case, n) for case in (H100, H200) for n in FEW[1:]], "*tokens/s a GPU, stage 2*"),
        "\n",
    )
    print(sliced(), "\n")
    print(*figures(), sep="\n")


if __name__ == "__main__":
    main()
