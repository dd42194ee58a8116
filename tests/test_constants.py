"""A constant that switches behaviour, or says how much is looked at, is right on both sides of itself.

Each has a case whose size is `at`: it runs with the constant below that, at it and above it, against a witness.
"""

import ast
import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import saved
import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import zfunc
from zfunc.checkpoint import export, manifest, safetensors_file, strict_json, swap_file
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.core import bucketing, setting_values
from zfunc.core.layout import Parameter
from zfunc.core.settings import StepSettings
from zfunc.engine.rows import row_attention, tile_attention
from zfunc.engine.trace import facts, fake_tensors
from zfunc.engine.trace.pass_options import PassOptions
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.engine.trace.vjp import make_vjp
from zfunc.errors import CheckpointError, RankError
from zfunc.models.loss import linear_next_token_loss
from zfunc.optim import rules, updates
from zfunc.optim.loss_scale import LossScale
from zfunc.runtime import memory_limits
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.stage_ranks import StageRanks

ROOT = Path(__file__).parents[1]
MARKED = (
    "models",
    "engine/trace",
    "engine/rows",
    "engine/program",
    "engine/compile.py",
    "planner/candidate.py",
    "optim",
    "checkpoint",
    "core",
    "runtime",
)


def named(texts: Iterable[str]) -> list[str]:
    """The constants of texts that each have a module, and names in it."""
    return [f"{module}.{x}" for module, *names in map(str.split, texts) for x in names]


NONE = {  # numbers of another kind, and why no result depends on them
    "torch's, C's or Linux's": [
        "models.loss_pieces IGNORE_INDEX",
        "core.spec ALLOCATION",
        "runtime.host_memory POPULATE_WRITE _MMAP_THRESHOLD _TRIM_THRESHOLD",
    ],
    "of initial values": ["models.gpt _INIT_STD"],
    "a version": [
        "models.hf.families OLDEST",
        "models.hf.adapters OLDEST OLDEST_OF_TENSORS",
        "checkpoint.manifest VERSION",
        "checkpoint.swap_file VERSION",
    ],
    "of a text": [
        "engine.program.traced_spec SHOWN",
        "core.setting_docs DOCSTRING_WIDTH",
        "core.graph SHOWN",
        "core.display FIELD WHOLE",
        "core.explain NAMED",
        "runtime.failure_detection LONGEST",
    ],
    "of a look before each step, which finds what it can in microseconds": ["engine.trace.facts MOST"],
    "given by construction": [
        "engine.rows.keys SLOTS",
        "core.graph EVERY",
        "core.simulator WAKING",
        "core.layout LEFT",
        "models.cut.module_traces IN_EVAL",
        "core.region_table SUM_PARTS BF16 FP32 FP64",
        "optim.adafactor FP32_EPS",
    ],
    "of a plan's memory or time, an estimate or an upper bound": [
        "engine.trace.operation_kernels MULTIPROCESSORS",
        "core.regions ACTIVATION_SLOTS",
        "core.spec HOP",
        "runtime.accelerator LIBRARIES",
        "runtime.host_memory LEAST_GIVEN_BACK",
    ],
    "of a measurement": [
        "engine.program.fit_to_memory STEPS MEASURED REPEATS HEADROOM",
        "runtime.direct_io SECONDS MEASURED CHUNK",
    ],
    "of buckets, whose size changes no bit": ["core.bucketing BUCKET_SIZE LARGEST FEW_RANKS"],
    "far above what there is": [
        "models.config_file LARGEST_SIZE MOST_LAYERS",
        "runtime.collectives MOST_TEXT",
        "runtime.rng BACKWARD",
    ],
    "of a format, which another number would change": [
        "optim.formats SPREAD SCALE_BITS CUT BINADE EXPONENT EXP_AVG EXP_AVG_SQ HIGHEST_CODE INFINITE LARGEST",
        "optim.formats MIN_SHIFT NAN NUM_SHIFTS ROOT SIZE SMALLEST_NORMAL",
        "optim.adafactor SUMMED",
        "checkpoint.safetensors_file LENGTH _ALIGNMENT",
        "core.extents BLOCK",
        "core.layout ALIGNMENT",
        "models.quantization BLOCK NESTED_BLOCK NF4",
    ],
    "of patience, or how many threads wait": [
        "runtime.accelerator SPIN LONGEST_SLEEP CHECK_EVERY",
        "runtime.blocking_calls SLOW THREADS LEAVE_AFTER",
        "runtime.collectives SLICE LISTEN SETTLE TOGETHER SETTLE_LATE",
        "runtime.failure_detection POLL STORE_TIMEOUT EXIT_GRACE LONGEST_TIMEOUT",
        "runtime.direct_io THREADS MOST_RETRIES PAUSE",
        "runtime.launch POLL",
    ],
}
ELSEWHERE = {  # tests with cases on both sides
    "planner/test_steady_state.py extrapolated_right_or_not_at_all": ["planner.candidate FEW MANY CLOSE"],
    "engine/test_tile_check.py what_reaches_farther_than_a_tile_is_refused": ["engine.rows.check FEW SIZES"],
    "engine/test_tile_check.py what_mixes_tokens_is_refused": ["engine.rows.check LARGE"],
    "optim/test_update.py special_values_meet": ["optim.rules GRAD_FLOOR EXP_AVG_FLOOR EXP_AVG_SQ_FLOOR"],
    "optim/test_update.py pieces_change_no_bit": ["optim.rules PIECE"],
    "optim/test_rules_in_cuda.py bits_of_the_reference": ["optim.rules_in_cuda LONGEST THREADS"],
    "models/test_any_model.py no_segment_is_larger": ["models.cut.modules PARTS"],
    "models/test_any_model_values.py more_elements_than_are_computed": ["models.cut.known LARGEST"],
    "models/test_quantization.py decoded_alike_in_pieces": ["models.quantization PIECE"],
    "optim/test_whole_parameters.py shapes_types_threads_and_places": ["optim.adafactor PIECE"],
    "optim/test_compact.py exp_avg_sq_of_anything": ["optim.formats LIMIT"],
    "checkpoint/test_swap_space.py headers_and_records_read_back": ["core.extents _METADATA"],
    "checkpoint/test_swap_space.py a_large_buffer_goes_in_batches": [
        "core.extents SUMMED",
        "checkpoint.swap_file BATCH",
    ],
    "runtime/test_direct_io.py what_is_read_is_what_was_written": ["runtime.direct_io REQUEST MOST_PIECES"],
    "runtime/test_resources.py huge_pages_are_asked_for": ["runtime.host_memory HUGE_MIN"],
    "runtime/test_resources.py touched_pages_are_resident": ["runtime.host_memory TURN"],
}
LLAMA = 27168  # parameters
OFF = 4.99e-4


@frozen
class Row:
    """A case of this size, which raises where its witness differs; it gets the constant that runs."""

    at: Any
    check: Callable[[Any, pytest.MonkeyPatch], None]
    step: Any = 1


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def close(run: Callable[..., Tensor], witness: Callable[..., Tensor], *given: Tensor) -> None:
    """Values and gradients of two functions."""
    results = []
    for f in (run, witness):
        leaves = [t.clone().requires_grad_() for t in given]
        y = f(*leaves)
        results.append([y, *torch.autograd.grad((y * random(*y.shape).to(y.dtype)).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def windows(_: int, patch: pytest.MonkeyPatch) -> None:
    from hf_models import MIXED, assert_plain, model_of

    model, x = model_of(MIXED["Qwen2"](12)), torch.arange(2 * 30).view(2, 30)
    segments = zfunc.hf.segments(model)
    assert_plain(segments, model, x, F.pad(x[:, 1:], (0, 1), value=-100), model(x, labels=x).loss)


def small_model(most: int, _: pytest.MonkeyPatch) -> None:
    from hf_models import random_model

    from zfunc.models.hf.comparison import _small_copy

    own = random_model("Llama")
    found = sum(p.numel() for p in _small_copy(own).parameters())
    assert found == LLAMA if most >= LLAMA else found <= most


def compared(bound: float, _: pytest.MonkeyPatch, *, loss: bool) -> None:
    """A loss, or a gradient, that is OFF of it off is refused where no more than `bound` may be."""
    from zfunc.models.hf.comparison import _compared

    model, x = nn.Linear(4, 1), random(3, 4).float()
    off = (lambda y: y + OFF * y.detach()) if loss else (lambda y: y + OFF * (y - y.detach()))
    said = _compared(
        model,
        model(x).square().mean(),
        lambda values: off(torch.func.functional_call(model, values, x).square().mean()),
    )
    assert bool(said) == (bound < OFF), said


def of_largest(bound: float, _: pytest.MonkeyPatch) -> None:
    from zfunc.models.hf.comparison import _compared

    model = nn.ParameterDict({"large": torch.ones(()), "none": torch.ones(())})
    said = _compared(model, model["large"] * 1.0, lambda values: values["large"] + OFF * (values["none"] - 1))
    assert bool(said) == (bound < OFF), said


def loss_in_pieces(logits_bytes: int, _: Any) -> None:
    labels = torch.arange(2 * 12).view(2, 12) % 31
    labels[1, 5:] = -100
    close(
        lambda x, w: linear_next_token_loss(x, w, labels, logits_bytes=logits_bytes),
        lambda x, w: F.cross_entropy((x @ w.T).flatten(0, 1), labels.flatten()),
        random(2, 12, 4).float(),
        random(31, 4).float(),
    )


def many_pieces(_: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.import_module("zfunc.models.loss_pieces"), "_ALIGNMENT", 1)
    loss_in_pieces(0, patch)


def rows(_: int, __: pytest.MonkeyPatch) -> None:
    """With a window, with documents, with both."""
    q, at = random(3, 2, 4, 24, 8).float(), torch.arange(24)
    first = torch.tensor([[0] * 10 + [10] * 14, [0] + [1] * 23])
    for window, begins in ((5, None), (None, first), (5, first)):
        seen = (at[:, None] >= at) & (at > at[:, None] - (window or 24))
        mask = seen if begins is None else (seen & (at >= begins[..., None]))[:, None]
        close(
            lambda *x, w=window, f=begins: row_attention.attend_row(*x, f, w),
            lambda *x, m=mask: F.scaled_dot_product_attention(*x, attn_mask=m),
            *q,
        )


def blocks(_: int, __: pytest.MonkeyPatch) -> None:
    """Documents that begin in their block; those that began before are another kernel's."""
    q, k, v = random(3, 16, 2, 4).float()
    first = torch.tensor([0, 0, 2, 2, 2, 5, 6, 7, 8, 8, 10, 10, 12, 13, 13, 13])
    parts = tile_attention._in_blocks(tile_attention.View(0, 0.5, first), first, q, k, v)
    got = torch.cat(
        [
            tile_attention._InTorch.forward(tile_attention.Pair(*x, seen, (0, x[0].shape[2])))[0]
            .transpose(1, 2)
            .flatten(0, 1)
            for seen, x in parts
        ]
    )
    at = torch.arange(16)
    mask = (at[:, None] >= at) & (at >= first[:, None])
    own = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), mask, scale=0.5)
    inside = first >= at // tile_attention._block(16) * tile_attention._block(16)
    torch.testing.assert_close(got[inside], own.transpose(0, 1)[inside])


def tiles(_: int, __: pytest.MonkeyPatch) -> None:
    """A few tiles that are counted as all have the costs of all, which grow evenly behind the first."""
    for backward in (False, True):
        counted = [
            (i, fake_tensors.COUNTED.get())
            for i in tile_attention.tile_numbers(9, 2, fake=True, backward=backward)
        ]
        assert sum(i * times for i, times in counted) == sum(range(9))
        assert sum(times for _, times in counted) == 9


def shapes(_: int, __: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    body = nn.Linear(8, 8)
    pair = make_vjp(lambda p, x: torch.func.functional_call(body, p, x).cos(), PassOptions("none"))
    weights = SegmentWeights({k: p.detach() for k, p in body.named_parameters()}, {})
    for tokens in (2, 3, 4, 3, 2, 4):
        x = random(tokens, 8).float()
        y, kept = pair.forward(weights, (x,))
        own, _below = pair.backward(weights, (x,), kept, [torch.ones_like(y)])
        expected = torch.autograd.grad(body(x).cos().sum(), [*body.parameters()])
        for a, b in zip(own.values(), expected, strict=True):
            torch.testing.assert_close(a, b)


class Scaled(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept


def told_apart(make: Callable[[float], Any]) -> Callable[..., None]:
    """Modules that keep other values do not share a trace."""

    def check(_: int, __: pytest.MonkeyPatch) -> None:
        assert facts.held(Scaled(make(1.0))) != facts.held(Scaled(make(2.0)))

    return check


def nested(value: float) -> list[Any]:
    return [[[value]]]


def strides(_: int, __: pytest.MonkeyPatch) -> None:
    """A kernel that returns other strides than its fake one says, and then a view."""
    pair = make_vjp(
        lambda p, x: F.smooth_l1_loss(x.mT * p["w"], x.mT.cos(), reduction="none").mT,
        PassOptions("none"),
    )
    w, x = random(4, 6).float(), random(6, 4).float()
    y, kept = pair.forward(SegmentWeights({"w": w}, {}), (x,))
    own, (below,) = pair.backward(SegmentWeights({"w": w}, {}), (x,), kept, [torch.ones_like(y)])
    a, b = w.clone().requires_grad_(), x.clone().requires_grad_()
    expected = torch.autograd.grad(F.smooth_l1_loss(b.mT * a, b.mT.cos(), reduction="sum"), [a, b])
    torch.testing.assert_close([own["w"], below], [*expected])


def groups_of_queries(_: int, patch: pytest.MonkeyPatch) -> None:
    from zfunc.models.hf import attention

    patch.setattr(attention, "fuses_grouped_queries", lambda *_: True)
    close(
        lambda *x: attention.attend(nn.Identity(), *x, None)[0].transpose(1, 2),
        lambda q, *x: F.scaled_dot_product_attention(
            q, *(t.repeat_interleave(2, 1) for t in x), is_causal=True
        ),
        random(2, 4, 7, 16).float(),
        *random(2, 2, 2, 7, 16).float(),
    )


def averaged(_: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(updates, "EMA_PIECE", rules.EMA_PIECE)
    ema, weights = random(128).float(), random(256).float()[128:]
    expected = np.float32(0.9) * ema.numpy() + weights.numpy() * np.float32(1 - 0.9)
    updates.average_(ema, {"master": weights}, 0.9)
    np.testing.assert_array_equal(ema.numpy(), expected)


def exported(_: int, __: pytest.MonkeyPatch) -> None:
    values, written = random(96).float(), dict[int, bytes]()
    writer: Any = SimpleNamespace(write_at=lambda _, start, data: written.update({start: bytes(data)}))
    export._write(writer, "w", values, "bf16")
    assert b"".join(x for _, x in sorted(written.items())) == bytes(
        values.bfloat16().view(torch.uint8).numpy()
    )
    values[-1] = 1e6
    with pytest.raises(ValueError, match="a weight of 1e"):
        export._write(writer, "w", values, "fp16")


def of_four_ranks(_: int, __: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as folder:
        saved.assert_complete(open_checkpoint(saved.save(Path(folder), world=4)))


def in_chunks(_: int, __: pytest.MonkeyPatch) -> None:
    """Read by the library whose format it is."""
    with TemporaryDirectory() as folder:
        data, path = random(16).float(), Path(folder, "a.safetensors")
        writer = safetensors_file.create_shard(path, [safetensors_file.TensorInfo("w", "F32", (16,))])
        writer.write_at("w", 0, data.numpy())
        writer.finish()
        writer.close()
        assert torch.equal(pytest.importorskip("safetensors.torch").load_file(path)["w"], data)
        shard = saved.checksummed(writer.shard, {"w": data.numpy().tobytes()}, writer.shard.chunk)
        own = safetensors_file.open_shard(path, shard)
        for start in range(16):
            part = torch.empty(16 - start)
            own.read_into("w", start, 16, part.numpy())
            assert torch.equal(part, data[start:])
        own.close()


def limited(fits: Callable[[Any], bool], run: Callable[[Any], Any]) -> Callable[..., None]:
    """What fits runs, and what does not is refused."""

    def check(value: Any, _: pytest.MonkeyPatch) -> None:
        with nullcontext() if fits(value) else pytest.raises((ValueError, CheckpointError)):
            run(value)

    return check


def at_most(size: int, run: Callable[[], Any]) -> Row:
    """Of what is of this size, and no more is allowed."""
    return Row(size, limited(lambda most: size <= most, lambda _: run()))


def counted(most: int, make: Callable[[int], Any]) -> Row:
    """A limit that a field has from its beginning, so that what is counted is below, at and above it."""
    return Row(most, limited(lambda count: count <= most, make))


def make_file() -> None:
    with TemporaryDirectory() as folder:
        safetensors_file.create_shard(
            Path(folder, "a"), [safetensors_file.TensorInfo("w", "F32", (2,))]
        ).close()


SWAP = swap_file.SwapHeader({}, "one", 0, 1, ("/a",), (1,), {}, 0)
MANIFEST = manifest.Manifest(1, "fp32", (), (), manifest.TrainingPosition(1, 1, 1, 1, LossScale()), {}, {})
HEADER = 56  # bytes of the header of a file with one tensor, of that of a swap space
SWAP_HEADER = len(SWAP.raw.rstrip(b"\0")) - swap_file._HEADER.size
EPS = 2.0**-126


def shard_in_chunks(chunk: int) -> None:
    shard = strict_json.to_plain(safetensors_file.Shard("a", 72, 0, 64, ()))
    strict_json.JsonNode({**shard, "chunk": chunk}, "x").read(safetensors_file.Shard)


def message(limit: int, patch: pytest.MonkeyPatch) -> None:
    """With 64 bytes of text."""
    job = RankGroup(world=2, members=(0, 1), store=dist.HashStore())
    stage = StageRanks(world=1, members=(0,), store=job.store, stage=0, whole=job)
    line, done = deque[Tensor](), SimpleNamespace(wait=lambda _: None)

    def isend(part: Tensor, _peer: int, **_: Any) -> Any:
        line.append(part.clone())
        return done

    def irecv(part: Tensor, _peer: int, **_: Any) -> Any:
        part.copy_(line.popleft())
        return done

    patch.setattr(dist, "isend", isend)
    patch.setattr(dist, "irecv", irecv)
    head, flat = bytes(range(8, 72)), torch.arange(8, dtype=torch.uint8)
    stage.send(1, 0, head, flat)
    if limit < 64:
        with pytest.raises(RankError, match="got a message of 8 bytes with 64 of text"):
            stage.receive(1, 0, 8)
    else:
        text, values = stage.receive(1, 0, 8)
        assert (text, values.tolist(), [*line]) == (head, flat.tolist(), [])


def whole_message(_: int, patch: pytest.MonkeyPatch) -> None:
    """Whether its text of 64 bytes comes with its sizes or goes on behind the data."""
    message(64, patch)


def in_shares(least: int, _: pytest.MonkeyPatch) -> None:
    """A quarter of the state is so within a bucket."""
    parameters = [[Parameter(f"{s}.{n}", (64,)) for n in range(2)] for s in range(8)]
    layout = bucketing.lay_out(parameters, StepSettings(state_on="device:0.75,host", bucket_size=1024), 1)
    on_device = bucketing.resident_buckets(layout, 0.75)
    assert len(layout.buckets) >= least
    assert abs(len(on_device) / len(layout.buckets) - 0.75) <= 0.5 / least


def counts_of_tiles(shortest: int, _: pytest.MonkeyPatch) -> None:
    """None is shorter, unless it is the row; and the longest that may be are among them."""
    for tokens in (1, 7, 8, 9, 16, 56, 64, 72, 120):
        may_be = [n for n in range(1, tokens + 1) if tokens % n == 0 and tokens >= n * shortest] or [1]
        found = setting_values.tile_counts(tokens)
        assert {*found} <= {*may_be}
        assert found[0] == 1
        assert min(may_be, key=lambda n: abs(n - 4)) in found


def addresses(times: float, patch: pytest.MonkeyPatch) -> None:
    """As many bytes of them as torch's libraries have."""
    size = sum(x.stat().st_size for x in Path(torch.__file__).parent.glob("lib/*.so*"))
    patch.setattr(memory_limits, "address_limit", lambda: size)
    patch.delitem(sys.modules, "torch")
    with nullcontext() if times <= 1 else pytest.raises(MemoryError, match="RLIMIT_AS: got"):
        memory_limits.check_addresses()


ROWS = {
    "optim.rules.SMALLEST_NORMAL": Row(
        EPS, limited(lambda least: least <= EPS, lambda _: zfunc.AdamW(eps=EPS)), EPS / 2
    ),
    "optim.rules.MAX_STEP": at_most(2**53, lambda: rules.checked_step(2**53)),
    "optim.rules.EMA_PIECE": Row(128, averaged, 64),
    "checkpoint.export.PIECE": Row(96, exported),
    "checkpoint.reader.MAX_OPEN": Row(4, of_four_ranks),
    "checkpoint.safetensors_file.CHUNK": Row(64, in_chunks, 4),
    "checkpoint.safetensors_file.CHUNK_LIMIT": counted(64 << 20, shard_in_chunks),
    "checkpoint.safetensors_file.HEADER_LIMIT": at_most(HEADER, make_file),
    "checkpoint.strict_json.MAX_INT": at_most(99, lambda: strict_json.parse_json(b"99", "x")),
    "checkpoint.swap_file.HEADER_LIMIT": at_most(SWAP_HEADER, lambda: evolve(SWAP).raw),
    "checkpoint.manifest.LIMIT": at_most(len(manifest.to_json(MANIFEST)), lambda: manifest.to_json(MANIFEST)),
    "core.bucketing.MIN_PARTIAL_BUCKETS": Row(8, in_shares),
    "core.setting_values.MOST_TILES": counted(1 << 16, lambda n: StepSettings(tiles=n)),
    "core.setting_values.MOST_DEVICES": counted(1024, lambda n: StepSettings(devices=n)),
    "core.setting_values.MOST_MICRO_BATCHES": counted(1 << 16, lambda n: StepSettings(micro_batches=n)),
    "core.setting_values.SHORTEST_TILE": Row(8, counts_of_tiles),
    "runtime.stage_ranks.MOST_HEAD": Row(64, message),
    "runtime.stage_ranks.FIRST": Row(80, whole_message),
    "runtime.memory_limits._OF_LIBRARIES": Row(1.0, addresses, 0.5),
    "models.hf.cutting.RECORDED": Row(12, windows),
    "models.hf.comparison.SMALL": Row(LLAMA, small_model),
    "models.hf.comparison.LOSS_CLOSE": Row(5e-4, lambda *x: compared(*x, loss=True), 2e-5),
    "models.hf.comparison.GRADIENT_CLOSE": Row(5e-4, lambda *x: compared(*x, loss=False), 2e-5),
    "models.hf.comparison.ROUNDING": Row(5e-4, of_largest, 2e-5),
    "models.hf.attention._FUSED_GQA": Row(16, groups_of_queries),
    "models.loss_pieces.LOGITS_BYTES": Row(4 * 24 * 31, loss_in_pieces),
    "models.loss_pieces._ALIGNMENT": Row(24, lambda _, patch: loss_in_pieces(0, patch)),
    "models.loss_pieces._MOST_PIECES": Row(24, many_pieces),
    "engine.rows.row_attention.TILE": Row(24, rows),
    "engine.rows.tile_attention.FEW": Row(6, tiles),
    "engine.rows.tile_attention.BLOCK": Row(4, blocks),
    "engine.rows.tile_attention.AT_ONCE": Row(16, blocks),
    "engine.trace.traced_passes.MAX_TRACES": Row(3, shapes),
    "engine.trace.facts.MAX_DEPTH": Row(3, told_apart(nested)),
    "engine.trace.facts.MAX_HASHED": Row(64, told_apart(lambda x: np.full(8, x))),
    "engine.trace.fake_tensors.MOST_RUN": Row(72, strides),
}


def constants() -> Iterator[str]:
    """The numbers of marked modules, by name."""
    for place in MARKED:
        path = ROOT / "zfunc" / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            module = ".".join(file.relative_to(ROOT / "zfunc").with_suffix("").parts)
            for node in ast.parse(file.read_text()).body:
                for name, value in assigned(node):
                    if isinstance(name, ast.Name) and name.id.isupper() and is_number(value):
                        yield f"{module}.{name.id}"


def assigned(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Names and values of an assignment, one by one."""
    if isinstance(node, ast.Assign):
        name, value = node.targets[0], node.value
        if isinstance(name, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(name.elts, value.elts, strict=True)
        else:
            yield name, value


def is_number(value: ast.expr) -> bool:
    """Whether a literal, or a product or sum of some, is a number, or several."""
    names = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple
    inside = [x.value for x in ast.walk(value) if isinstance(x, ast.Constant)]
    return isinstance(value, names) and bool(inside) and all(type(x) in (int, float) for x in inside)


def test_every_constant_of_a_marked_module_is_in_a_row() -> None:
    found, known = {*constants()}, [*ROWS]
    for listed in (*NONE.values(), *ELSEWHERE.values()):
        known += named(listed)
    assert found - {*known} == set(), "a row with a case on both sides, or the reason for none"
    assert {*known} - found == set()
    assert len({*known}) == len(known)
    for place in ELSEWHERE:
        file, name = place.split()
        assert name in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("side", [-1, 0, 1], ids=["below", "at", "above"])
@pytest.mark.parametrize("name", ROWS)
def test_both_sides_of_a_constant_have_the_results_of_its_witness(
    name: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, (module, _, short) = ROWS[name], name.rpartition(".")
    if module.startswith("models.hf"):
        pytest.importorskip("transformers")
    value = row.at + side * row.step
    monkeypatch.setattr(importlib.import_module(f"zfunc.{module}"), short, value)
    row.check(value, monkeypatch)
