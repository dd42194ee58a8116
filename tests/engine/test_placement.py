"""Where things live: the share that was asked for, what fits, what is refused, and the memory it takes.

That no bit changes, and that a checkpoint of one place goes on in another, are laws (test_laws.py).
"""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import trained
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from pairs import in_pairs
from parity import Row, results
from small_models import MODELS, rows_of
from table import chain, layouts, spec
from threaded_ranks import ThreadedRanks, on_every, programs_of
from torch import Tensor
from torch.nn.functional import mse_loss

import zfunc
from benchmarks.streaming import measure, parser
from zfunc.core.bucketing import resident_buckets
from zfunc.core.layout import make_layout, round_up
from zfunc.core.memory_model import peak_memory
from zfunc.core.setting_values import CHOICES
from zfunc.core.settings import StepSettings
from zfunc.core.spec import ALLOCATION
from zfunc.engine import compile as compiling
from zfunc.engine.program import fit_to_memory
from zfunc.engine.program.fit_to_memory import largest_share
from zfunc.engine.program.specialize import specialize
from zfunc.engine.state.memory import ActivationSlot
from zfunc.engine.trace.cost_trace import AllocationTracker
from zfunc.errors import OutOfMemory
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_init_has_the_values_of_one_segment_at_a_time(precision: Any) -> None:
    """Beside the state on the host, which the tracker does not see: the same for 2 layers as for 6."""

    def peak(layers: int) -> int:
        config = GPTConfig(
            vocab_size=64, seq_length=8, num_layers=layers, hidden_size=64, num_attention_heads=2
        )
        program = zfunc.compile(
            gpt_segments(config), precision=precision, device="cpu", params_on="host", stage=3
        )
        with AllocationTracker() as tracker:
            zfunc.init(program)
        return tracker.peak

    assert peak(6) - peak(2) < 4 * 64 * 64  # a block has 12 matrices of this size in fp32


def test_automatic_is_the_nearest_place_where_a_step_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU, the host's memory is the device's: there, parameters in bf16 need no copy beside their masters."""

    def free(nbytes: int, **settings: Any) -> tuple[str, ...]:
        monkeypatch.setattr(fit_to_memory, "available_host_bytes", lambda: nbytes)
        chosen = zfunc.compile(
            segments, device="cpu", example=batch(0), precision="bf16", **settings
        ).settings
        folders = (tmp_path.name,) if chosen.swap == (str(tmp_path),) else ()
        return *(getattr(chosen, name) for name in CHOICES if settings.get(name) == "auto"), *folders

    program, batch = trained.compiled("pairs", precision="bf16")
    segments = program.segments
    on_device = sum(peak.nbytes for peak in specialize(program, batch(0)).memory.values())
    enough = int(on_device / (1 - fit_to_memory.HEADROOM)) + 1
    assert free(enough, params_on="auto") == ("device",)
    assert free(enough - 2, params_on="auto") == ("host",)
    assert free(1, params_on="auto", activations_on="auto") == ("host", "host")
    with_disk = {**dict.fromkeys(("state_on", "grads_on", "activations_on"), "auto"), "swap": [tmp_path]}
    assert free(enough, **with_disk) == ("host", "device", "device")
    assert free(1, **with_disk) == ("disk", "disk", "disk", tmp_path.name)
    assert free(1, state_on="auto") == ("host",)
    assert free(1, params_on="auto", grads_on="host") == ("host",)
    assert free(1 << 40, recompute="auto") == ("min-cut",)
    assert free(1, recompute="auto") == ("all",)
    with pytest.raises(ValueError, match="example: got none with params_on='auto', expected a batch"):
        zfunc.compile(segments, device="cpu", params_on="auto")


def test_ranks_of_unequal_memory_choose_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the least of it decides, and parameters on the hosts of several ranks are sliced."""
    every, free = ThreadedRanks.all(2), [1 << 60, 0]
    monkeypatch.setattr(compiling, "_ranks", lambda _: every[0])
    monkeypatch.setattr(fit_to_memory, "_room", lambda program: {"host": free[program.ranks.rank]})
    automatic = StepSettings(precision="bf16", params_on="auto", activations_on="auto").placed(
        len(every), disk=False
    )
    names = ("precision", "params_on", "activations_on", "stage")
    chosen = [{name: getattr(settings, name) for name in names} for settings in automatic]
    assert [way["stage"] for way in chosen] == [2, 2, 3, 3]
    made = [trained.compiled("pairs", **way) for way in chosen]
    programs, rows = [program for program, _ in made], rows_of(made[0][1](0), 0, 2)
    needed = [sum(peak.nbytes for peak in specialize(program, rows).memory.values()) for program in programs]

    def choose(ranks: ThreadedRanks) -> StepSettings:
        ways = [partial(evolve, program, ranks=ranks) for program in programs]
        return fit_to_memory.first_that_fits(ways, rows).settings

    for room in (*needed, 0):
        free[1] = room
        first, second = on_every(every, choose)
        fitting = [program for program, nbytes in zip(programs, needed, strict=True) if nbytes <= room]
        assert first == second == (*fitting, programs[-1])[0].settings


def test_parameters_on_the_host_of_several_ranks_need_stage_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_ranks", lambda _: ThreadedRanks.all(2)[0])
    with pytest.raises(ValueError, match="got 'host' with stage=2 on 2 ranks, expected stage=3"):
        trained.compiled("pairs", params_on="host")


def test_the_host_keeps_no_copy_of_bf16_parameters() -> None:
    """12, 8 or 6 bytes a parameter, whatever the format of the moments, and the gradient."""
    for moments, kept in (("fp32", 12), ("16bit", 8), ("8bit", 6 + 2 / 64)):
        program, _ = trained.compiled("pairs", precision="bf16", params_on="host", moments=moments)
        state = [r for r in program.plan.graph.regions if r.lifetime == "state"]
        assert {r.tier for r in state} == {"host", "pinned"}
        assert sum(r.nbytes for r in state) == kept * program.layout.numel


def test_an_unaligned_view_takes_no_more_room_than_it_has_bytes() -> None:
    """And tensors of several types in one memory keep their places there, in other memory too."""
    two, memory = torch.empty(2, 1024, dtype=torch.uint8), torch.arange(130, dtype=torch.int32)
    tree = [memory[1:129], memory[2:].view(torch.int64), memory.view(torch.int16)[3:9].view(2, 3).T]
    for here, there in ((0, 1), (1, 0)):
        slot, other = ActivationSlot(two[here]), ActivationSlot(two[there])
        slot.put(tree)
        other.flat.copy_(slot.flat)
        other.hold(slot)
        slot.flat.zero_()
        assert all(map(torch.equal, other.tree, tree))
    slot = ActivationSlot(torch.empty(512, dtype=torch.uint8))
    slot.put(view := memory[1:129])
    assert torch.equal(slot.tree, view)


def test_tensors_of_one_memory_take_no_more_room_than_alone_and_no_more_than_it_has() -> None:
    numbers = Random(0)
    for _ in range(200):
        memory = torch.arange(numbers.randrange(16, 1200), dtype=torch.int32)
        edges = [sorted(numbers.sample(range(len(memory) + 1), 2)) for _ in range(numbers.randrange(1, 6))]
        tree = [memory[first:last] for first, last in edges]
        tree += [t[: len(t) // 2 * 2].view(torch.int64) for t in tree if not t.storage_offset() % 2]
        alone = sum(round_up(t.nbytes, ALLOCATION) for t in tree)
        slot = ActivationSlot(torch.empty(alone, dtype=torch.uint8))
        slot.put(tree)
        assert slot.used <= min(alone, round_up(memory.nbytes, ALLOCATION))
        assert all(map(torch.equal, slot.tree, tree))
        slot.tree[0].zero_()  # what is shared still is
        memory[slice(*edges[0])] = 0
        assert all(map(torch.equal, slot.tree, tree))


class TwoWeights(torch.nn.Module):
    """Hands on two weights of one bucket, and not the one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.between, self.b = (torch.nn.Parameter(torch.ones(n)) for n in (100, 128, 100))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * self.between.sum(), self.a, self.b


class UsesThem(torch.nn.Linear):
    def forward(self, given: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:  # pyright: ignore
        x, a, b = given
        return mse_loss(super().forward(x * a + b), targets)


def test_weights_that_a_segment_hands_on_reach_another_device_alone() -> None:
    segments = [zfunc.segment("first", TwoWeights()), zfunc.segment("last", UsesThem(100, 3))]
    batch, losses = (torch.linspace(0, 1, 400).view(4, 100), torch.zeros(4, 3)), []
    for devices in (1, 2):
        program = zfunc.compile(
            segments, precision="fp32", device="cpu", micro_batches=2, devices=devices, schedule="Overlapped"
        )
        state, _ = zfunc.train_step(program, zfunc.init(program, seed=0), batch)
        losses.append(zfunc.train_step(program, state, batch)[1].loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("params_on", ["device", "host"])
def test_each_rank_keeps_its_share_of_frozen_parameters(params_on: str) -> None:
    """And the rest of a slice is padding, which has no parameter."""
    programs = programs_of(2, lambda: trained.compiled("frozen below", stage=3, params_on=params_on)[0])
    for program, state in zip(programs, on_every(programs, zfunc.init), strict=True):
        layout, weights = program.layout, state.buffers.weights
        frozen = [x for b, x in weights.items() if b >= len(layout.buckets)]
        assert 2 * sum(x.flat.numel() for x in frozen) == layout.frozen_buckets[-1].stop > 0
        assert not any(x.views for x in weights.values())


@pytest.mark.parametrize("job", ["", "--tied --micro-batches 2", "--num-layers 1 --micro-batches 4"])
def test_a_step_moves_the_bytes_of_the_formulae(job: str) -> None:
    """And its losses are those of a training on the device: the benchmark refuses anything else."""
    size = "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --turns 2"
    moved = measure(parser().parse_args([*size.split(), *job.split()]))["bytes"]
    assert min(moved.values()) > 0


@pytest.mark.parametrize(
    ("model", "precision", "micro_batches", "same_bits"),
    [
        ("odd sizes", "fp32", 2, True),
        ("odd sizes", "bf16", 1, True),
        ("pairs", "fp32", 1, True),
        ("odd sizes", "bf16", 2, False),
        ("pairs", "fp32", 2, False),
        ("pairs", "bf16", 1, False),
    ],
)
def test_stage_1_has_the_bits_of_stage_2_where_it_adds_in_one_order(
    model: str, precision: str, micro_batches: int, same_bits: bool
) -> None:
    """In the dtype of the precision on the device, the parts of tied parameters of "pairs" too."""
    settings = {"precision": precision, "micro_batches": micro_batches, "clip_norm": 0.1}
    row = Row("fp32", "one slot", model)
    (first,), (second,) = (results(row, {"stage": stage, **settings}) for stage in (1, 2))
    assert first.same(second) == same_bits


# --- a share of the optimizer's state on the device ----------------------------------------


@given(layouts(), st.floats(0, 1))
def test_the_share_is_as_near_to_what_is_asked_as_half_a_bucket(inputs: Any, share: float) -> None:
    segments, bucket_size, world = inputs
    layout = make_layout(segments, bucket_size=bucket_size, world=world)
    resident = resident_buckets(layout, share)
    on_device = sum(layout.buckets[b].numel for b in resident)
    largest = max(b.numel for b in layout.buckets)
    assert abs(on_device - share * layout.numel) <= largest / 2 + 1e-6 * layout.numel
    assert len(resident_buckets(layout, 1.0)) == len(layout.buckets)
    assert not resident_buckets(layout, 0.0)


@pytest.mark.parametrize(
    ("ratio", "num_layers", "bucket_size"), in_pairs([0.1, 0.5, 0.9], [1, 4, 30], [1000, 50_000_000])
)
def test_the_ratio_holds_at_any_size_of_model_and_bucket(
    ratio: float, num_layers: int, bucket_size: int
) -> None:
    """A ratio of a half of a model in one bucket is a half all the same: it is cut into more."""
    modules = [
        (f"layer{n}", torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)]))
        for n in range(num_layers)
    ]
    segments = [zfunc.segment(n, m) for n, m in modules]
    program = zfunc.compile(
        segments,
        state_on=f"device:{1 - ratio:g},host",
        bucket_size=bucket_size,
        device="cpu",
        precision="fp32",
    )
    assert program.spec.share_on_host == pytest.approx(ratio, abs=1 / 32)


def test_a_ratio_of_0_leaves_nothing_on_the_host() -> None:
    program, data = trained.compiled(precision="bf16", clip_norm=0.5, bucket_size=1000, state_on="device")
    state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
    assert {r.tier for r in state.buffers.memory} == {"device"}
    assert not {"to_host", "update", "to_device"} & {op.verb for op in program.plan.graph}
    assert peak_memory(program.plan)["host"].nbytes < 100_000


def test_resident_buckets_are_planned_on_the_device() -> None:
    settings = {"precision": "fp32", "bucket_size": 200}
    half, full = (
        trained.compiled("odd sizes", state_on=x, **settings)[0] for x in ("device:0.5,host", "host")
    )
    kept = sum(half.layout.buckets[b].numel for b in half.spec.resident)
    a, b = peak_memory(half.plan), peak_memory(full.plan)
    rounding = a["device"].kept - b["device"].kept - 12 * kept  # of three buffers, to the allocator's units
    assert 0 <= rounding < 3 * ALLOCATION
    assert b["host"].kept - a["host"].kept == 12 * kept


def test_the_share_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="zfunc"):
        program, _ = trained.compiled(precision="fp32", bucket_size=1000, state_on="device:0.75,host")
    share = f"{100 * program.spec.share_on_host:.1f}%"
    assert (
        f"offload: {share} of the optimizer's state is on the host (requested: device:0.75,host)"
        in caplog.text
    )


def test_auto_keeps_on_the_device_what_fits_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where all memory is one: then less is needed the more stays where it is."""
    segments, data = MODELS["tied GPT"]()
    options: dict[str, Any] = {"precision": "bf16", "bucket_size": 400, "device": "cpu", "example": data(0)}
    needed = {
        ratio: sum(
            p.nbytes
            for p in peak_memory(
                zfunc.compile(segments, state_on=f"device:{1 - ratio:g},host", **options).plan
            ).values()
        )
        for ratio in (0.0, 1.0)
    }
    assert needed[0.0] < needed[1.0]
    program = zfunc.compile(segments, state_on="device:auto,host", **options)
    assert program.spec.share_on_host == 0
    state, _ = zfunc.train_step(program, zfunc.init(program), data(0))
    assert state.step == 1
    monkeypatch.setattr(fit_to_memory, "available_host_bytes", lambda: needed[0.0] // 2)
    with pytest.raises(OutOfMemory, match="state_on 'device:auto,host'"):
        zfunc.compile(segments, state_on="device:auto,host", **options)
    both = "got none with tiles='auto' and state_on='device:auto,host', expected a batch"
    with pytest.raises(ValueError, match=f"example: {both}.*: pass one, or values without 'auto'"):
        zfunc.compile(segments, state_on="device:auto,host", tiles="auto", device="cpu")
    for mixed in ("device:auto,disk", "host:auto,disk"):
        with pytest.raises(
            ValueError, match=f"got '{mixed}', expected device:auto,host, which leaves nothing"
        ):
            zfunc.compile(segments, state_on=mixed, example=data(0), device="cpu")


@pytest.mark.parametrize("most", [0.0, 0.03, 0.7, 1.0, None])
def test_the_largest_share_that_fits_is_found(most: float | None) -> None:
    share = largest_share(lambda x: most is not None and x <= most)
    assert share == (None if most is None else most * 32 // 1 / 32)


def test_unknown_resident_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"resident: got buckets \[7\]"):
        evolve(spec(chain((8, 8))), resident={7})
