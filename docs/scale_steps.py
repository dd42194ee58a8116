"""The steps that docs/scale.md is about: a GPT on one of `world` ranks, planned without data and simulated.

A model is traced once for each size of a micro-batch; all else is arithmetic on that. The invariant: nothing is
allocated, no GPU is asked, no clock is read, so the figures are the same wherever the command runs.
"""

import math
from functools import cache
from typing import Any, Literal

import torch
from attrs import evolve, frozen

from zfunc.cli.plan_settings import PlanSettings
from zfunc.core.critical_path import bound_by, critical_path_of
from zfunc.core.graph import Graph, Tier
from zfunc.core.hardware import Hardware
from zfunc.core.plan import Plan, build
from zfunc.models.gpt import num_parameters
from zfunc.options import AUTO
from zfunc.planner.candidate import Choice, PlannedStep, Setup, play_through
from zfunc.planner.cost_model import CostModel, precision_for
from zfunc.planner.max_layers import max_layers
from zfunc.planner.profile import Profile
from zfunc.planner.profile_toml import load_profile
from zfunc.planner.search import search
from zfunc.planner.search_space import SearchSpace
from zfunc.train.setup import gpt_config, gpt_segments

SEQ_LENGTH = 1024
VOCAB_SIZE = 50_257
WORLDS = tuple(2**n for n in range(11))  # 1 to 1,024
EVERY_BUCKET = 1_000_000  # more than there are: to speculate on all
Network = Literal["all ports", "one port", "every hop"]


@frozen
class Case:
    """A GPT on a machine; every rank has `rows` sequences of SEQ_LENGTH tokens."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    profile: str
    rows: int

    @property
    def planning(self) -> PlanSettings:
        """The model's settings, as `zfunc plan` has them."""
        return PlanSettings(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            seq_length=SEQ_LENGTH,
            vocab_size=VOCAB_SIZE,
        )

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return num_parameters(gpt_config(self.planning))

    @property
    def model(self) -> str:
        """The model's size in words."""
        return f"{self.parameters / 1e9:.0f} B"

    @property
    def name(self) -> str:
        """Model and machine in words."""
        return f"{self.model}, {self.profile}"


@frozen
class NormsApart:
    """Overlapped, with the sums of squares on a lane of their own, so that backward does not wait for them."""

    def __call__(self, graph: Graph) -> Plan:
        """Deal the operations out by kind, `square_sum` apart."""
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(graph):
            lanes.setdefault("norms" if op.verb == "square_sum" else op.kind, []).append(i)
        return build(graph, lanes)


@frozen
class Figures:
    """What is kept of a simulated step, times in seconds.

    `tokens` are one rank's, `bound` the shares of the critical path by kind, `after_backward` what the step takes
    after the last backward, `held_up` how long a device idles just before operations of a verb, by verb.
    """

    seconds: float
    compute_seconds: float
    world: int
    tokens: int
    tflops: float
    memory: dict[Tier, int]
    room: dict[Tier, int]
    lacking: dict[Tier, int]
    bound: dict[str, float]
    after_backward: float
    held_up: dict[str, float]
    busy: dict[str, float]

    @property
    def fits(self) -> bool:
        """Whether every tier has room for it."""
        return not self.lacking

    @property
    def per_gpu(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.seconds

    @property
    def compute_share(self) -> float:
        """The share of the step in which a GPU computes."""
        return self.compute_seconds / self.seconds


@cache
def task(case: Case, rows: int) -> CostModel:
    """The model of `case` with a batch of `rows` on one rank; its segments are on the meta device."""
    tokens = torch.empty((rows, SEQ_LENGTH), dtype=torch.int64, device="meta")
    return CostModel(gpt_segments(case.planning), (tokens, tokens), load_profile(case.profile))


def hardware(profile: Profile, precision: str, world: int, network: Network = "all ports") -> Hardware:
    """What one of `world` ranks gets, and how their collectives go.

    "all ports": those of a node together carry a collective, as rings that enter it through every port do; it is
    never faster than inside the node. "one port": a rank has its own alone. "every hop": all ports, and a latency
    for each rank that a ring passes instead of for log2(world).
    """
    on = profile.hardware(precision, world)
    local = min(world, int(profile.value("count", "devices")))
    if world <= local:
        return on
    inside, between = "network_in_node", "network_between_nodes"
    rate = profile.reached("bytes_per_s", between)
    if network != "one port" and local > 1:
        rate = min(rate * local, profile.reached("bytes_per_s", inside))
    latency = on.latencies["network"]
    if network == "every hop":
        nodes = math.ceil(world / local)
        within = profile.value("seconds", inside) if local > 1 else 0.0
        latency = nodes * profile.value("seconds", between) + (world - nodes) * within
    return evolve(on, rates={**on.rates, "network": rate}, latencies={**on.latencies, "network": latency})


def setup(case: Case, world: int, **changes: Any) -> Setup:
    """Plain with clipping, in the 16 bits the machine is fast in; `changes` by their names in `zfunc.plan`."""
    plain = Setup(
        precision_for(load_profile(case.profile), AUTO), clip_norm=1.0, world=world, choice=Choice()
    )
    return plain.having(**changes)


@cache
def simulated(
    case: Case, world: int, network: Network = "all ports", rows: int = 0, **changes: Any
) -> Figures:
    """The figures of a step. `rows` is for one rank, the case's if it is 0."""
    rows = rows or case.rows
    settings = setup(case, world, **changes)
    planned, on = task(case, rows), hardware(load_profile(case.profile), settings.precision, world, network)
    return figures(play_through(planned.job(settings), settings.choice, on), world, rows)


@cache
def found(case: Case, world: int, *, ratios_only: bool = False) -> tuple[Choice, Figures]:
    """What a search finds: of everything but a delay, or of offload ratios alone."""
    settings = setup(case, world)
    on = hardware(load_profile(case.profile), settings.precision, world)
    alone = SearchSpace((), (), (), (), speculate=(), delay=())
    best = search(
        task(case, case.rows).job(settings), on, settings.choice, alone if ratios_only else SearchSpace()
    ).step
    return best.choice, figures(best, world, case.rows)


def figures(made: PlannedStep, world: int, rows: int) -> Figures:
    """What is kept of `made`."""
    forward = sum(cost.flops for cost in made.job.costs) * made.job.micro_batches
    shares: Any = bound_by(critical_path_of(made.plan, made.timeline))
    backward = max(e.end for e in made.timeline.events if e.op.startswith("backward"))
    return Figures(
        seconds=made.seconds,
        compute_seconds=sum(e.end - e.start for e in made.timeline.events if e.kind == "compute"),
        world=world,
        tokens=rows * SEQ_LENGTH,
        tflops=3 * forward / made.seconds / 1e12,
        memory=made.memory,
        room=dict(made.hardware.memory),
        lacking=made.lacking,
        bound=shares,
        after_backward=made.seconds - backward,
        held_up=_held_up(made),
        busy={lane: made.timeline.busy(lane) for lane in made.timeline.lanes},
    )


def _held_up(made: PlannedStep) -> dict[str, float]:
    """How long the compute lane idles just before operations of a verb, by verb."""
    spent: dict[str, float] = {}
    now = 0.0
    for e in sorted((e for e in made.timeline.events if e.lane == "compute"), key=lambda e: e.start):
        verb = e.op.partition("[")[0]
        spent[verb] = spent.get(verb, 0.0) + max(0.0, e.start - now)
        now = e.end
    return spent


def most_layers(case: Case, world: int, **changes: Any) -> int:
    """How many layers of the case's width fit on one of `world` ranks, in every tier."""
    settings = setup(case, world, **changes)
    one = task(evolve(case, num_layers=1), case.rows)
    on = hardware(load_profile(case.profile), settings.precision, world)
    return max_layers(one.job(settings), settings.choice, on)
