"""The device half: the bits of the serial step under every schedule and delay, and what a State leaves there."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import shared_traces
import torch
from attrs import evolve
from device_training import LIBRARIES, at_night, compiled, gpt, needs, train, weights_of
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
from small_models import MODELS, Loss
from table import Scattered
from torch import Tensor, nn

import zfunc
from zfunc.engine.program.specialize import specialize
from zfunc.engine.state.memory import flat_of
from zfunc.engine.trace import vjp
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.runtime import accelerator

pytestmark = pytest.mark.usefixtures("own_format")


def on_a_device(row: Row) -> bool:
    """Alone; and not where the norm of a sum, of micro-batches or of the uses of a tied parameter, is taken by
    another sweep on the device than on the host."""
    sums = row.settings.get("micro_batches", 1) > 1 or row.model in ("pairs", "tied GPT", "GPT with dropout")
    return row.world == 1 and not (
        sums and ("update_on" in row.settings or "device" in row.settings.get("state_on", ""))
    )


def of_day(row: Row) -> bool:
    """Tiles by night: by day test_device_memory.py compares losses in tiles with those on the host."""
    return row.by_day and not row.numbers.startswith("in tiles")


@pytest.mark.parametrize("row", rows(lambda row: row.values, on_a_device, of_day))
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
    at_night(Row("fp32 in 2, clipped, 8 bits", "a third on the host", "frozen below")),
    Row("fp16 in 2", "from the host", "pairs"),
    at_night(Row("a split master", "half of the activations on the host", "tied GPT")),
    Row("bf16 in 3, clipped", "half of the state on the disk", "odd sizes"),
    at_night(Row("whole matrices, 8 bits", "on the device", "odd sizes")),
    at_night(Row("bf16 in 2, 16 bits", "stage 3", "GPT with dropout")),
    Row(
        "bf16, clipped in part, 16 bits", "updated on the device, from the host", "odd sizes"
    ),  # and a gradient that waits
    at_night(Row("bf16, some in fp32, 8 bits", "half on the device", "odd sizes")),
    at_night(Row("fp32", "two devices", "norms")),
    Row("bf16 in 3, clipped", "two devices, half updated there", "odd sizes"),
    at_night(Row("fp32, clipped", "dealt to three devices", "tied GPT")),
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


@pytest.mark.parametrize(
    "row", [*(EMPTIED[n] for n in (0, 3, 11)), *(at_night(EMPTIED[n]) for n in (1, 8))], ids=str
)
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


@pytest.mark.parametrize(
    "way", [at_night("two devices"), "two devices, backward split", "two devices, from the host"]
)
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
