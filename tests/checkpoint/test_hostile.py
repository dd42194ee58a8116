"""A checkpoint is data: a hostile file is refused with its reason, soon, and before anything is allocated.

Every byte of the files of a small checkpoint and of a swap space is changed at random, every field is left out or
replaced, and what an enemy would try first stands in tables. Each is read, or refused with a CheckpointError that
says where; nothing raises another error, takes more than SECONDS, or more than LARGEST bytes.
"""

import copy
import json
import os
import random
import resource
import signal
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import everything, fill, refused, save, save_swap

from zfunc.checkpoint import manifest as manifest_file
from zfunc.checkpoint import strict_json
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.manifest import FILE
from zfunc.checkpoint.safetensors_file import Shard, open_shard
from zfunc.checkpoint.swap_file import frame_header, frame_record, parse_header, parse_record, swap_file_name
from zfunc.errors import CheckpointError

SECONDS = 10  # an input that takes longer is taken for a hang
LARGEST = 256 << 20
DEEP, ENDLESS, TWICE, NAN = "@deep@", "@endless@", "@twice@", "@nan@"  # what json.dumps would not write
RAW = {DEEP: "[" * 50_000 + "]" * 50_000, ENDLESS: "[" * 50_000, TWICE: '{"a":1,"a":2}', NAN: "NaN"}
NUMBERS = [-1, 0, 1, 2, 63, *(2**bits for bits in (31, 32, 53, 60, 63)), 2**63 - 1, -(2**63)]
NUMBERS += [10**19, 10**400, 1.5, -0.0, 1e308]
NAMES = ["", "..", "../x", "/etc/passwd", "a/b", ".hidden", FILE, "\0", "\ud800", "x" * 2000]
NAMES += ["F32", "U8", "F31", "é"]
VALUES = [*NUMBERS, *NAMES, None, True, False, [], {}, [0], [[]], {"": 0}, float("inf"), *RAW]


@frozen
class Sample:
    """A valid checkpoint, as bytes, in a folder that inputs are written to."""

    folder: Path
    manifest: bytes
    shard: Shard
    shard_bytes: bytes
    swap: Path  # the file of a swap space
    swap_bytes: bytes
    swap_header: bytes  # in JSON, without what frames it
    swap_record: bytes  # of the last commit


@contextmanager
def sample() -> Iterator[Sample]:
    """A small checkpoint in a folder that goes away."""
    with TemporaryDirectory() as folder:
        path = save(Path(folder), moments="8bit")
        shard = manifest_file.read_manifest(path).shards[0]
        fields = json.loads((path / FILE).read_bytes())
        del fields["checksum"]  # see `summed`
        (swap := Path(folder) / "swap").mkdir()
        save_swap([swap], world=1, moments="8bit")
        file = swap / swap_file_name(0, 1, 0)
        raw = file.read_bytes()
        header, at = json_in(raw, 0), parse_header(raw, "").record_at(1)
        yield Sample(
            path,
            strict_json.render(fields),
            shard,
            (path / shard.file).read_bytes(),
            *(file, raw, header, json_in(raw, at)),
        )


def attempted(read: Callable[[], Any]) -> str:
    """What is said where `read` is refused, or "". It says what was got, in no more than one reads."""
    try:
        read()
        return ""
    except CheckpointError as error:
        text = str(error)
        assert ": got " in text, text
        assert len(text.encode()) < 5000, text[:5000]
        return text


def summed(raw: bytes) -> bytes:
    """A manifest with its checksum, as an enemy would write it; another text as it is."""
    try:
        fields = strict_json.parse_json(raw, "").read(dict)
        return strict_json.render({**fields, "checksum": zlib.crc32(strict_json.render(fields))})
    except CheckpointError:
        return raw


def read_all(folder: Path) -> manifest_file.Manifest:
    """Every byte of the checkpoint in a folder."""
    checkpoint = open_checkpoint(folder)
    fill(checkpoint, everything(checkpoint.manifest))
    return checkpoint.manifest


def try_manifest(known: Sample, raw: bytes) -> str:
    """Why a checkpoint with this manifest is refused, if it is."""

    def read() -> None:
        manifest = read_all(known.folder)
        assert manifest_file.from_json(manifest_file.to_json(manifest)) == manifest

    (known.folder / FILE).write_bytes(summed(raw))
    try:
        return attempted(read)
    finally:
        (known.folder / FILE).write_bytes(known.manifest)


def try_shard(known: Sample, raw: bytes) -> str:
    """Why this file is not read as the shard, which it may be only if its bytes are those written."""

    def read() -> None:
        with closing(open_shard(path, known.shard)) as reader:
            for tensor in known.shard.tensors:
                reader.read_into(tensor.name, 0, tensor.numel, bytearray(tensor.nbytes))
        assert raw == known.shard_bytes, "changed bytes were taken for those written"

    (path := known.folder / "fuzzed").write_bytes(raw)
    return attempted(read)


def json_in(raw: bytes, at: int) -> bytes:
    """The JSON text in a frame that begins there, which ends at its last brace."""
    start = raw.index(b'{"', at)
    return raw[start : start + json.JSONDecoder().raw_decode(raw[start:].decode("latin-1"))[1]]


def try_swap_header(known: Sample, text: bytes) -> str:
    """Why a swap space with this header is not read as a checkpoint."""
    old, new = frame_header(known.swap_header), frame_header(text)
    known.swap.write_bytes(new + known.swap_bytes[len(old) :])
    return attempted(lambda: read_all(known.swap.parent))


def try_swap_record(known: Sample, text: bytes) -> str:
    """Why a swap space with this last commit is not."""
    raw, header = bytearray(known.swap_bytes), parse_header(known.swap_bytes, "")
    at = header.record_at(1)
    checksums = parse_record(raw[at : at + header.record_size], header, "").checksums  # type: ignore[union-attr]
    new = frame_record(1, text, checksums)
    raw[at : at + len(new)] = new
    known.swap.write_bytes(raw)
    return attempted(lambda: read_all(known.swap.parent))


# --- any change -----------------------------------------------------------------------------------------------


def mutate_bytes(raw: bytes, by: random.Random) -> bytes:
    """Flip, cut out, insert or repeat a few bytes, or cut the end off."""
    data = bytearray(raw)
    for _ in range(by.choice([1, 1, 1, 2, 8])):
        at = by.randrange(len(data) + 1)
        end = min(len(data), at + by.choice([1, 2, 8, 100]))
        match by.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << by.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = by.randbytes(end - at)
            case 3:
                data[at:at] = data[at:end]
            case _:
                del data[at:]
    return bytes(data)


def mutate_json(raw: bytes, by: random.Random) -> bytes:
    """Change a few values, names or lengths of lists, and write them as JSON, or nearly."""
    root = {"": json.loads(raw)}
    for _ in range(by.choice([1, 1, 1, 2, 4])):
        if matches := list(places(root)):
            mutate_place(*by.choice(matches), by)
    text = json.dumps(root.get("", by.choice(VALUES[:10])))
    for name, replacement in RAW.items():
        text = text.replace(json.dumps(name), replacement)
    return text.encode()


def places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Every value below, as the dict or list that holds it and its key there."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], (dict, list)):
            yield from places(holder[key])


def mutate_place(holder: Any, key: Any, by: random.Random) -> None:
    """Change one value: to a hostile one, a near one, a copy of another, or none."""
    value = holder[key]
    match by.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(value, (int, float)):
            holder[key] = value + by.choice([-1, 1, 64, -64])
        case 2 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        case 3 if isinstance(holder, dict):
            holder[by.choice(NAMES)] = holder.pop(key)
        case 4:
            other, at = by.choice(list(places(holder)))
            holder[key] = copy.deepcopy(other[at])
        case _:
            holder[key] = by.choice(VALUES)


# what is changed, how, and how it is read
CHANGES: dict[str, tuple[str, Callable[[bytes, random.Random], bytes], Callable[[Sample, bytes], str]]] = {
    "manifest bytes": ("manifest", mutate_bytes, try_manifest),
    "manifest values": ("manifest", mutate_json, try_manifest),
    "shard bytes": ("shard_bytes", mutate_bytes, try_shard),
    "swap header": ("swap_header", mutate_json, try_swap_header),
    "swap record": ("swap_record", mutate_json, try_swap_record),
}


@contextmanager
def limited() -> Iterator[None]:
    """No more memory than LARGEST above what is in use, and a signal for what hangs."""

    def hung(*_: object) -> None:
        raise AssertionError(f"an input took more than {SECONDS} s")

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + LARGEST, before[1]))
    handler = signal.signal(signal.SIGALRM, hung)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def known() -> Iterator[Sample]:
    with sample() as checkpoint:
        yield checkpoint


def test_the_sample_itself_is_read(known: Sample) -> None:
    """Or every test of this file would pass for the wrong reason."""
    assert not any(attempt(known, getattr(known, part)) for part, _, attempt in CHANGES.values())


@pytest.mark.parametrize("examples", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", CHANGES)
def test_a_mutated_file_is_refused_or_read(known: Sample, what: str, examples: int) -> None:
    part, mutate, attempt = CHANGES[what]

    @settings(max_examples=examples)
    @given(st.randoms(use_true_random=False))
    def change(by: random.Random) -> None:
        raw = mutate(getattr(known, part), by)
        try:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            attempt(known, raw)
        except BaseException as error:
            error.add_note(f"the input ({what}): {raw[:2000]!r}")
            raise

    with limited():
        change()


WRONG = {int: "7", float: "0.5", str: 7, bool: 1, list: {}, dict: []}
FREE = ("optimizer", "extra", "pieces")  # objects with any names, and values of theirs


def fields(value: Any, place: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Each field below, as what holds it, its key and its place; of a list the first element."""
    keys = list(value) if isinstance(value, dict) else [0][: len(value)] if isinstance(value, list) else []
    for key in keys:
        yield value, key, (own := f"{place}.{key}" if isinstance(key, str) else f"{place}[{key}]")
        if key not in FREE:
            yield from fields(value[key], own)


@pytest.mark.parametrize("part", ["manifest", "swap_header", "swap_record"])
def test_a_field_that_is_missing_or_of_another_type_is_refused_by_its_name(known: Sample, part: str) -> None:
    """Every one of them, in every file that has JSON."""
    raw, attempt = getattr(known, part), {own: how for own, _, how in CHANGES.values()}[part]
    for n, (_, key, place) in enumerate(fields(json.loads(raw))):
        for missing in {False, isinstance(key, str)}:
            root = json.loads(raw)
            holder = next(islice(fields(root), n, None))[0]
            if missing:
                del holder[key]
            else:
                holder[key] = WRONG[type(holder[key])]
            assert (key if missing else place) in attempt(known, json.dumps(root).encode())
    assert n > 5


# --- what an enemy would try first ----------------------------------------------------------------------------

# A place in the manifest, the value that comes there ("-" for none), and what is said of it. The pieces are of
# "embed.weight", master_high.
ROWS = r"""
path escapes
shards/0/file = "../x" -> shards: got the file name '../x'
shards/0/file = "/etc/passwd" -> shards: got the file name '/etc/passwd'
shards/0/file = "." -> shards: got the file name '.'
shards/0/file = "manifest.json" -> shards: got the file name 'manifest.json'
shards/0/file = "a\u0000b" -> shards: got the file name 'a\\x00b', expected letters, digits
shards/0/file = "rank-00001-of-00002.safetensors" -> shard 'rank-00001-of-00002.safetensors': got it twice
huge sizes
shards/0/size = 1048576 -> safetensors: got \d+ bytes, expected 1048576: the file is truncated
shards/0/size = 4611686018427387904 -> got a header of 46116860184273\d+ bytes, expected at most 16777224
shards/0/size = 9223372036854775808 -> got a number of 19 digits, above 64 bits, expected strict JSON
shards/0/chunk = 1099511627776 -> shards\[0\].chunk: got 1099511627776, expected an integer of 1 to 67108864
shards/0/chunk = 0 -> shards\[0\].chunk: got 0, expected an integer of 1 to
shards/0/tensors/0/shape = [1099511627776] -> got tensors larger than the file, expected them to fit in
shards/0/tensors/0/shape = [2147483648, 2147483648, 2147483648] -> shape: got .* at most 64 dimensions and 2^60
shards/0/tensors/0/shape = [0, 4611686018427387904] -> tensors\[0\].shape: got .* at most 64 dimensions and 2^60
shards/0/tensors/0/shape = [-1] -> tensors\[0\].shape\[0\]: got -1, expected an integer of 0 to
parameters/0/shape = [1099511627776] -> 'embed.weight', master_high: got 130 elements, expected pieces
world = 0 -> world: got 0, expected an integer of 1 to 1048576
overlapping and missing pieces
PIECES/0/1 = 127 -> 'embed.weight', master_high: got no elements 127 to 128, expected pieces that tile
PIECES/0/1 = 129 -> 'embed.weight', master_high: got elements 128 to 129 twice
PIECES/0/1 = 0 -> 'embed.weight', master_high: got an empty range, 0 to 0
PIECES/1 = - -> 'embed.weight', master_high: got 128 elements, expected pieces that tile its 130
PIECES/0/4 = 2 -> master_high'?: got no elements 0 to 2, expected each of 128 to be one parameter's
PIECES/0/4 = 4611686018427387904 -> embed.weight/master_high'?: got no elements 0 to 4611686018427387904
PIECES/0/2 = 2 -> 'embed.weight', master_high: got tensor 'embed.weight/master_high' of shard 2, expec
PIECES/0/2 = -1 -> pieces.master_high\[0\]\[2\]: got -1, expected an integer of 0 to
PIECES/0/3 = "head.bias/master_high" -> 'embed.weight/master_high': got 0 elements, expected each of 128
PIECES/0/3 = "embed.weight/exp_avg" -> elements of U8 in 'embed.weight/exp_avg', expected BF16
PIECES/0 = [0, 128, 0, "x"] -> master_high\[0\]: got a list of 4, expected one of 5
PIECES = - -> 'embed.weight': got the state master_low, exp_avg, .*, expected master_high, master_low
parameters/0/pieces/momentum = [] -> 'embed.weight': got the state .*momentum, expected
parameters/0/name = "head.bias" -> parameter 'head.bias': got it twice
shards/0/tensors/0/name = "embed.weight/exp_avg" -> tensor 'embed.weight/exp_avg': got it twice
shards/0/tensors/0/name = "__metadata__" -> tensors\[0\]: got .*__metadata__.* expected the fields of a TensorInfo
values of the right type
shards/0/tensors/0/dtype = "F31" -> tensors\[0\].dtype: got 'F31' \(did you mean 'F32'\?\), expected one of
shards/0/tensors/0/dtype = "F64" -> got tensors larger|another number of checksums|elements of F64
shards/0/tensors/0/checksums = [1] -> master_high': got another number of checksums, expected 4
shards/0/tensors/0/checksums/0 = 4294967296 -> checksums\[0\]: got 4294967296, expected an integer of 0 to 4294
moments = "4bit" -> moments: got '4bit' \(did you mean '(8|16)bit'\?\), expected one of fp32, fp32-split
moments = "8bit" -> moments: got '8bit', the first 8-bit moments, whose codes were others, expected one of fp32
moments = "fp32" -> 'embed.weight': got the state master_high, .*, expected master, exp_avg, exp_avg_sq
parameters/0/name = "" -> parameters\[0\].name: got '', expected a text of 1 to 1000 characters
parameters/0/name = "\ud800" -> got text that is not UTF-8, expected strict JSON
position/stp = 1 -> position: got a field 'stp' \(did you mean 'step'\?\), expected only step, batches
position/loss_scale/scale = 0 -> position.loss_scale: got .*scale: got 0, .* expected the fields of a LossScale
position/loss_scale/scale = NaN -> got NaN, which JSON does not have
version = 2 -> got version 2, expected version 1, the one that this zfunc reads
"""
REMOVED = object()
MANIFESTS: list[tuple[str, Any, str]] = [
    ("shards/0/size", 10**400, "got a number of 401 digits, above 64 bits"),
    (
        "shards/0/tensors/0/shape",
        [1] * 65,
        r"tensors\[0\].shape: got .* expected at most 64 dimensions and 2^60",
    ),
    ("parameters/0/name", "x" * 1001, r"parameters\[0\].name: got 'x+...x+', expected a text of 1 to 1000"),
]
for row in (x for x in ROWS.splitlines() if " -> " in x):
    (place, value), message = row.partition(" -> ")[0].split(" = "), row.partition(" -> ")[2]
    place = place.replace("PIECES", "parameters/0/pieces/master_high")
    MANIFESTS.append((place, REMOVED if value == "-" else json.loads(value), message))


def edited(raw: bytes, path: str, value: Any) -> bytes:
    """The JSON with the value at a path like "shards/0/file" replaced, or removed."""
    holder = root = json.loads(raw)
    *parents, last = (int(x) if x.isdigit() else x for x in path.split("/"))
    for key in parents:
        holder = holder[key]
    if value is REMOVED:
        del holder[last]
    else:
        holder[last] = value
    return json.dumps(root).encode()


@pytest.mark.parametrize(("path", "value", "message"), MANIFESTS)
def test_a_hostile_manifest_is_refused_with_its_reason(
    known: Sample, path: str, value: Any, message: str
) -> None:
    raw = edited(known.manifest, path, value)
    with refused(message.replace("^", r"\^")) as caught:
        refused_by_open(known, raw)
    assert str(caught.value).startswith(str(known.folder))
    assert try_manifest(known, raw)


def refused_by_open(known: Sample, raw: bytes) -> None:
    path = known.folder / FILE
    path.write_bytes(summed(raw))
    try:
        open_checkpoint(known.folder)
    finally:
        path.write_bytes(known.manifest)


TEXTS: list[tuple[bytes, str]] = [
    (b"", "invalid JSON"),
    (b"\xff\xfe", "text that is not UTF-8"),
    (b"[" * 1_000_000, "a value nested too deep"),
    (b'{"a":' * 1_000_000, "a value nested too deep"),
    (b'"' + b'\\"' * 1_000_000, "invalid JSON"),
    (b'"' + b"\\" * 1_000_001, "invalid JSON"),
    (b"1" * 1_000_000, "a number of 1000000 digits, above 64 bits"),
    (b"-" + b"1" * 21, "a number of 22 digits"),
    (b"1e999", "the number '1e999', above all floats"),
    (b"1." + b"1" * 1_000_000, "1.111111111111111., expected an object"),
    (b"-Infinity", "-Infinity, which JSON does not have"),
    (b'{"version":1,"version":1}', "the name 'version' twice in one object"),
    (b'{"version":1}{}', "invalid JSON"),
    (b'{"' + b"x" * 1_000_000 + b'":1}', "no version"),
    (b'{"version":1,"' + b"x" * 1_000_000 + b'":1}', "a field 'xxx"),
    (b"[1]", r"\[1\], expected an object"),
    (b"null", "None, expected an object"),
    (b'"\xed\xa0\x80"', "text that is not UTF-8"),
]


@pytest.mark.parametrize(("raw", "message"), TEXTS, ids=[str(n) for n in range(len(TEXTS))])
def test_text_that_is_not_strict_json_is_refused_with_its_reason(raw: bytes, message: str) -> None:
    with refused(f"manifest.json: got {message}") as caught:
        manifest_file.from_json(raw)
    assert len(str(caught.value)) < 1000


def test_false_sizes_allocate_nothing_large(known: Sample) -> None:
    """A header of 8 TiB, in a file that is one hole; a swap space of 2^62 ranks; parameters of 2^40 elements."""
    tracemalloc.start()
    try:
        with sample() as huge:
            os.truncate(huge.folder / huge.shard.file, 8 << 40)
            raw = edited(huge.manifest, "shards/0/size", 8 << 40)
            with refused(r"got a header of 8796\d+ bytes, expected at most 16777224"):
                refused_by_open(huge, raw)
        assert "rank-00000-of-4611686018427387904" in try_swap_header(
            known, edited(known.swap_header, "world", 2**62)
        )
        for change, value in (("parameters/0/shape", [2**40]), ("shards/0/size", 2**62)):
            assert try_manifest(known, edited(known.manifest, change, value))
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


MADE: dict[str, Callable[[Path, Path], Any]] = {  # what takes the place of a file, whose bytes are away
    "link": lambda path, away: path.symlink_to(away),
    "link to a folder": lambda path, away: path.symlink_to(away.parent),
    "loop": lambda path, _: path.symlink_to(path),
    "pipe": lambda path, _: os.mkfifo(path),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
    "folder": lambda path, _: path.mkdir(),
}


@pytest.mark.parametrize("place", ["manifest.json", "rank-00000-of-00002.safetensors"])
@pytest.mark.parametrize("what", MADE)
def test_links_pipes_devices_and_folders_are_refused(tmp_path: Path, place: str, what: str) -> None:
    """A link out of the folder, though it leads to the right bytes; a pipe does not hang."""
    with sample() as known:
        path = known.folder / place
        MADE[what](path, path.rename(tmp_path / "away"))
        with refused(rf"{place}: got ('Too many levels.*links'|something else than a regular file)"):
            open_checkpoint(known.folder)


def test_a_manifest_of_a_gigabyte_is_not_read(known: Sample) -> None:
    path = known.folder / FILE
    try:
        os.truncate(path, 1 << 30)
        with refused("manifest.json: got 1073741824 bytes, expected at most 67108864"):
            open_checkpoint(known.folder)
    finally:
        path.write_bytes(known.manifest)
