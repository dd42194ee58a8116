"""The state of a checkpoint into a rank's buffers, whatever world, layout or kind of moments it was written with.

The invariant: only the slices this rank keeps are read, straight into its buffers where moments are of one kind;
where they are not, a bounded part at a time goes through fp32.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from zfunc.checkpoint.directory import Checkpoint
from zfunc.checkpoint.manifest import FROZEN, PENDING, state_kinds
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.checkpoint.slices import slices_of
from zfunc.checkpoint.writer import as_bytes
from zfunc.core.dtypes import DTYPES
from zfunc.core.layout import Layout
from zfunc.core.optimizer_state import ADAM_FORMATS, stored_buffers
from zfunc.engine.state import Buffers
from zfunc.engine.weights import send_weights
from zfunc.errors import CheckpointError
from zfunc.optim.compact_reference import Compact, join, pack, unpack, unpack_first_codes
from zfunc.runtime.collectives import RankGroup
from zfunc.runtime.torch_dtypes import TORCH_DTYPES

PART = 1 << 17  # elements of a parameter that are converted at once: 5 MB of temporaries
FILE_DTYPES = {x.safetensors: TORCH_DTYPES[name] for name, x in DTYPES.items()}

Target = tuple[WantedSlice, Tensor]  # a slice, and a contiguous host tensor of its size and type


def fill_state(
    buffers: Buffers, layout: Layout, state_format: str, checkpoint: Checkpoint, ranks: RankGroup
) -> None:
    """Read this rank's slices and all frozen parameters; the device is sent only what is there already.

    Raises CheckpointError, naming file, parameter and offset, for bytes that are not what was written.
    """
    with CheckpointReader(checkpoint) as reader:
        if checkpoint.manifest.state_format == state_format:
            _fill(reader, list(_own(buffers, layout, state_format, ranks)))
        else:
            _check_convertible(checkpoint.manifest.state_format, state_format)
            _convert(reader, buffers, layout, state_format, ranks)
        if checkpoint.manifest.position.pending is not None:
            _fill(reader, list(_pending(buffers, layout, state_format, ranks)))
        _read_frozen(reader, buffers, layout)


def send_parameters(buffers: Buffers, layout: Layout, ranks: RankGroup) -> None:
    """Give every rank's device the weights that are on all hosts: a collective for each bucket."""
    for bucket in layout.buckets:
        send_weights(buffers, bucket, ranks)


def _own(buffers: Buffers, layout: Layout, state_format: str, ranks: RankGroup) -> Iterator[Target]:
    """Every slice of this rank, and where its buffers have it."""
    for x in slices_of(layout, state_format, ranks.rank, ranks.world):
        into = buffers.state(x.bucket)[x.kind]
        yield WantedSlice(x.kind, x.parameter, x.start, x.stop), into[x.at : x.at + x.stop - x.start]


def _pending(buffers: Buffers, layout: Layout, state_format: str, ranks: RankGroup) -> Iterator[Target]:
    """Every slice of a gradient that waits, and where it does."""
    into = buffers.waiting()
    for x in slices_of(layout, state_format, ranks.rank, ranks.world, dict.fromkeys(into, "F32")):
        if x.kind == PENDING:
            at = into[x.bucket][x.at : x.at + x.stop - x.start]
            yield WantedSlice(x.kind, x.parameter, x.start, x.stop), at


def _convert(
    reader: CheckpointReader, buffers: Buffers, layout: Layout, state_format: str, ranks: RankGroup
) -> None:
    """Through fp32. Moments are rounded as the step that was saved would have rounded them; weights are exact."""
    kinds, types = list(state_kinds(state_format).items()), _dtypes(state_format)
    mine = list(_own(buffers, layout, state_format, ranks))
    for first in range(0, len(mine), len(kinds)):
        of_one = mine[first : first + len(kinds)]  # all kinds of one parameter; in the first none is shared
        wanted, _ = of_one[0]
        for start in range(wanted.start, wanted.stop, PART):
            stop = min(start + PART, wanted.stop)
            converted = _packed(
                _unpacked(reader, wanted.parameter, start, stop), state_format, reader.manifest.position.step
            )
            for (name, kind), (w, into), values in zip(kinds, of_one, converted, strict=True):
                at = start // kind.shared - w.start
                into[at : at + values.numel()].copy_(values.view(types[name]))


def _unpacked(reader: CheckpointReader, parameter: str, start: int, stop: int) -> tuple[Any, ...]:
    """Master, exp_avg and exp_avg_sq of elements start to stop, as fp32 arrays."""
    state_format = reader.manifest.state_format
    types = _dtypes(state_format)
    targets = [
        (
            WantedSlice(name, parameter, start // kind.shared, kind.numel(stop)),
            torch.empty(kind.numel(stop) - start // kind.shared, dtype=types[name]),
        )
        for name, kind in state_kinds(state_format).items()
    ]
    reader.read([(wanted, as_bytes(x)) for wanted, x in targets])
    if state_format == "fp32":
        return tuple(x.numpy() for _, x in targets)
    arrays = [_array(x) for _, x in targets]
    if state_format == "8bit-1":
        return join(*arrays[:2]), *unpack_first_codes(*arrays[2:])
    return unpack(Compact(*arrays))


def _dtypes(state_format: str) -> dict[str, torch.dtype]:
    return {x.name: TORCH_DTYPES[x.dtype] for x in stored_buffers(state_format)}


def _check_convertible(stored: str, wanted: str) -> None:
    if not {stored, wanted} <= {*ADAM_FORMATS}:
        raise CheckpointError(
            f"got optimizer state in the format {stored!r}, expected {wanted!r}, this program's: load it "
            "with the optimizer that saved it, or pass its parameters to init(program, params=...)"
        )


def _packed(values: tuple[Any, ...], state_format: str, step: int) -> list[Tensor]:
    if state_format == "fp32":
        return [torch.from_numpy(np.ascontiguousarray(x)) for x in values]
    packed = pack(*values, moments=state_format, step=step)
    return [
        torch.from_numpy(x.view(np.int16) if x.dtype == np.uint16 else x) for x in packed if x is not None
    ]


def _array(x: Tensor) -> Any:
    """NumPy has no bf16: its bits."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def _read_frozen(reader: CheckpointReader, buffers: Buffers, layout: Layout) -> None:
    """All of them: every rank has them."""
    wanted = [WantedSlice(FROZEN, x.name, 0, x.stop - x.start) for x in layout.frozen]
    _fill(reader, [(x, buffers.views[x.parameter].view(-1)) for x in wanted])


def _fill(reader: CheckpointReader, targets: Sequence[Target]) -> None:
    """Fill the targets: directly, or, where they are on the device or of another type, in bounded parts."""
    direct: list[tuple[WantedSlice, Any]] = []
    for wanted, into in targets:
        dtype = FILE_DTYPES[reader.dtype(wanted.parameter, wanted.kind)]
        if into.device.type == "cpu" and into.dtype == dtype:
            direct.append((wanted, as_bytes(into)))
            continue
        for start in range(wanted.start, wanted.stop, PART):
            stop = min(start + PART, wanted.stop)
            values = torch.empty(stop - start, dtype=dtype)
            reader.read([(evolve(wanted, start=start, stop=stop), as_bytes(values))])
            into[start - wanted.start : stop - wanted.start].copy_(values)
    reader.read(direct)
