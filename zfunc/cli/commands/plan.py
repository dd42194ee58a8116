"""`zfunc plan`: plan the GPT of the flags, or the largest that fits, and print the answer.

The segments are on the meta device and the batch has no data, so nothing is allocated. The answer is printed as one
screen of text, or as one JSON object for programs.
"""

import json
import math
import sys
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, fields, frozen

from zfunc import schedules
from zfunc.cli.parser import EXIT_FAILED, EXIT_OK, Command, write_file
from zfunc.cli.simulated_model import SimulatedFlags, simulated_model
from zfunc.cli.terminal import progress_line
from zfunc.core.display import counted
from zfunc.core.hardware import ROUND
from zfunc.core.pipeline import B, F
from zfunc.core.setting_values import BY_DEVICE
from zfunc.core.settings import StepSettings
from zfunc.errors import refuse, setting
from zfunc.options import AUTO, as_flag, count, file_to_write, one_of, option
from zfunc.planner.candidate import garbage_collection_paused, shortage_text
from zfunc.planner.profile import Profile, box_of
from zfunc.train.settings import CHOSEN, STEP, check_rows, check_together, step_flags, step_settings

if TYPE_CHECKING:
    from zfunc.cli.simulated_model import SimulatedModel
    from zfunc.planner.candidate import PlannedStep
    from zfunc.planner.cost_model import CostModel
    from zfunc.planner.planned import Planned
    from zfunc.planner.search import Watch
    from zfunc.planner.suggestions import Suggestion

UNPLANNED = ("deterministic",)  # settings without a flag here
MAXIMA = {"layers": "num_layers", "batch": "batch_size", "length": "seq_length"}  # of `max`
COUNTED = {"layers": "layers", "batch": "sequences", "length": "tokens"}
MOST_LAYERS = 400  # that are tried; each adds operations and time
MOST_ROWS, MOST_TOKENS = 1 << 14, 1 << 23  # that are tried: for each rank and micro-batch, and of a sequence
LENGTH_UNIT, TILED_UNIT = 128, 1024  # tokens; where a number of tiles is chosen
# Settings that a search's answer always has; others where they are not the default.
ALWAYS_TYPED = ("schedule", "bucket_size", "slots")
PIPELINED = ("devices", "order", "micro_batches")
FIGURES = (
    *("fits", "step_seconds", "tflops", "tokens_per_second", "memory", "bus_bytes", "lanes", "bound"),
    *("lacking", "world", "devices", "bubble", "reasons"),
)

_output = partial(option, group="output")

SCHEDULE = STEP["schedule"].offering(
    (BY_DEVICE, *schedules.__all__, AUTO),
    f"; {AUTO} searches for all settings that change no number, but precision and micro-batches",
)
PlannedStepFlags = step_flags(SimulatedFlags, {**CHOSEN, "schedule": SCHEDULE}, without=UNPLANNED)


@frozen(kw_only=True)
class PlanSettings(PlannedStepFlags):
    """Settings of `zfunc plan`: the step to plan, by default that of `zfunc train`, on a GPU."""

    UNNAMED = "v100-32gb"

    max: str | None = option(
        None,
        "find the most that fits, whatever its flag says: layers, as `max` alone does, sequences of a batch, or "
        f"tokens of a sequence, in steps of {LENGTH_UNIT} (with tiles {AUTO}: {TILED_UNIT:,}), up to the "
        "positions of its config (default: nothing)",
        one_of(MAXIMA),
        "|".join(MAXIMA),
        group="model",
        alone="layers",
        common=True,
    )
    world: int = option(
        1, "ranks that train together, each on its `devices`", count, group="hardware", common=True
    )
    gpus: int | None = option(
        None,
        "GPUs in all, in one machine where a profile has so many of the card: they are divided into `world` ranks "
        "of so many `devices` each, what is not given of these as is fastest (default: what those say)",
        count,
        group="hardware",
        common=True,
    )
    out: Path | None = _output(
        None,
        "file to write the answer to: .html with a picture of the step, or .txt (default: print it)",
        file_to_write(".html", ".txt"),
        common=True,
    )
    json: bool = _output(False, "print one JSON object, for programs")

    def __attrs_post_init__(self) -> None:
        check_together(self)
        if self.max == "layers" and (self.hf or self.hf_config):
            got = "layers with a Hugging Face model, whose config says how many"
            refuse("max", got, "batch or length", f"pass {setting('max', 'batch')}")
        check_rows(self.batch_size, self.world, self.micro_batches)


@garbage_collection_paused()  # the import of torch, too
def run_plan(settings: PlanSettings) -> int:
    """Run `zfunc plan`, and print its answer, also after Ctrl-C; returns exit code 0 if the step fits, 1 if not."""
    from zfunc.planner.planned import report_html
    from zfunc.planner.search import Watch

    with progress_line() as show:
        answer = plan_model(settings, watch := Watch(show))
    if watch.stopped:
        print("stopped: the best so far follows, without advice", file=sys.stderr, flush=True)
    text = plan_text(answer)
    if settings.json:
        print(as_json(answer), flush=True)
    elif settings.out is None:
        print(text, end="", flush=True)
    if settings.out is not None:
        is_page = settings.out.suffix == ".html"
        write_file(settings.out, report_html(answer.planned, text) if is_page else text)
    return EXIT_OK if answer.planned.fits else EXIT_FAILED


@frozen(eq=False)
class PlannedModel:
    """A model and the plan of its step. With `settings.max`, `settings` have the most layers, batch or length
    that fits, `limit` says what bounds this besides memory ("": nothing), and `knee` has pairs of a length up
    to it and tokens/s. With `settings.gpus`, `layouts` are the plans of all divisions of the GPUs into ranks
    and devices, and `box` says which larger machine replaced the profile's, because all GPUs fit in it ("":
    none did)."""

    settings: PlanSettings
    planned: "Planned"
    model: "SimulatedModel"
    limit: str = ""
    layouts: "tuple[PlannedModel, ...]" = ()
    knee: tuple[tuple[int, float], ...] = ()
    box: str = ""

    @property
    def layout(self) -> str:
        """A line of text: how many ranks and devices, and their tokens per second or the memory that is short."""
        p = self.planned
        speed = f"{p.tokens_per_second:,.0f} tokens/s" if p.fits else shortage_text(p.lacking)
        return f"{counted(p.world, 'rank')} of {counted(p.devices, 'device')}: {speed}"


def plan_model(settings: PlanSettings, watch: "Watch | None" = None) -> PlannedModel:
    """Plan the step of `settings`. A `watch` is told how searches progress, and can stop them.

    Raises ValueError for what cannot work, FileNotFoundError for hardware that is not known.
    """
    from zfunc.planner.cost_model import precision_for
    from zfunc.planner.plan_step import plan_settings
    from zfunc.planner.search import watched

    hardware = settings.profile
    assert hardware is not None
    if settings.gpus is not None:
        return _fastest_layout(settings, settings.gpus, hardware, watch)
    step = step_settings(settings, precision=precision_for(hardware, settings.precision))
    begin = settings if settings.max != "length" else evolve(settings, seq_length=1)
    model, limit, fitting = simulated_model(begin), "", step
    if settings.max:
        found, limit, fitting = _largest_that_fits(settings, step, hardware, model, watch)
        settings = evolve(settings, **{MAXIMA[settings.max]: found})
        if not (settings.hf or settings.hf_config):
            model = simulated_model(settings)
    costs = _costs(model, settings, hardware)
    knee: list[tuple[int, float]] = []
    tiled = step.tiles == AUTO
    unit = LENGTH_UNIT if tiled else math.lcm(LENGTH_UNIT, int(step.tiles))
    with watched(watch):
        for part in (8, 4, 2) if settings.max == "length" else ():
            if (shorter := settings.seq_length // part // unit * unit) and not _stopped(watch):
                given = evolve(settings, seq_length=shorter)
                fewer = simulated_model(given) if not (settings.hf or settings.hf_config) else model
                speed = plan_settings(_costs(fewer, given, hardware), step, advice=False, watch=watch)
                knee.append((shorter, speed.tokens_per_second))
    if _stopped(watch):
        step, knee = fitting, []
    if settings.max and tiled:  # as many as the most fits in
        step = evolve(step, tiles=costs.segments.tile_counts[-1])
    planned = plan_settings(costs, step, watch=watch)
    knee += [(settings.seq_length, planned.tokens_per_second)] if knee else []
    return PlannedModel(settings, planned, model, limit, knee=tuple(knee))


def _stopped(watch: "Watch | None") -> bool:
    return watch is not None and watch.stopped


def _fastest_layout(
    settings: PlanSettings, gpus: int, hardware: Profile, watch: "Watch | None"
) -> PlannedModel:
    """Plan every division of `gpus` GPUs into ranks of one or more devices; returns the fastest plan that
    fits, or if none fits, the one that lacks the fewest bytes. If a known machine of this kind has `gpus`
    GPUs, that is planned."""
    planned: list[PlannedModel] = []
    refused: list[ValueError] = []
    own, box = int(hardware.value("count", "devices")), ""
    if gpus > own and (name := box_of(hardware.name, gpus)) != hardware.name:
        box = f"planned in one machine, {name}: that of {hardware.name} has {counted(own, 'device')}"
        settings, own = evolve(settings, hardware=name), gpus
    ways = ((gpus // n, n) for n in range(1, min(gpus, own) + 1) if gpus % n == 0)
    given = [(w, n) for w, n in ways if settings.world in (1, w) and settings.devices in (1, n)]
    if not given:
        own = f"{setting('world', settings.world)} and {setting('devices', settings.devices)}"
        refuse("gpus", f"{gpus} with {own}", "their product on machines that have them", "leave out `gpus`")
    for world, devices in given:
        try:
            planned.append(plan_model(evolve(settings, gpus=None, world=world, devices=devices), watch))
        except ValueError as error:  # too few sequences for its ranks, or segments for its devices
            refused.append(error)
        if _stopped(watch) and planned:
            break
    if not planned:
        raise refused[0]
    best = min(planned, key=lambda x: (sum(x.planned.lacking.values()), x.planned.step_seconds))
    return evolve(best, layouts=tuple(planned), box=box)


def _costs(model: "SimulatedModel", settings: PlanSettings, hardware: Profile) -> "CostModel":
    rows = settings.batch_size // settings.world
    return model.cost_model(hardware, rows, settings.seq_length, settings.world)


def _largest_that_fits(
    settings: PlanSettings,
    step: StepSettings,
    hardware: Profile,
    model: "SimulatedModel",
    watch: "Watch | None",
) -> tuple[int, str, StepSettings]:
    """Find the most layers, sequences or tokens (`settings.max` names which) that fit. Tiers and tile counts
    that `step` leaves "auto" are tried. Returns that number, or the smallest one if none fits; what else
    limits it, or ""; and the settings."""
    from zfunc.planner.plan_step import most_that_fit, search_start

    placed = [
        search_start(x).scheduled(on_cpu=hardware.unified) for x in step.placed(settings.world, disk=True)
    ]
    what, longest = settings.max or "", model.longest or MOST_TOKENS
    tiled = step.tiles == AUTO
    length = TILED_UNIT if tiled else math.lcm(LENGTH_UNIT, int(step.tiles))
    unit, most = {
        "layers": (1, MOST_LAYERS),
        "batch": (settings.world * settings.micro_batches, MOST_ROWS),
        "length": (min(length, longest), max(1, longest // length)),
    }[what]
    costs: dict[int, CostModel] = {}

    def step_of(count: int, way: StepSettings) -> "PlannedStep":
        if count not in costs:
            given = evolve(settings, **{MAXIMA[what]: count * unit})
            costs[count] = _costs(simulated_model(given) if what == "layers" else model, given, hardware)
        tiles = {"tiles": costs[count].segments.tile_counts[-1]} if tiled else {}
        return costs[count].step(evolve(way, **tiles))

    def told(count: int) -> str:
        return f"{count * unit:,} {COUNTED[what]}"

    found, fitting = 0, placed[0]
    for way in placed:
        if not _stopped(watch) and (n := most_that_fit(partial(step_of, way=way), most, watch, told)) > found:
            found, fitting = n, way
    if _stopped(watch) and not found:
        raise KeyboardInterrupt  # before anything fits there is nothing to tell
    limit = "Ctrl-C" if _stopped(watch) else ""
    if found == most:
        limit = f"{told(most)}, beyond which none are tried"
        if what == "length" and model.longest:
            limit = "the positions of its config (max_position_embeddings)"
    return max(1, found) * unit, limit, fitting


# --- the answer ------------------------------------------------------------------------------------------


def as_json(answer: PlannedModel) -> str:
    """The answer of `zfunc plan` as a JSON object; memory in bytes, times in seconds. "advice", flags that
    would make the step fit or faster, is [] if none was found, null if Ctrl-C ended the search."""
    p = answer.planned
    content: dict[str, Any] = {
        **{name: getattr(p, name) for name in FIGURES},
        "segments": [p.step.spec.mesh.segments_on(d, F, B) for d in range(p.devices)],
        "release": p.release and asdict(p.release),
        "disk": p.disk and {**asdict(p.disk), "busy": p.disk.busy},
        "advice": [_typed(suggestion) for suggestion in p.suggestions] if p.advised else None,
        "peaks": {tier: {"op": p.step.peaks[tier].op, "holds": held} for tier, held in p.held.items()},
        **{name: getattr(answer.model, name) for name in ("parameters", "trained", "num_layers")},
        **{name: getattr(answer.settings, name) for name in ("batch_size", "seq_length")},
        "limit": answer.limit,
        "knee": answer.knee,
        "layouts": [x.layout for x in answer.layouts],
        "box": answer.box,
        "hardware": p.hardware.name,
        "settings": {
            **p.settings,
            "schedule": p.step.settings.schedule_name,
            "moments": p.step.settings.moments,
        },
    }
    return json.dumps(content, indent=2)


def plan_text(answer: PlannedModel) -> str:
    """The answer of `zfunc plan` as one screen of text."""
    from zfunc.planner.planned import report

    flags, model, p = answer.settings, answer.model, answer.planned
    lines: list[str] = []
    if flags.max:
        found = f"{getattr(flags, MAXIMA[flags.max]):,} {COUNTED[flags.max]}"
        bounded = f", bounded by {answer.limit} and not by memory" * bool(answer.limit)
        lines.append(f"the most that fits with these settings: {found}{bounded}")
        known = "; ".join(f"{tokens:,}: {speed:,.0f}" for tokens, speed in answer.knee)
        lines += [f"  tokens/s by tokens of a sequence: {known}"] if known else []
    lines.append(
        f"{model.name}; a step of {flags.batch_size:,} x {flags.seq_length:,} tokens on {counted(p.world, 'rank')}"
    )
    found = _found(p) if AUTO in (flags.schedule, flags.order) else []
    if not p.fits and model.trained == model.parameters and (flags.hf or flags.hf_config):
        found.append("or train adapters alone (--lora 16): weights in 16 bits, no optimizer state of them")
    lines += [f"  {x}" for x in (answer.box, *(x.layout for x in answer.layouts)) if x]
    told = report(p, chosen_precision=flags.precision == AUTO, found=found, written=_typed)
    return "\n".join([*lines, told])


def _typed(suggestion: "Suggestion") -> str:
    """A suggestion of the planner as text: the flags to type, and their effect."""
    return f"{' '.join(starmap(as_flag, suggestion.changes.items()))}: {suggestion.effect}"


def _found(p: "Planned") -> list[str]:
    """Lines of text: the settings a search found, as options of `zfunc train`, a schedule by its name alone."""
    from zfunc.planner.planned import wrapped
    from zfunc.planner.search import SPACE

    settings = p.step.settings
    chosen = {
        name: settings.schedule_name if name == "schedule" else getattr(settings, name)
        for name, default in ((f.name, f.default) for f in fields(StepSettings))
        if name in ALWAYS_TYPED or (name in {*SPACE, *PIPELINED} and getattr(settings, name) != default)
    }
    orders = hasattr(p.settings["schedule"], "hardware") and p.hardware != ROUND
    note = " (which orders for round numbers, not for this hardware)" if orders else ""
    return wrapped(f"as options of zfunc train{note}: {' '.join(starmap(as_flag, chosen.items()))}")


COMMAND = Command(
    "say whether a step fits, how long it takes, and what would help",
    "Nothing is allocated and no GPU is needed: the step is simulated on a hardware profile.",
    PlanSettings,
    run_plan,
    """
    # 10 billion parameters on one V100
    zfunc plan --num-layers 50 --hidden-size 4096 --num-attention-heads 32 \\
        --seq-length 1024 --vocab-size 50257 --batch-size 10
    # the fastest settings that fit eight H100s
    zfunc plan --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 \\
        --vocab-size 50257 --hardware h100 --world 8 --schedule auto
    # the most layers that fit this machine
    zfunc plan --hidden-size 1024 --data texts --hardware machine.toml --max
    # the largest batch of a Hugging Face model, from its config alone
    zfunc plan --hf-config config.json --seq-length 2048 --lora 16 \\
        --hardware rtx4090 --max batch
    """,
    "Ctrl-C ends a search, that of --max, too, or the advice: the best that was found is printed, with its exit\n"
    "code, and the advice of --json is null.\n"
    "Exit codes: 0 it fits, 1 it does not, 2 it cannot be planned, 130 for Ctrl-C otherwise.",
)
