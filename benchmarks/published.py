"""What others published of their systems, planned: `zfunc.plan`, set to work as the peer does, over the published.

The rows are data (`benchmarks/published.toml`): model, hardware, batch, the way of working, figure and source.
Beside each stands zfunc's own best plan of the same batch. No figure is fitted to a row: constants come with the
profiles and their sources (the RTX 4090's by single layers that the authors of R1 to R6 measured), and what a peer
does on its host is a fact of the row.

    python -m benchmarks.published --only Z,P --no-best
    python -m benchmarks.published --json benchmarks/results --page
"""

import json
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import asdict, evolve, field, fields, frozen

from benchmarks.machine import make_parser, write
from benchmarks.planned import PUBLISHED, RESULTS, VOCABULARY, described, models, own_steps
from benchmarks.step import CLIP
from docs.markdown_table import table
from zfunc.core.dtypes import Precision
from zfunc.core.hardware import Measured
from zfunc.core.settings import StepSettings
from zfunc.core.spec import Origin, SegmentCost, StepSpec
from zfunc.engine.trace.segment import Segment
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.gpt_costs import gpt_costs
from zfunc.optim.adamw import AdamW
from zfunc.options import as_flag
from zfunc.planner.cost_model import CostModel, SegmentCosts, StepCosts
from zfunc.planner.plan_step import plan_settings
from zfunc.planner.planned import Planned
from zfunc.planner.profile import Profile, load_profile, replace_figures
from zfunc.planner.traced_costs import traced_costs

PAGE = Path(__file__).parent.parent / "docs" / "published.md"
BEGIN, END = "<!-- python -m benchmarks.published writes from here -->", "<!-- to here -->"
WIDE = 1.5  # a ratio beyond needs a fact beside it
BEST: dict[str, Any] = dict.fromkeys(("schedule", "params_on", "activations_on"), "auto")
SAID = ("title", "system", "facts", "searched")  # of a row, without effect on its plan
MORE = ("#b8860b", "#2a9d9d", "#c05a9b", "#5b5b5b", "#8fb339", "#111111")


@frozen(kw_only=True)
class Row:
    """A published figure, and the step of zfunc that works as the peer's; fields as `published.toml` explains."""

    id: str
    system: str
    title: str
    model: str
    hardware: str
    precision: Precision
    length: int
    micro_batch: int
    figure: float
    unit: str
    way: dict[str, Any] = field(factory=dict[str, Any], hash=False)
    micro_batches: int = 1
    world: int = 1
    divided: int = 1
    adam: float | None = None
    reductions: float = 1.0
    compiled: bool = False
    fp16_sums: bool = False
    searched: bool = False
    flops_per_token: str = ""
    facts: tuple[str, ...] = field(default=(), converter=tuple)

    @property
    def devices(self) -> int:
        """The number of GPUs in the published run."""
        return self.world * self.divided * self.settings.devices

    @property
    def tokens(self) -> int:
        """Tokens of one step, of all ranks together."""
        return self.world * self.micro_batches * self.micro_batch * self.length

    @property
    def settings(self) -> StepSettings:
        """The StepSettings with which zfunc's step works as the peer's."""
        return StepSettings(
            precision=self.precision,
            micro_batches=self.micro_batches,
            compile_segments=self.compiled,
            **self.way,
        )

    @property
    def seconds(self) -> float:
        """Seconds of one step of the peer, by its published figure."""
        if self.unit == "seconds":
            return self.figure
        rate = self.figure
        if self.unit == "TFLOPS":
            rate = self.figure * 1e12 / FORMULAS[self.flops_per_token](self) * self.devices
        elif self.unit == "tokens/s a GPU":
            rate *= self.devices
        return self.tokens / rate


def parameters(row: Row) -> int:
    """The number of trained parameter elements of the row's model, tied ones counted once."""
    spec = costs(row).untraced(row.settings, on_gpu=True)
    return spec.layout.num_trainable


def deep_compile(row: Row) -> float:
    """FLOPs a token as DeepSpeedExamples' `benchmarks/deepcompile/plot_common.py` counts them for Llama-3-70B."""
    hidden, inner, layers, vocabulary = 8192, 32768, 80, 32000
    attention = 2 * hidden**2 + 2 * hidden * row.length
    return 8 * (layers * (attention + 3 * inner * hidden) + vocabulary * hidden)


def recomputed(row: Row) -> float:
    """8 FLOPs for each token and parameter: 2 in forward, 4 in backward, 2 in recomputation."""
    return 8.0 * parameters(row)


FORMULAS = {"8P": recomputed, "DeepCompile": deep_compile}


def read_rows() -> tuple[list[Row], dict[str, str]]:
    """All rows of `published.toml`; and by name, why other published figures cannot be compared."""
    data = tomllib.loads(PUBLISHED.read_text())
    rows: list[Row] = []
    for source in data["source"]:
        for own in source.pop("rows"):
            order = {"order": own.pop("order")} if "order" in own else {}
            way = source.get("way", {}) | own.pop("way", {}) | order
            said = [*source.get("facts", ()), *([own.pop("note")] if "note" in own else ())]
            rows.append(Row(**source | own | {"way": way, "facts": said}))
    return rows, data["apart"]


# --- planning ---------------------------------------------------------------------------------------------


@cache
def _first_layers(model: str) -> tuple[tuple[Segment, ...], int]:
    """The segments of a model cut to the first one or two layers, and how often these make the model."""
    config = models()[model]
    few = 2 if "sliding_window" in config else 1  # every second layer looks back that far only
    return described(config | {"num_hidden_layers": few}), config["num_hidden_layers"] // few


def repeated_costs(few: SegmentCosts, times: int, world: int, rows: int) -> SegmentCosts:
    """The SegmentCosts of a model whose layers repeat `times`: `few` are the costs of one repetition, traced
    once, between the first and last segment. `rows` is one rank's batch."""
    first, *layers, last = few.parameters
    num_layers = len(layers)
    blocks = [[evolve(p, name=f"{n}.{p.name}") for p in own] for n in range(times) for own in layers]

    def trace(spec: StepSpec, on_gpu: bool, grouped: bool) -> StepCosts:
        settings = spec.settings
        several = (
            {"devices": 2, "order": str(settings.order).partition(":")[0]}
            if spec.mesh.parts
            else {"devices": 1}
        )
        found = few.traced(evolve(settings, micro_batches=1, **several), on_gpu=on_gpu, grouped=grouped)
        first, *layers, last = (_of_more(x, (times - 1) * num_layers, num_layers) for x in found.costs)
        return StepCosts([first, *layers * times, last], found.target_bytes, found.aux)

    tokens = rows // few.rows * few.tokens
    return SegmentCosts([first, *blocks, last], few.optimizer, rows, tokens, trace, world)


def _of_more(cost: SegmentCost, more: int, layers: int) -> SegmentCost:
    """`cost` of a segment of one repetition, which has so many `layers`, for a model of `more` layers: what the
    first segment passes on to the last passes these, too."""
    at = lambda n: n if n <= layers else n + more  # noqa: E731
    origin = lambda x: evolve(x, origin=Origin(at(x.origin.first), x.origin.leaf, at(x.origin.last)))  # noqa: E731
    names = ("shared", "passed_on", "passed_back")
    return evolve(cost, **{name: tuple(map(origin, getattr(cost, name))) for name in names})


@cache
def _few(model: str, rows: int, length: int) -> SegmentCosts:
    tokens = torch.empty((rows, length), dtype=torch.int64, device="meta")
    return traced_costs(_first_layers(model)[0], (tokens, tokens), AdamW())


def costs(row: Row) -> SegmentCosts:
    """The SegmentCosts of the row's model for one rank's batch."""
    of, count = dict(models()[row.model]), row.micro_batch * row.micro_batches
    if of.pop("gpt", False):
        return gpt_costs(GPTConfig(VOCABULARY, row.length, **of), count, AdamW(), row.world)
    times = _first_layers(row.model)[1]
    few = _few(row.model, row.micro_batch, row.length)
    return repeated_costs(few, times, row.world, count)


def profile(row: Row) -> Profile:
    """The Profile of the row's hardware, with the FLOP/s of products that sum in fp16 if the peer's do;
    attention keeps its rate, as it sums in fp32."""
    of, own, other = load_profile(row.hardware), row.precision, "fp16_accumulate"
    if not row.fp16_sums:
        return of
    share = of.value("reached", "attention") * of.value("flops_per_s", own) / of.value("flops_per_s", other)
    rates = {f"{table}.{own}": of.value(table, other) for table in ("flops_per_s", "reached")}
    return replace_figures(of, rates | {"reached.attention": share})


def planned(row: Row) -> Planned:
    """The Planned step of a row, with the peer's settings and the costs of the peer's way of working."""
    model = CostModel(costs(row), profile(row))
    plan = plan_settings(model, row.settings, advice=False)
    known = tuple(dict.fromkeys(as_the_peer(row, plan)))
    if not known:
        return plan
    own = evolve(model, machine=evolve(plan.hardware, measured=known), steps={})
    return plan_settings(own, row.settings, advice=False)


def as_the_peer(row: Row, plan: Planned) -> Iterator[Measured]:
    """Yield Measured seconds for the operations of `plan` that take the peer longer, by the row's facts."""
    ranks = min(row.world, int(profile(row).value("count", "devices")))
    buckets, hardware = plan.step.spec.layout.buckets, plan.hardware
    for op in (plan.step.repetition.small if plan.step.repetition else plan.step).graph:
        if op.verb == "update" and row.adam is not None:
            seconds = buckets[op.index[0]].numel / row.world * ranks / row.adam
            yield Measured("host", 0, op.nbytes, seconds)
        elif op.verb == "reduce_scatter" and row.reductions != 1:
            yield Measured("network", op.flops, op.nbytes, row.reductions * hardware.seconds(op))


def own_best(row: Row) -> Planned | None:
    """zfunc's fastest plan that fits for the same batch on the same GPUs; None if no plan fits.

    Where the peer divides one rank's work among GPUs, zfunc divides the sequences among ranks; a single
    sequence cannot be divided.
    """
    if row.divided > 1:
        each = row.micro_batch * row.micro_batches // row.divided
        if not each:
            return None
        count = max(1, each // row.micro_batch)
        row = evolve(row, world=row.divided, divided=1, micro_batches=count, micro_batch=each // count)
    model = CostModel(costs(row), profile(row))
    base = StepSettings(precision=row.precision, micro_batches=row.micro_batches, clip_norm=CLIP, **BEST)
    ways = [base] if row.world == 1 else [evolve(base, stage=stage) for stage in (2, 3)]
    plans = [plan_settings(model, way, advice=False) for way in ways]
    return min((p for p in plans if p.fits), key=lambda p: p.step_seconds, default=None)


def result(row: Row, *, search: bool) -> dict[str, Any]:
    """The result of a row: tokens/s as published, as planned and, with `search`, of zfunc's own best plan."""
    plan = planned(row)
    found: dict[str, Any] = {
        **asdict(row),
        "gpus": row.devices,
        "published": row.tokens / row.seconds,
        "planned": row.tokens / plan.step_seconds * row.divided,
        "bound": plan.bound,
        "lacking": {} if row.divided > 1 else dict(plan.lacking),
    }
    if search and row.searched:
        own = own_best(row)
        found["best"] = own and own.tokens_per_second
        found["best_settings"] = own and changed_settings(own.step.settings)
    return found


def changed_settings(settings: StepSettings) -> str:
    """The settings that differ from their default, as command-line flags."""
    own = {f.name: getattr(settings, f.name) for f in fields(StepSettings)}
    left = ("precision", "micro_batches", "clip_norm")
    return " ".join(
        as_flag(name, value)
        for name, value in own.items()
        if value != getattr(StepSettings(), name) and name not in left
    )


def identity(of: dict[str, Any]) -> str:
    """A JSON text of the fields that identify a row or its result, to compare rows of two runs."""
    return json.dumps([of[f.name] for f in fields(Row) if f.name not in SAID])


# --- the answer -------------------------------------------------------------------------------------------


def error(of: dict[str, Any]) -> float:
    """The ratio of planned to published tokens/s, or its inverse, whichever is at least 1."""
    return exp(abs(log(of["planned"] / of["published"])))


def summary(results: Sequence[dict[str, Any]]) -> str:
    """A sentence with the median error of the plans, and the number of rows within certain factors."""
    errors = [error(x) for x in results]
    systems = len({x["system"] for x in results})
    within = [f"{sum(e <= limit for e in errors)} within {limit:g}x" for limit in (1.15, 1.25, WIDE)]
    return (
        f"{len(results)} rows of {systems} systems: the median error is {median(errors):.2f}x, the largest "
        f"{max(errors):.2f}x; {', '.join(within)}."
    )


def table_rows(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a table row for each result; marks refer to the facts on the row."""
    notes = facts(results)
    for x in results:
        marks = ", ".join(str(notes.index(fact) + 1) for fact in x["facts"])
        batch = (
            f"{x['micro_batches']} x {x['micro_batch']}" if x["micro_batches"] > 1 else f"{x['micro_batch']}"
        )
        ratio = f"{x['planned'] / x['published']:.2f}"
        best = x.get("best")
        yield (
            x["id"],
            x["system"] + ", compiled" * x["compiled"] + (f" [{marks}]" if marks else ""),
            x["model"],
            f"{x['gpus']} x {x['hardware']}" if x["gpus"] > 1 else x["hardware"],
            f"{batch} x {x['length']:,}",
            f"{x['published']:,.0f}",
            f"{x['planned']:,.0f}" + (" (short of memory)" if x["lacking"] else ""),
            f"**{ratio}**" if error(x) > WIDE else ratio,
            f"{best:,.0f}" if best else "none fits" if "best" in x else "",
        )


def facts(results: Sequence[dict[str, Any]]) -> list[str]:
    """The facts on which the plans of all results rest, as lines of text, each once."""
    return list(dict.fromkeys(fact for x in results for fact in x["facts"]))


HEADS = ("row", "system", "model", "GPUs", "batch of a rank", "published", "planned", "planned / published",
         "zfunc's best")  # fmt: skip


def page(results: Sequence[dict[str, Any]], apart: dict[str, str], own: str = "") -> str:
    """The generated part of the page: summary, table, facts, our `own` steps, sources, and what is not compared
    (`apart`)."""
    sources = dict.fromkeys((x["id"], x["system"], x["title"]) for x in results)
    return "\n\n".join(
        [
            summary(results),
            table(HEADS, table_rows(results)),
            "Facts of the rows:",
            "\n".join(f"{n}. {fact}" for n, fact in enumerate(facts(results), 1)),
            *([own] if own else ()),
            "## Sources",
            table(("rows", "system", "where"), sources),
            "## Not compared",
            table(("what", "why"), apart.items()),
        ]
    )


def with_page(text: str) -> str:
    """The text of the documentation page, with `text` in place of its generated part."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def plot(results: Sequence[dict[str, Any]], path: str) -> None:
    """Write a plot to `path`: planned against published tokens/s for every row, coloured by system."""
    from benchmarks.plots import COLORS, figure, save

    fig, (left, right) = figure(2, title="Published steps, planned as their systems work")
    palette = [*COLORS.values(), *MORE]
    systems = dict.fromkeys(x["system"] for x in results)
    for system, color, marker in zip(systems, cycle(palette), cycle("os^Dv"), strict=False):
        of = [x for x in results if x["system"] == system]
        left.scatter(
            [x["published"] / x["gpus"] for x in of],
            [x["planned"] / x["gpus"] for x in of],
            s=14, color=color, marker=marker, label=system, zorder=3,
        )  # fmt: skip
    values = [v / x["gpus"] for x in results for v in (x["published"], x["planned"])]
    ends = (min(values) / 1.3, max(values) * 1.3)
    for factor in (1 / 1.25, 1, 1.25):
        left.plot(ends, [factor * e for e in ends], color="#999999", linewidth=1 if factor == 1 else 0.6)
    left.set(
        xscale="log", yscale="log", xlabel="published tokens/s a GPU", ylabel="planned", xlim=ends, ylim=ends
    )
    left.legend(frameon=False, fontsize=5.5, labelspacing=0.2, loc="upper left")
    errors = sorted(x["planned"] / x["published"] for x in results)
    right.step(
        errors, [(n + 1) / len(errors) for n in range(len(errors))], where="post", color=COLORS["fp32"]
    )
    right.set(xlabel="planned / published", ylabel="share of rows", xscale="log", ylim=(0, 1))
    ticks = [0.5, 0.67, 0.8, 1, 1.25, 1.5, 2]
    right.set_xticks(ticks, labels=[f"{t:g}" for t in ticks])
    right.minorticks_off()
    right.axvspan(1 / 1.25, 1.25, color="#e4ecf7", zorder=0)
    save(fig, path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", default="", help="the rows whose id begins so, comma separated (default: all)"
    )
    parser.add_argument("--no-best", action="store_true", help="do not search for zfunc's own best plans")
    parser.add_argument(
        "--from", dest="given", metavar="JSON", help="results of the rows that are not planned now"
    )
    parser.add_argument("--page", action="store_true", help="write docs/published.md and docs/published.svg")
    options = parser.parse_args()
    rows, apart = read_rows()
    told: list[dict[str, Any]] = []
    if options.given:
        told = json.loads(Path(options.given).read_text())["results"]
    known = {identity(x): x for x in told}
    for row in (r for r in rows if r.id in options.only.split(",") or not options.only):
        x = known[identity(asdict(row))] = result(row, search=not options.no_best)
        print(
            f"{row.id:<4}{row.system:<34}{row.model:<14}{x['published']:>12,.1f}{x['planned']:>12,.1f} tokens/s"
            f"{x['planned'] / x['published']:>7.2f}  {x['bound']}",
            flush=True,
        )
    results = [
        known[key] | asdict(row) for row in rows if (key := identity(asdict(row))) in known
    ]  # with what is said of it now
    write(options.json, "published", results)
    print(summary(results))
    if options.page:
        PAGE.write_text(with_page(page(results, apart, own_steps(RESULTS))))
        print(f"written: {PAGE}")
        plot(results, str(PAGE.with_suffix(".svg")))


if __name__ == "__main__":
    main()
