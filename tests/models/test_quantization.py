"""Weights in 4 and 8 bits: bytes and values are those of bitsandbytes, trainings those of decoded weights."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import play, played
from pairs import in_pairs
from quantized_models import BATCH, Shifted, modules, rounded, segments_of
from safetensors.torch import load_file
from small_models import rows_of
from torch import Tensor, nn

import zfunc
from zfunc.checkpoint.export import export_weights
from zfunc.core.layout import Parameter
from zfunc.core.spec import PassCost
from zfunc.engine.program.specialize import specialize
from zfunc.engine.trace.cost_trace import AllocationTracker
from zfunc.engine.trace.fake_tensors import FakeTensors
from zfunc.models import quantization
from zfunc.models.quantization import FORMATS, decode, decoded_name, dynamic_map, joined

GOLDEN = Path(__file__).parents[1] / "goldens" / "quantized.safetensors"
"""Matrices, and what bitsandbytes 0.50.2 makes of them: from `python models/test_quantization.py` in tests."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NESTED_KINDS = {"nf4": True, "nf4-single": False}
SHAPES = ((18, 66), (7, 9), (12, 64), (5, 13), (3, 1))
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"params_on": "host", "recompute": "min-cut"},
    "disk": {"params_on": "disk", "state_on": "disk", "swap": "swap"},
    "residuals": {"recompute": "none"},
    "micro-batches": {"params_on": "host", "micro_batches": 2, "clip_norm": 1.0},
    "pipeline": {"devices": 2, "order": "OneFOneB", "micro_batches": 2},
    "zero bubble": {"devices": 2, "order": "ZeroBubble", "micro_batches": 2},
}


def bits(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def matrix(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of many sizes, and a row of zeros."""
    g = torch.Generator().manual_seed(len(shape) + shape[0])
    w = torch.randn(shape, generator=g) * torch.logspace(-3, 2, shape[0]).view(-1, 1)
    w[1] = 0
    return w.to(dtype)


def made_by_bitsandbytes(w: Tensor, kind: str) -> tuple[Tensor, ...]:
    """The tensors that bitsandbytes makes of a matrix, in our order. Its CPU library looks codes of scales up in a
    table that misses the nearest one time in 300: here they are those of its kernel in torch, and of CUDA's."""
    F = pytest.importorskip("bitsandbytes.functional")  # noqa: N806
    if kind == "int8":
        numbers, scales, _ = F.int8_vectorwise_quant(w.half().contiguous())
        return scales, numbers
    codes, state = F.quantize_4bit(w, quant_type="nf4")
    if not NESTED_KINDS[kind]:
        return state.absmax, codes
    mean = state.absmax.mean()
    in_torch = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    quantize: Any = torch.ops.bitsandbytes.quantize_blockwise.default
    nested, scales = quantize.redispatch(in_torch, state.absmax - mean, F.create_dynamic_map(), 256)
    return scales, mean, nested, codes


def decoded_by_bitsandbytes(parts: tuple[Tensor, ...], kind: str, shape: Any, dtype: torch.dtype) -> Tensor:
    F = pytest.importorskip("bitsandbytes.functional")  # noqa: N806
    if kind == "int8":
        return F.int8_vectorwise_dequant(parts[1], parts[0]).to(dtype)
    given: dict[str, Any] = {"shape": torch.Size(shape), "blocksize": 64, "quant_type": "nf4", "dtype": dtype}
    if NESTED_KINDS[kind]:
        inner = F.QuantState(parts[0], code=F.create_dynamic_map(), blocksize=256, dtype=torch.float32)
        given |= {"offset": parts[1], "state2": inner}
    with torch._dynamo.config.patch(disable=True):  # for odd rows it compiles what it runs
        code = F.get_4bit_type("nf4", "cpu")
        return F.dequantize_4bit(parts[-1], F.QuantState(parts[-2], code=code, **given))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 257)])
def test_bytes_and_values_are_those_of_bitsandbytes(kind: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES.values():
        w = matrix(shape, dtype)
        parts = made_by_bitsandbytes(w, kind)
        stored = FORMATS[kind].encode(w)
        assert torch.equal(stored, joined(*parts))
        assert stored.numel() == FORMATS[kind].nbytes(shape)
        for to in DTYPES.values():
            theirs = decoded_by_bitsandbytes(parts, kind, shape, to)
            assert torch.equal(bits(decode(stored, kind, shape, to)), bits(theirs))


def test_bytes_and_values_are_those_that_bitsandbytes_wrote() -> None:
    own = load_file(GOLDEN)
    seen = {x.rpartition(".")[0] for x in own}
    assert len(seen) == len(FORMATS) * len(SHAPES)
    for x in seen:
        kind, w = x.split(".")[0], own[f"{x}.w"]
        assert torch.equal(own[f"{x}.bytes"], FORMATS[kind].encode(w))
        for to, dtype in DTYPES.items():
            assert torch.equal(
                bits(own[f"{x}.{to}"]), bits(decode(own[f"{x}.bytes"], kind, tuple(w.shape), dtype))
            )


def test_a_matrix_is_decoded_alike_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    w = matrix((600, 131), torch.float32)
    for kind, own in FORMATS.items():
        stored = own.encode(w)
        whole = decode(stored, kind, (600, 131))
        with monkeypatch.context() as m:
            m.setattr("zfunc.models.quantization.PIECE", 64 * 256)
            assert torch.equal(whole, decode(stored, kind, (600, 131)))


@pytest.mark.parametrize(("kind", "compiled"), in_pairs(FORMATS, [False, True]))
def test_three_pieces_cost_what_all_pieces_do(
    kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zfunc.models.quantization.PIECE", 64 * 256)
    few, seen = quantization._starts, list[int]()

    def cost(shape: tuple[int, int], starts: Callable[..., Any]) -> PassCost:
        monkeypatch.setattr("zfunc.models.quantization._starts", starts)
        made = FORMATS[kind].tables()  # of numbers that fake tensors lack
        with FakeTensors() as fake:
            stored = torch.empty(FORMATS[kind].nbytes(shape), dtype=torch.uint8)
            tables = [fake.from_tensor(x) for x in made]
            with AllocationTracker(compiled=compiled) as tracker:
                quantization.DEQUANTIZE(stored, tables, kind, list(shape), torch.bfloat16)
        seen.append(tracker.launches)
        return tracker.cost()

    for rows in (1, 65, 192, 256, 257, 500):
        shape = rows, 256
        assert cost(shape, few) == cost(shape, lambda n, step, fake: few(n, step, fake=False)), rows
    assert max(seen) > 4 * min(seen)


def trained(
    segments: Any, precision: str, batch: Any = BATCH, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    program = zfunc.compile(segments, precision=precision, optimizer=zfunc.AdamW(lr=1e-2), **settings)
    state, losses = zfunc.init(program), list[float]()
    for _ in range(3):
        state, metrics = zfunc.train_step(program, state, batch)
        losses.append(metrics.loss)
    own = {x.name for x in program.layout.spans}
    values = {x: t for x, t in zfunc.params(program, state).items() if x in own}
    program.close_swap()
    return losses, values


BY_DAY = [("nf4", "host"), ("int8", "disk"), ("nf4", "pipeline")]
WAYS = [
    x if x in BY_DAY else pytest.param(*x, marks=pytest.mark.slow) for x in product(("nf4", "int8"), PLACES)
]


@pytest.mark.parametrize(("kind", "place"), WAYS)
def test_a_training_is_that_of_decoded_weights_to_the_bit(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swap").mkdir()
    settings, precision = PLACES[place], "fp32" if place == "host" else "bf16"
    plain = rounded(modules(), kind, DTYPES[precision])
    of_step = {x: y for x, y in settings.items() if x in ("micro_batches", "clip_norm", "devices", "order")}
    expected = trained(segments_of(plain), precision, **of_step)
    losses, values = trained(zfunc.quantized(segments_of(modules()), kind), precision, **settings)
    assert losses == expected[0]
    assert values.keys() == expected[1].keys()
    assert all(torch.equal(t, expected[1][x]) for x, t in values.items())


RANKS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3, "params_on": "host", "clip_norm": 1.0},
    "stages of a pipeline": {"pp": 2, "order": "OneFOneB", "micro_batches": 2, "params_on": "host"},
    "device": {},
}


def one_rank(rank: int, world: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    for kind, (name, settings) in product(("nf4", "int8"), RANKS.items()):
        own = BATCH if "pp" in settings else rows_of(BATCH, rank, world)
        plain = segments_of(rounded(modules(), kind, torch.bfloat16))
        expected = trained(plain, "bf16", own, group=dist.group.WORLD, **settings)
        segments = zfunc.quantized(segments_of(modules()), kind)
        losses, values = trained(segments, "bf16", own, group=dist.group.WORLD, **settings)
        assert losses == expected[0], name
        assert values.keys() == expected[1].keys()
        assert all(torch.equal(t, expected[1][x]) for x, t in values.items()), name
    out.joinpath(f"{rank}").touch()


def every_rank(out: Path) -> None:
    play(one_rank, out, 2)


@pytest.mark.slow
def test_ranks_train_as_on_decoded_weights(tmp_path: Path) -> None:
    played(every_rank, tmp_path)
    assert {"0", "1"} <= {x.name for x in tmp_path.iterdir()}


def test_a_constant_in_half_precision_rounds_no_weight() -> None:
    def shifted() -> list[nn.Module]:
        first, *_, head = modules(0)
        return [first, Shifted(321), head]

    own = rounded(shifted(), "nf4", torch.float32)
    expected, made = (trained(x, "fp32") for x in (segments_of(own), zfunc.quantized(segments_of(shifted()))))
    assert made[0] == expected[0]


def test_gradients_are_those_of_plain_pytorch() -> None:
    """SGD of one step with rate 1: the difference is the gradient."""
    plain = rounded(modules(), "nf4", torch.float32)
    model = nn.Sequential(*plain[:-1])
    plain[-1](model(BATCH[0]), BATCH[1]).backward()
    program = zfunc.compile(
        zfunc.quantized(segments_of(modules())),
        precision="fp32",
        optimizer=zfunc.SGD(lr=1.0),
        params_on="host",
    )
    state = zfunc.init(program)
    before = {x: t.clone() for x, t in zfunc.params(program, state).items()}
    state, _ = zfunc.train_step(program, state, BATCH)
    after = zfunc.params(program, state)
    for n, m in enumerate(plain):
        for short, p in m.named_parameters():
            if p.grad is not None:
                difference = before[f"{n}.{short}"] - after[f"{n}.{short}"]
                torch.testing.assert_close(difference, p.grad, rtol=1e-5, atol=1e-6)


def test_one_decoded_matrix_is_in_memory_at_a_time() -> None:
    wide, kept = 1024, {}
    for kind in (None, "nf4"):
        own = segments_of(modules(1, wide))
        program = zfunc.compile(zfunc.quantized(own, kind) if kind else own, precision="bf16", example=BATCH)
        kept[kind] = specialize(program, BATCH).spec.costs[1]
    one = 2 * wide * 96
    for way in ("forward", "backward"):
        more = getattr(kept["nf4"], way).workspace - getattr(kept[None], way).workspace
        assert (
            one < more < one + 7 * wide * 96
        )  # 6 bytes an element while a matrix is decoded, and its scales


@pytest.mark.parametrize("recompute", ["none", "min-cut"])
def test_no_residual_is_a_decoded_matrix(recompute: Any) -> None:
    made = []
    for quantize in (False, True):
        own = segments_of(modules())
        own = zfunc.quantized(own) if quantize else own
        program = zfunc.compile(own, precision="bf16", example=BATCH, recompute=recompute)
        made.append(specialize(program, BATCH).spec.costs[1].residual_bytes)
    assert made[0] == made[1]


def test_a_checkpoint_has_the_bytes_and_is_resumed_to_the_bit(tmp_path: Path) -> None:
    def compiled(**settings: Any) -> zfunc.engine.program.program.Program:
        segments = zfunc.quantized(segments_of(modules()))
        return zfunc.compile(segments, precision="bf16", optimizer=zfunc.AdamW(lr=1e-2), **settings)

    program = compiled()
    state, _ = zfunc.train_step(program, zfunc.init(program), BATCH)
    path = zfunc.save(tmp_path / "kept", program, state)
    _, expected = zfunc.train_step(program, state, BATCH)
    (tmp_path / "swap").mkdir()
    for more in (
        {},
        {"params_on": "host"},
        {"params_on": "disk", "state_on": "disk", "swap": tmp_path / "swap"},
    ):
        other = compiled(**more)
        again = zfunc.load(path, other)
        assert zfunc.train_step(other, again, BATCH)[1].loss == expected.loss
        other.close_swap()
    export_weights(path, tmp_path / "out.safetensors")
    own = load_file(tmp_path / "out.safetensors")
    assert own["1.up.weight.nf4"].dtype == torch.uint8
    assert torch.equal(own["1.up.weight.nf4"], FORMATS["nf4"].encode(modules()[1].up.weight))
    export_weights(tmp_path / "swap", tmp_path / "swapped.safetensors")
    assert torch.equal(load_file(tmp_path / "swapped.safetensors")["1.up.weight.nf4"], own["1.up.weight.nf4"])


def test_elements_are_counted_as_weights() -> None:
    plain, own = (zfunc.compile(x) for x in (segments_of(modules()), zfunc.quantized(segments_of(modules()))))
    assert own.layout.num_parameters == plain.layout.num_parameters
    assert own.layout.num_trainable == plain.layout.num_trainable
    assert decoded_name("1.up.weight.nf4") == ("1.up.weight", "nf4")
    assert len({*dynamic_map()}) == 256


def head_alone() -> Any:
    return segments_of(modules(0))


REFUSED: dict[str, Callable[[], Any]] = {
    "kind: got 'nf5', expected one of nf4, nf4-single, int8": lambda: zfunc.quantized(
        segments_of(modules()), "nf5"
    ),
    r"got '1\.a', which is trained, expected frozen": lambda: zfunc.quantized(
        segments_of(modules()), "nf4", ["1.a"]
    ),
    r"got '1\.upp\.weight'.*mean '1\.up\.weight'": lambda: zfunc.quantized(
        segments_of(modules()), "nf4", ["1.upp.weight"]
    ),
    r"of shape \(321,\), expected a matrix": lambda: zfunc.quantized(
        segments_of(modules()), "int8", ["1.up.bias"]
    ),
    "got no frozen matrix between": lambda: zfunc.quantized(head_alone()),
    "got a weight beyond 65504": lambda: FORMATS["int8"].encode(torch.full((2, 2), 1e5)),
    "one of bytes that is trained": lambda: Parameter("a", (4,), encodes=8),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def write_golden() -> None:
    """Write GOLDEN with the bitsandbytes that is installed."""
    from safetensors.torch import save_file

    made: dict[str, Tensor] = {}
    for kind in FORMATS:
        for n, shape in enumerate(SHAPES):
            w = matrix(shape, [*DTYPES.values()][n % 3])
            parts = made_by_bitsandbytes(w, kind)
            made |= {f"{kind}.{n}.w": w, f"{kind}.{n}.bytes": joined(*parts)}
            for to, dtype in DTYPES.items():
                made[f"{kind}.{n}.{to}"] = decoded_by_bitsandbytes(parts, kind, shape, dtype)
    save_file({x: t.contiguous() for x, t in made.items()}, GOLDEN)


if __name__ == "__main__":
    write_golden()
