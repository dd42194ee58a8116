"""A stream of records as batches for a loop of one's own, whose position is saved with a checkpoint.

Records come from what has `state_dict()` and `load_state_dict()`: an IterableDataset of Hugging Face's `datasets`,
or a class of one's own. Their tokens are packed one after another, and rows are cut from that wherever they end. A
position is the source's state before a record, and how many tokens of that record are used: after `load_state_dict`
the same batches follow as in a loop that never stopped, whatever the records' lengths.
"""

import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from zfunc.checkpoint.strict_json import Count, JsonNode, to_plain
from zfunc.errors import refuse
from zfunc.models.loss_pieces import IGNORE_INDEX
from zfunc.values import whole

log = logging.getLogger("zfunc")


@frozen
class StreamPosition:
    """A PackedStream's position between two batches: the beginning of the stream if its checksum is None."""

    used: Count  # tokens of the record that earlier batches have
    source: Any = None  # the source's state before the record; None: as it was given
    checksum: int | None = None  # CRC-32 of all tokens of the record


@frozen(eq=False)
class _Record:
    before: Any  # the source's state
    tokens: np.ndarray  # int64


@define(eq=False)
class PackedStream:
    """An iterator over batches `(inputs, targets)`, int64 [batch_size, seq_length] each, of records of `source`.

    `tokens(record)` returns a record's token ids, with whatever ends a document. The targets are the inputs, one
    token later; each token is an input once. The iteration ends with the source, and leaves out the tokens that do
    not fill a batch. With several ranks, let each read the whole stream and keep its rows. Raises ValueError for a
    `source`, `tokens` or a size that cannot be used.

    >>> class Numbers:
    ...     at = 0
    ...     def __iter__(self):
    ...         while True:
    ...             self.at += 1
    ...             yield self.at
    ...     def state_dict(self):
    ...         return {"at": self.at}
    ...     def load_state_dict(self, state):
    ...         self.at = state["at"]
    >>> def stream():
    ...     return PackedStream(Numbers(), lambda n: [n] * n, seq_length=3, batch_size=2)
    >>> first = stream()
    >>> next(first)[0].tolist()
    [[1, 2, 2], [3, 3, 3]]
    >>> position = first.state_dict()
    >>> position["source"], position["used"]
    ({'at': 3}, 0)
    >>> again = stream()
    >>> again.load_state_dict(position)
    >>> next(again)[0].tolist()
    [[4, 4, 4], [4, 5, 5]]
    """

    source: Any
    tokens: Callable[[Any], Any]
    seq_length: int = field(kw_only=True)
    batch_size: int = field(kw_only=True)
    _position: StreamPosition = field(init=False)
    _records: Iterator[Any] | None = field(init=False, default=None)
    _before: Any = field(init=False)  # the source's state before the next record
    _unread: list[_Record] = field(init=False, factory=list[_Record])  # from the position on
    _loaded: bool = field(init=False, default=False)  # whether the source was

    def __attrs_post_init__(self) -> None:
        whole("seq_length", self.seq_length, 1)
        whole("batch_size", self.batch_size, 1)
        methods = ("__iter__", "state_dict", "load_state_dict")
        if missing := [x for x in methods if not hasattr(self.source, x)]:
            got, do = (
                f"a {type(self.source).__name__} without {', '.join(missing)}",
                "write a class with them",
            )
            refuse("source", got, f"what has {', '.join(methods)}, as an IterableDataset has", do)
        # An iterator says where it is. What makes one begins anew, wherever the one before it was.
        self._before = self._state() if hasattr(self.source, "__next__") else None
        self._position = StreamPosition(0, self._before)

    def __iter__(self) -> "PackedStream":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        used, count = self._position.used, self.batch_size * self.seq_length
        size = sum(len(x.tokens) for x in self._unread) - used
        while size <= count:
            self._unread.append(self._read())
            size += len(self._unread[-1].tokens)
        # What is left over is the end of the last record: without that one there was no token too many.
        last = self._unread[-1]
        ids = np.concatenate([x.tokens for x in self._unread])[used:]
        self._unread = [last]
        self._position = _position(last, len(last.tokens) - (len(ids) - count))
        inputs, targets = (torch.from_numpy(ids[n : n + count].reshape(-1, self.seq_length)) for n in (0, 1))
        return inputs, targets.clone()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, as values of JSON: `extra` of `zfunc.save` takes it.

        Raises ValueError, which names the part, if the source's state has values that JSON does not have.
        """
        _check_json(self._position.source)
        return to_plain(self._position)

    def load_state_dict(self, state: Mapping[str, Any], *, exact: bool = True) -> None:
        """Continue from the position `state`, which `state_dict` of a stream of the same records returned.

        Raises CheckpointError for a dict of another form, and ValueError if the source now has another record
        there: its data or tokenizer differ, or it has a shuffle buffer, whose content `datasets` does not save. An
        equal record goes unnoticed. With `exact` False, batches go on from there, with a warning.
        """
        position = JsonNode({**state}, "the position of a stream").read(StreamPosition)
        state_of_source = position.source
        if state_of_source is None and self._loaded:
            got, do = "the beginning for a source that was moved", "make one"
            refuse("state", got, "a source as it was at first", do)
        # datasets begins anew, silently, if its epoch is not that of the state.
        epoch = state_of_source.get("epoch") if isinstance(state_of_source, dict) else None
        if epoch is not None and hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        if state_of_source is not None:
            self.source.load_state_dict(deepcopy(state_of_source))
            self._loaded = True
        self._records, self._before, self._unread = None, state_of_source, []
        self._position = position
        if position.checksum is None:
            return
        try:
            self._unread = [self._read()]
            self._position = _position(self._unread[0], position.used)
        except StopIteration:
            self._position = StreamPosition(0, state_of_source)
        if self._position != position:
            self._position = evolve(self._position, used=0)
            message = (
                f"the stream has {'another' if self._unread else 'no'} record where it was left: its data or "
                "tokenizer are others, or it has a shuffle buffer of `datasets`, whose records are not saved"
            )
            if exact:
                refuse("state", message, "the same record", "pass exact=False to go on from there")
            say = "stream: %s; going on from there: this pass may leave out records, or have some again"
            log.warning(say, message)

    def _read(self) -> _Record:
        """The source's next record with tokens. Raises StopIteration at its end."""
        if self._records is None:
            self._records = iter(self.source)
            _check_json(self.source.state_dict())  # before a training rather than at its first save
        before, tokens = self._before, np.zeros(0)
        while not len(tokens):
            before, record = self._before, next(self._records)
            self._before = self._state()
            tokens = np.asarray(self.tokens(record))
            if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
                got = f"{tokens.dtype} of shape {tokens.shape} for {record!r:.60}"
                refuse("tokens", got, "a list of whole numbers", "return the ids of one record")
        return _Record(before, tokens.astype(np.int64))

    def _state(self) -> Any:
        return deepcopy(self.source.state_dict())  # a source may go on with the dict that it returned


@define(eq=False)
class StreamedBatches:
    """The batches of a PackedStream, each read once and in order, by their position in sequences since the start of
    training. A token id below 0 is the complement (`~token`) of a token that is not learned."""

    stream: PackedStream
    next: int = 0  # the position of the batch that is read next
    _before: dict[str, Any] = field(
        init=False, factory=dict[str, Any]
    )  # where the stream was before the last
    _last: tuple[int, Tensor, Tensor] | None = field(init=False, default=None)

    def at(self, position: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the batch at `position`, int64 [batch_size, seq_length] each; a label is -100 where
        no loss counts. Raises ValueError unless `position` is that of the last batch or the next."""
        if self._last is None or self._last[0] != position:
            if position != self.next:
                got = f"sequence {position:,} of a stream that is at {self.next:,}"
                refuse(
                    "stream", got, "the next one", "resume a run that began with `stream`, or leave it out"
                )
            self._before = self.stream.state_dict()
            inputs, targets = next(self.stream)
            labels = torch.where(targets < 0, IGNORE_INDEX, targets)
            self._last = position, torch.where(inputs < 0, ~inputs, inputs), labels
            self.next += self.stream.batch_size
        return self._last[1:]

    def state_dict(self, position: int) -> dict[str, Any]:
        """The stream's position before the batch at `position`, the last one or the next, as values of JSON."""
        return self._before if self._last and self._last[0] == position else self.stream.state_dict()

    def load_state_dict(self, position: int, state: Mapping[str, Any]) -> None:
        """Continue with the batch at `position`, for which `state_dict` returned `state`. If the data at that
        place has changed, the stream goes on from there, and a warning is logged."""
        self.stream.load_state_dict(state, exact=False)
        self._last, self.next = None, position


def _position(record: _Record, used: int) -> StreamPosition:
    return StreamPosition(used, record.before, zlib.crc32(record.tokens.astype("<i8").tobytes()))


def _check_json(state: Any) -> None:
    if odd := _not_json(state, "state_dict()"):
        do = "leave out what the source does not need, or make it a list, a number or text"
        refuse("source", odd, "a state of JSON's own types, which a checkpoint holds", do)


def _not_json(value: Any, name: str) -> str:
    """The innermost part of `value`, called `name`, that JSON does not restore, with that part's type, or ""."""
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return ""
    except (TypeError, ValueError):
        pass
    each: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    inner = (_not_json(x, f"{name}[{key!r}]") for key, x in each)
    return next(filter(None, inner), f"{name}, a {type(value).__name__}")
