"""Datasets as a corpus: pairs, tokens, labels, splits, Parquet, chats; few rows are in memory."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trainings import losses, train
from text_data import CHAT, END, dataset, loss_mask_of, opened, save, save_splits, tokens_of

from zfunc.train.data import tables
from zfunc.train.data.documents import holds_tokens
from zfunc.train.data.tokenizer import open_tokenizer

IDS = [[(n * k) % 300 for k in range(n % 7)] for n in range(40)]


def test_pairs_and_the_split_that_is_held_out(tmp_path: Path) -> None:
    def pairs(*numbers: int) -> dict[str, Any]:
        return {"completion": [str(2 * n) for n in numbers], "prompt": [f"{n}=" for n in numbers]}

    path = save_splits(tmp_path / "d", train=pairs(*range(20)), test=pairs(1), validation=pairs(7, 8))
    corpus = opened(path, tmp_path)
    assert bytes(corpus.held_out.tokens.tolist()) == b"7=14\x008=16\0"
    assert loss_mask_of(corpus)[-10:] == [0, 0, 1, 1, 1] * 2
    assert bytes(corpus.train.tokens.tolist()) == b"".join(b"%d=%d\0" % (n, 2 * n) for n in range(20))
    assert "held out: the split validation" in str(corpus)
    assert "left out: the splits test" in str(corpus)
    alone = opened(path / "train", tmp_path)
    assert tokens_of(alone) == corpus.train.tokens.tolist()
    assert "held out: the end" in str(alone)


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    path = save(tmp_path / "d", {"input_ids": IDS, "text": ["a"] * 40}, num_shards=2)
    assert holds_tokens(path)
    corpus = opened(path, tmp_path, vocab_size=300)
    assert tokens_of(corpus) == [x for row in IDS for x in row]
    stream = corpus.train
    assert (stream.tokens.dtype, corpus.vocab_size, stream.loss_mask) == (np.uint16, 300, None)
    assert len(stream) in np.cumsum([len(row) for row in IDS]), "whole rows are held out"
    assert opened(path, tmp_path, vocab_size=70_000).train.tokens.dtype == np.uint32


def test_labels_give_the_loss_mask_and_padding_is_dropped(tmp_path: Path) -> None:
    ids = [[n, n + 1, n + 2, 0] for n in range(30)]
    labels = [[-100, row[1], row[2], -100] for row in ids]
    columns = {"attention_mask": [[1, 1, 1, 0]] * 30, "input_ids": ids, "labels": labels}
    corpus = opened(save(tmp_path / "d", columns), tmp_path)
    assert tokens_of(corpus) == [x for row in ids for x in row[:3]]
    assert loss_mask_of(corpus) == [0, 1, 1] * 30
    assert "learned: 60 of 90, in 30 documents not all" in str(corpus)


def test_rows_that_were_selected_are_the_rows(tmp_path: Path) -> None:
    dataset({"text": ["a", "b", "c", "d"]}).select([3, 1, 2]).save_to_disk(tmp_path / "d")
    assert bytes(tokens_of(opened(tmp_path / "d", tmp_path))) == b"d\0b\0c\0"


def test_what_datasets_wrote_is_read(tmp_path: Path) -> None:
    """A DatasetDict of version 5.2, with 20 and 2 rows of prompt, completion and number."""
    pytest.importorskip("datasets")
    corpus = opened(Path(__file__).parents[1] / "goldens/saved_dataset", tmp_path)
    assert bytes(corpus.train.tokens.tolist()) == b"".join(b"%d+%d=%d\0" % (n, n, 2 * n) for n in range(20))
    assert bytes(corpus.held_out.tokens.tolist()) == b"3+3=6\x009+9=18\0"
    assert "left out: the columns number" in str(corpus)


def test_parquet_files_of_chats_as_the_hub_has_them(tokenizer_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    template = "{% for m in messages %}{{ m.content }} {{ m.tool_calls | default('</s>') }} {% endfor %}"
    tokenizer_file.with_name("chat_template.jinja").write_text(template)
    tokenizer = open_tokenizer(tokenizer_file)
    (tmp_path / "d" / "data").mkdir(parents=True)
    (tmp_path / "d" / "README.md").write_text("a card")
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("test-00000-of-00001", 1)):
        rows = dataset({"id": range(count), "messages": [CHAT] * count})
        rows.to_parquet(tmp_path / "d" / "data" / f"{name}.parquet")
    corpus = opened(tmp_path / "d", tmp_path, tokenizer=tokenizer)
    assert corpus.train.tokens.tolist() == [4, END, 5, END] * 5
    assert loss_mask_of(corpus) == [0, 0, 1, 1] * 6
    assert corpus.held_out.tokens.tolist() == [4, END, 5, END]
    assert "held out: the split test" in str(corpus)
    assert "left out: the columns id" in str(corpus)
    file = tmp_path / "d" / "data" / "test-00000-of-00001.parquet"
    assert tokens_of(opened(file, tmp_path, tokenizer=tokenizer)) == corpus.held_out.tokens.tolist()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="which datasets cannot read .*copy or save it again"):
        opened(tmp_path / "d", tmp_path, tokenizer=tokenizer)


def test_a_column_of_a_type_that_datasets_lacks_is_left_out_or_named(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    maps = pa.array([[("a", 1)]] * 3, type=pa.map_(pa.string(), pa.int64()))
    parquet.write_table(pa.table({"meta": maps, "text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": maps}), tmp_path / "b.parquet")
    corpus = opened(tmp_path / "a.parquet", tmp_path)
    assert bytes(tokens_of(corpus)) == b"a\0b\0c\0"
    assert "left out: the columns meta" in str(corpus)
    with pytest.raises(ValueError, match="which datasets cannot read .*no type for the column 'text'"):
        opened(tmp_path / "b.parquet", tmp_path)


def test_of_parquet_a_few_rows_are_in_memory_and_a_large_row_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one group of 4,000 rows, 24 MB with a column that is not read; and of 64 rows, one of them of 8 MB."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    monkeypatch.setattr(tables, "_BATCH", 1 << 20)
    rows = [f"{n:06}" * 512 for n in range(4000)]
    many, one = pa.table({"text": rows, "id": rows}), pa.table({"text": ["x" * 8_000_000, *["y"] * 63]})
    pa.set_memory_pool(pool)
    try:
        for table, of_arrow, of_python in ((many, 6e6, 4e6), (one, 24e6, 40e6)):
            parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="none")
            del table
            before = pool.bytes_allocated(), pool.max_memory()
            tracemalloc.start()
            corpus = opened(tmp_path / "a.parquet", tmp_path)
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < of_python
            assert pool.max_memory() <= max(before[1], before[0] + of_arrow)
            texts = bytes(tokens_of(corpus)).split(b"\0")[:-1]
            assert [len(x) for x in texts] == ([3072] * 4000 if len(texts) > 64 else [8_000_000, *[1] * 63])
    finally:
        pa.set_memory_pool(usual)


@pytest.mark.usefixtures("own_folder")
def test_a_training_on_tokens_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [[(n * k + n) % 300 for k in range(40)] for n in range(60)]
    save(Path("d"), {"input_ids": ids, "labels": [[-100] * 20 + row[20:] for row in ids]})
    job = ("--data", "d", "--vocab-size", 300, "--steps", 6)
    assert train(*job, "--save-every", 3, "--out", "first") == 0
    assert train(*job, "--resume", "first/checkpoints/step-00000003", "--out", "second") == 0
    assert losses("second") == losses("first")[3:]
    assert "bits per token" in capsys.readouterr().out
    assert train(*job, "--tokenizer", "tokenizer.json", "--out", "no") == 2
