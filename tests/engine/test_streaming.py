"""Parameters and activations on the host, sharded or not, micro-batches in any order: the same training.

The reference is each setting without them: everything on the device, one micro-batch after the other.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from attrs import evolve
from small_models import rows_of
from table import in_pairs
from threaded_ranks import ThreadedRanks, on_every, programs_of

import zfunc
from benchmarks.streaming import measure, parser
from zfunc.checkpoint.export import export_weights
from zfunc.core.settings import CHOICES, StepSettings
from zfunc.engine.compile import compile as compiling
from zfunc.engine.compile import fit_to_memory
from zfunc.engine.compile.cost_trace import AllocationTracker
from zfunc.engine.compile.program import Program
from zfunc.engine.compile.specialize import specialize
from zfunc.engine.state.state import ActivationSlot
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32, clipped": {"precision": "fp32", "clip_norm": 0.1},
    "bf16 in 2, 16 bits": {"precision": "bf16", "moments": "16bit", "micro_batches": 2},
    "fp16 in 2": {"precision": "fp16", "micro_batches": 2},
    "min-cut, bf16 in 2, half on the device": {
        "precision": "bf16",
        "micro_batches": 2,
        "recompute": "min-cut",
        "offload_ratio": 0.5,
        "clip_norm": 0.1,
    },
}
STREAMED: dict[str, dict[str, Any]] = {
    "vertical": {"accumulate": "vertical", "bucket_size": 100},
    "two at a time, activations on the host": {"accumulate": 2, "activations_on": "host"},
    "half of the activations on the host, another half recomputed": {
        "activations_on": "device,host,device",
        "recompute": ["min-cut", "all"],
        "accumulate": "vertical",
    },
    "parameters on the host": {"params_on": "host", "bucket_size": 100_000},
    "large ones on the host": {"params_on": "host", "persistent_params": 40, "defer": True},
    "everything on the host, one slot": {
        "params_on": "host",
        "activations_on": "host",
        "accumulate": "horizontal",
        "weight_slots": 1,
        "defer": True,
    },
}
SHARDED: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 3 on the host, deferred": {
        "stage": 3,
        "params_on": "host",
        "activations_on": "host",
        "defer": True,
        "persistent_params": 40,
    },
    "stage 3, horizontal, in other buckets": {
        "stage": 3,
        "accumulate": "horizontal",
        "schedule": "CriticalPath",
        "bucket_size": 500,
        "persistent_params": 20,
    },
}
MODELS = ("GPT with dropout", "odd sizes", "norms", "pairs")
STEPS = 3
Result = tuple[list[float], float, dict[str, torch.Tensor]]


def trainings(model: str, world: int, **settings: Any) -> list[Result]:
    """Losses and norms, an evaluation and the parameters, by rank."""
    whole = trained.MODELS[model]()[1]

    def batch(i: int, rank: int) -> Any:
        """The rank's rows, in micro-batches of one shape: a segment is traced once for each precision."""
        rows = 2 * world * settings.get("micro_batches", 1)
        return rows_of(tuple(x[:rows] for x in whole(i)), rank, world)

    def one(program: Program) -> Result:
        rank, losses, state = program.ranks.rank, list[float](), zfunc.init(program, seed=2)
        for i in range(STEPS):
            state, metrics = zfunc.train_step(program, state, batch(i, rank))
            losses += metrics.loss, metrics.grad_norm
        return losses, zfunc.evaluate(program, state, batch(9, rank)), zfunc.params(program, state)

    return on_every(programs_of(world, lambda: trained.compiled(model, **settings)[0], batch(0, 0)), one)


@cache
def reference(model: str, world: int, settings: str) -> list[Result]:
    """The training with everything on the device."""
    return trainings(model, world, **SETTINGS[settings])


def same(a: Result, b: Result) -> bool:
    return repr(a[:2]) == repr(b[:2]) and all(torch.equal(b[2][name], x) for name, x in a[2].items())


@pytest.mark.parametrize(("model", "settings", "streamed"), in_pairs(MODELS, SETTINGS, STREAMED, meets=2))
def test_where_parameters_live_changes_no_bit(model: str, settings: str, streamed: str) -> None:
    (got,) = trainings(model, 1, **{**SETTINGS[settings], **STREAMED[streamed]})
    (expected,) = reference(model, 1, settings)
    assert same(got, expected)


@pytest.mark.parametrize(
    ("settings", "sharded", "job"),
    in_pairs(SETTINGS, SHARDED, ["odd sizes on 2", "pairs on 3", "odd sizes on 3", "pairs on 2"]),
)
def test_nor_does_sharding_them(settings: str, sharded: str, job: str) -> None:
    model, _, world = job.rpartition(" on ")
    got = trainings(model, int(world), **SETTINGS[settings], **SHARDED[sharded])
    assert all(map(same, got, reference(model, int(world), settings)))


@pytest.mark.parametrize("model", ["tied GPT", "frozen below"])
def test_any_number_of_micro_batches_passes_in_any_order(model: str) -> None:
    for micro_batches, groups in ((3, (2, 3)), (8, (5, 8))):
        results = []
        for size in (1, *groups):
            program, batch = trained.compiled(
                model, micro_batches=micro_batches, accumulate=size, bucket_size=3000, precision="bf16"
            )
            state = zfunc.init(program, seed=2)
            rows = tuple(torch.cat(parts) for parts in zip(batch(0), batch(1), strict=True))
            state, metrics = zfunc.train_step(program, state, rows)
            results.append(([metrics.loss], metrics.grad_norm, zfunc.params(program, state)))
        assert all(same(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("settings", ["fp32, clipped", "bf16 in 2, 16 bits"])
def test_shards_of_parameters_on_the_host_export_and_go_on_as_the_whole_does(
    settings: str, tmp_path: Path
) -> None:
    """One process, then two ranks in stage 3, then one process: the same file, and the same next step."""
    program, batch = trained.compiled("odd sizes", **SETTINGS[settings])
    state, _ = zfunc.train_step(program, zfunc.init(program, seed=2), batch(0))
    zfunc.save(tmp_path / "one", program, state)
    more = {"stage": 3, "params_on": "host", "activations_on": "host", "bucket_size": 900}
    sharded = programs_of(2, lambda: trained.compiled("odd sizes", **SETTINGS[settings], **more)[0])
    on_every(sharded, lambda own: zfunc.save(tmp_path / "two", own, zfunc.load(tmp_path / "one", own)))
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "two")]
    for file in files:
        export_weights(tmp_path / file.stem, file, dtype="bf16")
    assert files[0].read_bytes() == files[1].read_bytes()
    again = zfunc.load(tmp_path / "two", program)
    assert len({zfunc.train_step(program, x, batch(1))[1].loss for x in (state, again)}) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_init_has_the_values_of_one_segment_at_a_time(precision: Any) -> None:
    """Beside the state on the host, which the tracker does not see: the same for 3 layers as for 12."""

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

    assert peak(12) - peak(3) < 4 * 64 * 64  # a block has 12 matrices of this size in fp32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"params_on": "host", "recompute": "none"}, "params_on: got 'host' with recompute='none'"),
        ({"activations_on": "host", "recompute": "none"}, "activations_on: got 'host'"),
        ({"activations_on": ("host", "device"), "recompute": "all,none"}, "got 'host,device' with"),
        ({"activations_on": "host,auto"}, "activations_on: got 'host,auto', expected 'auto' alone"),
        ({"recompute": "all,,all"}, "recompute: got '', expected one of all, none, min-cut"),
        ({"recompute": ["all"] * 9}, "recompute: got 9 values for 4 segments, expected at most one for each"),
        ({"stage": 1, "params_on": "host"}, "stage: got 1 with params_on='host'"),
        ({"stage": 1, "accumulate": 2, "micro_batches": 2}, "stage: got 1 with accumulate=2"),
        (
            {"accumulate": "diagonal"},
            "accumulate: got 'diagonal', expected auto, horizontal, vertical, or a number",
        ),
        ({"accumulate": None}, "accumulate: got None, expected auto, horizontal, vertical, or a number"),
        ({"accumulate": 0}, "accumulate: got 0"),
        ({"persistent_params": "pairs,"}, "persistent_params: got 'pairs,', expected names of segments or"),
        ({"persistent_params": "last"}, "persistent_params: got 'last', expected a number of elements, or"),
        ({"params_on": "disc"}, "params_on: got 'disc', expected one of device, host, disk"),
    ],
)
def test_what_excludes_each_other_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained.compiled("pairs", **settings)


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
    assert free(enough, **with_disk) == ("host", "host", "device")
    assert free(1, **with_disk) == ("disk", "disk", "disk", tmp_path.name)
    assert free(1, state_on="auto", disk_ratio=0.5) == ("host",)
    assert free(1 << 40, recompute="auto") == ("min-cut",)
    assert free(1, recompute="auto") == ("all",)
    with pytest.raises(ValueError, match="got 'auto' without an example, expected one"):
        zfunc.compile(segments, device="cpu", params_on="auto")


def test_ranks_of_unequal_memory_choose_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the least of it decides, and parameters on the hosts of several ranks are sliced."""
    every, free = ThreadedRanks.all(2), [1 << 60, 0]
    monkeypatch.setattr(compiling, "_ranks", lambda _: every[0])
    monkeypatch.setattr(fit_to_memory, "_room", lambda program: (0, free[program.ranks.rank]))
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


@pytest.mark.parametrize("params_on", ["device", "host"])
def test_each_rank_keeps_its_share_of_frozen_parameters(params_on: str) -> None:
    """And the rest of a slice is padding, which has no parameter."""
    programs = programs_of(2, lambda: trained.compiled("frozen below", stage=3, params_on=params_on)[0])
    for program, state in zip(programs, on_every(programs, zfunc.init), strict=True):
        layout, weights = program.layout, state.buffers.weights
        frozen = [x for b, x in weights.items() if b >= len(layout.buckets)]
        assert 2 * sum(x.flat.numel() for x in frozen) == layout.frozen_numel > 0
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
    (first,), (second,) = (trainings(model, 1, stage=stage, **settings) for stage in (1, 2))
    assert same(first, second) == same_bits
