"""Fill in the outputs of docs/tutorial.md: `python docs/make_tutorial.py`. It runs every command of it, in order.

No output of the page is written by hand. A block after `<!-- output NAME -->` is what the command before it prints;
"..." stands for the lines that OUTPUTS leaves out. Commands that plan run as they are; those that train or measure
run in the sizes of SMALL. tests/docs/test_tutorial.py runs the page by the same rules.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from attrs import frozen

DOCS = Path(__file__).parent
PAGE = DOCS / "tutorial.md"
CONFIG = DOCS.parent / "examples" / "zero_offload.json"

SMALL = {
    "--num-layers": {"50": "2", "2": "2"},
    "--hidden-size": {"4096": "64", "8192": "64"},
    "--num-attention-heads": {"32": "4", "64": "4"},
    "--seq-length": {"1024": "64"},
    "--vocab-size": {"50257": "256"},
    "--batch-size": {"10": "10"},
    "--micro-batches": {"2": "2"},
    "--bucket-size": {"500000000": "500000000", "1000000000": "1000000000"},
    "--lr": {"1e-4": "1e-4"},
    "--steps": {"500": "20", "600": "24", "20": "12"},
    "--save-every": {"100": "10", "0": "0"},
    "--nproc-per-node": {"2": "2"},
    "-n": {"1": "1"},
}
"""For every option that takes a number: that of the page, and the one that runs instead."""

_AS_ON_A_GPU = "--schedule", "Overlapped"
ADDED = {"tokens.bin": ("--vocab-size", "256"), "train": _AS_ON_A_GPU, "plan": _AS_ON_A_GPU}
"""Options that are added after a word: the tokens have fewer values than GPT-2's, and a CPU has another default."""

MEASURED = "here.toml"  # that zfunc calibrate wrote: a plan for it is a plan of the small job
SHRUNK = ("train", "calibrate", "torchrun", "plan")  # commands that take a machine's time and memory
UNCHANGED = ("draw", "doctor", "report", "export", "tail", "cp", "mkdir")

_FITS, _TIME = r"^plan |^ {11}|^it |^  (device|pinned|host) .* GiB", r"^a step|^  bound"
_FOUND, _ADVICE = r"^found|^  [a-z_]+ \S+ instead|^as options|^  \S+ --|^  --[a-z-]+ \S+ --", r"^to |^  --"

OUTPUTS = {
    "plan-v100": None,
    "plan-auto": f"^plan |^ {{11}}\\S|^it |needed|^  device|{_TIME}|{_FOUND}",
    "plan-parts": f"{_FITS}|needed|{_TIME}|{_ADVICE}",
    "draw": None,
    "doctor": r"^  (processor|threads|memory|bandwidth|this folder|devices) |^!",
    "train": r"json:|^host Adam|^precision|^data|held out|^model|^plan:|most:|^run|^step|^all|^  [a-z]",
    "row": None,
    "compare": r"^predicted|^ +ops|^the step|^(h2d|compute|d2h|host) |bound by|^written",
    "plan-40b-device": f"^GPT|{_FITS}|needed|{_ADVICE}",
    "plan-40b": f"{_FITS}|needed|{_TIME}|{_ADVICE}",
    "plan-desktop": f"{_FITS}|needed|^  disk .* GiB|{_TIME}|^the disk|^  (commits|space|wear)",
}
"""The lines of an output that the page shows: those with a match, or all."""

CODES = {
    "doctor": (0, 1),
    "plan-40b-device": (1,),
}  # exit codes that are expected of an output's command, if not 0
PICTURES = {"step.html": "tutorial-planned.svg", "forty.html": "tutorial-40b.svg"}  # drawn beside a page


@frozen
class Block:
    """A fenced block of the page: its language, its text, and the name of the output that it shows."""

    language: str
    body: str
    output: str = ""


def blocks(page: str) -> list[Block]:
    """The fenced blocks, in order."""
    fences = re.finditer(r"(?:^<!-- output (\S+) -->\n)?^```(\w+)\n(.*?)^```$", page, re.M | re.S)
    return [Block(match[2], match[3], match[1] or "") for match in fences]


def commands(body: str) -> list[list[str]]:
    """The commands of a block, as words."""
    joined = body.replace("\\\n", " ").splitlines()
    return [words for line in joined if (words := shlex.split(line, comments=True))]


def here(words: list[str]) -> list[str]:
    """The command in a size for any machine. LookupError for a command or a number that no rule is for."""
    name = words[1] if words[0] == "zfunc" else words[0]
    if name in UNCHANGED or (name == "plan" and MEASURED not in words):
        return words
    if name not in SHRUNK:
        raise LookupError(f"{words[:3]}: got a command without a rule, expected it in SHRUNK or UNCHANGED")
    smaller: list[str] = []
    for option, word in zip(["", *words], words, strict=False):
        number = re.fullmatch(r"[0-9][0-9.e+-]*", word)
        if number and word not in SMALL.get(option, {}):
            raise LookupError(f"{option} {word}: got a number without a rule, expected it in SMALL")
        smaller += [SMALL[option][word] if number else word, *ADDED.get(word, ())]
    return smaller


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


def shown(name: str, output: str) -> str:
    """An output as the page shows it."""
    output = re.sub(r"/\S*/(?=torch/lib/)", ".../", output)
    output = re.sub(r"/\S*/(?=runs/|swap\b)", "", output)
    keep, lines = OUTPUTS[name], [""]
    for line in output.rstrip().splitlines():
        new = line if not line or keep is None or re.search(keep, line) else "..."
        if (new, lines[-1]) not in (("...", "..."), ("", "..."), ("", "")):
            lines.append(new)
    return "".join(f"{line}\n" for line in lines[1:])


def filled(page: str, outputs: dict[str, str]) -> str:
    """The page with these outputs in their blocks, and the configuration in its own."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- output {match[1]} -->\n```text\n{shown(match[1], outputs[match[1]])}```"

    page = re.sub(r"^<!-- output (\S+) -->\n```text\n.*?^```$", fill, page, flags=re.M | re.S)
    config = f"```json5\n{CONFIG.read_text()}```"
    return re.sub(r"^```json5\n.*?^```$", lambda _: config, page, flags=re.M | re.S)


def prepare(folder: Path) -> None:
    """The files that the commands of the page read: the configuration, and tokens."""
    folder.joinpath("examples").mkdir()
    folder.joinpath("examples", CONFIG.name).write_text(CONFIG.read_text())
    tokens = bytearray()
    for n in range(24_000):  # words of three tokens, some more frequent than others
        word = (n * n + n // 7) % 61
        for token in (word, (word * 5 + 1) % 256, (word * 11 + 3) % 256):
            tokens += token.to_bytes(2, "little")
    folder.joinpath("tokens.bin").write_bytes(tokens)


def program(words: list[str]) -> list[str]:
    """The command for this Python, whatever is on the path."""
    module = {"zfunc": "zfunc", "torchrun": "torch.distributed.run"}.get(words[0])
    return words if module is None else [sys.executable, "-m", module, *words[1:]]


def _output(words: list[str], folder: Path, codes: tuple[int, ...]) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(program(here(words)), cwd=folder, env=environment, capture_output=True, text=True)
    print(f"{done.returncode}  {shlex.join(words)}", flush=True)
    if done.returncode not in codes:
        raise SystemExit(f"expected {codes}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Run the page, and write it and its pictures."""
    page, output, outputs = PAGE.read_text(), "", dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        parts = blocks(page)
        for block, following in zip(parts, [*parts[1:], Block("", "")], strict=True):
            for words in commands(block.body) if block.language == "sh" else ():
                output = _output(words, folder, CODES.get(following.output, (0,)))
                if picture := PICTURES.get(words[-1]):
                    _output([*words[:-1], str(DOCS / picture)], folder, (0,))
            if block.output:
                outputs[block.output] = output
        measured = (folder / "runs" / "ten" / "timeline.svg").read_text()
    PAGE.write_text(filled(page, outputs))
    DOCS.joinpath("tutorial-measured.svg").write_text(measured)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
