"""Writes a checkpoint: one file a rank, bucket by bucket, published when all files are complete.

All ranks decide together: if one fails, all of them report it, no checkpoint is published, and older ones are
unchanged.
"""

import logging
import os
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from attrs import define, field, frozen
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import durable_files as disk
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.directory import UnfinishedCheckpoint
from zfunc.checkpoint.manifest import Slice, Snapshot, check_plain
from zfunc.checkpoint.safetensors_file import (
    BYTES,
    Shard,
    ShardWriter,
    create_shard,
    cut_elements,
    num_chunks,
)
from zfunc.core.optimizer_state import FROZEN
from zfunc.errors import CheckpointError, Message, RankError, marked
from zfunc.runtime.blocking_calls import in_parallel
from zfunc.runtime.collectives import RankGroup
from zfunc.values import of_type, whole

T = TypeVar("T")
log = logging.getLogger("zfunc")


def _folder(path: Any) -> Path:
    of_type("Save: folder", path, str | os.PathLike, "a path: pass a string or a Path")
    return Path(os.fspath(path)).expanduser()


@frozen
class Save:
    """Where a step saves a checkpoint: in a new folder inside `folder`, in which the newest `keep`
    checkpoints and the one named `spare` remain.

    `extra`, a dict of JSON's own types, is saved with it. Raises ValueError for a `keep` below 1,
    CheckpointError for an `extra` that JSON cannot hold.
    """

    folder: Path = field(converter=_folder)
    keep: int = field(default=2, kw_only=True)
    spare: str = field(default="", kw_only=True)
    extra: Mapping[str, Any] = field(factory=dict[str, Any], kw_only=True)

    def __attrs_post_init__(self) -> None:
        whole("keep", self.keep, 1)
        check_plain(self.extra, "extra")


@frozen
class SaveResult:
    """The result of a save: the folder of the published checkpoint, or the reason why there is none."""

    path: Path | None
    failure: str = ""


@define(eq=False)
class CheckpointWriter:
    """One rank's writer of one checkpoint: `begin_writing` makes it, `publish` or `abandon` ends it."""

    snapshot: Snapshot
    save: Save
    ranks: RankGroup
    _unfinished: UnfinishedCheckpoint | None  # on rank 0
    _writer: ShardWriter
    _slices: Mapping[int, list[Slice]]  # by bucket
    _checksums: dict[str, list[int]]  # of every tensor's chunks
    _kept_of_frozen: Callable[[int], Mapping[str, Tensor]]
    _failure: str = ""

    def write(self, bucket: int, buffers: Mapping[str, Tensor]) -> None:
        """Write this rank's slices of bucket `bucket` from `buffers`, by kind of state such as "exp_avg". Of
        a frozen bucket, fp32 tensors that the rank keeps are written instead of the device's rounded ones.

        A failure does not stop the step: `publish` reports it.
        """
        if self._failure:
            return
        try:
            if FROZEN in buffers:
                buffers = {**buffers, **self._kept_of_frozen(bucket)}
            chunk, own = self._writer.shard.chunk, self._slices.get(bucket, ())
            items = ((x, BYTES[x.stored.dtype]) for x in own)
            calls = [
                (x, *ends) for x, item in items for ends in cut_elements(0, x.stop - x.start, item, chunk)
            ]
            in_parallel(partial(self._write_chunk, buffers), calls)
        except Exception as error:
            self._failure = _message(error)

    def _write_chunk(self, buffers: Mapping[str, Tensor], x: Slice, start: int, stop: int) -> None:
        """Write elements `start` to `stop` of slice `x`, which have one checksum, from `buffers[x.kind]`."""
        values = buffers[x.kind][x.at + start : x.at + stop]
        data, number = as_bytes(values.cpu()), start * values.element_size() // self._writer.shard.chunk
        self._checksums[x.stored.name][number] = zlib.crc32(data)
        self._writer.write_at(x.stored.name, start, data)

    def publish(self) -> SaveResult:
        """Publish the checkpoint once all ranks' files are on the disk; returns its folder or the failure."""
        ranks = self.ranks
        try:
            shard = all_or_none(ranks, self._finish)
            texts = ranks.texts(strict_json.render(strict_json.to_plain(shard)).decode())
            path = all_or_none(ranks, partial(self._publish, texts))
            return SaveResult(Path(ranks.texts(str(path))[0]))
        except RankError:
            raise
        except Exception as error:  # it must not stop a step whose updates have begun
            if not ranks.rank:
                log.warning("checkpoint: none was saved of step %d: %s", self.snapshot.position.step, error)
            return SaveResult(None, _message(error))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Delete the checkpoint's files, unless it was published. A second call does nothing."""
        self._writer.close()
        if self._unfinished is not None:
            checkpoints.abandon_checkpoint(self._unfinished)
            self._unfinished = None

    def _finish(self) -> Shard:
        if self._failure:
            raise CheckpointError(self._failure)
        self._writer.finish()
        return self._writer.shard.summed(self._checksums)

    def _publish(self, texts: list[str]) -> Path | None:
        """On rank 0, publish the checkpoint whose shards the ranks describe in `texts`, and return its
        folder; on other ranks return None."""
        if self._unfinished is None:
            return None
        shards = [strict_json.parse_json(text.encode(), "a rank's shard").read(Shard) for text in texts]
        manifest = self.snapshot.manifest(len(shards), shards, self.save.extra)
        return checkpoints.publish_checkpoint(
            self._unfinished, manifest, keep=self.save.keep, spare=self.save.spare
        )


def begin_writing(
    snapshot: Snapshot,
    save: Save,
    ranks: RankGroup,
    kept_of_frozen: Callable[[int], Mapping[str, Tensor]],
) -> CheckpointWriter:
    """Begin a checkpoint of the State that `snapshot` describes: reserve disk space on all ranks, or on none.

    `kept_of_frozen(bucket)` returns, by kind of state, the fp32 tensors that a rank keeps of a frozen bucket.

    Raises CheckpointError, on every rank, naming the folder or file that cannot be written.
    """

    def begin() -> UnfinishedCheckpoint | None:
        check_plain(dict(snapshot.optimizer), "optimizer")
        check_plain(dict(save.extra), "extra")
        step = snapshot.position.step
        return None if ranks.rank else checkpoints.begin_checkpoint(save.folder.absolute(), step)

    slices = snapshot.slices(ranks.rank, ranks.world)
    unfinished = all_or_none(ranks, begin)
    try:
        folder = Path(ranks.texts(str(unfinished and unfinished.path))[0])
        writer = all_or_none(ranks, lambda: _create(folder, ranks, slices))
    except BaseException:
        if unfinished is not None:
            checkpoints.abandon_checkpoint(unfinished)
        raise
    by_bucket = {b: [*own] for b, own in groupby(slices, key=lambda x: x.bucket)}
    checksums = {x.stored.name: [0] * num_chunks(x.stored.nbytes, writer.shard.chunk) for x in slices}
    return CheckpointWriter(snapshot, save, ranks, unfinished, writer, by_bucket, checksums, kept_of_frozen)


def all_or_none(ranks: RankGroup, function: Callable[[], T]) -> T:
    """Call `function` on every rank; return this rank's result. If it raises on one rank, all ranks raise:
    CheckpointError, or the error of the rank's own call."""
    ranks, result, mine = ranks.job, None, None
    try:
        result = function()
    except Exception as error:
        mine = error
    messages = ranks.texts("" if mine is None else _message(mine))
    if mine is not None and not isinstance(mine, CheckpointError):
        raise mine
    for rank, message in zip(ranks.members, messages, strict=True):
        if message:
            said = Message(f"rank {rank}: {message}" if ranks.world > 1 else message)
            raise CheckpointError(said) from mine
    return cast("T", result)


def as_bytes(flat: Tensor) -> Any:
    """The bytes of a contiguous host tensor of any dtype, bf16 among them, which NumPy lacks."""
    return memoryview(flat.view(torch.uint8).numpy())


def _message(error: Exception) -> str:
    return f"{'' if isinstance(error, CheckpointError) else f'{type(error).__name__}: '}{marked(error)}"


def _create(folder: Path, ranks: RankGroup, slices: list[Slice]) -> ShardWriter:
    if not folder.is_dir():
        do = "save to a file system that all ranks share"
        disk.reject(folder, "no such folder", "the one that rank 0 made", do)
    return create_shard(folder / checkpoints.shard_name(ranks.rank, ranks.world), [x.stored for x in slices])
