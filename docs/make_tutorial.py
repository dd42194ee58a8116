"""Fill the outputs of docs/tutorial.md: `python docs/make_tutorial.py`. It runs every command of it, in order.

The invariant: no output of the page is written by hand. A block that `<!-- output NAME -->` announces is what the
command before it printed here, without the lines that OUTPUTS leaves out; "..." stands for those. Commands that
plan run as they are; those that train or measure run in the sizes of SMALL. tests/docs/test_tutorial.py runs the
page by the same rules.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

DOCS = Path(__file__).parent
PAGE = DOCS / "tutorial.md"
CONFIG = DOCS.parent / "examples" / "zero_offload.json"

SMALL = {
    "--num-layers": {"50": "2", "2": "2"},
    "--hidden-size": {"4096": "64"},
    "--num-attention-heads": {"32": "4"},
    "--seq-length": {"1024": "64"},
    "--vocab-size": {"50257": "256"},
    "--batch-size": {"10": "10"},
    "--micro-batches": {"2": "2"},
    "--bucket-size": {"500000000": "500000000"},
    "--lr": {"1e-4": "1e-4"},
    "--steps": {"500": "20", "600": "24", "20": "12"},
    "--save-every": {"100": "10", "0": "0"},
    "--speculate": {"252": "1"},
    "--delay-from": {"100": "6"},
    "--nproc-per-node": {"2": "2"},
    "-n": {"1": "1"},
}
"""Of every option that takes a number: what the page says, and what runs here instead."""

ADDED = {"tokens.bin": ("--vocab-size", "256")}
"""What runs besides, where a word is: the tokens here are fewer than GPT-2's."""

MEASURED = "here.toml"  # that zfunc calibrate wrote: a plan for it is a plan of the small job
RUNS = ("train", "calibrate", "torchrun")  # commands that take a machine's time and memory
READS = ("doctor", "top", "report", "export", "tail", "cp")  # those that only look at what is there
OTHERS = {"draw": "--compare"}  # those that plan, and what makes them look at a run

_FITS, _TIME = r"^plan |^ {11}|^it |^  (device|pinned|host) .* GiB", r"^a step|^  bound"
_FOUND, _ADVICE = r"^found|^  [a-z_]+ [\d,]+ instead|^as options|^  --[a-z-]+ \S+ --", r"^to |^  --"

OUTPUTS = {
    "plan-v100": None,
    "plan-auto": f"^plan |^it |needed|^  device|{_TIME}|{_FOUND}",
    "plan-parts": f"{_FITS}|needed|{_TIME}|{_FOUND}|{_ADVICE}",
    "plan-h100": f"^hardware|{_FITS}|needed|{_TIME}|{_ADVICE}",
    "draw": None,
    "doctor": r"^(thr|mem|host|pin|CUDA)|^!|^  (of a|avail|huge|memory|Adam|lim|round|dev)|^\d wrong|^- |^  let",
    "plan-here": f"^hardware|^plan |^it |{_TIME}",
    "train": r"json:|^host Adam|^precision|^data|held out|^model|^plan:|most:|^run|^step|^all|^  [a-z]",
    "resume": r"^resum|^run|^step|^all",
    "row": None,
    "lines": r"Rank 0",
    "top": None,
    "compare": None,
    "export": None,
    "plan-8bit": f"{_FITS}|needed|{_TIME}",
    "ranks": r"ranks$|^step|^all",
}
"""What is shown of a command's output: the lines with a match, or all of them."""

CODES = {"doctor": (0, 1)}
"""Exit codes of the commands with these outputs, where it is not 0: what may be wrong."""


@frozen
class Block:
    """A fenced block of the page: its language, what it says, and the name of the output it is."""

    language: str
    body: str
    output: str = ""


def blocks(page: str) -> list[Block]:
    """The fenced blocks, in order."""
    fences = re.finditer(r"(?:^<!-- output (\S+) -->\n)?^```(\w+)\n(.*?)^```$", page, re.M | re.S)
    return [Block(found[2], found[3], found[1] or "") for found in fences]


def commands(body: str) -> list[list[str]]:
    """The commands of a block, as words."""
    joined = body.replace("\\\n", " ").splitlines()
    return [words for line in joined if (words := shlex.split(line, comments=True))]


def kind(words: list[str]) -> str:
    """What a command is: the name after `zfunc`, or the program."""
    return words[1] if words[0] == "zfunc" else words[0]


def here(words: list[str]) -> list[str]:
    """The command in a size for any machine. LookupError for a command or a number that no rule is for."""
    name = kind(words)
    if name in READS or OTHERS.get(name, "") in words:
        return words
    if name in ("plan", "draw") and MEASURED not in words:
        return words
    if name not in (*RUNS, "plan"):
        raise LookupError(
            f"{words[:3]}: got a command that no rule is for, expected one in docs/make_tutorial.py"
        )
    return [*_smaller(words)]


def _smaller(words: list[str]) -> Iterator[str]:
    for before, word in zip(["", *words], words, strict=False):
        number = re.fullmatch(r"[0-9][0-9.e+-]*", word)
        if number and word not in SMALL.get(before, {}):
            raise LookupError(f"{before} {word}: got a number without a rule, expected it in SMALL")
        yield SMALL[before][word] if number else word
        yield from ADDED.get(word, ())


def form(line: str) -> str:
    """A line without what differs from run to run and machine to machine: numbers, bars, hashes, names.

    >>> form("hardware   AMD EPYC, 2 cores") == form("hardware   Intel(R) Xeon(R) Processor, 64 cores")
    True
    >>> form("step 20/24  loss 5.31  0:07 left") == form("step 3/60  loss 4.9e-1  1:00 left")
    True
    """
    line = re.sub(r"\([0-9a-f]{16}\)", "(hash)", line)
    line = re.sub(r"^hardware .*(, \d+ cores)", r"hardware CPU\1", line)
    line = re.sub(r"[█▇▆▅▄▃▂▁░]+", "~", line)
    line = re.sub(r"\d[\d,.:]*(e[-+]?\d+)?", "#", line)
    line = re.sub(r"\b(B|KiB|MiB|GiB|ns|us|ms|s)\b", "U", line)
    return " ".join(line.split())


def shown(name: str, said: str) -> str:
    """What the page shows of an output."""
    said = re.sub(r"/\S*/(?=torch/lib/)", ".../", said)
    said = re.sub(r"/\S*/(?=runs/)", "", said)
    keep, lines = OUTPUTS[name], [""]
    for line in said.rstrip().splitlines():
        new = line if not line or keep is None or re.search(keep, line) else "..."
        if (new, lines[-1]) not in (("...", "..."), ("", "..."), ("", "")):
            lines.append(new)
    lines = lines[1:]
    return "".join(f"{line}\n" for line in lines)


def filled(page: str, outputs: dict[str, str]) -> str:
    """The page with these outputs in their blocks, and the configuration in its own."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- output {found[1]} -->\n```text\n{shown(found[1], outputs[found[1]])}```"

    page = re.sub(r"^<!-- output (\S+) -->\n```text\n.*?^```$", fill, page, flags=re.M | re.S)
    config = f"```json5\n{CONFIG.read_text()}```"
    return re.sub(r"^```json5\n.*?^```$", lambda _: config, page, flags=re.M | re.S)


def prepare(folder: Path) -> None:
    """What the commands of the page expect beside them: the configuration, tokens, texts and a tokenizer."""
    folder.joinpath("examples").mkdir()
    folder.joinpath("examples", CONFIG.name).write_text(CONFIG.read_text())
    tokens = bytearray()
    for n in range(24_000):  # words of three tokens, some more frequent than others
        word = (n * n + n // 7) % 61
        for token in (word, (word * 5 + 1) % 256, (word * 11 + 3) % 256):
            tokens += token.to_bytes(2, "little")
    folder.joinpath("tokens.bin").write_bytes(tokens)
    texts = (" ".join(f"w{(n * k) % 50}" for k in range(1, 60)) for n in range(200))
    folder.joinpath("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder.joinpath("tokenizer.json").write_text(json.dumps(_tokenizer()))


def _tokenizer() -> dict[str, Any]:
    """A word for each of the corpus, as `tokenizer.json` has it."""
    words = ["<unk>", "<|endoftext|>", *(f"w{n}" for n in range(50))]
    model = {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(words)}, "unk_token": "<unk>"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return {
        "version": "1.0",
        **dict.fromkeys(parts),
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }


def program(arguments: list[str]) -> list[str]:
    """The command for this Python, whatever is on the path."""
    modules = {"zfunc": "zfunc", "torchrun": "torch.distributed.run"}
    name = modules.get(arguments[0])
    return arguments if name is None else [sys.executable, "-m", name, *arguments[1:]]


def _run(words: list[str], folder: Path, codes: tuple[int, ...]) -> str:
    """What a command prints."""
    arguments = program(here(words))
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    print(f"{done.returncode}  {shlex.join(words)}", flush=True)
    if done.returncode not in codes:
        raise SystemExit(f"expected {codes}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Run the page, write it anew, and its pictures."""
    page, said, outputs = PAGE.read_text(), "", dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        parts = blocks(page)
        for block, following in zip(parts, [*parts[1:], Block("", "")], strict=True):
            for words in commands(block.body) if block.language == "sh" else ():
                said = _run(words, folder, CODES.get(following.output, (0,)))
                if "step.html" in words:
                    _run([*words[:-1], str(DOCS / "tutorial-planned.svg")], folder, (0,))
            if block.output:
                outputs[block.output] = said
        measured = (folder / "runs" / "ten" / "timeline.svg").read_text()
    PAGE.write_text(filled(page, outputs))
    DOCS.joinpath("tutorial-measured.svg").write_text(measured)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
