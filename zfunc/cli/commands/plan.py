"""`zfunc plan`: plan the GPT of the flags, or the largest that fits, and print the answer.

The segments are on the meta device and the batch has no data, so nothing is allocated. The answer is printed as one
screen of text, or as one JSON object for programs.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, field, frozen

from zfunc import schedules
from zfunc.cli.command import EXIT_FAILED, EXIT_OK, Command, write_files
from zfunc.cli.simulated_step import (
    HARDWARE,
    SIMULATED_PRECISION,
    VOCABULARY,
    WITH,
    check_precision,
    check_sizes,
    profile_of,
)
from zfunc.core.settings import BY_DEVICE, CHOICES, StepSettings
from zfunc.options import (
    AUTO,
    Option,
    anything,
    check_each,
    count,
    flag_fields,
    multiple,
    one_of,
    options_of,
    path,
)
from zfunc.planner.candidate import garbage_collection_paused
from zfunc.planner.profile import Profile
from zfunc.train.settings import (
    DESCRIBED,
    MODEL,
    OFFLOAD_RATIO,
    OPTIMIZER,
    STEP,
    GPTFlags,
    check_pretrained,
    check_rows,
    step_settings,
)

if TYPE_CHECKING:
    from zfunc.cli.simulated_model import SimulatedModel
    from zfunc.planner.candidate import PlannedStep
    from zfunc.planner.cost_model import CostModel
    from zfunc.planner.planned import Planned

UNPLANNED = ("compile_segments", "deterministic")  # settings without a flag here
MAXIMA = {"layers": "num_layers", "batch": "batch_size", "length": "seq_length"}  # of --max
MOST_ROWS, MOST_TOKENS = 1 << 14, 1 << 20  # that are tried: for each rank and micro-batch, and of a sequence
LENGTH_UNIT = 128  # tokens

PLAN = {
    **DESCRIBED,
    **MODEL,
    **options_of(StepSettings, without=UNPLANNED),
    **VOCABULARY,
    "optimizer": OPTIMIZER,
    "max": Option(
        "model",
        "find the most that fits, whatever its flag says: layers, as --max alone does, sequences of a batch, or "
        f"the length of a sequence, in steps of {LENGTH_UNIT} tokens (default: nothing)",
        one_of(MAXIMA),
        metavar="|".join(MAXIMA),
        alone="layers",
    ),
    "batch_size": Option(
        "step", "sequences of a step, a multiple of the ranks times the micro-batches", count
    ),
    "precision": SIMULATED_PRECISION,
    "schedule": STEP["schedule"].offering(
        (BY_DEVICE, *schedules.__all__, AUTO),
        f"; {AUTO} searches for all settings that change no number, but precision and micro-batches",
    ),
    **{
        name: STEP[name].offering((*STEP[name].words, AUTO), f". {AUTO}: the fastest that fits")
        for name in CHOICES
    },
    "offload_ratio": evolve(OFFLOAD_RATIO, help=f"{OFFLOAD_RATIO.help}. {AUTO}: the fastest"),
    "hardware": HARDWARE,
    "with_": WITH,
    "world": Option("hardware", "ranks that train together, one on a device", count),
    "out": Option(
        "output",
        "write the answer to a file, or anew: .html with a picture of the step, or .txt (default: print it)",
        path,
        metavar="FILE",
    ),
    "json": Option("output", "print one JSON object, for programs", anything),
}

PlannedStepFlags = flag_fields(StepSettings, GPTFlags, without=UNPLANNED, precision=AUTO, clip=1.0)


@frozen(kw_only=True)
class PlanSettings(PlannedStepFlags):
    """A step to plan. The defaults are the model and the step of `zfunc train`, on a GPU."""

    hf_config: Path | None = None
    max: str | None = None
    hardware: str = "v100-32gb"
    with_: tuple[str, ...] = field(default=(), converter=tuple)
    world: int = 1
    out: Path | None = None
    json: bool = False

    def __attrs_post_init__(self) -> None:
        check_each(self, PLAN)
        if self.out is not None and (self.json or self.out.suffix not in (".html", ".txt")):
            raise ValueError(
                f"--out: got {self.out}{' with --json' * self.json}, expected a name that ends in .html or .txt, "
                "and no --json, which is printed"
            )
        check_pretrained(self)
        check_sizes(self)
        if self.max == "layers" and (self.hf or self.hf_config):
            raise ValueError(
                "--max: got layers with a Hugging Face model, whose config says how many, expected batch or "
                "length: pass --max batch"
            )
        check_precision(self)
        multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.world == 1:
            multiple("batch_size", self.batch_size, "micro_batches", self.micro_batches)
        check_rows(self.batch_size, self.world, self.micro_batches)


@garbage_collection_paused()  # the import of torch, too
def run_plan(settings: PlanSettings) -> int:
    """`zfunc plan`: 0 if it fits, 1 if it does not."""
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
    """A model that was planned. With `max`, `settings` have the layers, the batch or the length that fits."""

    settings: PlanSettings
    planned: "Planned"
    model: "SimulatedModel"


def plan_model(settings: PlanSettings) -> PlannedModel:
    """Plan the step of `settings`.

    Raises ValueError for what cannot work, FileNotFoundError for hardware that is not known.
    """
    from zfunc.cli.simulated_model import simulated_model
    from zfunc.planner.cost_model import precision_for
    from zfunc.planner.plan_step import plan_settings

    hardware = profile_of(settings)
    assert hardware is not None
    step = step_settings(settings, precision=precision_for(hardware, settings.precision))
    if settings.max:
        settings = evolve(settings, **{MAXIMA[settings.max]: _most(settings, step, hardware)})
    model = simulated_model(settings)
    return PlannedModel(settings, plan_settings(_costs(model, settings, hardware), step), model)


def _costs(model: "SimulatedModel", settings: PlanSettings, hardware: Profile) -> "CostModel":
    rows = settings.batch_size // settings.world
    return model.cost_model(hardware, rows, settings.seq_length, settings.world)


def _most(settings: PlanSettings, step: StepSettings, hardware: Profile) -> int:
    """The most of what --max names that fits, however what is "auto" is placed; the least if nothing fits."""
    from zfunc.cli.simulated_model import simulated_model
    from zfunc.planner.max_batch import most_that_fit
    from zfunc.planner.max_layers import max_layers
    from zfunc.planner.plan_step import search_start

    placed = [
        search_start(x).scheduled(on_cpu=hardware.unified) for x in step.placed(settings.world, disk=True)
    ]
    name = MAXIMA[settings.max or ""]
    if name == "num_layers":
        one = evolve(settings, num_layers=1)
        costs = _costs(simulated_model(one), one, hardware)
        return max(1, *(max_layers(costs.spec, x, costs.hardware(x)) for x in placed))
    model = simulated_model(evolve(settings, seq_length=1) if name == "seq_length" else settings)
    unit, most = settings.world * settings.micro_batches, MOST_ROWS
    if name == "seq_length":
        unit = min(LENGTH_UNIT, model.longest or LENGTH_UNIT)
        most = (model.longest or MOST_TOKENS) // unit
    costs: dict[int, CostModel] = {}

    def step_of(count: int, way: StepSettings) -> "PlannedStep":
        if count not in costs:
            costs[count] = _costs(model, evolve(settings, **{name: count * unit}), hardware)
        return costs[count].estimate(way).step

    found = max(most_that_fit(partial(step_of, way=way), most) for way in placed)
    if found == most and name == "batch_size":
        raise ValueError(
            f"--max batch: {most * unit:,} sequences fit, and more are not tried: pass longer ones"
        )
    return max(1, found) * unit


# --- the answer ------------------------------------------------------------------------------------------


def as_json(answer: PlannedModel) -> str:
    """The answer as one object; memory in bytes, times in seconds."""
    from zfunc.planner.planned import as_flags

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
        "advice": [as_flags(suggestion) for suggestion in p.suggestions],
        "lacking": p.lacking,
        "peaks": {tier: {"op": p.step.peaks[tier].op, "holds": held} for tier, held in p.held.items()},
        "parameters": answer.model.parameters,
        "num_layers": answer.model.num_layers,
        "batch_size": answer.settings.batch_size,
        "seq_length": answer.settings.seq_length,
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
    return "\n".join([*_job(answer), report(answer.planned, chosen_precision=chosen, as_options=searched)])


def _job(answer: PlannedModel) -> Iterator[str]:
    flags = answer.settings
    if flags.max:
        found = {
            "layers": f"{flags.num_layers} layers",
            "batch": f"a batch of {flags.batch_size:,} sequences",
            "length": f"sequences of {flags.seq_length:,} tokens",
        }
        yield f"the most that fits with these settings: {found[flags.max]}"
    ranks = f"{answer.planned.world} rank{'s' * (answer.planned.world != 1)}"
    yield f"{answer.model.name}; a step of {flags.batch_size:,} x {flags.seq_length:,} tokens on {ranks}"


COMMAND = Command(
    "say whether a step fits, how long it takes, and what would help",
    "Nothing is allocated and no GPU is needed: the step is simulated on a hardware profile.",
    PlanSettings,
    PLAN,
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
