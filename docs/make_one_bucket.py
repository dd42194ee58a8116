"""Write the numbers, tables and pictures of docs/one_bucket.md: `python docs/make_one_bucket.py`.

The invariant: every figure of the page stands between `<!--name-->` and `<!--/-->` and is what this file makes of
that name, from the graph, the plan and the simulated step. The sentences around them are the page's own.
"""

import contextlib
import io
import re
import textwrap
from pathlib import Path

from one_bucket_lifetimes import lifetimes
from one_bucket_pictures import frames, held
from one_bucket_step import (
    BLOCK,
    BLOCKS,
    BUCKET,
    PLAIN,
    RECIPES,
    SLOW_BUS,
    TOKENS,
    TWO_RANKS,
    boxes,
    broken,
    make_job,
    planned,
    size,
    walk,
)
from one_bucket_tables import code, events, in_letters, named, tables, waits
from one_bucket_timelines import Panel, lanes

from zfunc.core.graph import Op
from zfunc.core.hardware import ROUND
from zfunc.core.optimizer_state import STATE_FORMATS
from zfunc.core.plan import Plan, PlanError
from zfunc.core.simulator import simulate
from zfunc.core.verifier import verify
from zfunc.units import format_seconds

HERE = Path(__file__).parent
PAGE = HERE / "one_bucket.md"
FILLED = re.compile(r"<!--([\w. ]+)-->(.*?)<!--/-->", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)

SAID = {  # what the sentences say of operations of the walk
    "forward": ("ms",),
    "pack": ("bytes", "ms", "waits"),
    "square_sum": ("bytes", "ms"),
    "to_host": ("bytes", "per", "ms"),
    "global_norm": ("waits",),
    "adam": ("bytes", "per", "ms", "waits"),
    "to_device": ("bytes", "per"),
}
SAID_OF_RATES = ("compute", "host", "d2h")
SAID_OF_RANKS = ("Overlapped", "Interleaved")


def fill(page: str) -> str:
    """The page with everything between markers made anew. Raises KeyError for a name that nothing is made for."""
    made = {**figures(), **tables(), "printed": f"\n\n```text\n{printed(page)}```\n\n"}

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name not in made:
            raise KeyError(
                f"one_bucket.md: got the marker {name!r}, expected one of {', '.join(sorted(made))}"
            )
        return f"<!--{name}-->{made[name]}<!--/-->"

    return FILLED.sub(filled, page)


def printed(page: str) -> str:
    """What the page's Python code prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("\n".join(CODE.findall(page)), {})
    return out.getvalue()


def figures() -> dict[str, str]:
    """Everything that stands in a sentence, by name."""
    plan, at = planned(PLAIN), events(planned(PLAIN))
    grad = next(r for r in boxes(PLAIN) if r.buffer == "host_grad")
    names = {b.name for b in STATE_FORMATS["fp32"]}
    state = sum(r.nbytes for r in boxes(PLAIN) if r.buffer in names)
    backwards = [e for e in at.values() if e.kind == "compute"]
    job = make_job()
    made = {
        "bucket": f"{BLOCK / 1e6:g} million",
        "blocks": in_letters(BLOCKS),
        "tokens": f"{TOKENS:,}",
        "flops": f"{ROUND.flops / 1e12:g} TFLOP/s",
        **{f"{kind}.rate": f"{ROUND.rates[kind] / 1e9:,g} GB/s" for kind in SAID_OF_RATES},
        "slots": in_letters(job.grad_slots),
        "tensors": in_letters(len(job.layout.buckets[BUCKET].spans)),
        "state": size(state),
        "state.per": f"{state / BLOCK:g}",
        "state.times": in_letters(state // named("to_device").nbytes),
        "squares on host": format_seconds(grad.nbytes / ROUND.rates["host"]),
        "grad waits": format_seconds(at[named("adam").name].start - at[named("to_host").name].end),
        "host idle": format_seconds(at[named("global_norm").name].start),
        "device idle": format_seconds(at["to_device[0]"].end - max(e.end for e in backwards)),
        "places": in_letters(sum(held(PLAIN, r, None) for r in boxes(PLAIN))),
        **{
            f"ranks {name}": format_seconds(simulate(planned(TWO_RANKS, name)).seconds)
            for name in SAID_OF_RANKS
        },
        **race_figures(),
    }
    sizes = {r.buffer: r.nbytes for r in boxes(PLAIN)}
    made |= {f"{buffer}.bytes": size(sizes[buffer]) for buffer in ("params", "grads", "squares")}
    made["params.per"] = f"{sizes['params'] / BLOCK:.2g}"
    for verb, said in SAID.items():
        found = op_figures(named(verb), plan)
        made |= {f"{verb}.{what}": found[what] for what in said}
    return made


def op_figures(op: Op, plan: Plan) -> dict[str, str]:
    """What a sentence can say of one operation."""
    return {
        "bytes": size(op.nbytes),
        "per": f"{op.nbytes / BLOCK:g}",
        "ms": format_seconds(ROUND.seconds(op)),
        "waits": code(waits(plan, op)),
    }


def race_figures() -> dict[str, str]:
    """The wait that is deleted, and what comes of it where copies are slow."""
    bad, writes, reads = broken(planned(PLAIN))
    lucky, late = events(bad), {e.op: e for e in simulate(bad, SLOW_BUS).events}
    left = late[reads.name].end - late[writes.name].start
    return {
        "race.writes": code([writes.name]),
        "race.reads": code([reads.name]),
        "race.margin": format_seconds(lucky[writes.name].start - lucky[reads.name].end),
        "race.rate": f"{SLOW_BUS.rates['d2h'] / 1e9:g} GB/s",
        "race.share": f"{left / late[reads.name].seconds:.0%}".replace("%", " %"),
        "race.said": f"\n\n```text\n{refusal(bad)}\n```\n\n",
    }


def refusal(plan: Plan) -> str:
    """What `verify` says of a plan with a race, without the plan that follows."""
    try:
        verify(plan)
    except PlanError as error:
        said = str(error).partition(":\n")[0]
        return "\n".join(textwrap.wrap(said, 110))
    raise AssertionError("the plan was expected to be refused: a wait that build keeps is needed")


def pictures() -> dict[str, str]:
    """Every picture of the page, by file name."""
    plan = planned(PLAIN)
    said = {op.name: subtitle(op, plan) for op in walk(PLAIN)}
    said[""] = (
        f"{BLOCK / 1e6:g} million parameters; boxes are as high as they have bytes, but for those of a few"
    )
    faint = (
        f"lit: bucket {BUCKET} and what the whole step shares; faint, with their numbers: the other buckets"
    )
    bad, writes, reads = broken(plan)
    lit = {op.name: op.name for op in (writes, reads)}
    race = [
        Panel(title, p, lit, ("compute", "d2h"), clash, SLOW_BUS)
        for title, p, clash in (
            ("As planned", plan, None),
            ("Without the wait", bad, (reads.name, writes.name)),
        )
    ]
    return {
        **frames(PLAIN, said),
        "bucket-lanes.svg": lanes(
            "One step under two schedules", f"{faint}; dotted: decide has ended",
            [Panel(name, planned(PLAIN, name)) for name in ("Serial", "Overlapped")],
        ),
        "bucket-bytes.svg": lifetimes(
            "Where the bytes are, and how long", "a bar lasts while what the region holds is needed; Overlapped",
            PLAIN, "Overlapped",
        ),
        "bucket-race.svg": lanes(
            "A slot used too early", "red: what is copied from here on is bucket 0's gradient", race
        ),
        "bucket-recipes.svg": lanes(
            "One step under four recipes", f"{faint}; dotted: decide has ended; Overlapped",
            [Panel(name.capitalize(), planned(graph)) for name, graph in RECIPES.items()],
        ),
        "bucket-ranks.svg": lanes(
            "One rank of two, no clipping", f"{faint}; dotted: decide has ended",
            [Panel(name, planned(TWO_RANKS, name)) for name in ("Overlapped", "Interleaved")],
        ),
    }  # fmt: skip


def subtitle(op: Op, plan: Plan) -> str:
    """Where an operation runs, how long alone, and what it waits for."""
    lane, position = plan.place[plan.graph.position[op.name]]
    before = plan.graph.ops[plan.lanes[lane].ops[position - 1]].name
    for_ = (
        f"waits for {', '.join(waits(plan, op))}"
        if waits(plan, op)
        else f"follows {before} there, and waits for nothing"
    )
    return f"{op.kind} lane, {format_seconds(ROUND.seconds(op))} alone; {for_}"


def main() -> None:
    """Write page and pictures."""
    for name, picture in pictures().items():
        (HERE / name).write_text(picture)
        print(f"written: {name}")
    PAGE.write_text(fill(PAGE.read_text()))
    print(f"written: {PAGE.name}")


if __name__ == "__main__":
    main()
