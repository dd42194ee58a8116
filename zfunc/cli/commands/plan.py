"""`zfunc plan`: plan the GPT of the flags, or the largest that fits, and print the answer.

The segments are on the meta device and the batch has no data, so nothing is allocated. The answer is printed as one
screen of text, or as one JSON object for programs.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, fields, frozen

from zfunc import schedules
from zfunc.cli.command import EXIT_FAILED, EXIT_OK, Command, write_files
from zfunc.cli.simulated_model import SimulatedFlags, simulated_model
from zfunc.core.hardware import ROUND
from zfunc.core.settings import BY_DEVICE, StepSettings
from zfunc.options import AUTO, as_flag, check_each, count, flag_fields, multiple, one_of, option, path
from zfunc.planner.candidate import garbage_collection_paused
from zfunc.planner.profile import Profile
from zfunc.train.settings import CHOSEN, STEP, check_pretrained, check_rows, step_settings

if TYPE_CHECKING:
    from zfunc.cli.simulated_model import SimulatedModel
    from zfunc.planner.candidate import PlannedStep
    from zfunc.planner.cost_model import CostModel
    from zfunc.planner.planned import Planned
    from zfunc.planner.suggestions import Suggestion

UNPLANNED = ("compile_segments", "deterministic")  # settings without a flag here
MAXIMA = {  # of `max`
    **{"layers": "num_layers", "batch": "batch_size", "length": "seq_length"},
    "longer": "seq_length",  # than the positions of the config
}
MOST_LAYERS = 400  # that are tried; each adds operations and time
MOST_ROWS, MOST_TOKENS = 1 << 14, 1 << 20  # that are tried: for each rank and micro-batch, and of a sequence
LENGTH_UNIT = 128  # tokens
PATIENCE = 2.0  # seconds
ALWAYS_TYPED = (
    "schedule",
    "bucket_size",
    "grad_slots",
    "host_slots",
)  # others where they are not the default

PlannedStepFlags = flag_fields(
    StepSettings,
    SimulatedFlags,
    {
        **CHOSEN,
        "schedule": STEP["schedule"].offering(
            (BY_DEVICE, *schedules.__all__, AUTO),
            f"; {AUTO} searches for all settings that change no number, but precision and micro-batches",
        ),
    },
    without=UNPLANNED,
    precision=AUTO,
    clip=1.0,
)


@frozen(kw_only=True)
class PlanSettings(PlannedStepFlags):
    """A step to plan. The defaults are the model and the step of `zfunc train`, on a GPU."""

    UNNAMED = "v100-32gb"

    max: str | None = option(
        None,
        "model",
        "find the most that fits, whatever its flag says: layers, as `max` alone does, sequences of a batch, or "
        f"the length of a sequence, in steps of {LENGTH_UNIT} tokens, up to the positions of a Hugging Face "
        "config; or longer, where these are computed and not learned (default: nothing)",
        one_of(MAXIMA),
        "|".join(MAXIMA),
        alone="layers",
        common=True,
    )
    world: int = option(1, "hardware", "ranks that train together, one on a device", count, common=True)
    out: Path | None = option(
        None,
        "output",
        "write the answer to a file, or anew: .html with a picture of the step, or .txt (default: print it)",
        path,
        "FILE",
        common=True,
    )
    json: bool = option(False, "output", "print one JSON object, for programs")

    def __attrs_post_init__(self) -> None:
        check_each(self)
        if self.out is not None and (self.json or self.out.suffix not in (".html", ".txt")):
            raise ValueError(
                f"out: got {self.out}{' with `json`' * self.json}, expected a name that ends in .html or .txt, "
                "and no `json`, which is printed"
            )
        check_pretrained(self)
        described = self.hf or self.hf_config
        if self.max == "layers" and described:
            raise ValueError(
                "max: got layers with a Hugging Face model, whose config says how many, expected batch, length "
                "or longer: pass max='batch'"
            )
        if self.max == "longer" and not described:
            raise ValueError(
                "max: got longer without `hf`, expected a Hugging Face model: pass max='length', which has no such "
                "limit here"
            )
        self.check_simulated()
        multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.world == 1:
            multiple("batch_size", self.batch_size, "micro_batches", self.micro_batches)
        check_rows(self.batch_size, self.world, self.micro_batches)


@contextmanager
def _told_where_it_takes_long() -> Iterator[None]:
    """On a terminal a line says after PATIENCE seconds what takes so long."""
    told = "zfunc plan: planning. A Hugging Face model is traced once: its costs are kept for the next plan"
    timer = threading.Timer(PATIENCE, print, [told], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@garbage_collection_paused()  # the import of torch, too
def run_plan(settings: PlanSettings) -> int:
    """`zfunc plan`: 0 if it fits, 1 if it does not."""
    with _told_where_it_takes_long():
        answer = plan_model(settings)
    if settings.out is None:
        print(as_json(answer) + "\n" if settings.json else plan_text(answer), end="", flush=True)
    else:
        from zfunc.planner.planned import report_html

        text = plan_text(answer)
        is_page = settings.out.suffix == ".html"
        write_files({settings.out: report_html(answer.planned, text) if is_page else text})
    return EXIT_OK if answer.planned.fits else EXIT_FAILED


@frozen(eq=False)
class PlannedModel:
    """A model that was planned. With `max`, `settings` have the layers, the batch or the length that fits, and
    `limit` says what else than memory bounds it, if anything does."""

    settings: PlanSettings
    planned: "Planned"
    model: "SimulatedModel"
    limit: str = ""


def plan_model(settings: PlanSettings) -> PlannedModel:
    """Plan the step of `settings`.

    Raises ValueError for what cannot work, FileNotFoundError for hardware that is not known.
    """
    from zfunc.planner.cost_model import precision_for
    from zfunc.planner.plan_step import plan_settings

    hardware = settings.profile
    assert hardware is not None
    step = step_settings(settings, precision=precision_for(hardware, settings.precision))
    begin = settings if MAXIMA.get(settings.max or "") != "seq_length" else evolve(settings, seq_length=1)
    model, limit = simulated_model(begin), ""
    if settings.max:
        found, limit = _most(settings, step, hardware, model)
        settings = evolve(settings, **{MAXIMA[settings.max]: found})
        if not (settings.hf or settings.hf_config):
            model = simulated_model(settings)
    return PlannedModel(settings, plan_settings(_costs(model, settings, hardware), step), model, limit)


def _costs(model: "SimulatedModel", settings: PlanSettings, hardware: Profile) -> "CostModel":
    rows = settings.batch_size // settings.world
    return model.cost_model(hardware, rows, settings.seq_length, settings.world)


def _most(
    settings: PlanSettings, step: StepSettings, hardware: Profile, model: "SimulatedModel"
) -> tuple[int, str]:
    """The most of what `max` names that fits, however what is "auto" is placed; the least if nothing fits. And what
    else bounds it, if anything does."""
    from zfunc.planner.largest import most_that_fit
    from zfunc.planner.plan_step import search_start

    placed = [
        search_start(x).scheduled(on_cpu=hardware.unified) for x in step.placed(settings.world, disk=True)
    ]
    name = MAXIMA[settings.max or ""]
    unit, most, limit = settings.world * settings.micro_batches, MOST_ROWS, ""
    if name == "num_layers":
        unit, most = 1, MOST_LAYERS
    if name == "seq_length":
        longest = MOST_TOKENS if settings.max == "longer" else model.longest or MOST_TOKENS
        if settings.max == "longer" and model.learned:
            raise ValueError(
                f"max: got longer for a {model.architecture}, whose positions are learned, expected a model that "
                "computes them: pass max='length'"
            )
        unit = min(LENGTH_UNIT, longest)
        most = longest // unit
        limit = f"{longest:,} tokens, beyond which none are tried"
        if longest == model.longest:
            limit = "the positions of its config (max_position_embeddings)"
    costs: dict[int, CostModel] = {}

    def step_of(count: int, way: StepSettings) -> "PlannedStep":
        if count not in costs:
            given = evolve(settings, **{name: count * unit})
            of_layers = simulated_model(given) if name == "num_layers" else model
            costs[count] = _costs(of_layers, given, hardware)
        return costs[count].estimate(way).step

    found = max(most_that_fit(partial(step_of, way=way), most) for way in placed)
    if found == most and not limit:
        what, larger = (
            ("layers", "a larger hidden_size") if name == "num_layers" else ("sequences", "longer ones")
        )
        raise ValueError(f"max: {most * unit:,} {what} fit, and more are not tried: pass {larger}")
    return max(1, found) * unit, limit if found == most else ""


# --- the answer ------------------------------------------------------------------------------------------


def as_json(answer: PlannedModel) -> str:
    """The answer as one object; memory in bytes, times in seconds."""
    p = answer.planned
    content: dict[str, Any] = {
        "fits": p.fits,
        "step_seconds": p.step_seconds,
        "tflops": p.tflops,
        "tokens_per_second": p.tokens_per_second,
        "memory": p.memory,
        "bus_bytes": p.bus_bytes,
        "disk": p.disk and {**asdict(p.disk), "busy": p.disk.busy},
        "lanes": p.lanes,
        "bound": p.bound,
        "advice": [_typed(suggestion) for suggestion in p.suggestions],
        "lacking": p.lacking,
        "peaks": {tier: {"op": p.step.peaks[tier].op, "holds": held} for tier, held in p.held.items()},
        "parameters": answer.model.parameters,
        "trained": answer.model.trained,
        "num_layers": answer.model.num_layers,
        "batch_size": answer.settings.batch_size,
        "seq_length": answer.settings.seq_length,
        "limit": answer.limit,
        "hardware": p.hardware.name,
        "world": p.world,
        "settings": {**p.settings, "schedule": p.step.settings.schedule_name},
        "reasons": list(p.reasons),
    }
    return json.dumps(content, indent=2)


def plan_text(answer: PlannedModel) -> str:
    """The answer as one screen of text."""
    from zfunc.planner.planned import report

    flags = answer.settings
    chosen, searched = flags.precision == AUTO, flags.schedule == AUTO
    found = _found(answer.planned) if searched else []
    whole = answer.model.trained == answer.model.parameters
    if not answer.planned.fits and whole and (flags.hf or flags.hf_config):
        found.append(
            "or train adapters alone (--lora 16): weights in 16 bits, and no optimizer state of them"
        )
    return "\n".join(
        [*_job(answer), report(answer.planned, chosen_precision=chosen, found=found, written=_typed)]
    )


def _typed(suggestion: "Suggestion") -> str:
    """A suggestion as one types it, and its effect."""
    return f"{' '.join(starmap(as_flag, suggestion.changes.items()))}: {suggestion.effect}"


def _found(p: "Planned") -> list[str]:
    """The result of a search as options of zfunc train, which makes a schedule by its name alone."""
    from zfunc.planner.moves import SPACE
    from zfunc.planner.planned import wrapped

    settings = p.step.settings
    chosen = {
        name: settings.schedule_name if name == "schedule" else getattr(settings, name)
        for name, default in ((f.name, f.default) for f in fields(StepSettings))
        if name in ALWAYS_TYPED or (name in SPACE and getattr(settings, name) != default)
    }
    orders = hasattr(p.settings["schedule"], "hardware") and p.hardware != ROUND
    note = " (which orders for round numbers, not for this hardware)" if orders else ""
    return wrapped(f"as options of zfunc train{note}: {' '.join(starmap(as_flag, chosen.items()))}")


def _job(answer: PlannedModel) -> Iterator[str]:
    flags = answer.settings
    if flags.max:
        length = f"sequences of {flags.seq_length:,} tokens"
        found = {
            "layers": f"{flags.num_layers} layers",
            "batch": f"a batch of {flags.batch_size:,} sequences",
            "length": length,
            "longer": length,
        }
        bounded = f", bounded by {answer.limit} and not by memory" * bool(answer.limit)
        yield f"the most that fits with these settings: {found[flags.max]}{bounded}"
    model = answer.model
    if answer.limit and flags.max == "length" and not model.learned:
        yield "its positions are computed: --max longer goes on, beyond what its config says it was trained for"
    if model.longest is not None and flags.seq_length > model.longest:
        yield f"its config has {model.longest:,} positions: the same model computes those beyond, untrained"
    if model.quantized:
        precision = answer.planned.step.settings.precision
        yield f"its weights are stored quantized ({model.quantized}), and planned as they are trained: {precision}"
    ranks = f"{answer.planned.world} rank{'s' * (answer.planned.world != 1)}"
    yield f"{model.name}; a step of {flags.batch_size:,} x {flags.seq_length:,} tokens on {ranks}"


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
    "Exit codes: 0 it fits, 1 it does not, 2 it cannot be planned.",
)
