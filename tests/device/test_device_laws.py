"""The device half: the bits of the serial step under every schedule and delay, planned memory, real overlap."""

import copy
import gc
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shared_traces
import torch
from attrs import evolve
from device_training import compiled, train, weights_of
from device_training import run as run_steps
from parity import (
    WAYS,
    Row,
    begun,
    own_format,  # noqa: F401
    plain,
    programs,
    result,
    results,
    rows,
    steps,
    varied,
)
from quantized_models import BATCH, modules, segments_of
from small_models import MODELS, Loss
from table import Scattered
from torch import Tensor, nn

import zfunc
from zfunc.cli.commands import doctor
from zfunc.core.extents import whole_blocks
from zfunc.core.memory_model import persistent_bytes
from zfunc.core.timeline import Timeline
from zfunc.engine.program.fit_to_memory import measured_rates
from zfunc.engine.program.specialize import specialize
from zfunc.engine.rows import row_attention
from zfunc.engine.rows.tiled_vjp import tiled_vjp
from zfunc.engine.stages import move_stages
from zfunc.engine.stages.stages import STAGES
from zfunc.engine.state.memory import ActivationSlot, flat_of
from zfunc.engine.trace import vjp
from zfunc.engine.trace.host_keys import HostMemory, keys_in
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.errors import OutOfMemory
from zfunc.models.gpt import Head, gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.loss import linear_next_token_loss
from zfunc.optim.by_name import make_optimizer
from zfunc.planner.calibrate import clocked, issue_seconds, measure_launch
from zfunc.runtime import accelerator
from zfunc.runtime.executor import Executor
from zfunc.runtime.host_memory import alloc_host

pytestmark = pytest.mark.usefixtures("own_format")
LIBRARIES = {
    "pretend": 0,
    "cuda": 160 << 20,
}  # bytes that cuBLAS and its kin allocate through torch for themselves: 32 MiB a stream on a GPU of 2022
at_night = partial(pytest.param, marks=pytest.mark.slow)
CLIPPED: dict[str, Any] = {"clip_norm": 2.0, "bucket_size": 600}


def on_a_device(row: Row) -> bool:
    """Alone; and not where the norm of a sum, of micro-batches or of the uses of a tied parameter, is taken by
    another sweep on the device than on the host."""
    sums = row.settings.get("micro_batches", 1) > 1 or row.model in ("pairs", "tied GPT", "GPT with dropout")
    return row.world == 1 and not (
        sums and ("update_on" in row.settings or "device" in row.settings.get("state_on", ""))
    )


def needs(devices: int) -> None:
    """Skip the test where there are fewer."""
    if devices > (there := torch.accelerator.device_count()):
        pytest.skip(f"needs {devices} devices, torch sees {there}")


@pytest.mark.parametrize("row", rows(lambda row: row.entries, on_a_device))
def test_no_way_of_training_changes_a_bit(device: str, row: Row, tmp_path: Path) -> None:
    """As in test_laws.py, whatever host and device delay. What is updated on the device is by other code."""
    given, step = varied(row, row.given(tmp_path))
    needs(given.get("devices", 1))
    (expected,) = plain(row.numbers, row.job, device=device)
    (got,) = results(row, {**given, "device": device}, **step)
    assert got.same(expected), (given, step)


@pytest.mark.parametrize(("job", "debug"), [("pairs", True), ("pairs", False), ("odd sizes", False)])
def test_no_lane_of_a_segment_that_cannot_be_traced_changes_a_bit(
    device: str, job: str, debug: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd runs its backward on the stream of its forward, whichever lane the backward is on."""
    row = Row("bf16 in 6", "one slot", job)
    (expected,) = plain(row.numbers, row.job, device=device)
    monkeypatch.setattr(shared_traces, "SHARED", ())
    monkeypatch.setattr(vjp, "joint_graph", lambda *_: 1 / 0)
    given = {**row.given(tmp_path), "device": device, "recompute": "none", "schedule": Scattered(0)}
    (got,) = results(row, given, debug=debug)
    assert got.same(expected)


EMPTIED = [
    Row("fp32", "half on the device", "odd sizes"),  # constants, averages, frozen parameters
    Row("bf16, clipped in part, 16 bits", "deferred", "norms"),  # module buffers
    Row("fp32 in 2, clipped, 8 bits", "a third on the host", "frozen below"),
    Row("fp16 in 2", "from the host", "pairs"),
    Row("a split master", "half of the activations on the host", "tied GPT"),
    Row("bf16 in 3, clipped", "half of the state on the disk", "odd sizes"),
    Row("whole matrices, 8 bits", "on the device", "odd sizes"),
    Row("bf16 in 2, 16 bits", "stage 3", "GPT with dropout"),
    Row(
        "bf16, clipped in part, 16 bits", "updated on the device, from the host", "odd sizes"
    ),  # and a gradient that waits
    at_night(Row("bf16, some in fp32, 8 bits", "half on the device", "odd sizes")),
    at_night(Row("fp32", "two devices", "norms")),
    Row("bf16 in 3, clipped", "two devices, half updated there", "odd sizes"),
    Row("fp32, clipped", "dealt to three devices", "tied GPT"),
]


def allocated() -> int:
    """On all devices."""
    return sum(map(torch.accelerator.memory_allocated, range(torch.accelerator.device_count())))


@pytest.mark.parametrize("row", EMPTIED, ids=str)
def test_a_released_state_leaves_nothing_on_the_device(device: str, row: Row, tmp_path: Path) -> None:
    """No byte on the pretend device, after any step, an evaluation and a save; and the next step has its bits."""
    gc.collect()  # what other tests left
    before, given = allocated(), {**row.given(tmp_path / "swap"), "device": device}
    needs(given.get("devices", 1))
    (program,), batch = programs(row, given)
    sizes = set[int]()

    def between(program: Any, state: Any) -> None:
        if state.batches == 2:
            zfunc.evaluate(program, zfunc.release(program, state), batch(9, 0))
        sizes.add(allocated())
        zfunc.release(program, state)
        assert allocated() - before <= LIBRARIES[device] * len(program.devices)
        if state.batches == 3:
            zfunc.save(tmp_path / "saved", program, state)
            zfunc.release(program, state)

    got = result(program, batch, *steps(program, batch, begun(program), between=between))
    assert len(sizes) == 1
    (never,) = results(row, {**row.given(tmp_path / "another swap"), "device": device})
    assert got.same(never)


@pytest.mark.parametrize("row", [EMPTIED[n] for n in (0, 1, 3, 8, 11)], ids=str)
def test_a_copied_state_trains_on_as_its_source(device: str, row: Row, tmp_path: Path) -> None:
    """In the memories that its source has, which trains on first; a deferred update is made in both."""
    given = {**row.given(tmp_path), "device": device}
    needs(given.get("devices", 1))
    (program,), batch = programs(row, given)
    state, _ = steps(program, batch, begun(program), 2)
    before = allocated()
    other = copy.deepcopy(state)
    there = [flat_of(x).nbytes for r, x in state.buffers.memory.items() if flat_of(x).device.type == device]
    assert sum(there) <= allocated() - before <= sum(there) + 512 * len(there) + LIBRARIES[device]
    of_source, of_copy = (result(program, batch, *steps(program, batch, x)) for x in (state, other))
    assert of_source.same(of_copy)


@pytest.mark.parametrize("way", [{}, {"params_on": "host"}, {"stage": 3, "state_on": "device:0.5,host"}])
@pytest.mark.parametrize("dtype", [None, "bf16", "fp32"])
def test_weights_are_handed_over_with_one_tensor_beside_the_model(
    device: str, way: dict[str, Any], dtype: Any
) -> None:
    """Those that are on the device take nothing; to the byte on the pretend device."""
    program, _ = compiled("odd sizes", device, precision="bf16", moments="8bit", **way)
    state = zfunc.init(program, seed=1)
    expected = zfunc.params(program, state)
    before, copied = torch.accelerator.memory_allocated(), dtype is not None or "params_on" in way
    weights = zfunc.weights(program, state, dtype=dtype)
    torch.accelerator.reset_peak_memory_stats()
    while item := next(weights, None):
        name, t = item
        assert t.device.type == device
        assert torch.equal(t.cpu(), expected.pop(name).to(t.dtype))
        own = -(-t.nbytes // 512) * 512 * copied
        assert torch.accelerator.max_memory_allocated() - before <= own
        del item, t
        assert torch.accelerator.memory_allocated() == before
        torch.accelerator.reset_peak_memory_stats()
    assert not expected
    assert {t.device.type for _, t in zfunc.weights(program, state, dtype=dtype, device="cpu")} == {"cpu"}


@pytest.mark.gpu  # the kernels of the pretend device are the CPU's
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 3e-2)])
@pytest.mark.parametrize("model", [m for m in MODELS if "dropout" not in m and m != "frozen below"])
def test_losses_are_the_cpus_within_tolerance(model: str, precision: str, tolerance: float) -> None:
    settings: dict[str, Any] = {"precision": precision, "clip_norm": 1.0, "micro_batches": 2}
    cpu, _ = train(model, "cpu", **settings)
    there, _ = train(model, "cuda", **settings)
    assert [a for a, _ in there] == pytest.approx([a for a, _ in cpu], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(
    "more", [{}, {"micro_batches": 3, "order": "vertical", "state_on": "device:0.5,host"}]
)
def test_norms_of_parameters_and_auxiliary_outputs_are_the_hosts(device: str, more: dict[str, Any]) -> None:
    seen = []
    for place, norms in ((device, True), (device, False), ("cpu", True)):
        program, data = compiled("odd sizes", place, precision="fp32", norms=norms, **more)
        seen.append(zfunc.train_step(program, zfunc.init(program, seed=1), data(0))[1])
    there, without, here = seen
    assert there.grad_norm == without.grad_norm
    assert there.norms == pytest.approx(here.norms, rel=1e-3, abs=1e-6)
    assert there.aux == pytest.approx(here.aux, rel=1e-3, abs=1e-6)
    assert without.norms == {}


class Scored(Loss):
    def forward(self, x: Any, targets: Tensor) -> Any:
        return super().forward(x, targets), {
            "targets": targets,
            "double": 2 * targets,
            "mean": targets.mean(),
        }


@pytest.mark.parametrize("more", [{}, {"params_on": "host", "recompute": "all", "schedule": "Overlapped"}])
def test_auxiliary_outputs_of_rows_come_to_the_host_in_order(device: str, more: dict[str, Any]) -> None:
    batch = torch.randn(8, 4), torch.randn(8)
    segments = [zfunc.segment("body", nn.Linear(4, 4)), zfunc.segment("head", Scored(4))]
    program = zfunc.compile(segments, device=device, precision="fp32", micro_batches=4, **more)
    aux = zfunc.train_step(program, zfunc.init(program), batch, debug=True)[1].aux
    evaluated = zfunc.evaluate(program, zfunc.init(program), batch, has_aux=True)[1]
    for found in (aux, evaluated):
        assert found["targets"].device.type == "cpu"
        assert torch.equal(found["targets"], batch[1])
        assert torch.equal(found["double"], 2 * batch[1])
        assert found["mean"] == pytest.approx(float(batch[1].mean()), abs=1e-6)


def test_a_saved_state_and_a_stream_of_the_callers_give_the_same_bits(device: str, tmp_path: Any) -> None:
    """The batch is only queued, on the caller's own stream, when the step begins; resident state is saved."""
    program, data = compiled("odd sizes", device, state_on="device:0.5,host", schedule="Overlapped")
    batches = [data(i) for i in range(4)]
    state = zfunc.init(program, seed=1)
    for batch in batches:
        state, _ = zfunc.train_step(program, state, batch)
    expected = weights_of(program, state)

    with torch.Stream(program.device):
        state = zfunc.init(program, seed=1)
        for i, batch in enumerate(batches):
            there = tuple(t.to(program.device).mul(2.0).div(2.0) for t in batch)
            saving = {"save": tmp_path / "checkpoints"} if i == 2 else {}
            state, _ = zfunc.train_step(program, state, there, **saving)
        assert torch.equal(weights_of(program, state), expected)

    state = zfunc.load(tmp_path / "checkpoints", program)
    for batch in batches[2:]:
        state, _ = zfunc.train_step(program, state, batch)
    assert torch.equal(weights_of(program, state), expected)


def test_two_devices_train_side_by_side(device: str) -> None:
    needs(2)
    both = [compiled("tied GPT", torch.device(device, n), schedule="Overlapped") for n in (0, 1)]
    states = [zfunc.init(program, seed=1) for program, _ in both]
    for i in range(3):
        for n, (program, data) in enumerate(both):
            states[n], _ = zfunc.train_step(program, states[n], data(i))
    first, second = (weights_of(program, state) for (program, _), state in zip(both, states, strict=True))
    assert torch.equal(first, second)
    assert torch.accelerator.memory_allocated(1) > 0


@pytest.mark.parametrize("way", ["two devices", "two devices, backward split", "two devices, from the host"])
def test_peers_copy_past_the_host(device: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one operation where others need two, with their bits. Their memory is a row of the peaks below."""
    needs(2)
    ends, verbs, pinned = list[Any](), list[set[str]](), list[int]()
    there = accelerator.VENDORS[device]
    for peers in (True, False):
        monkeypatch.setitem(accelerator.VENDORS, device, evolve(there, peers=lambda *_, peers=peers: peers))
        program, data = compiled("norms", device, micro_batches=3, clip_norm=1.0, **WAYS[way])
        state = zfunc.init(program, seed=1)
        for i in range(3):
            state, metrics = zfunc.train_step(program, state, data(i))
        shaped = specialize(program, data(0))
        verbs.append({op.verb for op in shaped.plan.graph})
        pinned.append(shaped.memory["pinned"].nbytes)
        ends.append((metrics.loss, metrics.grad_norm, weights_of(program, state).tolist()))
    assert ends[0] == ends[1]
    assert verbs[1] - verbs[0] == {"send_act", "send_grad_act"}
    assert verbs[0] < verbs[1]
    assert pinned[0] < pinned[1]


def test_a_state_goes_on_on_any_number_of_devices(device: str, tmp_path: Path) -> None:
    """With the bits of one; and each evaluates as it does."""
    needs(3)
    here: dict[str, Any] = {"params_on": "host", "activations_on": "host"}
    ways = [here, {**here, "devices": 3, "order": "RoundPipe"}, {**here, "devices": 2}]

    def trained(ways: list[dict[str, Any]]) -> list[Any]:
        told, state = list[Any](), None
        for i, way in enumerate(ways):
            program, data = compiled("tied GPT", device, micro_batches=4, defer=True, clip_norm=1.0, **way)
            state = zfunc.init(program, seed=1) if state is None else zfunc.load(tmp_path, program)
            state, metrics = zfunc.train_step(program, state, data(i))
            zfunc.save(tmp_path, program, state)
            told += [metrics.loss, metrics.grad_norm, zfunc.evaluate(program, state, data(9))]
        return [*told, weights_of(program, state).tolist()]

    assert trained(ways) == trained(ways[:1] * 3)


def test_times_of_several_devices_are_on_one_clock(device: str) -> None:
    """Each operation begins after those that it waits for have ended, whatever device they are on, and whatever one
    of them has to do before the step."""
    program, batch = gpt(device, devices=3, micro_batches=4, tied=False)
    state = zfunc.init(program)
    for _ in range(2):
        busy = torch.eye(64, device=program.devices[2])
        for _ in range(1000):
            busy = busy @ busy
        state, metrics = zfunc.train_step(program, state, batch, trace=True)
    plan, events = metrics.plan, {x.op: x for x in metrics.timeline.events}
    slack = 3e-2 if device == "pretend" else 1e-4  # between the moments at which devices begin to count
    for op, waits in zip(plan.graph, plan.waits, strict=True):
        for n in waits:
            assert events[plan.graph.ops[n].name].end <= events[op.name].start + slack
    assert all(-slack <= x.start <= x.end <= metrics.seconds + slack for x in events.values())
    assert {x.lane for x in events.values()} >= {"compute", "compute:1", "compute:2"}


def test_a_default_device_of_the_callers_changes_nothing(device: str, tmp_path: Any) -> None:
    """Nor does a saved and loaded state under it."""
    _, expected = train("odd sizes", device, steps=2, moments="8bit")
    segments, data = MODELS["odd sizes"]()
    batches = [data(i) for i in range(2)]
    optimizer = zfunc.AdamW(lr=1e-2, weight_decay=0.1, moments="8bit")
    with torch.device(device):
        program = zfunc.compile(segments, optimizer=optimizer, device=device, bucket_size=3000)
        state = zfunc.init(program, seed=1)
        state, _ = zfunc.train_step(program, state, batches[0])
        zfunc.save(tmp_path / "checkpoints", program, state)
        state = zfunc.load(tmp_path / "checkpoints", program)
        state, _ = zfunc.train_step(program, state, batches[1])
        assert torch.equal(weights_of(program, state), expected)


def test_the_device_is_picked_and_named(device: str) -> None:
    assert accelerator.device_types() == ("cpu", device)
    assert accelerator.pick_device() == torch.device(device, 0)
    assert accelerator.pick_device("cpu").type == "cpu"
    assert accelerator.best_precision(torch.device(device)) in ("bf16", "fp16")
    with pytest.raises(ValueError, match=f"got '{device}:99', expected {device}:0 to {device}:"):
        accelerator.pick_device(f"{device}:99")


class InPieces(Head):
    """A head whose logits are computed in pieces, though they are few."""

    def forward(self, x: Tensor, targets: Any = None) -> Tensor:
        return linear_next_token_loss(self.ln_f(x), self.out.weight, targets, logits_bytes=0)


def gpt(
    device: str,
    layers: int = 0,
    *,
    head: type[Head] = Head,
    tied: bool = True,
    packed: bool = False,
    **settings: Any,
) -> tuple[Any, Any]:
    """A GPT of 100 million parameters; of 100,000 for the pretend device."""
    hidden, length = (1024, 512) if device == "cuda" else (64, 32)
    config = GPTConfig(
        vocab_size=512,
        seq_length=length,
        num_layers=layers or (8 if device == "cuda" else 5),
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        tied=tied,
    )
    needs(settings.get("devices", 1))
    segments = gpt_segments(config)
    if head is not Head:
        with torch.device("meta"):
            segments = (
                *segments[:-1],
                zfunc.segment("head", head(config), share={"out.weight": "embed.tok.weight"}),
            )
    program = zfunc.compile(
        segments,
        device=device,
        precision="bf16",
        bucket_size=16 * hidden * hidden,
        schedule="Overlapped",
        **settings,
    )
    tokens = torch.randint(0, 512, (8, length + 1), generator=torch.Generator().manual_seed(0))
    ids, places = tokens[:, :-1], torch.arange(length).repeat(8, 1) % (length - 12)
    return program, ({"input_ids": ids, "position_ids": places} if packed else ids, tokens[:, 1:])


def overlap(timeline: Timeline, one: str, other: str) -> float:
    """Seconds in which an operation of each kind was running."""
    spans = [[(e.start, e.end) for e in timeline.events if e.kind == kind] for kind in (one, other)]
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans[0] for b in spans[1])


@pytest.mark.gpu
def test_copies_and_host_updates_really_overlap_compute() -> None:
    program, batch = gpt("cuda")
    state = zfunc.init(program)
    for _ in range(2):
        state, metrics = zfunc.train_step(program, state, batch)
    state, metrics = zfunc.train_step(program, state, batch, trace=True)
    timeline = metrics.timeline
    assert timeline is not None
    assert overlap(timeline, "d2h", "compute") > 0.5 * timeline.seconds_of("d2h")
    assert overlap(timeline, "host", "compute") > 0


SEVERAL: dict[str, Any] = {"micro_batches": 4, "tied": False}
DEALT: list[dict[str, Any]] = [
    {"order": "RoundPipe", "activations_on": "host", "slots": 1, "clip_norm": 1.0},
    {"order": "LoopedBFS", "recompute": "min-cut", "defer": True},
]


@pytest.mark.parametrize(
    "settings",
    [
        *(at_night({"recompute": how}) for how in ("all", "min-cut")),
        {"recompute": "none", "clip_norm": 1.0, "defer": True},
        {"update_on": "device", "clip_norm": 1.0, "defer": True},
        at_night({"update_on": "device", "params_on": "host", "slots": 1, "clip_norm": 1.0}),
        {"params_on": "host", "clip_norm": 1.0, "micro_batches": 2},
        {"recompute": "all,min-cut", "activations_on": "host,device"},
        {"params_on": "host", "activations_on": "host", "slots": 1, "clip_norm": 1.0, "defer": True},
        {"recompute": "none", "head": InPieces},
        at_night({"recompute": "min-cut", "head": InPieces}),
        {"layers": 2, "recompute": "all", "packed": True},
        *(at_night({"recompute": how, "packed": True}) for how in ("none", "min-cut")),
        at_night({"tiles": 4, "recompute": "all", "packed": True}),
        {"optimizer": make_optimizer("muon"), "clip_norm": 1.0},
        at_night({"tiles": 4, "recompute": "all"}),
        at_night(
            {"tiles": 8, "recompute": "all", "activations_on": "host", "params_on": "host", "clip_norm": 1.0}
        ),
        {"layers": 2, "tiles": 4, "recompute": "all", "activations_on": "host", "keys_on": "host"},
        at_night({**SEVERAL, "devices": 2, "recompute": "all"}),
        at_night({**SEVERAL, "devices": 3, "recompute": "none"}),
        {**SEVERAL, "devices": 4, "recompute": "min-cut"},
        *({"devices": 3, "micro_batches": 4, "params_on": "host", **more} for more in DEALT),
    ],
)
def test_peak_memory_is_as_planned(
    device: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte on the pretend device, whose allocator counts exactly, and which attends documents by tiles."""
    monkeypatch.setattr(row_attention, "TILE", 6)
    check_peak(device, *gpt(device, **settings))


@pytest.mark.parametrize("keys_on", ["device", "host"])
def test_memory_of_a_block_in_tiles_follows_the_tile(device: str, controls: Any, keys_on: str) -> None:
    """To the byte, from 3 tiles to 4. For each token of the row there is y in forward; in backward nothing,
    as the input's gradient is where the output's was. Keys and values on the device are beside them, in backward
    with their gradients in fp32."""
    controls.delay(0.0, 0)
    hidden, tile, left = 32, 128, set[tuple[int, int]]()
    config = GPTConfig(vocab_size=8, seq_length=8, num_layers=1, hidden_size=hidden, num_attention_heads=1)
    block = gpt_segments(config)[1]
    values = {k: t.to(device, torch.bfloat16) for k, t in block.initial(0).items()}
    weights = vjp.SegmentWeights({short: values[full] for short, full in block.by_short.items()}, {})
    for tokens in (384, 512):
        options = PassOptions("all", tiles=tokens // tile)
        passes = tiled_vjp(block.function, options, evaluate=block.evaluation)
        x = torch.rand(1, tokens, hidden, device=device).bfloat16()
        passes.backward(weights, (x,), None, [passes.forward(weights, (x,))[0]])  # traced and compared
        given, peaks = torch.rand_like(x), list[int]()
        room = alloc_host(2 * (2 + 4) * hidden * tokens, torch.uint8, pinned_for=x.device)
        host, kept_bytes = (HostMemory(room), 0) if keys_on == "host" else (None, 2 * 2 * hidden * tokens)
        for run in (passes.forward, lambda *a, g=given, p=passes: p.backward(*a, None, [g])):
            gc.collect()
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            with keys_in(host):
                kept = run(weights, (x,))
            peaks.append(torch.accelerator.max_memory_allocated() - before)
            torch.accelerator.synchronize()  # before the host's memory goes
            del kept
        left.add((peaks[0] - 2 * hidden * tokens - kept_bytes, peaks[1] - 3 * kept_bytes))
        assert host is None or host.nbytes == room.nbytes
    assert len(left) == 1, left


@pytest.mark.parametrize(
    ("tokens", "tiles"), [(4096, 16), pytest.param(131_072, 128, marks=pytest.mark.slow)]
)
def test_a_long_row_trains_in_a_quarter_of_what_it_needs_whole(
    controls: Any, tokens: int, tiles: int
) -> None:
    """Of what is planned with fused attention, which the pretend device does not have. The longer row, minutes
    there, trains alone."""
    transformers = pytest.importorskip("transformers")
    controls.delay(0.0, 0)
    row = torch.randint(512, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    batch, sizes = (row[:, :-1], row[:, 1:]), {"hidden_size": 64, "intermediate_size": 176, "vocab_size": 512}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=tokens)
    segments = zfunc.hf.segments(transformers.AutoModelForCausalLM.from_config(config))
    losses = list[float]()
    for place, number in (("cpu", 1), ("pretend", tiles)):
        given = {"precision": "fp32", "recompute": "all", "clip_norm": 1.0, "tiles": number, "device": place}
        program = zfunc.compile(segments, optimizer=zfunc.AdamW(lr=1e-3), patience=1e4, **given)
        if place == "cpu":
            whole = specialize(program, batch).memory["device"].nbytes
            if tokens > 5000:
                continue
        else:
            controls.set_capacity(0, torch.accelerator.memory_allocated() + whole // 4)
        state = zfunc.init(program, seed=1)
        for _ in range(2 if tokens < 5000 else 1):
            state, metrics = zfunc.train_step(program, state, batch)
        losses.append(metrics.loss)
    assert losses[-1] == pytest.approx(losses[0], rel=1e-6)


def test_what_a_kernel_keeps_on_the_host_stays_there(device: str) -> None:
    """Fused attention reads the seed of its dropout on the host, whatever tier activations pass through."""
    memory = lambda where: ActivationSlot(torch.zeros(4096, dtype=torch.uint8, device=where))  # noqa: E731
    out, seed = torch.arange(5.0, device=device), torch.tensor(7)
    page, read, slot = memory("cpu"), memory("cpu"), memory(device)
    page.put({"out": out, "more": [seed]})
    read.flat.copy_(page.flat)
    read.hold(page)
    slot.put(read.tree)
    torch.accelerator.synchronize()
    assert slot.tree["more"][0] is seed
    assert slot.tree["out"].device == out.device
    assert slot.tree["out"].tolist() == out.tolist()


def check_peak(device: str, program: Any, batch: Any) -> None:
    """Of each device."""
    gc.collect()
    before = [*map(torch.accelerator.memory_allocated, program.devices)]
    state = zfunc.init(program)
    for _ in range(2):
        state, _ = zfunc.train_step(program, state, batch)
    for one in program.devices:
        torch.accelerator.reset_peak_memory_stats(one)
    zfunc.train_step(program, state, batch)
    peaks = specialize(program, batch).memory
    for (place, one), empty in zip(program.memories.items(), before, strict=True):
        measured, planned = torch.accelerator.max_memory_allocated(one) - empty, peaks[place].nbytes
        assert measured <= planned + LIBRARIES[device]
        # The plan holds in any timing: all that a peer sends may have come before the first of it is used.
        assert planned <= 1.12 * measured + LIBRARIES[device]


@pytest.mark.parametrize("params_on", ["device", "host"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_peak_memory_of_encoded_weights_is_as_planned(device: str, kind: str, params_on: str) -> None:
    own = zfunc.quantized(segments_of(modules()), kind)
    settings: dict[str, Any] = {"params_on": params_on, "device": device, "precision": "bf16"}
    check_peak(device, zfunc.compile(own, **settings), BATCH)


def test_adapters_train_on_a_tenth_of_the_models_memory(device: str, controls: Any) -> None:
    """With the frozen weights in 4 bits on the host, and the bits of a device with room for all of them."""
    own = zfunc.quantized(segments_of(modules(40, 512)))
    given: dict[str, Any] = {"device": device, "precision": "bf16", "optimizer": zfunc.AdamW(lr=1e-4)}
    made = list[list[float]]()
    for place in ("device", "host"):
        program = zfunc.compile(own, **given, params_on=place)
        if place == "host":
            empty = torch.accelerator.memory_allocated()
            controls.set_capacity(0, empty + 2 * program.layout.num_parameters // 10)
        made.append([x for x, _ in run_steps(program, lambda _: BATCH)[0]])
    assert made[0] == made[1]
    assert made[0][-1] < made[0][0]


@pytest.mark.slow
def test_a_billion_parameters_train_on_a_tenth_of_their_memory(
    device: str, controls: Any, tmp_path: Path
) -> None:
    """A folder of transformers in bf16, packed into NF4 as it is read, under adapters of peft."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 512}
    config = transformers.LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.normal_(std=0.02) if p.dim() > 1 else p.data.fill_(1)
    model.save_pretrained(tmp_path)
    numel = sum(p.numel() for p in model.parameters())
    assert numel > 0.97e9
    del model
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    _, segments = zfunc.hf.load(tmp_path, quantize="nf4", lora=lora)
    how = {"optimizer": zfunc.AdamW(lr=1e-3), "precision": "bf16", "device": device}
    program = zfunc.compile(segments, **how, params_on="host", activations_on="host")
    controls.set_capacity(0, torch.accelerator.memory_allocated() + 2 * numel // 10)
    tokens = torch.randint(512, (1, 33), generator=torch.Generator().manual_seed(0))
    seen, _ = run_steps(program, lambda _: (tokens[:, :-1], tokens[:, 1:]), steps=2)
    losses = [x for x, _ in seen]
    assert losses[-1] < losses[0]


def test_updates_on_the_device_take_its_slots_and_the_gradients_that_wait_alone(device: str) -> None:
    """Of kept memory: what a step allocates beside it is another law's."""
    taken, planned, kept = dict[str, int](), dict[str, int](), dict[str, Counter[str]]()
    for place in ("host", "device"):
        program, batch = gpt(device, update_on=place, clip_norm=1.0, recompute="all")
        gc.collect()
        before = torch.accelerator.memory_allocated()
        state = zfunc.init(program)
        zfunc.train_step(program, state, batch)
        taken[place] = torch.accelerator.memory_allocated() - before
        planned[place] = persistent_bytes(program.plan.graph)["device"]
        kept[place] = Counter()
        for r in (r for r in program.plan.graph.regions if r.kept and r.tier == "device"):
            kept[place][r.buffer] += r.nbytes
        del state
    more = kept["device"] - kept["host"]
    # The head's weights are tied: a sum, of which the host measures the squares otherwise.
    assert more.keys() == {"update_slot", "device_grad", "device_sum", "squares"}
    assert not kept["host"] - kept["device"]
    assert more["device_grad"] + more["device_sum"] // 2 == 2 * program.layout.numel
    largest = max(3 * whole_blocks(4 * b.numel) for b in program.layout.buckets)
    assert more["update_slot"] <= program.settings.state_slots * largest
    assert taken["device"] - taken["host"] == planned["device"] - planned["host"]
    assert abs(planned["device"] - planned["host"] - more.total()) < 512  # a buffer is rounded up, in either


@pytest.mark.parametrize(
    ("host", "copies", "expected"),
    [
        (1e12, 1e9, "host"),
        (1e9, 1e12, "device"),
        (1e9, 4e8, "host,device"),
        (1e9, 2.5e8, "host:0.75,device"),
    ],
)
def test_updates_are_where_they_take_least(
    device: str, host: float, copies: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zfunc.engine.program.fit_to_memory.measured_rates", lambda _: (host, copies))
    _, data = compiled("odd sizes", device)
    program, _ = compiled("odd sizes", device, update_on="auto", example=data(0))
    assert program.settings.update_on == expected


def test_the_rates_of_updates_are_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sweep by what no cache holds, of copies both ways at once."""
    swept, copied, update, copy = list[int](), list[str](), zfunc.AdamW.host_update, torch.Tensor.copy_
    synchronize = torch.accelerator.synchronize

    def host_update(_: Any, state: dict[str, Tensor], grad: Tensor, *more: Any, **given: Any) -> None:
        few = {name: x[:4096] for name, x in state.items()}
        swept.append(grad.nbytes + sum(x.nbytes for x in state.values()))
        update(zfunc.AdamW(), few, grad[:4096], *more, **given)

    def copy_(into: Tensor, source: Tensor, **given: Any) -> Tensor:
        copied.append(into.device.type)
        return copy(into[:4096], source[:4096], **given)

    monkeypatch.setattr(zfunc.AdamW, "host_update", host_update)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *x: (synchronize(*x), copied.append("wait")))
    assert min(measured_rates(torch.device(device, 0))) > 1e6
    assert min(swept) >= 1 << 30
    assert copied == [device, "cpu", "wait"] * (len(copied) // 3)


def test_init_never_has_the_whole_model_on_the_device(device: str) -> None:
    program, _ = gpt(device, params_on="host", stage=3)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    state = zfunc.init(program)
    peak = torch.accelerator.max_memory_allocated() - before
    assert peak == torch.accelerator.memory_allocated() - before  # the slots, which stay
    assert peak < sum(2 * bucket.numel for bucket in program.layout.buckets)
    assert state.step == 0


class Gated(nn.Module):
    """Wide, and its output is a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 512)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return torch.tanh(z * torch.sigmoid(z))


@pytest.mark.parametrize("settings", [{"recompute": "none"}, {"recompute": "min-cut", "params_on": "host"}])
def test_an_output_that_is_a_residual_counts_until_its_backward(
    device: str, settings: dict[str, Any]
) -> None:
    modules = {"below": Gated(), "narrow": nn.Linear(512, 8), "above": Gated(), "loss": Loss(512)}
    segments = [zfunc.segment(name, module) for name, module in modules.items()]
    program = zfunc.compile(segments, device=device, schedule="Overlapped", **settings)
    check_peak(device, program, (torch.ones(1024, 8), torch.ones(1024)))


def test_slots_of_activations_that_do_not_fit_are_refused_before_they_are_allocated(controls: Any) -> None:
    program, data = compiled("pairs", "pretend", activations_on="host")
    state, before = zfunc.init(program), torch.accelerator.memory_allocated()
    planned = specialize(program, data(0)).memory["device"]
    controls.set_capacity(0, before + planned.transient)
    with pytest.raises(OutOfMemory, match="nothing was allocated"):
        zfunc.train_step(program, state, data(0))
    assert torch.accelerator.memory_allocated() == before
    controls.set_capacity(0, 1 << 30)
    zfunc.train_step(program, state, data(0))


def test_the_device_that_is_too_small_is_named(controls: Any) -> None:
    program, batch = gpt("pretend", devices=3, micro_batches=4, tied=False)
    controls.set_capacity(1, torch.accelerator.memory_allocated(1) + 1000)
    what = r"init: needs [\d,]+ bytes of device:1 memory, 1,000 are free.*fewer segments on it \(`cut` of the order"
    with pytest.raises(OutOfMemory, match=what):
        zfunc.init(program)
    controls.set_capacity(1, 1 << 30)
    state = zfunc.init(program)
    controls.set_capacity(1, torch.accelerator.memory_allocated(1) + 1000)
    with pytest.raises(
        OutOfMemory, match=r"train_step: needs [\d,]+ bytes of device:1 memory.*at (for|back)ward\["
    ):
        zfunc.train_step(program, state, batch)


def test_what_is_on_the_host_is_pinned(device: str) -> None:
    program, data = compiled("odd sizes", device, params_on="host", activations_on="host", precision="fp16")
    state = zfunc.init(program)
    zfunc.train_step(program, state, data(0))
    waiting = [
        slot.flat for r, slot in program.cache.staging.items() if (r.role, r.tier) == ("act", "pinned")
    ]
    assert waiting
    assert all(t.is_pinned() for t in (*waiting, *(x.flat for x in state.buffers.weights.values())))


def test_device_memory_does_not_grow_from_step_to_step(device: str) -> None:
    program, batch = gpt(device, layers=2)
    state, seen = zfunc.init(program), []
    for _ in range(6):
        state, _ = zfunc.train_step(program, state, batch)
        seen.append((torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()))
    assert len(set(seen[2:])) == 1


def test_pinned_buffers_are_exact_and_pinned(device: str) -> None:
    buffer = alloc_host((1 << 20) + 3, torch.bfloat16, pinned_for=torch.device(device, 0))
    assert buffer.is_pinned()
    assert buffer[5:100].is_pinned()
    assert buffer.untyped_storage().nbytes() == 2 * ((1 << 20) + 3)
    there = torch.randn(1 << 10, device=device).bfloat16()
    buffer[: 1 << 10].copy_(there, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(buffer[: 1 << 10], there.cpu())


@pytest.mark.gpu
def test_compiled_segments_follow_the_plain_ones() -> None:
    plain, batch = gpt("cuda", layers=2)
    fast, _ = gpt("cuda", layers=2, compile_segments=True)
    losses = []
    for program in (plain, fast):
        state = zfunc.init(program)
        state, _ = zfunc.train_step(program, state, batch)
        _, m = zfunc.train_step(program, state, batch)
        losses.append(m.loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


class Slow(nn.Module):
    """Keeps the compute stream busy, so that a copy that does not wait for it takes what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20 if x.device.type == "cuda" else 4):
            x = torch.tanh(x @ self.w)
        return x


def test_a_busy_stream_does_not_let_a_copy_overtake(device: str) -> None:
    class Out(nn.Module):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (x.float() - targets.float()).square().mean()

    def run(schedule: str) -> torch.Tensor:
        torch.manual_seed(0)
        parts = [zfunc.segment(f"slow{i}", Slow()) for i in range(6 if device == "cuda" else 3)]
        program = zfunc.compile(
            [*parts, zfunc.segment("out", Out())], device=device, bucket_size=65536, schedule=schedule
        )
        state = zfunc.init(program)
        g = torch.Generator().manual_seed(0)
        rows = 4096 if device == "cuda" else 64
        batch = torch.randn(rows, 256, generator=g), torch.randn(rows, 256, generator=g)
        for _ in range(3):
            state, _ = zfunc.train_step(program, state, batch)
        return weights_of(program, state)

    assert all(torch.equal(run(s), run("Serial")) for s in ("Overlapped", "Interleaved"))


@pytest.mark.parametrize("recompute", ["all", "none", "min-cut"])
def test_backward_runs_on_the_lane_that_computes(device: str, recompute: Any) -> None:
    """And not on the thread that autograd has for each accelerator."""
    threads: set[int] = set()

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            threads.add(threading.get_ident())
            return grad * 2

    class Body(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Watched.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return y

    parts = [zfunc.segment("body", Body(8, 8)), zfunc.segment("loss", Loss(8))]
    program = zfunc.compile(parts, device=device, precision="fp32", recompute=recompute)
    zfunc.train_step(program, zfunc.init(program), (torch.ones(4, 8), torch.ones(4)))
    assert threads == {threading.get_ident()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_graphs_of_a_device_are_refused_beside_the_main_thread(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch has none there; another device computes on a thread of its own."""
    run = vjp._as_device_graph(lambda *given: [*given])
    for has_them in (True, False):
        monkeypatch.setattr(vjp, "GRAPHS_IN_THREADS", has_them)
        run(torch.ones(1, device=device))
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(run, torch.ones(1, device=device))
            assert isinstance(done.exception(), ValueError) != has_them
    with pytest.raises(ValueError, match=r'"reduce-overhead" beside the main thread.*devices=1'):
        needs(2)
        compiled("tied GPT", device, devices=2, micro_batches=2, compile_segments="reduce-overhead")


@pytest.mark.parametrize("verb", ["send_act", "send_grad_act"])
def test_what_passes_between_ranks_is_in_pinned_memory(
    device: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way from a device and on that to another, so that no copy waits."""
    wire: list[Any] = []

    def receive(*_: Any, pinned: bool = False) -> list[Any]:
        assert pinned
        return wire

    ranks = SimpleNamespace(send=lambda _, __, *message: wire.extend(message), receive=receive)
    one = torch.device(device, 0)
    spec = SimpleNamespace(mesh=SimpleNamespace(device_of=lambda *x: x[-1]))
    step: Any = SimpleNamespace(ranks=ranks, devices=[one], calls=[None], spec=spec)
    monkeypatch.setattr(move_stages, "wait_for_copies", lambda _: torch.accelerator.synchronize())
    mem: Any = {"made": {"x": torch.arange(6.0, device=one)}}
    for name, source, target in ((verb, "made", "wire"), (verb.replace("send", "recv"), "wire", "arrived")):
        op: Any = SimpleNamespace(verb=name, index=(0, 1), nbytes=512, reads=[source], writes=[target])
        move_stages._between_ranks(op, mem, step)
    assert wire[1].is_pinned()
    assert mem["arrived"]["x"].device == one
    assert mem["arrived"]["x"].tolist() == [*range(6)]


def test_programs_one_after_another_have_the_same_streams(device: str) -> None:
    """Those of two at once are apart: torch has 32 of a device."""

    def streams(program: Executor) -> set[int]:
        found = [program.stream(lane) for lane in ("compute", "h2d", "d2h")]
        return {x.stream_id for x in found if x is not None}

    one, other = (Executor(torch.device(device, 0)) for _ in range(2))
    first, second = streams(one), streams(other)
    assert len(first | second) == 6
    del one
    gc.collect()
    assert streams(Executor(torch.device(device, 0))) == first


def test_with_deterministic_the_serial_bits_stay(device: str) -> None:
    plain, deterministic = (train("GPT with dropout", device, deterministic=x) for x in (False, True))
    assert deterministic[0][0] == pytest.approx(plain[0][0], rel=1e-3)
    again = train("GPT with dropout", device, deterministic=True, schedule="Overlapped")
    assert repr(again[0]) == repr(deterministic[0])
    assert torch.equal(again[1], deterministic[1])
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
def test_long_attention_has_the_same_bits_with_deterministic_and_is_close_without() -> None:
    """Over 1,024 positions dQ is a sum of many blocks, which a GPU adds in any order unless it is told."""

    def trained(deterministic: bool) -> tuple[list[float], torch.Tensor]:
        config = GPTConfig(
            vocab_size=512, seq_length=1024, num_layers=2, hidden_size=256, num_attention_heads=4
        )
        program = zfunc.compile(
            gpt_segments(config), device="cuda", precision="bf16", deterministic=deterministic
        )
        state, losses = zfunc.init(program, seed=1), list[float]()
        for i in range(4):
            tokens = torch.randint(0, 512, (8, 1025), generator=torch.Generator().manual_seed(i))
            state, m = zfunc.train_step(program, state, (tokens[:, :-1], tokens[:, 1:]))
            losses += [m.loss, m.grad_norm]
        return losses, weights_of(program, state)

    (losses, params), (again, same) = trained(True), trained(True)
    assert again == losses
    assert torch.equal(same, params)
    near, _ = trained(False)
    assert near == pytest.approx(losses, rel=1e-2)


def test_the_plan_counts_launches(device: str, controls: Any) -> None:
    """But for kernels that torch makes of others only while they run, such as a softmax of masked rows."""
    launched: dict[str, int] = {}

    def counting(op: Any, *args: Any) -> None:
        before = controls.launches()
        STAGES[op.verb](op, *args)
        launched[op.name] = controls.launches() - before

    stages = dict.fromkeys(STAGES, counting)
    program, data = compiled("tied GPT", device, schedule="Serial", stages=stages, recompute="none")
    zfunc.train_step(program, zfunc.init(program), data(0))
    passes = [op for op in specialize(program, data(0)).plan.graph if op.launches]
    assert {op.verb for op in passes} == {"forward", "backward"}
    assert all(
        op.launches == launched[op.name] for op in passes if op.verb == "backward" and op.index[1] in (1, 2)
    )
    for op in passes:
        assert op.launches <= launched[op.name] <= 1.25 * op.launches + 1, op


def test_a_launch_is_timed(device: str) -> None:
    assert 1e-7 < measure_launch(torch.device(device, 0)) < 1e-2


def test_what_python_takes_to_issue_each_operation_is_timed(device: str) -> None:
    program, data = compiled("tied GPT", device, schedule="Serial")
    alone, spent = clocked(program)
    zfunc.train_step(alone, zfunc.init(program), data(0))
    assert sorted(op.name for op, _ in spent) == sorted(
        op.name for op in specialize(program, data(0)).plan.graph
    )
    assert {"issue_compute", "issue_d2h", "issue_h2d"} <= issue_seconds(spent).keys()


def test_the_doctor_tells_what_a_device_is_and_how_fast_it_copies(device: str) -> None:
    (told,) = dict(doctor.reads(()))[f"{device}:0"]()
    assert re.search(r" free; (bf16|fp16|fp32); copies [\d.]+ GB/s to it, [\d.]+ GB/s back$", told)
