"""The table of parity: what a training computes, of which model on how many ranks, and the ways it may do so.

A row of NUMBERS has a result of its own. A row of WAYS changes no bit of any of them: where things live, when they
move, in what order, what is kept for backward. A new setting is one row, and goes through every law of
tests/engine/test_laws.py.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from attrs import evolve, frozen
from pairs import covering
from small_models import IN_FP32, SHORTER, rows_of
from table import Scattered
from threaded_ranks import on_every, programs_of
from torch import Tensor
from zfunc.schedules import OneFOneB, ZeroBubble
from zfunc.schedules.stages import RecomputeAhead

import zfunc
from zfunc import schedules
from zfunc.core.decision import StepDecision
from zfunc.core.optimizer_state import STATE_FORMATS, StateBuffer
from zfunc.engine.program.program import Program
from zfunc.engine.state.state import State
from zfunc.errors import CheckpointError
from zfunc.runtime.fault_injection import Jitter

Settings = dict[str, Any]
MOMENTUM = "momentum"


@pytest.fixture
def own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of Momentum is one that zfunc knows."""
    monkeypatch.setitem(STATE_FORMATS, MOMENTUM, (StateBuffer("master", "fp32"), StateBuffer("buf", "fp32")))


@frozen
class Momentum:
    """One of one's own: SGD with momentum, as `torch.optim.SGD` writes it. `own_format` adds its state's row."""

    lr: float = 0.01
    momentum: float = 0.9

    def group(self, name: str, shape: tuple[int, ...]) -> int:
        return len(shape) > len(name)  # never

    def state_format(self, group: int) -> str:
        assert group == 0
        return MOMENTUM

    def factors(self, step: int) -> dict[str, Any]:
        return {"lr": self.lr / step}

    def describe(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def host_update(
        self,
        state: Mapping[str, Tensor],
        grad: Tensor,
        decision: StepDecision,
        *,
        group: int,
        out: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        assert group == 0
        new = state if into is None else into
        new["buf"].copy_(state["buf"] * self.momentum + grad.float() * decision.grad_scale)
        new["master"].copy_(state["master"] - decision.factors["lr"] * new["buf"])
        if out is not None:
            out.copy_(new["master"])

    device_update = host_update

    def device_workspace(self, numel: int) -> int:
        return 16 * numel

    def convert_state(
        self, state: Mapping[str, Tensor], state_format: str, step: int, *, group: int
    ) -> Mapping[str, Tensor]:
        if group or state_format != "fp32":
            raise CheckpointError(f"step {step}: no momentum from {state_format}")
        return {"master": state["master"], "buf": -state["exp_avg"]}


def on_disk(settings: Mapping[str, Any]) -> bool:
    """Whether there has to be a swap space for the state."""
    return "disk" in settings.get("state_on", "")


def is_matrix(_name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


ADAMW = zfunc.AdamW(1e-3, weight_decay=0.1, decay=zfunc.matrices_only)
GROUPS = zfunc.groups(
    ("huge.*", zfunc.AdamW(zfunc.lr.linear_warmup(1e-2, 3))),
    ("*.weight", zfunc.SGD(0.1, momentum=0.9, nesterov=True)),
    (lambda _, shape: not shape, zfunc.Adagrad(0.1)),
    ("loss.*", zfunc.SGD(0.1)),
    zfunc.Lion(1e-3, weight_decay=0.1),
)
MATRICES = zfunc.groups((is_matrix, zfunc.Muon(0.02, momentum=0.8)), zfunc.AdamW(1e-3))
WHOLE = zfunc.groups(  # what needs whole parameters
    ("huge.*", zfunc.Adafactor(0.1)),
    ("inlet.*", zfunc.Adafactor(0.05, weight_decay=0.1)),
    (is_matrix, zfunc.Muon(0.02, momentum=0.8)),
    zfunc.AdamW(1e-3),
)
TWO = {"precision": "bf16", "micro_batches": 2, "clip_norm": 0.5}
NUMBERS: dict[str, Settings] = {
    "fp32": {"precision": "fp32", "ema": 0.9},
    "fp32, clipped": {"precision": "fp32", "clip_norm": 0.1},
    "fp32 in 2, clipped, 8 bits": {
        "precision": "fp32",
        "clip_norm": 0.55,
        "micro_batches": 2,
        "moments": "8bit",
    },
    "bf16, clipped in part, 16 bits": {
        "precision": "bf16",
        "clip_norm": 0.85,
        "moments": "16bit",
        "ema": 0.75,
    },
    "bf16 in 2, 16 bits": {"precision": "bf16", "moments": "16bit", "micro_batches": 2},
    "bf16 in 3, clipped": {"precision": "bf16", "clip_norm": 0.5, "micro_batches": 3},
    "bf16 in 6": {"precision": "bf16", "micro_batches": 6},
    "fp16": {"precision": "fp16"},
    "fp16 in 2": {"precision": "fp16", "micro_batches": 2},
    "a split master": {"precision": "bf16", "clip_norm": 0.5, "split_master": True},
    "momentum of one's own": {**TWO, "optimizer": Momentum()},
    "groups": {**TWO, "optimizer": GROUPS},
    "groups, 8 bits": {**TWO, "optimizer": GROUPS, "moments": "8bit"},
    "bf16 in 2, some in fp32": {**TWO, "fp32_params": IN_FP32},
    "bf16, some in fp32, 8 bits": {
        **{"precision": "bf16", "fp32_params": IN_FP32, "moments": "8bit", "ema": 0.9}
    },
    "fp16 in 2, some in fp32, 16 bits": {
        **{"precision": "fp16", "fp32_params": IN_FP32, "micro_batches": 2, "moments": "16bit"}
    },
    "a split master, some in fp32": {**TWO, "fp32_params": IN_FP32, "split_master": True},
    "two AdamW": {**TWO, "optimizer": zfunc.groups(("huge.*", zfunc.AdamW(1e-2, betas=(0.8, 0.9))), ADAMW)},
    "whole matrices, 8 bits": {**TWO, "optimizer": MATRICES, "moments": "8bit"},
    "whole parameters, some in fp32, 16 bits": {
        **{**TWO, "optimizer": WHOLE, "fp32_params": IN_FP32, "moments": "16bit"}
    },
    "whole matrices, no barrier": {"precision": "bf16", "optimizer": MATRICES},
    "momentum, 16 bits": {
        **TWO,
        "optimizer": zfunc.SGD(0.1, momentum=0.9, dampening=0.1),
        "moments": "16bit",
    },
    "Lion, 16 bits": {**TWO, "optimizer": zfunc.Lion(1e-3, weight_decay=0.1), "moments": "16bit"},
    "Adafactor, 16 bits": {**TWO, "optimizer": zfunc.Adafactor(0.1, weight_decay=0.1), "moments": "16bit"},
    "Adagrad, 16 bits": {**TWO, "optimizer": zfunc.Adagrad(0.1), "moments": "16bit"},
    "in tiles": {**TWO, "tiles": 4, "recompute": "all"},
}
ALL_ON_DISK = {"state_on": "disk", "params_on": "disk", "grads_on": "disk"}
WAYS: dict[str, Settings] = {
    "one slot": {"slots": 1},
    "small buckets": {"bucket_size": 100},
    "one bucket": {"bucket_size": 1 << 20},
    "norms": {"norms": True},
    "deferred": {"defer": True},
    "half on the device": {"state_on": "device:0.5,host", "bucket_size": 400},
    "a third on the host": {"state_on": "device:0.7,host", "bucket_size": 400},
    "on the device": {"state_on": "device"},
    "updated on the device": {"update_on": "device"},
    "half updated on the device": {"update_on": "host,device", "bucket_size": 100, "slots": 1},
    "updated on the device, from the host": {
        **{"update_on": "device", "params_on": "host", "defer": True, "bucket_size": 400}
    },
    "updated on the device, gradients on the host": {
        **{"update_on": "device", "grads_on": "host", "defer": True, "bucket_size": 500}
    },
    "on the disk, updated on the device": {**ALL_ON_DISK, "update_on": "device", "commit_every": 2},
    "vertical": {"order": "vertical", "bucket_size": 100},
    "two at a time, activations on the host": {"order": 2, "activations_on": "host"},
    "four at a time": {"order": 4, "keys_on": "host"},
    "half of the activations on the host": {"activations_on": "device,host,device", "order": "vertical"},
    "from the host": {"params_on": "host", "bucket_size": 100_000},
    "large ones from the host": {"params_on": "host", "persistent_params": 40, "defer": True},
    "half from the host, two at a time": {
        **{"params_on": "host", "slots": 1, "state_on": "device:0.5,host", "order": 2}
    },
    "all from the host, one slot": {
        **{"params_on": "host", "activations_on": "host", "order": "horizontal", "slots": 1},
        **{"defer": True, "keys_on": "host"},
    },
    "stage 3": {"stage": 3},
    "stage 3, all from the host": {
        **{"stage": 3, "params_on": "host", "activations_on": "host", "defer": True, "persistent_params": 40}
    },
    "stage 3, horizontal": {
        **{"stage": 3, "order": "horizontal", "bucket_size": 500, "persistent_params": 20}
    },
    "two devices": {"devices": 2},
    "two devices, all forwards first": {"devices": 2, "order": "GPipe", "bucket_size": 500},
    "two devices, from the host": {
        "devices": 2,
        "params_on": "host",
        "activations_on": "host",
        "defer": True,
    },
    "two devices, half updated there": {
        **{
            "devices": 2,
            "order": "LoopedBFS",
            "update_on": "host,device",
            "bucket_size": 400,
            "state_on": "device:0.3,host",
        }
    },
    "two devices, backward split": {"devices": 2, "order": "ZeroBubble", "bucket_size": 500},
    "two devices, backward split, from the host": {
        **{"devices": 2, "params_on": "host", "activations_on": "host", "defer": True},
        "order": RecomputeAhead(ZeroBubble()),
    },
    "down a V and up": {
        "devices": 2,
        "order": "DualPipeV",
        "state_on": "device:0.5,host",
        "bucket_size": 400,
    },
    "dealt to three devices": {
        **{"devices": 3, "order": "RoundPipe", "params_on": "host", "activations_on": "host", "slots": 1}
    },
    "dealt to two devices, all on the disk": {
        **{**ALL_ON_DISK, "devices": 2, "order": "RoundPipe", "activations_on": "disk", "commit_every": 2}
    },
    "two stages": {"pp": 2},
    "two stages, all forwards first": {"pp": 2, "order": "GPipe", "bucket_size": 500},
    "two stages, from the host": {
        **{"pp": 2, "params_on": "host", "activations_on": "host", "slots": 1, "defer": True}
    },
    "two stages, all on the disk": {
        **{**ALL_ON_DISK, "pp": 2, "activations_on": "disk", "defer": True, "commit_every": 2}
    },
    "two stages, half of the state on the disk": {
        **{"pp": 2, "order": "GPipe", "state_on": "host:0.5,disk", "slots": 1}
    },
    "three stages, one without parameters": {
        **{"pp": 3, "order": "OneFOneB:2,1,3", "state_on": "disk", "defer": True}
    },
    "three stages, state on the disk, from the host": {
        **{"pp": 3, "state_on": "disk", "params_on": "host", "bucket_size": 300, "commit_every": 3}
    },
    "two stages, down a V and up": {
        "pp": 2,
        "order": "DualPipeV",
        "activations_on": "host",
        "bucket_size": 400,
    },
    "three stages, half updated there": {
        **{"pp": 3, "update_on": "host,device", "bucket_size": 400, "state_on": "device:0.3,host"},
        "order": RecomputeAhead(OneFOneB()),
    },
    "state on the disk": {"state_on": "disk"},
    "state on the disk, deferred": {"state_on": "disk", "defer": True, "commit_every": 2},
    "half of the state on the disk": {**{"state_on": "host:0.5,disk", "commit_every": 3, "slots": 1}},
    "state on the disk, from the host": {"state_on": "disk", "params_on": "host", "commit_every": 2},
    "all on the disk": {**ALL_ON_DISK, "activations_on": "disk", "defer": True, "bucket_size": 300},
    "all on the disk, one slot": {
        **{**ALL_ON_DISK, "slots": 1},
        **{"order": "horizontal", "activations_on": "host,disk"},
    },
}
TIED = ("pairs", "GPT with dropout", "tied GPT")
JOBS = (  # a model, and on how many ranks
    *("odd sizes", "pairs", "norms", "frozen below", "GPT with dropout", "tied GPT"),
    *("odd sizes on 2", "pairs on 3", "frozen below on 2", "norms on 2", "odd sizes on 3"),
    *("edits", "aliases", "aliases on 2"),
)
STEPS = 4
KINDS = ("a device", "off the device", "several devices")
BY_DAY = {  # the precision in which a model is traced: "odd sizes" in each, and with some parameters in fp32
    **dict.fromkeys(("pairs", "GPT with dropout", "frozen below"), "fp32"),
    **dict.fromkeys(("norms", "tied GPT", "edits", "aliases"), "bf16"),
}
STREAMED = ("devices", "pp", "stage", "defer", "persistent_params")
FORMATS = ("moments", "split_master", "fp32_params", "ema", "optimizer")
TILED = {"tiles", "recompute"}  # whose traces cost most
SCHEDULES = (*schedules.__all__, Scattered(0), Scattered(1, 5, num_threads=2))


@frozen
class Row:
    """A row of the table: what is computed, how, and of which model on how many ranks."""

    numbers: str
    way: str
    job: str

    def __str__(self) -> str:
        return f"{self.numbers}-{self.way}-{self.job}"

    @property
    def settings(self) -> Settings:
        return {**self.computed, **WAYS[self.way]}

    @property
    def computed(self) -> Settings:
        """The settings that its result depends on."""
        return {k: x[self.model] if x is IN_FP32 else x for k, x in NUMBERS[self.numbers].items()}

    @property
    def number(self) -> int:
        """Its place in the table."""
        return [*NUMBERS].index(self.numbers) + [*WAYS].index(self.way) + JOBS.index(self.job)

    @property
    def kind(self) -> str:
        """Of its way: what is elsewhere than on one device."""
        way = WAYS[self.way]
        if way.keys() & {"devices", "pp"}:
            return "several devices"
        return "off the device" if "stage" in way or on_disk(way) or way.get("params_on") else "a device"

    @property
    def of_day(self) -> set[str]:
        """Its numbers, if by day its kind of ways computes them: one of KINDS each, in turn."""
        return {self.numbers} if self.kind == KINDS[[*NUMBERS].index(self.numbers) % len(KINDS)] else set()

    @property
    def pairs(self) -> set[Any]:
        """What meets in it: its numbers and one kind of ways; any setting of its numbers and any of its way; ranks
        and these, of tiles where keys are; its optimizer and where that updates; its model, its ranks, a schedule,
        residuals and the kind; its job; and `of_way`."""
        way = WAYS[self.way]
        varied = (self.number % len(SCHEDULES), f"{self.number % 6} of six")
        return {
            *product((*varied, *self.of_day, self.model, self.world), [self.kind]),
            *product(({*NUMBERS[self.numbers]} - TILED) | {self.world > 1}, way),
            *product({*NUMBERS[self.numbers]} & TILED, {*way} & {"keys_on"}),
            *product([self.optimizer], {*way} & {"update_on"}),
            *self.of_way,
            self.job,
        }

    @property
    def values(self) -> set[Any]:
        """What meets in it where a way's bits are known already: each setting of its numbers with its value, and,
        of tiles where keys are, with the kind of its way; its job; and `of_way`."""
        numbers = NUMBERS[self.numbers]
        return {
            *((name, name in ("clip_norm", "ema") or str(value)) for name, value in numbers.items()),
            *product({*numbers} - TILED, [self.kind]),
            *product({*numbers} & TILED, {*WAYS[self.way]} & {"keys_on"}),
            *self.of_way,
            self.job,
        }

    @property
    def of_way(self) -> set[Any]:
        """Each setting of its way with its value but for numbers in it; any two places."""
        way = WAYS[self.way]
        places = [x for x in sorted(way) if x.endswith("_on") or x in ("devices", "pp", "stage")]
        values = ((name, re.sub(r"[\d._]", "", str(value))) for name, value in way.items())
        return {*values, *combinations(places, 2)}

    @property
    def optimizer(self) -> str:
        """Of its numbers; "None" for AdamW."""
        return str(NUMBERS[self.numbers].get("optimizer"))

    @property
    def places(self) -> set[Any]:
        """Where it has what, and in what formats its state is."""
        where = {(k, str(x)) for k, x in WAYS[self.way].items() if k[-3:] == "_on" or k in STREAMED}
        return where | {(k, str(x)) for k, x in NUMBERS[self.numbers].items() if k in FORMATS}

    @property
    def model(self) -> str:
        return self.job.partition(" on ")[0]

    @property
    def world(self) -> int:
        return int(self.job.partition(" on ")[2] or 1)

    @property
    def by_day(self) -> bool:
        """Whether its model is traced in its precision by day."""
        given = NUMBERS[self.numbers]
        precision = BY_DAY.get(self.model)
        if "tiles" in given:
            return self.model == "tied GPT"
        return precision is None or (given["precision"] == precision and "fp32_params" not in given)

    @property
    def possible(self) -> bool:
        """Whether nothing in it excludes something else there, and a batch has rows enough."""
        given = self.settings
        if "optimizer" in given and self.model != "odd sizes":
            return False  # its rules are of those parameters
        if self.world > 1 and "Adafactor" in str(given.get("optimizer")):
            return False  # which has slices of parameters there
        order = str(given.get("order", ""))
        halves = "ZeroBubble" in order or "DualPipeV" in order
        if "tiles" in given and (self.model not in ("tied GPT", "edits", "aliases") or halves):
            return False  # a batch of no rows of tokens, or attention with dropout
        apart = self.model in TIED and (self.model == "pairs" or order != "DualPipeV")
        if apart and ("pp" in given or ("devices" in given and "params_on" not in given)):
            return False  # a weight of both devices, or of two stages
        if self.model in ("edits", "aliases") and "fp32_params" in given:
            return False  # their code casts nothing
        if given.get("pp", 1) * self.world > 4:
            return False  # threads enough
        if ":" in order and self.model != "odd sizes":
            return False  # of another number of segments
        if self.model == "norms" and "dealt" in self.way and given.get("micro_batches", 1) > given["devices"]:
            return False  # buffers of a segment on several devices
        if on_disk(given) and self.model == "norms":
            return False  # a swap space has no modules' buffers
        return self.world * given.get("micro_batches", 1) <= 6

    def given(self, folder: Path) -> Settings:
        """What `zfunc.compile` is given, with a swap space in the folder if there has to be one."""
        given: Settings = {"defer": False, **self.settings}
        if self.world > 1 and given.get("params_on", "device") != "device":
            given["stage"] = 3
        if on_disk(given):
            (second := folder / "second").mkdir(parents=True, exist_ok=True)
            given["swap"] = [folder, second]
            given.pop("ema", None)  # a swap space has no averages
        return given


@cache
def _possible() -> list[Row]:
    """All pairs of NUMBERS and WAYS, each with three of the jobs, all jobs in turn."""
    found = list[Row]()
    for (n, numbers), (w, way) in product(enumerate(NUMBERS), enumerate(WAYS)):
        jobs = [x for x in JOBS if Row(numbers, way, x).possible]
        chosen = dict.fromkeys(jobs[(n + w + k * len(jobs) // 3) % len(jobs)] for k in range(3) if jobs)
        found += [Row(numbers, way, job) for job in chosen]
    return found


def rows(
    meets: Callable[[Row], Collection[Any]],
    where: Callable[[Row], bool] = lambda _: True,
    of_day: Callable[[Row], bool] = lambda row: row.by_day,
) -> list[Any]:
    """For parametrize: all rows that are possible. By day those run in which all meets that does in any that is
    `of_day`, whose model is traced by day, of rows that add alike those of the first jobs, which share models and
    plain results; the others are `slow`."""
    found = [row for row in _possible() if where(row)]
    by_day = {*covering(sorted(filter(of_day, found), key=lambda row: JOBS.index(row.job)), meets)}
    return [pytest.param(x, marks=() if x in by_day else (pytest.mark.slow,), id=str(x)) for x in found]


@frozen
class Result:
    """What a training of one rank has come to, and all that its steps told."""

    seen: str
    evaluated: float
    values: dict[str, Tensor]  # weights, modules' buffers, averages, moments: what there is, by name

    def same(self, other: "Result") -> bool:
        """To the bit, in all that both have."""
        mine, theirs = self.values, other.values
        same = all(torch.equal(mine[name], theirs[name]) for name in mine.keys() & theirs.keys())
        return same and (self.seen, self.evaluated) == (other.seen, other.evaluated)


def programs(
    row: Row, given: Mapping[str, Any], *, alike: bool = False
) -> tuple[list[Program], Callable[..., Any]]:
    """Those of every rank of a row; and the batch with a number of a rank, in micro-batches of two rows: a segment
    is traced once for each precision. `alike` are the rows of all ranks."""
    made = SHORTER[row.model]()
    whole, count = made[1], 2 * given.get("micro_batches", 1)

    def batch(i: int, rank: int) -> Any:
        rank, world = (0, 1) if alike else (rank, row.world)
        return rows_of(tuple(x[: count * world] for x in whole(i)), rank, world)

    make, pp = lambda: trained.compiled(made, **given)[0], given.get("pp", 1)
    return programs_of(row.world, make, batch(0, 0), pp), batch


def varied(row: Row, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """From row to row another schedule, other residuals, and delays in stages that are watched."""
    n = row.number
    stays = given.get("stage") != 3 and {given.get(x, "device") for x in ("params_on", "activations_on")} == {
        "device"
    }
    recompute = ("all", "min-cut", "none")[: 1 if "tiles" in given else 3 if stays else 2]
    # Several ranks have to issue their collectives in one order.
    alone = row.world == given.get("pp", 1) == 1
    schedule = SCHEDULES[n % len(SCHEDULES if alone else schedules.__all__)]
    step = {"jitter": Jitter(n, 3e-4), "debug": True} if n % 2 else {}
    return {**given, "schedule": schedule, "recompute": recompute[n % len(recompute)]}, step


def begun(program: Program) -> State:
    """With fp16 at a scale that overflows at first, and again when it has grown."""
    return zfunc.init(program, seed=1, loss_scale=zfunc.LossScale(scale=2.0**20, window=2, hysteresis=1))


def steps(
    program: Program,
    batch: Callable[..., Any],
    state: State,
    stop: int = STEPS,
    *,
    between: Callable[[Program, State], Any] = lambda *_: None,
    **step: Any,
) -> tuple[State, list[Any]]:
    """Train on until so many batches have been seen, and what the steps told; `between` is called after each."""
    rank, told = program.ranks.rank, list[Any]()
    while state.batches < stop:
        state, m = zfunc.train_step(program, state, batch(state.batches, rank), **step)
        assert m.skipped or m.lr == program.optimizer.factors(m.step)["lr"]
        told.append((m.loss, m.grad_norm, m.skipped, m.loss_scale, m.aux))
        between(program, state)
    return state, told


def result(program: Program, batch: Callable[..., Any], state: State, told: list[Any]) -> Result:
    """All that can be known of a State."""
    values = {**zfunc.params(program, state), **zfunc.buffers(program, state)}
    if program.spec.settings.ema is not None:
        values |= {f"average of {k}": x for k, x in zfunc.params(program, state, ema=True).items()}
    if program.ranks.world == 1:
        values |= moments(program, state)
    values = {name: x.clone() for name, x in values.items()}
    evaluated = zfunc.evaluate(program, state, batch(9, program.ranks.rank))
    return Result(repr(told), evaluated, values)


def moments(program: Program, state: State) -> dict[str, Tensor]:
    """What is kept of each trained parameter, element by element; not what blocks of elements share.

    Nor the sign of fp32 squares, by which a split master says how a tie was rounded.
    """
    found: dict[str, Tensor] = {}
    for bucket in program.layout.buckets:
        for kind, x in state.buffers.state(bucket.index).items():
            for span in bucket.spans if x.numel() == bucket.numel else ():
                own = x[span.start - bucket.start : span.stop - bucket.start]
                squares = kind == "exp_avg_sq" and own.dtype == torch.float32
                found[f"{kind} of {span.name}"] = own.abs() if squares else own
    return found


def results(row: Row, given: Mapping[str, Any], *, alike: bool = False, **step: Any) -> list[Result]:
    """Of every rank of a training from beginning to end."""
    every, batch = programs(row, given, alike=alike)

    def train(program: Program) -> Result:
        return result(program, batch, *steps(program, batch, begun(program), **step))

    return first_stage(on_every(every, train), given)


def first_stage(of_all: list[Result], given: Mapping[str, Any]) -> list[Result]:
    """Of every rank of the first stage, which has found the same as the others; each has its own moments."""
    world = len(of_all) // given.get("pp", 1)
    for n, one in enumerate(of_all):
        assert one.same(of_all[n % world]), f"rank {n}"
    others = [{k: x for one in of_all[n::world] for k, x in one.values.items()} for n in range(world)]
    return [evolve(one, values=values) for one, values in zip(of_all, others, strict=False)]


@cache
def plain(numbers: str, job: str, *, alike: bool = False, device: str = "cpu") -> list[Result]:
    """Of every rank the plain way: all but the update on the device, one operation after the other."""
    row = Row(numbers, "one slot", job)
    given = {"schedule": "Serial", "defer": False, "device": device, **row.computed}
    return results(row, given, alike=alike)
