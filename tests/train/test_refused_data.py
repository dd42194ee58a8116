"""Data that cannot be trained on is refused with its place; a first look ends behind its characters."""

import errno
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trainings import train
from text_data import CHAT, opened, save, save_splits, tokens_of, write

from zfunc.train.data import documents, packing
from zfunc.train.data.documents import first_look
from zfunc.train.data.tokenizer import BYTES, open_tokenizer

LINE = "a.jsonl, line 2"
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "\ud800"}


def call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


REFUSED: dict[
    str, list[tuple[Any, str]]
] = {  # by the file: its content (of a.jsonl its second line), or columns
    "a.jsonl": [
        ('{"text": "a', rf"{LINE}: got invalid JSON \(Unterminated string starting at: line 1 column 10"),
        (b'{"text": "\xff"}', f"{LINE}: got invalid JSON .*utf-8.*: save it as UTF-8"),
        ([1], rf"{LINE}: got \[1\], expected .*write one object a document, or name the file .json"),
        ({"txt": "a"}, f"{LINE}: got an object with txt, expected .*rename its keys"),
        ({"prompt": "a"}, f"{LINE}: got an object with prompt, expected"),
        ({"text": 5}, f"{LINE}, 'text': got 5, expected a string: write it as one"),
        ({"prompt": None, "completion": ""}, "got None, expected a string: write a text, or leave"),
        ({"prompt": "a", "completion": [USER]}, "expected a string: write both of the pair as texts or as"),
        ('{"text": "a", "text": "b"}', "the name 'text' twice in one object"),
        ({"text": "a\ud800"}, f"{LINE}: got invalid JSON .*surrogates"),
        ('{"text": "a"} {"text": "b"}', "Extra data"),
        ("[" * 100_000, f"{LINE}: got invalid JSON"),
        ({"messages": [USER]}, f"{LINE}: got a chat without a turn of the assistant to learn, expected one"),
        ({"messages": []}, f"{LINE}: got a chat without a turn of the assistant"),
        ({"messages": "hi"}, f"{LINE}: got 'hi', expected JSON"),
        ({"messages": {"a": 1}}, f"{LINE}: got .*'a': 1.*, expected a list of objects, as in"),
        ({"messages": [USER, call("{")]}, f"{LINE}, message 2: got '{{', expected JSON"),
        (
            {"messages": [USER, call("[1]")]},
            f"{LINE}, message 2: got the arguments .1., expected a JSON object",
        ),
        ({"messages": [USER, call("{}")], "tools": "x"}, f"{LINE}: got 'x', expected JSON"),
        (
            {"conversations": [{"from": "bing", "value": "a"}]},
            "message 1: got 'bing' as role, expected .*human, ",
        ),
        ({"prompt": [USER, call("{}")], "completion": [USER]}, "without a turn of the assistant to learn"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
            "message 1: got ..f.., expected a li",
        ),
        ({"prompt": [USER], "completion": "a"}, f"{LINE}: got 'a', expected JSON"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, rf"{LINE}: got a preference \(chosen, rejected\)"),
        ({"prompt": "a", "completion": "b", "label": False}, r"got a preference \(completion, label\)"),
        ({"messages": [USER | {"weight": "0"}]}, f"{LINE}, message 1: got '0' as weight, expected 0 or 1"),
        (
            {"instruction": "a", "input": ["b"], "output": "c"},
            f"{LINE}, message 1: got .*b.* as content, exp",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            f"{LINE}, message 2: got a function_call, expected tool_calls, .*: rewrite it",
        ),
        ({"messages": [{"content": "a"}]}, f"{LINE}, message 1: got None as role, expected text, as in"),
        ({"messages": [{"role": "user"}]}, f"{LINE}, message 1: got None as content, expected text"),
        ({"messages": [USER | {"content": [{"type": "image"}]}]}, "message 1: got .*image.* as content, exp"),
        ({"input_ids": [1]}, "got an object with input_ids, expected text, or"),
        ({"question": "a", "answer": "b"}, "got an object with answer, question, expected text, or"),
        ({"messages": [ANSWER]}, f"{LINE}: .*surrogates"),
        (
            {"conversations": [{"from": "human", "value": "<image>\na"}], "image": "a.jpg"},
            f"{LINE}: got a text with <image>, in the place of .*'image' beside it, expected .*: leave it out",
        ),
        ({"text": "a <video>", "videos": ["b.mp4"]}, f"{LINE}: got a text with <video>, in the place of"),
        (
            '{\n "text": "a"\n}',
            f"{LINE}: got invalid JSON .*: write one object a line, or name the file .json",
        ),
        ("", "got no text in .*, expected at least one document"),
    ],
    "a.json": [
        ([{"txt": "a"}], r"a\.json, record 1: got an object with txt, expected .*rename its keys"),
        ("[1", r"a\.json: got invalid JSON"),
        ({"train": []}, r"a\.json, line 1: got an object with train"),
        ('{\n "train": []\n}', r"a\.json, line 1: got an object with train"),
    ],
    "a.csv": [
        (b"a,b\n1,2\n", "a.csv: got the columns a, b, expected text, .*: name them in the first line"),
        (b"id;text\n1;a\n", "a.csv: got the columns id;text, expected .*: separate them by ',', not ';'"),
        (b"text\n1,2\n", "a.csv, line 2: got 2 cells for the columns text, expected one each"),
        (b'text\n"1', "a.csv, which cannot be read after line 2 .unexpected end.*expected a table in UTF-8"),
        (
            b"text\ngr\xf6sse\n",
            r"a.csv, which cannot be read after line 0 .'utf-8' codec.*save it again as UTF",
        ),
    ],
    "a.jsonl.gz": [
        (gzip.compress(b"{}")[:-4], r"a\.jsonl\.gz, which cannot be read \(Compressed file ended")
    ],
    "a.jsonl.bz2": [
        (b"BZh91AY&SY and no more of it", r"a\.jsonl\.bz2, which cannot be read \(Invalid data stream")
    ],
    "a.zip": [(b"PK\3\4", "a.zip, which is packed, and not by gzip, .* it: unpack it by unzip /.*a.zip$")],
    "a.7z": [(b"7z\xbc\xaf", "a.7z, which is packed, and not by gzip, bzip2 or xz, .* in it: unpack it$")],
    "a.xlsx": [
        (b"PK\3\4" + bytes(26) + b"[Content_Types].xml", "a.xlsx, which is an office .*: save it as CSV, or"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a.xlsx, which is an office document, .*: save it as CSV, or"),
    ],
    "in/a.csv": [(b"a,b\n1,2\n", "a.csv: got the columns a, b, expected")],
    "in/data.jsonl.zst": [
        (
            b"\x28\xb5\x2f\xfd",
            r"in/data\.jsonl\.zst, which is packed, .* what is in it: unpack it by zstd -d /.*zst$",
        )
    ],
    "in/utf16.jsonl": [
        ('{"text": "a"}'.encode("utf-16"), r"in/utf16\.jsonl, which is binary, as a text in UTF")
    ],
    "utf16.csv": [
        ("text\na\n".encode("utf-16"), r"utf16\.csv, which is binary, .*, expected UTF-8: save it so")
    ],
    "in/parquet.jsonl": [(b"PAR1\0PAR1", r"parquet\.jsonl, which is Parquet, expected .*: name it .parquet")],
    "empty.txt": [(b"", "empty.txt, which is empty; expected data")],
    "empty.bin": [(b"", "empty.bin, which is empty; expected data")],
    "wide.bin": [
        (
            np.arange(300, dtype="<u4").tobytes(),
            "wide.bin, in which every second uint16 is 0, as if it were written as uint32, .*: pass dtype='uint32'",
        )
    ],
    "others.bin": [
        (
            np.array([20240520, 1], "<i4").tobytes(),
            "which llm.c .* wrote, .* before .*: cut them off, by tail -c",
        ),
        (np.array([20240801, 1], "<i4").tobytes(), r"tail -c \+1025 OLD > NEW.bin, and pass dtype='uint32'"),
        (b"\x93NUMPY\1\0", "others.bin, which is an array of NumPy, expected tokens alone, as a .bin: write"),
    ],
    "a.npy": [
        (b"\x93NUMPY\1\0", "a.npy, which is an array of NumPy, expected tokens alone, as a .bin: write")
    ],
    "odd.bin": [(b"abc", r"odd.bin of 3 bytes; .* multiple of 2 \(uint16\); check that")],
    "in/.hidden": [(b"text", r"got no text in .*in, expected at least one document")],
    "in/empty": [(b"", r"got no text in .*in \(1 empty file\), expected .*document: name")],
    "in/binary": [
        (b"\0\1", r"got no text in .*in \(1 binary file\), expected .*: save UTF-16 as UTF-8, or name"),
        (b"%PDF-1.7\n", r"got no text in .*in \(1 binary file\), expected"),
        (b"text\n\3 and \x80\2", r"got no text in .*in \(1 binary file\), expected"),
    ],
    "a.txt": [
        ("text".encode("utf-16"), "a.txt, which is binary, as .* in UTF-16 is, expected text in UTF-8")
    ],
    "a.pdf": [(b"%PDF-1.7\n", "a.pdf, which is binary, as a PDF .* is, expected text .*: convert it, or")],
    "dataset": [
        ({"txt": ["a"], "id": [1]}, "with the columns txt, id, expected text"),
        ({"prompt": ["a"]}, "with the columns prompt, expected text"),
        ({"text": ["a", None]}, "row 1: got an object with nothing, expected text"),
        ({"text": [1, 2]}, "row 0, 'text': got 1, expected a string"),
        ({"text": ["a", "<image>"], "images": ["b", "c"]}, "row 1: got a text with <image>, in the place of"),
        ({"prompt": [CHAT], "completion": ["b"]}, "row 0: got 'b', expected JSON"),
        ({"input_ids": [[[1, 2]], [[3]]]}, "row 0: got input_ids .*, expected a list of whole numbers"),
        ({"input_ids": [[1, 2]], "labels": [1]}, "row 0: got labels 1, expected a list of whole"),
        ({"input_ids": [[1, None]]}, "row 0: got input_ids .*None.*, expected a list of whole"),
        ({"input_ids": [["a"]]}, "row 0: got input_ids .*, expected a list of whole"),
        ({"input_ids": [[1], None]}, "row 1: got an object with nothing, expected"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [4, -100]]}, "row 1: got the label 4 for the"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]}, "row 1: got 1 labels for 2 input_ids"),
        ({"input_ids": [[1], [99_999]]}, "row 1: got tokens from 99999 to 99999, expected .* below 50257"),
        (
            {"input_ids": [[1, 2]], "labels": [[-100, -100]]},
            "got nothing to learn in 1 document of .*, expected a label at least: look at their weights or labels",
        ),
        ({"input_ids": [[1], [-1, 3]]}, "row 1: got tokens from -1 to 3"),
        ({"text": [""]}, "got no text in"),
        ({"input_ids": [[]]}, "got no text in"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "message"), [(x, *row) for x, rows in REFUSED.items() for row in rows]
)
def test_unusable_data_is_refused_with_its_place(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    if name == "dataset":
        path = save(tmp_path / "d", content)
    else:
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        raw = text.encode() if isinstance(text, str) else text
        path = write(tmp_path / name, b'{"text": ""}\n' + raw if name == "a.jsonl" else raw)
        path = path if path.parent == tmp_path else path.parent
    with pytest.raises(ValueError, match=message):
        opened(path, tmp_path)
    assert not list(tmp_path.glob("cache/*")), "nothing is left of it"


def test_unusable_splits_and_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = {"text": ["a"] * 40}, {"prompt": ["a"], "completion": ["b"]}
    with pytest.raises(ValueError, match="with the splits a, b, expected one called train: name the folder"):
        opened(save_splits(tmp_path / "x", a=one, b=one), tmp_path)
    with pytest.raises(
        ValueError, match="y, which datasets cannot read .*expected Parquet files or what save"
    ):
        opened(save_splits(tmp_path / "y", train=one, test=other), tmp_path)
    assert tokens_of(opened(save_splits(tmp_path / "z", a=one), tmp_path))
    (tmp_path / "z" / "a" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}]}))
    with pytest.raises(ValueError, match="z, which datasets cannot read .*save it again"):
        opened(tmp_path / "z", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'needs datasets .*: pip install -e "\.\[datasets\]"'):
        opened(tmp_path / "y", tmp_path)


@pytest.mark.usefixtures("own_folder")
def test_missing_and_unreadable_data_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("missing", "missing.bin", "missing.jsonl"):
        assert train("--data", name) == 2
        message = f"--data: got {name}, which does not exist, expected what is to be trained on"
        assert message in capsys.readouterr().err
    write(Path("in/a.txt"), b"text")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("zfunc.train.data.documents.opened", refuse)
    monkeypatch.setattr(np, "memmap", lambda *_, **__: os.fstat(-1))  # an error without a name
    assert train("--data", "in/a.txt") == 2
    assert "--data: got in/a.txt, which cannot be read (Bad file descriptor)" in capsys.readouterr().err
    assert train("--data", "in") == 2
    message = "--data: got in/a.txt, which cannot be read (Permission denied), expected"
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_cannot_keep_tokens_is_not_the_data(
    full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write(Path("in/a.txt"), b"text")
    write(Path("home" if not full else "other"), b"")
    monkeypatch.setenv("XDG_CACHE_HOME", "home")
    monkeypatch.setattr(packing, "sync", fails)
    assert train("--data", "in") == 1
    said = " ".join(capsys.readouterr().err.split())
    reason = "No space left on device" if full else "Not a directory"
    assert (
        f"home/zfunc: got '{reason}' while keeping the data's tokens: set XDG_CACHE_HOME to a folder" in said
    )
    assert "--data" not in said


def test_a_tokenizer_takes_text_in_utf8(tokenizer_file: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"w1 \xe9")
    with pytest.raises(ValueError, match=f"got {path}, which is not UTF-8 at byte 3"):
        opened(path, tmp_path, tokenizer=open_tokenizer(tokenizer_file))
    tokens = write(tmp_path / "a.bin", b"1234")
    with pytest.raises(ValueError, match="which holds tokens, expected text or JSONL"):
        opened(tokens, tmp_path, tokenizer=BYTES)
    with pytest.raises(ValueError, match=r"a\.bin, which does not say where documents end, expected text"):
        opened(tokens, tmp_path, whole_documents=16)


FLAWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "which cannot be read .*expected a tokenizer.json"),
    "no tokenizer": (lambda path: path.write_text("{}"), "which cannot be read .*expected a tokenizer.json"),
    "no end": (lambda path: path.write_text(path.read_text().replace("</s>", "<z>")), "without an end token"),
    "bad configuration": (
        lambda path: path.with_name("tokenizer_config.json").write_text("["),
        "which cannot be read .*expected a tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", FLAWS)
def test_an_unusable_tokenizer_is_refused(name: str, tokenizer_file: Path) -> None:
    flaw, message = FLAWS[name]
    flaw(tokenizer_file)
    with pytest.raises(ValueError, match=message):
        open_tokenizer(tokenizer_file)
    if name == "no end":
        assert open_tokenizer(tokenizer_file, end=7).end == 7, "the caller may give it"


def test_a_first_look_ends_behind_its_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that books do not take minutes before a training."""
    path = tmp_path / "books.jsonl"
    path.write_text(json.dumps({"text": "a" * 90}) + '\n{"title": 1}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2: got an object with title"):
        first_look(path)
    monkeypatch.setattr(documents, "_CHARACTERS", 90)
    assert [x.kind for x in first_look(path)] == ["text", "text"]  # and the last


def test_a_first_look_takes_texts_that_are_no_utf_8_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_bytes(b'{"name": "\xe9"}')
    assert [x.kind for x in first_look(tmp_path)] == ["bytes"]
