"""The CUDA path: the same losses as the CPU, the same bits under every schedule, real overlap, planned memory.

Run by `make gpu`; skipped, with the reason, where torch sees no GPU.
"""

from typing import Any

import pytest
import torch
from small_models import MODELS
from torch import nn

import zfunc
from zfunc import schedules
from zfunc.core.timeline import Timeline
from zfunc.engine.specialize import specialize
from zfunc.models.gpt import GPTConfig, gpt_segments
from zfunc.runtime.executor import Jitter
from zfunc.runtime.host_memory import alloc_host

pytestmark = pytest.mark.gpu
LIBRARIES = 96 << 20  # bytes; what cuBLAS and its kin allocate through torch for their own workspaces


def trained(
    model: str, device: str, steps: int = 4, *, step: dict[str, Any] | None = None, **settings: Any
) -> Any:
    segments, data = MODELS[model]()
    optimizer = zfunc.AdamW(lr=1e-2, weight_decay=0.1, moments=settings.pop("moments", "fp32"))
    settings = {"bucket_size": 3000, **settings}
    program = zfunc.compile(segments, optimizer=optimizer, device=device, **settings)
    state, losses = zfunc.init(program, seed=1), []
    for i in range(steps):
        state, m = zfunc.train_step(program, state, data(i), **(step or {}))
        losses.append((m.loss, m.grad_norm))
    return losses, torch.cat([p.flatten() for p in zfunc.params(program, state).values()])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 3e-2)])
@pytest.mark.parametrize("model", [m for m in MODELS if "dropout" not in m and m != "frozen below"])
def test_losses_are_the_cpus_within_tolerance(model: str, precision: str, tolerance: float) -> None:
    settings: dict[str, Any] = {"precision": precision, "clip_norm": 1.0, "micro_batches": 2}
    cpu, _ = trained(model, "cpu", **settings)
    gpu, _ = trained(model, "cuda", **settings)
    assert [a for a, _ in gpu] == pytest.approx([a for a, _ in cpu], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_schedule_gives_the_serial_bits(model: str, precision: str, clip: float | None) -> None:
    settings: dict[str, Any] = {"precision": precision, "clip_norm": clip, "micro_batches": 2}
    losses, params = trained(model, "cuda", schedule="Serial", **settings)
    for name in schedules.__all__:
        for jitter in (None, Jitter(0, 1e-3)):
            again, same = trained(model, "cuda", schedule=name, step={"jitter": jitter}, **settings)
            assert repr(again) == repr(losses), name
            assert torch.equal(same, params), name


@pytest.mark.parametrize("moments", ["fp32", "16bit", "8bit"])
@pytest.mark.parametrize("recipe", [{"speculate": 100}, {"offload_ratio": 0.5}, {"offload_ratio": 0.0}])
def test_speculation_and_residence_give_the_plain_bits(recipe: dict[str, Any], moments: str) -> None:
    """Some steps are clipped. What is updated on the device is updated by other code: to the same bits."""
    plain = trained("odd sizes", "cuda", clip_norm=2.0, moments=moments, bucket_size=600)
    for name in schedules.__all__:
        other = trained(
            "odd sizes", "cuda", clip_norm=2.0, moments=moments, bucket_size=600, schedule=name, **recipe
        )
        assert other[0] == plain[0], name
        assert torch.equal(other[1], plain[1]), name


@pytest.mark.parametrize("more", [{}, {"moments": "8bit"}, {"precision": "fp16"}, {"offload_ratio": 0.5}])
def test_delayed_updates_give_the_serial_bits_under_every_schedule(more: dict[str, Any]) -> None:
    reference = trained("tied GPT", "cuda", steps=6, delay_from=2, schedule="Serial", **more)
    for name in schedules.__all__:
        for jitter in (None, Jitter(0, 1e-3)):
            step = {"jitter": jitter}
            again = trained("tied GPT", "cuda", steps=6, delay_from=2, schedule=name, step=step, **more)
            assert repr(again[0]) == repr(reference[0]), name
            assert torch.equal(again[1], reference[1]), name


@pytest.mark.parametrize("recompute", ["none", "min-cut"])
def test_what_is_kept_for_backward_changes_nothing(recompute: str) -> None:
    reference = trained("GPT with dropout", "cuda", precision="bf16")
    kept = trained("GPT with dropout", "cuda", precision="bf16", recompute=recompute)
    assert kept[0] == reference[0]
    assert torch.equal(kept[1], reference[1])


def test_debug_mode_runs() -> None:
    reference = trained("tied GPT", "cuda", precision="bf16")
    debugged = trained("tied GPT", "cuda", precision="bf16", step={"debug": True})
    assert torch.equal(debugged[1], reference[1])


def gpt(layers: int = 8, hidden: int = 1024, **settings: Any) -> tuple[Any, Any]:
    config = GPTConfig(
        vocab_size=512, seq_length=512, num_layers=layers, hidden_size=hidden, num_attention_heads=16
    )
    program = zfunc.compile(
        gpt_segments(config),
        device="cuda",
        precision="bf16",
        bucket_size=16 << 20,
        schedule="Overlapped",
        **settings,
    )
    tokens = torch.randint(0, 512, (8, 513), generator=torch.Generator().manual_seed(0))
    return program, (tokens[:, :-1], tokens[:, 1:])


def overlap(timeline: Timeline, one: str, other: str) -> float:
    """Seconds in which an operation of each kind was running."""
    spans = [[(e.start, e.end) for e in timeline.events if e.kind == kind] for kind in (one, other)]
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans[0] for b in spans[1])


def test_copies_and_host_updates_really_overlap_compute() -> None:
    program, batch = gpt()
    state = zfunc.init(program)
    for _ in range(2):
        state, metrics = zfunc.train_step(program, state, batch)
    state, metrics = zfunc.train_step(program, state, batch, trace=True)
    timeline = metrics.timeline
    assert timeline is not None
    assert overlap(timeline, "d2h", "compute") > 0.5 * timeline.seconds_of("d2h")
    assert overlap(timeline, "host", "compute") > 0


@pytest.mark.parametrize("recompute", ["all", "none", "min-cut"])
def test_peak_memory_is_as_planned(recompute: str) -> None:
    program, batch = gpt(recompute=recompute)
    before = torch.cuda.memory_allocated()
    state = zfunc.init(program)
    state, _ = zfunc.train_step(program, state, batch)
    torch.cuda.reset_peak_memory_stats()
    zfunc.train_step(program, state, batch)
    measured = torch.cuda.max_memory_allocated() - before
    planned = specialize(program, batch).memory["device"].nbytes
    assert measured <= planned + LIBRARIES
    assert planned <= 1.1 * measured + LIBRARIES


def test_device_memory_does_not_grow_from_step_to_step() -> None:
    program, batch = gpt(layers=2)
    state, seen = zfunc.init(program), []
    for _ in range(6):
        state, _ = zfunc.train_step(program, state, batch)
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(seen[2:])) == 1


def test_pinned_buffers_are_exact_and_pinned() -> None:
    buffer = alloc_host((1 << 20) + 3, torch.bfloat16, pinned=True)
    assert buffer.is_pinned()
    assert buffer[5:100].is_pinned()
    assert buffer.untyped_storage().nbytes() == 2 * ((1 << 20) + 3)
    device = torch.randn(1 << 10, device="cuda").bfloat16()
    buffer[: 1 << 10].copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer[: 1 << 10], device.cpu())
    del buffer


def test_compiled_segments_follow_the_plain_ones() -> None:
    plain, batch = gpt(layers=2)
    fast, _ = gpt(layers=2, compile_segments=True)
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
        for _ in range(20):
            x = torch.tanh(x @ self.w)
        return x


def test_a_busy_stream_does_not_let_a_copy_overtake() -> None:
    class Out(nn.Module):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (x.float() - targets.float()).square().mean()

    def run(schedule: str) -> torch.Tensor:
        torch.manual_seed(0)
        parts = [zfunc.segment(f"slow{i}", Slow()) for i in range(6)]
        program = zfunc.compile(
            [*parts, zfunc.segment("out", Out())], device="cuda", bucket_size=65536, schedule=schedule
        )
        state = zfunc.init(program)
        g = torch.Generator().manual_seed(0)
        batch = torch.randn(4096, 256, generator=g), torch.randn(4096, 256, generator=g)
        for _ in range(5):
            state, _ = zfunc.train_step(program, state, batch)
        return torch.cat([p.flatten() for p in zfunc.params(program, state).values()])

    assert all(torch.equal(run(s), run("Serial")) for s in ("Overlapped", "Interleaved"))
