"""Mutated manifests, shards and swap spaces for their readers: each is refused with a CheckpointError or read.

The invariant: no input makes a reader raise another error, take more than SECONDS, or more than LARGEST bytes.

    python tests/fuzz_checkpoint.py --inputs 20000 --seed 1

prints how many of each kind were refused and accepted. An input that does anything else is kept and named.
"""

import argparse
import copy
import json
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import frozen
from saved import everything, fill, save, save_swap

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
TEXTS = [
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    ".hidden",
    FILE,
    "\0",
    "\ud800",
    "x" * 2000,
    "F32",
    "U8",
    "F31",
    "é",
]
VALUES = [*NUMBERS, *TEXTS, None, True, False, [], {}, [0], [[]], {"": 0}, float("inf"), *RAW]


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
        del fields["checksum"]  # it would refuse nearly all, and nothing behind it would be tried
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


def try_manifest(known: Sample, raw: bytes) -> bool:
    """Whether a checkpoint with this manifest is read; every byte of it, then. Raises what no reader should."""
    (known.folder / FILE).write_bytes(raw)
    try:
        checkpoint = open_checkpoint(known.folder)
        fill(checkpoint, everything(checkpoint.manifest))
        assert manifest_file.from_json(manifest_file.to_json(checkpoint.manifest)) == checkpoint.manifest
        return True
    except CheckpointError as error:
        check_message(error)
        return False
    finally:
        (known.folder / FILE).write_bytes(known.manifest)


def try_shard(known: Sample, raw: bytes) -> bool:
    """Whether this file is read as the shard, which it may be only if its bytes are those written."""
    path = known.folder / "fuzzed"
    path.write_bytes(raw)
    try:
        with open_shard(path, known.shard) as reader:
            for tensor in known.shard.tensors:
                reader.read_into(tensor.name, 0, tensor.numel, bytearray(tensor.nbytes))
        assert raw == known.shard_bytes, "changed bytes were taken for those written"
        return True
    except CheckpointError as error:
        check_message(error)
        return False


def json_in(raw: bytes, at: int) -> bytes:
    """The JSON text in a frame that begins there, which ends at its last brace."""
    start = raw.index(b'{"', at)
    return raw[start : start + json.JSONDecoder().raw_decode(raw[start:].decode("latin-1"))[1]]


def try_swap_header(known: Sample, text: bytes) -> bool:
    """Whether a swap space with this header is read as a checkpoint, every byte of it."""
    old, new = frame_header(known.swap_header), frame_header(text)
    known.swap.write_bytes(new + known.swap_bytes[len(old) :])
    return swap_is_read(known)


def try_swap_record(known: Sample, text: bytes) -> bool:
    """Whether a swap space with this last commit is read."""
    raw, header = bytearray(known.swap_bytes), parse_header(known.swap_bytes, "")
    at = header.record_at(1)
    checksums = parse_record(raw[at : at + header.record_size], header, "").checksums  # type: ignore[union-attr]
    new = frame_record(1, text, checksums)
    raw[at : at + len(new)] = new
    known.swap.write_bytes(raw)
    return swap_is_read(known)


def swap_is_read(known: Sample) -> bool:
    """Every byte of the checkpoint that the swap space is."""
    try:
        checkpoint = open_checkpoint(known.swap.parent)
        fill(checkpoint, everything(checkpoint.manifest))
        return True
    except CheckpointError as error:
        check_message(error)
        return False


def check_message(error: CheckpointError) -> None:
    """It says what was got, is printable, and is no longer than one reads."""
    text = str(error)
    assert ": got " in text, text
    assert len(text.encode()) < 5000, text[:5000]


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
            holder[by.choice(TEXTS)] = holder.pop(key)
        case 4:
            other, at = by.choice(list(places(holder)))
            holder[key] = copy.deepcopy(other[at])
        case _:
            holder[key] = by.choice(VALUES)


KINDS: dict[str, Callable[[Sample, random.Random], tuple[bool, bytes]]] = {}


def kind(
    what: str,
    part: str,
    mutate: Callable[[bytes, random.Random], bytes],
    attempt: Callable[[Sample, bytes], bool],
) -> None:
    """Add a kind of input: how one is made of a sample, and tried. An input that fails is in the error's notes."""

    def run(known: Sample, by: random.Random) -> tuple[bool, bytes]:
        raw = mutate(getattr(known, part), by)
        try:
            return attempt(known, raw), raw
        except BaseException as error:
            error.add_note(f"the input ({what}): {raw[:2000]!r}")
            raise

    KINDS[what] = run


kind("manifest bytes", "manifest", mutate_bytes, try_manifest)
kind("manifest values", "manifest", mutate_json, try_manifest)
kind("shard bytes", "shard_bytes", mutate_bytes, try_shard)
kind("swap header", "swap_header", mutate_json, try_swap_header)
kind("swap record", "swap_record", mutate_json, try_swap_record)


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


def main(arguments: list[str] | None = None) -> int:
    """Run so many inputs, and print what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    by = random.Random(options.seed)
    count: Counter[tuple[str, bool]] = Counter()
    began = time.monotonic()
    with sample() as known, limited():
        for n in range(options.inputs):
            what = list(KINDS)[n % len(KINDS)]
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            accepted, _ = KINDS[what](known, by)
            count[what, accepted] += 1
    for what in KINDS:
        print(f"{what:<16} {count[what, False]:>8} refused {count[what, True]:>8} accepted")
    print(
        f"{options.inputs} inputs in {time.monotonic() - began:.0f} s, no other error (seed {options.seed})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
