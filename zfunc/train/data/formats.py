"""Formats: the records of a file with the place of each: JSON Lines, a JSON array, CSV or TSV, compressed or not.

The standard library reads these files: `datasets` would read them by Arrow, which takes a text like a date for a
time, and gives every record the keys of all others.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from zfunc.checkpoint.strict_json import unique_keys
from zfunc.errors import refuse
from zfunc.train.data.records import EXPECTED, PREFERENCES, RECORDS, read_keys

Placed = Generator[tuple[str, Any]]
COMPRESSED = ".gz", ".bz2", ".xz", ".zst"  # suffixes left out when a file's format is read from its name
OPENERS: dict[str | None, Callable[..., Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
LINES = (".jsonl", ".ndjson")
_END = 1 << 20  # bytes in which the last line is looked for
_RECORD = ", record "  # in the place of an element of an array
LOOKED_AT = 1 << 16  # bytes in which binary content is told from text
_CONTROLS = bytes({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})  # which no text has, but for a few
_PACKED = re.compile(  # what a packed file begins with; an office document is a zip of certain names, or older
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))|(?P<xz>\xfd7zXZ)"
    rb"|(?P<office>PK\x03\x04.{26}(?:\[Content_Types\]|_rels/|docProps/|mimetype)|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1)"
    rb"|(?P<unzip>PK\x03\x04)|(?P<zstd>\x28\xb5\x2f\xfd)|(?P<lz4>\x04\x22\x4d\x18)|7z\xbc\xaf|Rar!\x1a",
    re.DOTALL,
)
_UNPACK = {"unzip": "unzip", "zstd": "zstd -d", "lz4": "lz4 -d"}  # commands
_BEGIN = 64  # bytes, with the first name in a zip
_PARQUET = b"PAR1"  # what it begins and ends with


def suffix_of(path: Path) -> str:
    """The suffix of a file's name that tells its format, in small letters, without the suffix of its compression.

    >>> suffix_of(Path("train.JSONL.gz")), suffix_of(Path("book.txt"))
    ('.jsonl', '.txt')
    """
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


@contextmanager
def opened(path: Path) -> Generator[BinaryIO]:
    """The file at `path`, open to read bytes, decompressed if it is of gzip, bzip2 or xz. Raises ValueError for a
    damaged file, and for records compressed in another way."""
    try:
        with path.open("rb") as file, _unpacked(path, file) as content:
            yield content
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise ValueError(
            f"got {path}, which cannot be read ({error}), expected it whole: copy it again"
        ) from error


class _Packed(ValueError):  # noqa: N818
    """A file that is packed in a way that is not read."""


def is_compressed(path: Path) -> bool:
    """Whether the file at `path` is compressed by gzip, bzip2 or xz. Raises ValueError for records compressed in
    another way."""
    with path.open("rb") as file:
        return _unpacked(path, file) is not file


def _unpacked(path: Path, file: BufferedReader) -> Any:
    """`file`, or a file of what is compressed in it."""
    begin = file.peek(_BEGIN)[:_BEGIN]
    found = _PACKED.match(begin)
    if found and found.lastgroup in OPENERS:
        return OPENERS[found.lastgroup](file)
    if suffix_of(path) in FORMATS:
        refuse_packed(path, begin)
        if b"\0" in begin:  # before a line of it, which may be the whole file, is in memory
            refuse((), f"{path}, which is binary, as a text in UTF-16 is", "UTF-8", "save it so", ValueError)
    return file


def refuse_packed(path: Path, begin: bytes) -> None:
    """Raise ValueError if the file at `path`, which begins with `begin`, is compressed, an office document or of
    Parquet."""
    if found := _PACKED.match(begin):
        if found.lastgroup == "office":
            got = f"{path}, which is an office document, as those of Excel are"
            refuse((), got, "text", "save it as CSV, or as plain text", _Packed)
        command = _UNPACK.get(found.lastgroup or "")
        by = f" by {command} {shlex.quote(str(path))}" if command else ""
        got = f"{path}, which is packed, and not by gzip, bzip2 or xz"
        refuse((), got, "what is in it", f"unpack it{by}", _Packed)
    if begin.startswith(_PARQUET):
        with path.open("rb") as file:
            file.seek(-len(_PARQUET), io.SEEK_END)
            if file.read() == _PARQUET:
                refuse((), f"{path}, which is Parquet", "its suffix", "name it .parquet", _Packed)


def is_binary(content: bytes) -> bool:
    """Whether `content`, a file's bytes or first bytes, is no text: it is compressed or a PDF, has a zero byte, or
    more than one in a hundred of its first bytes is a control character.

    >>> [is_binary(x) for x in ("größer".encode("latin-1"), b"%PDF-1.7", "text".encode("utf-16"))]
    [False, True, True]
    """
    first = content[:LOOKED_AT]
    controls = len(first) - len(first.translate(None, _CONTROLS))
    return (
        b"\0" in content
        or content.startswith(b"%PDF-")
        or _PACKED.match(content) is not None
        or (controls > len(first) / 100)
    )


def holds_records(path: Path) -> bool | None:
    """Whether the records of a file are documents; None for a table, or an array of objects, without known keys,
    and for records that are packed in a way that is not read."""
    if (suffix := suffix_of(path)) not in FORMATS:
        return False
    where, first = "", None
    try:
        with opened(path) as file, closing(FORMATS[suffix](path, file)) as records:
            if suffix not in LINES:
                where, first = next(records, (where, first))
    except _Packed:
        return None
    except ValueError:
        pass  # a damaged one is told when it is read
    if suffix in LINES:
        return True
    if isinstance(first, dict) and read_keys(first, RECORDS[1:]):
        return True
    objects = _RECORD in where and isinstance(first, dict)
    return None if objects or suffix != ".json" else False  # a JSON object is settings, or the like


def records_of(path: Path) -> Placed:
    """The records of a file, each after its place (path and line). Raises ValueError for a damaged record."""
    with opened(path) as file:
        yield from FORMATS[suffix_of(path)](path, file)


def _lines(path: Path, file: BinaryIO) -> Placed:
    for number, line in enumerate(file, 1):
        if line.removeprefix(BOM_UTF8).strip():
            yield (where := f"{path}, line {number}"), parsed(line, where)


def lines_after(path: Path, offset: int, line: int) -> Generator[tuple[str, bytes, int, int]]:
    """The lines of a file from byte `offset` on, before which there are `line` lines: each as its place, its bytes,
    and the offset and number of the next line. A compressed file is read up to `offset`."""
    with opened(path) as file:
        file.seek(offset)
        for content in file:
            line, offset = line + 1, offset + len(content)
            if content.removeprefix(BOM_UTF8).strip():
                yield f"{path}, line {line}", content, offset, line


def last_line(path: Path) -> Placed:
    """Yield the last record of a file of lines, with its place; nothing for a longer record than is read at
    the end, and for a compressed or other file.

    Raises ValueError for a damaged record, as of a file that was not copied whole.
    """
    if suffix_of(path) not in LINES:
        return
    with opened(path) as file:
        if not isinstance(file, BufferedReader):
            return
        start = file.seek(max(0, file.seek(0, io.SEEK_END) - _END))
        _, newline, line = file.read().rstrip().rpartition(b"\n")
    if line and (newline or not start):
        yield (where := f"{path}, the last line"), parsed(line, where)


def _array(path: Path, file: BinaryIO) -> Placed:
    """The records of a `.json` file, each after its place: elements of a JSON array, or objects, one a line, or one
    over several lines."""
    content = file.read().removeprefix(BOM_UTF8)
    if content.lstrip().startswith(b"["):
        yield from ((f"{path}{_RECORD}{n}", x) for n, x in enumerate(parsed(content, str(path)), 1))
        return
    try:
        only = parsed(content, where := f"{path}, line 1")
    except ValueError:
        yield from _lines(path, io.BytesIO(content))
    else:
        yield where, only


def parsed(content: bytes, where: str) -> Any:
    """The record in `content`, one line of JSON. Raises ValueError, with the place `where`, for invalid JSON."""
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique_keys)
        if b"\\ud" in content.lower():  # half a surrogate pair cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        opens = content.strip() in (b"{", b"[")
        do = "write one object a line, or name the file .json" if opens else "correct or delete it"
        do = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else do
        raise ValueError(f"{where}: got invalid JSON ({error}), {EXPECTED}: {do}") from error
    return value


def _table(path: Path, file: BinaryIO) -> Placed:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        rows = _whole(path, reader)
        names = next(rows, [])
        if names and not read_keys(names, (*RECORDS[1:], *PREFERENCES)):
            other = next((x for x in ";\t|," if len(names) == 1 and x in names[0]), "")
            do = f"separate them by {delimiter!r}, not {other!r}" if other else "name them in the first line"
            raise ValueError(f"{path}: got the columns {', '.join(names):.200}, {EXPECTED}: {do}")
        for row in filter(None, rows):
            where = f"{path}, line {reader.line_num}"
            if len(row) != len(names) or len({*names}) != len(names):
                raise ValueError(
                    f"{where}: got {len(row)} cells for the columns {', '.join(names):.200}, expected one each: "
                    "correct the table"
                )
            yield where, dict(zip(names, row, strict=True))


def _whole(path: Path, reader: Any) -> Generator[list[str]]:
    try:
        yield from reader
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"got {path}, which cannot be read after line {reader.line_num} ({error}), expected a table in UTF-8: "
            "correct it, or save it again as UTF-8"
        ) from error


FORMATS: dict[str, Callable[[Path, BinaryIO], Placed]] = {
    **dict.fromkeys(LINES, _lines),
    **{".json": _array, ".csv": _table, ".tsv": _table},
}
