"""A checkpoint on its way to the disk: one file a rank, written bucket by bucket, published when all are whole.

The invariant: what becomes of it is decided by all ranks. A failure on one is told to all, no checkpoint gets a
name, and those before it are as they were.
"""

import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from attrs import define, field, frozen
from torch import Tensor

from zfunc.checkpoint import directory as checkpoints
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.manifest import check_plain
from zfunc.checkpoint.manifest_json import position_fields, read_shard, shard_fields
from zfunc.checkpoint.parallel_io import in_parallel
from zfunc.checkpoint.safetensors_file import CHUNK, Shard, cut_elements, describe_shard, num_chunks
from zfunc.checkpoint.shard_writer import ShardWriter, create_shard
from zfunc.checkpoint.snapshot import Slice, Snapshot
from zfunc.errors import CheckpointError, RankError
from zfunc.runtime.collectives import RankGroup
from zfunc.values import of_type

T = TypeVar("T")
log = logging.getLogger("zfunc")


def _folder(path: Any) -> Path:
    of_type("Save: folder", path, str | os.PathLike, "a path: pass a string or a Path")
    return Path(os.fspath(path)).expanduser()


@frozen
class Save:
    """Where to save: `folder` gets a folder for every checkpoint, of which the newest `keep` stay.

    `extra` is saved with it: a dict of JSON's own types. Raises ValueError for a
    `keep` below 1, and CheckpointError for an `extra` that is something else.
    """

    folder: Path = field(converter=_folder)
    keep: int = field(default=2, kw_only=True)
    extra: Mapping[str, Any] = field(factory=dict[str, Any], kw_only=True)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise ValueError(
                f"keep: got {self.keep!r}, expected at least 1: the newest checkpoint always stays"
            )
        check_plain(self.extra, "extra")


@frozen
class SaveResult:
    """How it ended: the folder of a complete checkpoint, or why there is none."""

    path: Path | None
    failure: str = ""


@define(eq=False)
class CheckpointWriter:
    """A checkpoint from `begin_writing` to `publish` or `abandon`."""

    snapshot: Snapshot
    save: Save
    ranks: RankGroup
    _pending: checkpoints.UnfinishedCheckpoint | None  # rank 0 has it
    _writer: ShardWriter
    _slices: Mapping[int, list[Slice]]
    _checksums: dict[str, list[int]]  # of every tensor's chunks
    _failure: str = ""

    def write(self, bucket: int, kept: Mapping[str, Tensor]) -> None:
        """Write this rank's slices of a bucket; `kept` are its buffers of that bucket, by kind.

        A disk that cannot take them does not stop the step: `publish` tells.
        """
        if self._failure:
            return
        parts = [part for x in self._slices.get(bucket, ()) for part in _parts(x, kept[x.kind])]
        try:
            in_parallel(self._put, parts)
        except Exception as error:
            self._failure = _told(error)

    def _put(self, name: str, start: int, values: Tensor) -> None:
        data = as_bytes(values.cpu())
        self._checksums[name][start * values.element_size() // CHUNK] = zlib.crc32(data)
        self._writer.write_at(name, start, data)

    def publish(self) -> SaveResult:
        """When all ranks have written everything: wait for the disk, and give the checkpoint its name."""
        ranks = self.ranks
        try:
            shard = all_or_none(ranks, self._finish)
            texts = ranks.texts(strict_json.render(shard_fields(shard)).decode())
            path = all_or_none(ranks, partial(self._name, texts))
            return SaveResult(Path(ranks.texts(str(path))[0]))
        except RankError:
            raise
        except Exception as error:  # a step whose updates have begun does not end for it
            if not ranks.rank:
                log.warning("checkpoint: none was saved of step %d: %s", self.snapshot.position.step, error)
            return SaveResult(None, _told(error))
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Delete what there is of it. Nothing happens if it has its name, or the second time."""
        self._writer.close()
        if self._pending is not None:
            checkpoints.abandon_checkpoint(self._pending)
            self._pending = None

    def _finish(self) -> Shard:
        if self._failure:
            raise CheckpointError(self._failure)
        self._writer.finish()
        return describe_shard(self._writer.path.name, self._writer.header, self._checksums, CHUNK)

    def _name(self, texts: list[str]) -> Path | None:
        """On rank 0: publish it, and return its folder."""
        if self._pending is None:
            return None
        shards = [read_shard(strict_json.parse_json(text.encode(), "a rank's shard")) for text in texts]
        return checkpoints.publish_checkpoint(
            self._pending, self.snapshot.manifest(shards, self.save.extra), keep=self.save.keep
        )


def begin_writing(snapshot: Snapshot, save: Save, ranks: RankGroup) -> CheckpointWriter:
    """Reserve the room for a checkpoint: on every rank, or on none.

    Raises CheckpointError, on every rank, naming the folder or file that cannot be written.
    """
    slices, writers = snapshot.slices(ranks.rank, ranks.world), list[ShardWriter]()
    all_or_none(ranks, partial(_check, snapshot, save))
    pending = all_or_none(ranks, partial(_begin, snapshot, save, ranks))
    try:
        folder = Path(ranks.texts(str(pending and pending.path))[0])
        all_or_none(ranks, lambda: writers.append(_create(folder, ranks, slices)))
    except BaseException:
        for writer in writers:
            writer.close()
        if pending is not None:
            checkpoints.abandon_checkpoint(pending)
        raise
    by_bucket: dict[int, list[Slice]] = {}
    for x in slices:
        by_bucket.setdefault(x.bucket, []).append(x)
    checksums = {x.stored.name: [0] * num_chunks(x.stored.nbytes, CHUNK) for x in slices}
    return CheckpointWriter(snapshot, save, ranks, pending, writers[0], by_bucket, checksums)


def all_or_none(ranks: RankGroup, function: Callable[[], T]) -> T:
    """What `function` returns here, if it does on all ranks. Where it raises on any, all of them raise.

    What they raise is CheckpointError; but the rank on which another error came up raises that.
    """
    result, failure = None, ""
    mine: Exception | None = None
    try:
        result = function()
    except Exception as error:
        mine, failure = error, _told(error)
    for rank, message in zip(ranks.members, ranks.texts(failure), strict=True):
        if message and not (mine is not None and not isinstance(mine, CheckpointError)):
            raise CheckpointError(f"rank {rank}: {message}" if ranks.world > 1 else message)
    if mine is not None:
        raise mine
    return cast("T", result)


def as_bytes(flat: Tensor) -> Any:
    """The bytes of a contiguous host tensor, not copied: NumPy has no bf16."""
    return memoryview(flat.view(torch.uint8).numpy())


def _parts(x: Slice, kept: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """A slice's tensor, where to begin and what to write: a chunk at a time."""
    flat = kept[x.at : x.at + x.stop - x.start]
    for start, stop in cut_elements(0, flat.numel(), flat.element_size(), CHUNK):
        yield x.stored.name, start, flat[start:stop]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _check(snapshot: Snapshot, save: Save) -> None:
    """What goes into the manifest beside the bytes has to be readable again: said before anything is done."""
    for what, value in (
        ("position", position_fields(snapshot.position)),
        ("optimizer", dict(snapshot.optimizer)),
        ("extra", dict(save.extra)),
    ):
        check_plain(value, what)
        try:
            strict_json.render(value)
        except ValueError as error:
            raise CheckpointError(
                f"{what}: got {error}, expected text that can be encoded: change it"
            ) from error


def _begin(snapshot: Snapshot, save: Save, ranks: RankGroup) -> checkpoints.UnfinishedCheckpoint | None:
    """On rank 0: the folder."""
    return (
        None if ranks.rank else checkpoints.begin_checkpoint(save.folder.absolute(), snapshot.position.step)
    )


def _create(folder: Path, ranks: RankGroup, slices: list[Slice]) -> ShardWriter:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: got nothing there, expected the folder that rank 0 has made: save where all ranks see one "
            "file system"
        )
    return create_shard(folder / checkpoints.shard_name(ranks.rank, ranks.world), [x.stored for x in slices])
