"""Frozen weights in 4 or 8 bits: the formats of bitsandbytes, to the bit, and segments whose weights are kept so.

A segment decodes a weight where its function reads it: until then the weight is the bytes of one frozen parameter,
which lives, moves and is saved as such. Decoded weights are memory of the passes that use them, like activations.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from math import prod
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from zfunc.core.layout import Parameter
from zfunc.engine.trace.fake_tensors import counted_times
from zfunc.engine.trace.graph_cuts import DECODERS
from zfunc.engine.trace.model_segments import checked_segments
from zfunc.engine.trace.operation_flops import MADE_OF
from zfunc.engine.trace.segment import Segment
from zfunc.engine.trace.tensor_memory import Values
from zfunc.errors import did_you_mean
from zfunc.options import one_of
from zfunc.runtime.torch_dtypes import byte_view

Shape = tuple[int, ...]
BLOCK, NESTED_BLOCK = 64, 256  # elements that share a scale, and scales that share one
PIECE = (
    1 << 22
)  # elements that are decoded at a time: what is between codes and values needs memory for these
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the codes of NF4 (Dettmers et al. 2023, appendix E)."""


@cache
def dynamic_map() -> tuple[float, ...]:
    """The 256 values of the signed dynamic 8-bit type (Dettmers 2016), ascending, each that of an fp32.

    >>> [round(dynamic_map()[i], 4) for i in (0, 1, 127, 254, 255)]
    [-0.993, -0.9789, 0.0, 0.993, 1.0]
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        means = (10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += [*means, *(-x for x in means)]
    return tuple(sorted(values))


def _nearest(x: Tensor, values: Sequence[float], block: int) -> tuple[Tensor, Tensor]:
    """Codes (uint8) for `x` [n], fp32: the index in ascending `values` nearest to each element divided by its
    block's largest magnitude; and these magnitudes, fp32 [blocks]. The last block may be short."""
    code = torch.tensor(values, device=x.device)
    full = len(x) - len(x) % block
    blocks = x[:full].view(-1, block)
    largest = blocks.abs().amax(1)
    scaled = (blocks * (1 / largest.clamp(min=1e-38)).view(-1, 1)).flatten()
    if full < len(x):  # divided, not multiplied, as in bitsandbytes
        last = x[full:].abs().max().clamp(min=1e-38)
        largest, scaled = torch.cat([largest, last.view(1)]), torch.cat([scaled, x[full:] / last])
    middles = (code[:-1] + code[1:]) / 2
    return torch.bucketize(scaled.clamp(-1, 1), middles, out_int32=True).to(torch.uint8), largest


def _scaled(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply fp32 `values` [n] by the scale of their block, in place. The last block may be short, and scales of
    blocks behind it are not read."""
    full = len(values) - len(values) % block
    values[:full].view(-1, block).mul_(scales[: full // block].view(-1, 1))
    values[full:].mul_(scales[full // block : -(-len(values) // block)])
    return values


def _starts(count: int, step: int, *, fake: bool) -> Iterator[int]:
    """Yield where pieces of `step` elements begin in `count` elements. In a trace (`fake`), pieces between
    the first and the last are equal in cost, so the second is traced once and counted for all of them."""
    starts = range(0, count, step)
    times = dict.fromkeys(starts, 1)
    if fake and len(starts) > 3:
        times = {starts[0]: 1, starts[1]: len(starts) - 2, starts[-1]: 1}
    return counted_times(times.items())


def joined(*parts: Tensor) -> Tensor:
    """The bytes of the tensors `parts`, one after the other, as one uint8 tensor."""
    return torch.cat([byte_view(x) for x in parts])


@frozen
class FourBit:
    """NF4 in blocks of 64 elements: two codes a byte, the first in its high half, and the fp32 magnitude of
    each block as its scale. If `nested`, scales less their mean are 8-bit codes in blocks of 256. The bytes
    of a tensor are

        nested      scales of scales (fp32), their mean (fp32), codes of scales, codes
        else        scales (fp32), codes
    """

    nested: bool = True

    def _edges(self, numel: int) -> tuple[int, int]:
        """The byte offsets, in an encoded tensor, of the codes of nested scales and of the tensor's own codes."""
        blocks = -(-numel // BLOCK)
        if not self.nested:
            return 0, 4 * blocks
        first = 4 * (-(-blocks // NESTED_BLOCK) + 1)
        return first, first + blocks

    def nbytes(self, shape: Shape) -> int:
        """The size in bytes of a tensor of this shape in NF4, with its scales."""
        return self._edges(numel := prod(shape))[1] + -(-numel // 2)

    def encode(self, values: Tensor) -> Tensor:
        """Encode `values` in NF4: the bytes of scales and codes, uint8 [nbytes]."""
        codes, scales = _nearest(values.detach().flatten().float(), NF4, BLOCK)
        if len(codes) % 2:
            codes = torch.cat([codes, codes.new_tensor([NF4.index(0.0)])])
        packed = (codes[::2] << 4) | codes[1::2]
        if not self.nested:
            return joined(scales, packed)
        mean = scales.mean()
        nested, outer = _nearest(scales - mean, dynamic_map(), NESTED_BLOCK)
        return joined(outer, mean, nested, packed)

    def tables(self) -> list[Tensor]:
        """The lookup tables of `decode`: both NF4 values of a byte [256, 2]; values of scale codes [256]."""
        code = torch.tensor(NF4, device="cpu")
        pairs = torch.stack([code.repeat_interleave(16), code.repeat(16)], 1)
        return [pairs, torch.tensor(dynamic_map(), device="cpu")]

    def decode(self, stored: Tensor, tables: Sequence[Tensor], into: Tensor) -> None:
        """Decode NF4 bytes `stored`, by `tables`, into the tensor `into`, whose dtype rounds fp32 values once."""
        flat, (first, begin) = into.view(-1), self._edges(into.numel())
        for start in _starts(len(flat), PIECE, fake=isinstance(stored, FakeTensor)):
            part = flat[start : start + PIECE]
            scales = self._scales(stored[:begin], tables[1], first, start // BLOCK, -(-len(part) // BLOCK))
            codes = stored[begin + start // 2 :][: -(-len(part) // 2)].int()
            values = tables[0].index_select(0, codes).flatten()[: len(part)]
            part.copy_(_scaled(values, scales, BLOCK))

    def _scales(self, stored: Tensor, dynamic: Tensor, first: int, start: int, count: int) -> Tensor:
        """Fp32 scales of `count` blocks from `start`; nested ones are codes from byte `first`, decoded by
        `dynamic`."""
        if not self.nested:
            return stored.view(torch.float32)[start:][:count]
        outer = stored[:first].view(torch.float32)
        values = dynamic.index_select(0, stored[first + start :][:count].int())
        return _scaled(values, outer[start // NESTED_BLOCK : -1], NESTED_BLOCK).add_(outer[-1])


@frozen
class EightBit:
    """LLM.int8 (Dettmers et al. 2022): whole numbers from -127 to 127, in rows of a matrix with one fp32 scale, the
    largest magnitude of the row. The bytes are those of the scales, then those of the numbers."""

    def nbytes(self, shape: Shape) -> int:
        """The size in bytes of a matrix of this shape in LLM.int8, with its scales."""
        return 4 * shape[0] + prod(shape)

    def encode(self, values: Tensor) -> Tensor:
        """Encode a matrix in LLM.int8: uint8 [nbytes]. Raises ValueError for a value that fp16 cannot hold."""
        rows = values.detach().half()  # as bitsandbytes reads them
        if not rows.isfinite().all():
            raise ValueError("got a weight beyond 65504, the most that int8 takes: quantize to nf4")
        scales = rows.abs().amax(1).float()
        numbers = (rows * (127 / scales.view(-1, 1))).nan_to_num(0).round().to(torch.int8)  # a row of zeros
        return joined(scales, numbers)

    def tables(self) -> list[Tensor]:
        """The lookup tables that `decode` takes: none, as int8 needs none."""
        return []

    def decode(self, stored: Tensor, _: Sequence[Tensor], into: Tensor) -> None:
        """Decode LLM.int8 bytes `stored` into the matrix `into`, whose dtype rounds the fp32 values once."""
        edge, step = 4 * len(into), max(1, PIECE // into.shape[1])
        scales = stored[:edge].view(torch.float32).view(-1, 1)
        numbers = stored[edge:].view(torch.int8).view(into.shape)
        for start in _starts(len(into), step, fake=isinstance(stored, FakeTensor)):
            part = slice(start, start + step)
            into[part].copy_((numbers[part] * scales[part]).mul_(7.874015718698502e-3))  # 1/127, as there


FORMATS: dict[str, FourBit | EightBit] = {
    "nf4": FourBit(),
    "nf4-single": FourBit(nested=False),
    "int8": EightBit(),
}
"""Formats of a frozen weight by name: 4.13, 4.5 and 8 bits an element. "nf4" has double quantization."""


def encoded_name(name: str, kind: str) -> str:
    """The name of the parameter that holds the bytes of parameter `name`, encoded in format `kind`."""
    return f"{name}.{kind}"


def decoded_name(name: str) -> tuple[str, str]:
    """The name of the parameter that `name` has the bytes of, and their format; `name` and "" for any other.

    >>> decoded_name("model.q_proj.weight.nf4"), decoded_name("model.norm.weight")
    (('model.q_proj.weight', 'nf4'), ('model.norm.weight', ''))
    """
    owner, _, kind = name.rpartition(".")
    return (owner, kind) if kind in FORMATS else (name, "")


def encode(value: Tensor, kind: str) -> Tensor:
    """The bytes of a parameter in format `kind`; `value` itself if it is such bytes already."""
    return value if value.dtype == torch.uint8 else FORMATS[kind].encode(value)


def decode(stored: Tensor, kind: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a parameter of this shape from its bytes in format `kind`, rounded to `dtype`."""
    return _decoded(stored, [x.to(stored.device) for x in FORMATS[kind].tables()], kind, shape, dtype)


def _decoded(
    stored: Tensor, tables: Sequence[Tensor], kind: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    into = stored.new_empty(shape, dtype=dtype)
    FORMATS[kind].decode(stored, tables, into)
    return into


_LIBRARY, _NAME = torch.library.Library("zfunc", "FRAGMENT"), "dequantize"
_LIBRARY.define(f"{_NAME}(Tensor stored, Tensor[] tables, str kind, int[] shape, ScalarType dtype) -> Tensor")
_LIBRARY.impl(_NAME, _decoded, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"zfunc::{_NAME}",
    lambda stored, _tables, _kind, shape, dtype: stored.new_empty(shape, dtype=dtype),
    lib=_LIBRARY,
)
DEQUANTIZE: Any = torch.ops.zfunc.dequantize.default
MADE_OF[DEQUANTIZE] = _decoded
DECODERS.add(DEQUANTIZE)


# --- segments ------------------------------------------------------------------------------------------------


def quantized(
    segments: Iterable[Segment], kind: str = "nf4", names: Collection[str] | None = None
) -> tuple[Segment, ...]:
    """Segments whose frozen weights are kept in format `kind` ("nf4", "nf4-single" or "int8"), and decoded where
    they are read.

    `names` are full names of frozen parameters; the default are the frozen matrices of all segments but the first
    and the last. In a program each becomes the parameter `name.kind` of bytes. The weights of a segment are encoded
    one after the other when `zfunc.init` asks for them. Gradients are those of the segments with decoded weights.

    Raises ValueError for an unknown format, and for a name that is no frozen parameter that the format takes.

    >>> from torch import nn
    >>> from zfunc.engine.trace.segment import segment
    >>> part = nn.Linear(64, 64, bias=False).requires_grad_(False)
    >>> (own,) = quantized([segment("part", part)], "nf4", ["part.weight"])
    >>> [(p.name, p.shape, p.encodes) for p in own.parameters]
    [('part.weight.nf4', (2120,), 4096)]
    """
    one_of(FORMATS)("kind", kind)
    segments = checked_segments(segments)
    known = {p.name: p for s in segments for p in s.parameters}
    if names is None:
        inside = segments[1:-1]
        names = {p.name for s in inside for p in s.parameters if not p.trainable and len(p.shape) == 2}
    if not names:
        raise ValueError(
            "names: got no frozen matrix between the first and the last segment, expected weights to quantize: "
            "freeze them (requires_grad_(False)), or pass names="
        )
    for name in names:
        if name not in known:
            raise ValueError(
                f"names: got {name!r}, which no segment has{did_you_mean(name, [*known])}: pass full names"
            )
        p = known[name]
        if p.trainable:
            raise ValueError(
                f"names: got {name!r}, which is trained, expected frozen parameters: a weight in {kind} cannot be "
                "updated; freeze it (requires_grad_(False)), and train adapters beside it"
            )
        if not p.numel or (kind == "int8" and len(p.shape) != 2):
            expected = "a matrix" if kind == "int8" else "elements"
            raise ValueError(f"names: got {name!r} of shape {p.shape}, expected {expected}: leave it out")
    return tuple(keep_encoded(s, dict.fromkeys(names, kind)) for s in segments)


def keep_encoded(segment: Segment, kinds: Mapping[str, str]) -> Segment:
    """A segment that keeps the parameters in `kinds` (format by full name) as bytes and decodes them at the
    beginning of its function. Initial values are encoded when made, unless they are bytes already."""
    own = {x: p for x, p in zip(segment.short, segment.parameters, strict=True) if p.name in kinds}
    if not own:
        return segment
    codes = {x: (encoded_name(x, kinds[p.name]), kinds[p.name], p.shape) for x, p in own.items()}
    made = {kind: FORMATS[kind].tables() for kind in {x: None for _, x, _ in codes.values()}}
    tables = {kind: [f"{kind} table {n}" for n in range(len(own))] for kind, own in made.items()}
    constants = {x: t for kind, names in tables.items() for x, t in zip(names, made[kind], strict=True)}
    as_stored = {*segment.constants, *segment.buffers}  # in the dtype of their module

    def decoding(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def decoded(params: Values, *inputs: Any) -> Any:
            hidden = {*constants, *(x for x, _, _ in codes.values())}
            given = {x: t for x, t in params.items() if x not in hidden}
            floats = [t for x, t in given.items() if x not in as_stored]
            dtype = _narrowest((floats, inputs[:1]))  # behind it are targets, in any dtype
            given |= {
                short: DEQUANTIZE(params[x], [params[t] for t in tables[kind]], kind, [*shape], dtype)
                for short, (x, kind, shape) in codes.items()
            }
            return function(given, *inputs)

        return decoded

    def renamed(p: Parameter) -> Parameter:
        if p.name not in kinds:
            return p
        kind = kinds[p.name]
        size = FORMATS[kind].nbytes(p.shape)
        return Parameter(encoded_name(p.name, kind), (size,), trainable=False, encodes=p.numel)

    def encoded(name: str, value: Tensor) -> tuple[str, Tensor]:
        if name not in kinds:
            return name, value
        return encoded_name(name, kinds[name]), encode(value, kinds[name])

    def initial(seed: int) -> Values:
        return dict(encoded(*item) for item in segment.initial(seed).items())

    return evolve(
        segment,
        function=decoding(segment.function),
        evaluate=None if segment.evaluate is None else decoding(segment.evaluate),
        parameters=map(renamed, segment.parameters),
        short=(codes[x][0] if x in codes else x for x in segment.short),
        initial=initial,
        shared={encoded_name(x, kinds[x]) if x in kinds else x for x in segment.shared},
        origins={x: t for x, t in segment.origins.items() if x not in kinds},
        constants={**segment.constants, **constants},
        codes=codes,
    )


def _narrowest(tree: Any) -> torch.dtype:
    """The narrowest floating-point dtype of tensors in `tree`, which most parameters have on the device."""
    found = {t.dtype for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()}
    return min(found, key=lambda x: x.itemsize, default=torch.float32)
