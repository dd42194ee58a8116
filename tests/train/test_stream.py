"""A stream that stops after any batch and is taken up by new objects goes on as one that never stopped."""

import gzip
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from forked import fork
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import in_pairs
from text_data import save, save_splits

from zfunc.errors import CheckpointError
from zfunc.models.loss import IGNORE_INDEX
from zfunc.runtime.collectives import RankGroup
from zfunc.train.data.corpus import rank_batch
from zfunc.train.data.documents import holds_tokens
from zfunc.train.data.record_files import open_stream
from zfunc.train.data.stream import PackedStream
from zfunc.train.settings import TrainSettings

Make = Callable[[list[int]], Any]  # a source of records, of the lengths of their tokens
LENGTHS = [5, 0, 1, 40, 2, 3, 0, 0, 17, 1, 1, 1, 9, 4, 30, 6, 2]


class Iterates:
    """An iterator of records, whose state is one dict that it goes on with."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.state = lengths, {"at": 0}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.state["at"] >= len(self.lengths):
            raise StopIteration
        self.state["at"] += 1
        return {"number": self.state["at"], "length": self.lengths[self.state["at"] - 1]}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


class Begins(Iterates):
    """What makes an iterator: each begins at the first record, or once where a state says."""

    __next__: Any = property()  # none: it is the iterator's

    def __iter__(self) -> Iterator[Any]:
        while self.state["at"] < len(self.lengths):
            yield Iterates.__next__(self)


def records(numbers: list[int], lengths: Sequence[int]) -> Iterator[Any]:
    for n in numbers:
        yield {"number": n + 1, "length": lengths[n]}


def dataset(lengths: list[int], shards: int = 3, **shuffled: Any) -> Any:
    datasets = pytest.importorskip("datasets", reason='pip install -e ".[datasets]"')
    numbers = [[*range(n, len(lengths), shards)] for n in range(shards)]

    def generated(numbers: list[list[int]], lengths: tuple[int, ...]) -> Iterator[Any]:
        for own in numbers:
            yield from records(own, lengths)

    of = {"numbers": numbers, "lengths": tuple(lengths)}  # a list is one of shards
    made = datasets.IterableDataset.from_generator(generated, gen_kwargs=of, features=_features(datasets))
    return made.shuffle(**shuffled) if shuffled else made


def _features(datasets: Any) -> Any:
    return datasets.Features({"number": datasets.Value("int64"), "length": datasets.Value("int64")})


def interleaved(lengths: list[int]) -> Any:
    datasets = pytest.importorskip("datasets", reason='pip install -e ".[datasets]"')
    parts = [dataset(lengths, 2), dataset(lengths[::-1], 1).map(lambda x: x)]
    return datasets.interleave_datasets(parts, probabilities=[0.4, 0.6], seed=3)


def mapped(lengths: list[int]) -> Any:
    def twice(batch: Any) -> Any:
        return {name: [x for x in values for _ in range(2)] for name, values in batch.items()}

    return dataset(lengths).map(twice, batched=True, batch_size=3).filter(lambda x: x["number"] % 5)


def of_epoch(lengths: list[int]) -> Any:
    made = dataset(lengths, 7, seed=1, buffer_size=1)  # the order of shards
    made.set_epoch(2)
    return made


SOURCES: dict[str, Make] = {
    "an iterator": Iterates,
    "datasets": dataset,
    "datasets, interleaved": interleaved,
    "datasets, mapped in batches": mapped,
    "datasets, repeated": lambda lengths: dataset(lengths).repeat(2),
    "datasets, of another epoch": of_epoch,
}


def tokens(record: Any) -> list[int]:
    return [1000 * record["number"] + n for n in range(record["length"])]


def stream(source: Any, seq_length: int = 4, batch_size: int = 2, of: Any = tokens) -> PackedStream:
    return PackedStream(source, of, seq_length=seq_length, batch_size=batch_size)


def batches(of: PackedStream) -> list[Any]:
    return [[x.tolist() for x in batch] for batch in of]


def assert_resumes(make: Make, lengths: list[int], seq: int, rows: int, stop: int) -> None:
    every = [x for record in make(lengths) for x in tokens(record)]  # the witness: all tokens, cut
    count = max(0, len(every) - 1) // (seq * rows)
    cut = [np.array(every[n : n + count * seq * rows]).reshape(count, rows, seq).tolist() for n in (0, 1)]
    expected = [list(pair) for pair in zip(*cut, strict=True)]
    first = stream(make(lengths), seq, rows)
    seen = [[x.tolist() for x in next(first)] for _ in range(min(stop, count))]
    saved = json.loads(json.dumps(first.state_dict()))
    assert seen + batches(first) == expected  # saving moves nothing
    again = stream(make(lengths), seq, rows)
    again.load_state_dict(saved)
    assert again.state_dict() == saved
    assert batches(again) == expected[len(seen) :]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 5), st.integers(1, 3), st.integers(0, 12))
def test_a_stream_that_stopped_goes_on_as_if_it_had_not(
    lengths: list[int], seq: int, rows: int, stop: int
) -> None:
    for make in (Iterates, Begins):
        assert_resumes(make, lengths, seq, rows, stop)


@pytest.mark.parametrize("name", SOURCES)
def test_a_stream_of_any_source_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    for stop in (0, 1, 2, 3, 5, 8, 100):
        assert_resumes(SOURCES[name], LENGTHS, 4, 2, stop)


def test_a_resume_with_rows_of_another_size_goes_on_at_the_same_token() -> None:
    first = stream(Iterates(LENGTHS))
    for _ in range(3):
        next(first)
    again = stream(Iterates(LENGTHS), seq_length=7, batch_size=1)
    again.load_state_dict(first.state_dict())
    assert next(again)[0][0, 0] == next(first)[0][0, 0]


def test_a_resume_goes_to_the_epoch_of_the_state() -> None:
    """`datasets` itself begins anew if the epoch is another."""
    first = stream(of_epoch(LENGTHS))
    for _ in range(6):
        next(first)
    again = stream(dataset(LENGTHS, 7, seed=1, buffer_size=1))
    again.load_state_dict(first.state_dict())
    assert batches(again) == batches(first) != []


def test_a_source_that_has_another_record_there_is_refused_or_named(caplog: Any) -> None:
    """Other tokens or data, or a shuffle buffer, whose records `datasets` does not save."""

    def shuffled(lengths: list[int]) -> Any:
        return dataset(lengths, seed=1, buffer_size=4)

    for make, lengths, of in (
        (shuffled, LENGTHS, tokens),
        (dataset, LENGTHS, lambda x: [n + 1 for n in tokens(x)]),
        (dataset, LENGTHS[:3], tokens),
        (Iterates, [3, *LENGTHS], tokens),
    ):
        first = stream(make(LENGTHS))
        for _ in range(8):
            next(first)
        saved = first.state_dict()
        again = stream(make(lengths), of=of)
        with pytest.raises(
            ValueError, match=r"(?s)state: got .*shuffle buffer.* expected the same record: pass"
        ):
            again.load_state_dict(saved)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "zfunc"):
            again.load_state_dict(saved, exact=False)
        assert "stream: the stream has " in caplog.text
        begun = next(iter(batches(again)), [[[0]]])[0][0][0]
        assert begun % 1000 == of({"number": 0, "length": 1})[0] or lengths == LENGTHS[:3]  # a record's first


class Odd(Iterates):
    def state_dict(self) -> Any:
        return {"at": [0, {"rng": self.state["rng"]}]} if "rng" in self.state else super().state_dict()


def test_what_cannot_be_saved_is_refused_by_its_name_before_a_batch() -> None:
    for value, kind in ((np.int64(1), "int64"), ((1, 2), "tuple"), ({1}, "set"), (float("nan"), "float")):
        source = Odd([9, 9])
        source.state["rng"] = value
        with pytest.raises(
            ValueError, match=rf"got state_dict\(\)\['at'\]\[1\]\['rng'\], a {kind}, expected"
        ):
            next(stream(source))


def test_what_is_no_stream_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"source: got a list without state_dict, load_state_dict, expected"):
        stream([1, 2])
    with pytest.raises(ValueError, match="batch_size: got 0, expected a whole number of at least 1"):
        stream(Iterates([1]), batch_size=0)
    for odd in ([0.5], [[1]], "text"):
        with pytest.raises(ValueError, match=r"tokens: got .* expected a list of whole numbers"):
            next(stream(Iterates([1]), of=lambda _, x=odd: x))
    with pytest.raises(CheckpointError, match="the position of a stream: got none, expected a field"):
        stream(Iterates([1])).load_state_dict({})
    moved = stream(dataset(LENGTHS))
    beginning = moved.state_dict()
    for _ in range(3):
        next(moved)
    moved.load_state_dict(moved.state_dict())
    with pytest.raises(ValueError, match="got the beginning for a source that was moved, expected"):
        moved.load_state_dict(beginning)


# --- files of records -------------------------------------------------------------------------------------


def write_shards(folder: Path) -> list[int]:
    """Files of records of any size and format: the numbers of all records, which are their texts."""
    numbers = iter(range(1000))
    for n, size in enumerate((7, 0, 1, 12)):
        lines = [json.dumps({"text": f"<{next(numbers)}>"}) for _ in range(size)]
        text = "".join(f"{x}\n{'' if k % 3 else chr(10)}" for k, x in enumerate(lines)).encode()
        path = folder / f"{n}.jsonl{'.gz' if n == 3 else ''}"
        path.write_bytes(gzip.compress(text) if n == 3 else text)
    pq = pytest.importorskip("pyarrow.parquet", reason='pip install -e ".[datasets]"')
    pyarrow = pytest.importorskip("pyarrow")
    texts = [f"<{next(numbers)}>" for _ in range(11)]
    pq.write_table(pyarrow.table({"text": texts, "id": [*range(11)]}), folder / "4.parquet", row_group_size=4)
    saved = save(folder / "saved", {"text": [f"<{next(numbers)}>" for _ in range(9)]})
    (saved / "data-00000-of-00001.arrow").rename(folder / "5.arrow")
    return [*range(next(numbers))]


def write_saved(folder: Path) -> list[int]:
    """What `save_to_disk` wrote: a held-out split, and a training split with what `map` left beside its files."""
    texts = [f"<{n}>" for n in range(40)]
    save_splits(folder, train={}, test={"text": ["<99>"]})
    save(folder / "train", {"id": [*range(40)], "text": texts}, num_shards=3)
    shutil.copy(folder / "test/data-00000-of-00001.arrow", folder / "train/cache-1f.arrow")
    return [*range(40)]


def read_numbers(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"<(\d+)>", text)]


def opened_shards(folder: Path, buffer: int, seq: int = 4, rows: int = 2) -> Any:
    sizes: dict[str, Any] = {"seq_length": seq, "batch_size": rows, "vocab_size": 256}
    return open_stream(folder, tokenizer=None, buffer=buffer, seed=3, **sizes).stream


def texts_of(stream: Any, begin: int, count: int) -> str:
    """The bytes that are learned in batches from one on, as text."""
    each = [stream.at(n * 2)[1] for n in range(begin, begin + count)]
    return bytes(x for labels in each for x in labels.flatten().tolist()).decode()


@pytest.mark.parametrize(
    ("files", "buffer"),
    in_pairs([(write_shards, "*"), (write_saved, ""), (write_saved, "train")], [1, 3, 10, 1000]),
)
def test_a_pass_over_files_has_each_record_once_and_goes_on_from_any_batch(
    files: tuple[Any, str], buffer: int, tmp_path: Path
) -> None:
    write, name = files
    every = write(tmp_path)
    passes, path = 12, tmp_path / name
    text = "<" + texts_of(opened_shards(path, buffer), 0, passes * len(every))  # the first is no label
    found = read_numbers(text)
    each = [found[n : n + len(every)] for n in range(0, len(found), len(every))][:-1]
    assert len(each) > 2
    assert [sorted(x) for x in each] == len(each) * [every]
    assert all(x == every for x in each) == (buffer == 1)
    assert (each[0] == each[1]) == (buffer == 1)
    moved = np.abs(np.argsort(each[0]) - np.arange(len(every)))
    assert buffer != 10 or len({*moved.tolist()}) > 5
    for stop in (1, 2, 5, 17, 40, 61):
        first, again = opened_shards(path, buffer), opened_shards(path, buffer)
        texts_of(first, 0, stop)
        saved = json.loads(json.dumps(first.state_dict(stop * 2)))
        later = texts_of(first, stop, 20)
        assert later in text
        again.load_state_dict(stop * 2, saved)
        assert texts_of(again, stop, 20) == later
        assert first.state_dict((stop + 20) * 2) == again.state_dict((stop + 20) * 2)


def one_of_two_ranks(rank: int, out: Path) -> None:
    """Write the labels of this rank's rows of the batches of some passes beside the folder `out`."""
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
    sizes: dict[str, Any] = {"seq_length": 4, "batch_size": 6}
    job = TrainSettings(**sizes, stream=True, data=out / "*", eval_every=0)
    corpus = open_stream(out / "*", tokenizer=None, buffer=5, seed=3, vocab_size=256, **sizes)
    each = (rank_batch(job, corpus, n * 6, RankGroup.of())[1] for n in range(30))
    found = [labels.tolist() for labels, _ in each]
    out.with_name(f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_two_ranks_have_each_record_once_a_pass_between_them(tmp_path: Path) -> None:
    (folder := tmp_path / "shards").mkdir()
    every = write_shards(folder)
    pids = [fork(partial(one_of_two_ranks, rank, folder)) for rank in (0, 1)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    ranks = [json.loads((tmp_path / f"{n}.json").read_text()) for n in (0, 1)]
    batches = [[*a, *b] for a, b in zip(*ranks, strict=True)]
    assert all(len(own) == 3 for rank in ranks for own in rank)
    text = bytes(x for batch in batches for row in batch for x in row if x != IGNORE_INDEX).decode()
    found = read_numbers("<" + text)
    each = [found[n : n + len(every)] for n in range(0, len(found), len(every))][:-1]
    assert len(each) > 2
    assert [sorted(x) for x in each] == len(each) * [every]


def test_the_first_files_may_be_empty(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason='pip install -e ".[datasets]"')
    pyarrow = pytest.importorskip("pyarrow")
    for name, rows in (("a", []), ("b", [[k, 2] for k in range(300)])):
        typed = pyarrow.array(rows, pyarrow.list_(pyarrow.int64()))
        pq.write_table(pyarrow.table({"input_ids": typed}), tmp_path / f"{name}.parquet")
    assert holds_tokens(tmp_path / "*.parquet")
    assert not holds_tokens(tmp_path / "*.jsonl")
    sizes: dict[str, Any] = {"seq_length": 4, "batch_size": 1, "vocab_size": 999, "buffer": 1, "seed": 0}
    stream = open_stream(tmp_path, tokenizer=None, **sizes).stream
    assert stream is not None
    assert stream.at(0)[1].tolist() == [[2, 1, 2, 2]]


def test_held_out_splits_and_packed_files_are_left_out_and_named(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / "files" / f"{name}-00000.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "files" / f"{name}-00000.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "files/packed.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    save_splits(tmp_path / "saved", train={"text": ["train"]}, test={"text": ["test"]})
    sizes: dict[str, Any] = {"seq_length": 9, "batch_size": 1, "vocab_size": 256, "buffer": 1, "seed": 0}
    for name, left_out in (("files", "packed.jsonl.zst, test-00000.jsonl"), ("saved", "test")):
        corpus = open_stream(tmp_path / name, tokenizer=None, **sizes)
        assert f"left out: {left_out}\n" in f"{corpus}\n"
        assert bytes(corpus.stream.at(0)[0].flatten().tolist()) == b"train\0tra"  # type: ignore[union-attr]


def test_a_damaged_saved_dataset_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save(tmp_path / "d", {"text": [str(n) * 99 for n in range(300)]}, num_shards=2)
    file, state = tmp_path / "d/data-00000-of-00002.arrow", tmp_path / "d/state.json"
    whole = file.read_bytes()
    for expected, damage in (
        (
            "arrow, which datasets cannot read .*: copy or save it again",
            lambda: file.write_bytes(whole[:-99]),
        ),
        ("arrow, which datasets cannot read .*: copy or save it again", file.unlink),
        ("whose list of files cannot be read .* save it again", lambda: state.write_text("{}")),
    ):
        damage()
        with pytest.raises(ValueError, match=expected):
            texts_of(opened_shards(tmp_path / "d", 1), 0, 99)


def test_a_stream_of_chats_masks_what_is_not_learned(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ask", "completion": "ok"}) + "\n" for _ in range(4)))
    sizes: dict[str, Any] = {"seq_length": 6, "batch_size": 1, "vocab_size": 256, "buffer": 1, "seed": 0}
    corpus = open_stream(path, tokenizer=None, **sizes)
    inputs, labels = corpus.stream.at(0)  # type: ignore[union-attr]
    assert bytes(inputs[0].tolist()) == b"askok\0"
    assert labels[0].tolist() == [-100, -100, *b"ok\0", -100]
    assert corpus.held_out.loss_mask is not None


def test_data_that_is_no_stream_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text("\n")
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n')
    for name, expected in (
        ("x*", r"names no file, expected JSONL, Parquet or Arrow files, a folder or a pattern"),
        ("a.txt", r"where .*a\.txt is, expected JSONL, Parquet or Arrow"),
        ("b.jsonl", r"got no record in .*b\.jsonl: name other data"),
        ("c.jsonl", r"got no text in .*c\.jsonl, expected at least one document"),
    ):
        with pytest.raises(ValueError, match=expected):
            opened_shards(tmp_path / name, 1)
