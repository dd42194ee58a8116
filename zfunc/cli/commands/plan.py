"""`zfunc plan`: plan the GPT of the flags, or the largest that fits, and print the answer.

The segments are on the meta device and the batch has no data, so nothing is allocated. The answer is printed as one
screen of text, or as one JSON object for programs.
"""

import json
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, fields, frozen

from zfunc import schedules
from zfunc.cli.parser import EXIT_FAILED, EXIT_OK, Command, write_file
from zfunc.cli.simulated_model import SimulatedFlags, simulated_model
from zfunc.core.hardware import ROUND
from zfunc.core.settings import BY_DEVICE, StepSettings
from zfunc.options import AUTO, as_flag, count, file_to_write, flag_fields, multiple, one_of, option
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
MAXIMA = {"layers": "num_layers", "batch": "batch_size", "length": "seq_length"}  # of `max`
MOST_LAYERS = 400  # that are tried; each adds operations and time
MOST_ROWS, MOST_TOKENS = 1 << 14, 1 << 20  # that are tried: for each rank and micro-batch, and of a sequence
LENGTH_UNIT = 128  # tokens
ALWAYS_TYPED = (
    "schedule",
    "bucket_size",
    "grad_slots",
    "host_slots",
)  # others where they are not the default
FIGURES = (
    "fits",
    "step_seconds",
    "tflops",
    "tokens_per_second",
    "memory",
    "bus_bytes",
    "lanes",
    "bound",
    "lacking",
)

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
        "config (default: nothing)",
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
        file_to_write(".html", ".txt"),
        "FILE",
        common=True,
    )
    json: bool = option(False, "output", "print one JSON object, for programs")

    def __attrs_post_init__(self) -> None:
        check_pretrained(self)
        if self.max == "layers" and (self.hf or self.hf_config):
            raise ValueError(
                "max: got layers with a Hugging Face model, whose config says how many, expected batch or length: "
                "pass max='batch'"
            )
        self.check_simulated()
        multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.world == 1:
            multiple("batch_size", self.batch_size, "micro_batches", self.micro_batches)
        check_rows(self.batch_size, self.world, self.micro_batches)


@garbage_collection_paused()  # the import of torch, too
def run_plan(settings: PlanSettings) -> int:
    """`zfunc plan`: 0 if it fits, 1 if it does not."""
    from zfunc.planner.planned import report_html

    answer = plan_model(settings)
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
    begin = settings if settings.max != "length" else evolve(settings, seq_length=1)
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
    name, longest = MAXIMA[settings.max or ""], model.longest or MOST_TOKENS
    unit, most, larger = {
        "num_layers": (1, MOST_LAYERS, "a larger hidden_size"),
        "batch_size": (settings.world * settings.micro_batches, MOST_ROWS, "longer ones"),
        "seq_length": (min(LENGTH_UNIT, longest), max(1, longest // LENGTH_UNIT), ""),
    }[name]
    costs: dict[int, CostModel] = {}

    def step_of(count: int, way: StepSettings) -> "PlannedStep":
        if count not in costs:
            given = evolve(settings, **{name: count * unit})
            of_layers = simulated_model(given) if name == "num_layers" else model
            costs[count] = _costs(of_layers, given, hardware)
        return costs[count].step(way)

    found = max(most_that_fit(partial(step_of, way=way), most) for way in placed)
    if found < most:
        return max(1, found) * unit, ""
    if larger:
        what = {"num_layers": "layers"}.get(name, "sequences")
        raise ValueError(f"max: {most * unit:,} {what} fit, and more are not tried: pass {larger}")
    of_config = "the positions of its config (max_position_embeddings)"
    return most * unit, of_config if model.longest else f"{longest:,} tokens, beyond which none are tried"


# --- the answer ------------------------------------------------------------------------------------------


def as_json(answer: PlannedModel) -> str:
    """The answer as one object; memory in bytes, times in seconds."""
    p = answer.planned
    content: dict[str, Any] = {
        **{name: getattr(p, name) for name in FIGURES},
        "disk": p.disk and {**asdict(p.disk), "busy": p.disk.busy},
        "advice": [_typed(suggestion) for suggestion in p.suggestions],
        "peaks": {tier: {"op": p.step.peaks[tier].op, "holds": held} for tier, held in p.held.items()},
        **{name: getattr(answer.model, name) for name in ("parameters", "trained", "num_layers")},
        **{name: getattr(answer.settings, name) for name in ("batch_size", "seq_length")},
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

    flags, model, p = answer.settings, answer.model, answer.planned
    lines: list[str] = []
    if flags.max:
        found = {
            "layers": f"{flags.num_layers} layers",
            "batch": f"a batch of {flags.batch_size:,} sequences",
            "length": f"sequences of {flags.seq_length:,} tokens",
        }[flags.max]
        bounded = f", bounded by {answer.limit} and not by memory" * bool(answer.limit)
        lines.append(f"the most that fits with these settings: {found}{bounded}")
    if model.quantized:
        stored = f"its weights are stored quantized ({model.quantized})"
        lines.append(f"{stored}, and planned as they are trained: {p.step.settings.precision}")
    ranks = f"{p.world} rank{'s' * (p.world != 1)}"
    lines.append(f"{model.name}; a step of {flags.batch_size:,} x {flags.seq_length:,} tokens on {ranks}")
    found = _found(p) if flags.schedule == AUTO else []
    if not p.fits and model.trained == model.parameters and (flags.hf or flags.hf_config):
        found.append(
            "or train adapters alone (--lora 16): weights in 16 bits, and no optimizer state of them"
        )
    told = report(p, chosen_precision=flags.precision == AUTO, found=found, written=_typed)
    return "\n".join([*lines, told])


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
