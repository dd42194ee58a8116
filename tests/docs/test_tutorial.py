"""docs/tutorial.md as a reader goes through it: every command of it, in order, in one folder, in a size for here.

What a command becomes is said once, in docs/make_tutorial.py, which fills the page's outputs by the same rules.
"""

import contextlib
import doctest
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import frozen

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import make_tutorial  # noqa: E402
from make_tutorial import CODES, CONFIG, OUTPUTS, blocks, commands, filled, form, here, program, shown  # noqa: E402

from zfunc.cli.commands.plan import PlanSettings, plan_model  # noqa: E402
from zfunc.cli.main import main  # noqa: E402
from zfunc.planner.profile import load_profile  # noqa: E402
from zfunc.runtime.accelerator import available_bytes  # noqa: E402
from zfunc.runtime.memory_limits import available_host_bytes  # noqa: E402

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = blocks(PAGE)
COMMANDS = [shlex.join(words) for b in BLOCKS if b.language == "sh" for words in commands(b.body)]
PLANNED = [name for name in OUTPUTS if name.startswith(("draw", "plan-"))]


@frozen
class Ran:
    """A command of the page as it ran here. `output` names the block that follows it."""

    command: str
    output: str
    code: int
    printed: str


# --- running it ------------------------------------------------------------------------------------------


def run(words: list[str], output: str) -> Ran:
    """A command in a size for here. zfunc runs in this process: a new one spends seconds on importing torch."""
    arguments = here(words)
    if arguments[0] == "zfunc":
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(arguments[1:])
        printed.seek(0)
        return Ran(shlex.join(words), output, code, printed.read())
    done = subprocess.run(
        program(arguments),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    return Ran(shlex.join(words), output, done.returncode, done.stdout)


def steps() -> Iterator[Ran]:
    """Every block of the page that does something, in order."""
    for block, after in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        words = commands(block.body) if block.language == "sh" else []
        for n, command in enumerate(words):
            yield run(command, after.output if after is not None and n == len(words) - 1 else "")
        if block.language == "python":
            pytest.importorskip("safetensors")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block.body, "docs/tutorial.md", "exec"), {})
            yield Ran("python", "", 0, printed.getvalue())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Ran]]]:
    """The page, run once; and the folder it ran in."""
    folder = tmp_path_factory.mktemp("tutorial")
    make_tutorial.prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr("zfunc.train.loop.SAMPLE_TOKENS", 5)
        yield folder, [*steps()]
    logging.getLogger("zfunc").handlers.clear()


def printed_for(ran: tuple[Path, list[Ran]], output: str) -> str:
    """What the command before an output of the page prints now, as the page would show it."""
    (text,) = (one.printed for one in ran[1] if one.output == output)
    return shown(output, text)


# --- laws ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_command_of_the_page_runs_and_ends_as_the_page_says(ran: tuple[Path, list[Ran]]) -> None:
    assert [one.command for one in ran[1] if one.command != "python"] == COMMANDS
    for one in ran[1]:
        assert one.code in CODES.get(one.output, (0,)), f"{one.command}\n{one.printed}"


@pytest.mark.slow
def test_what_is_planned_is_printed_as_on_the_page(ran: tuple[Path, list[Ran]]) -> None:
    for name in PLANNED:
        (block,) = (b for b in BLOCKS if b.output == name)
        assert printed_for(ran, name) == block.body, f"{name}: run python docs/make_tutorial.py"


@pytest.mark.slow
def test_what_depends_on_the_machine_has_the_lines_of_the_page(ran: tuple[Path, list[Ran]]) -> None:
    """But for their numbers. What the doctor finds is the machine's, so of it only one line has to be there. Some
    lines are said once by a process, and here many commands are one.
    """
    if torch.cuda.is_available():
        pytest.skip("the page has the lines of a CPU")
    once = {
        form(line) for one in ran[1] for line in one.printed.splitlines() if line.startswith("host Adam uses")
    }
    for block in (b for b in BLOCKS if b.output and b.output not in PLANNED):
        now = {form(line) for line in printed_for(ran, block.output).splitlines()}
        page = {form(line) for line in block.body.splitlines()} - {"", "..."}
        if block.output == "doctor":
            assert "  threads  " in block.body
            assert "  threads  " in printed_for(ran, "doctor")
        elif block.output == "row":
            old, new = (json.loads(text) for text in (block.body, printed_for(ran, "row")))
            assert old.keys() == new.keys()
        else:
            lost = {
                line for line in page - now - once if "bound by" not in line and not line.startswith("lane")
            }
            assert not lost, f"{block.output}: {lost} is not in\n{now}"


@pytest.mark.slow
def test_flags_and_file_are_the_same_training(ran: tuple[Path, list[Ran]]) -> None:
    def losses(name: str) -> list[float]:
        lines = (ran[0] / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [row["loss"] for row in map(json.loads, lines) if "loss" in row]

    assert len(losses("flags")) == 20
    assert losses("ten")[:20] == losses("flags")
    assert len(losses("ten")) == 24


@pytest.mark.slow
def test_what_the_page_makes_is_there(ran: tuple[Path, list[Ran]]) -> None:
    files = "step.html", "here.toml", "ten.safetensors", "runs/ten/report.html", "runs/ten/compare.html"
    assert all((ran[0] / name).stat().st_size > 0 for name in files)
    (python,) = (one.printed for one in ran[1] if one.command == "python")
    assert python == "120576 torch.bfloat16\n"


def test_the_page_has_its_outputs_and_configuration_from_the_generator() -> None:
    page = filled(PAGE, {b.output: b.body for b in BLOCKS if b.output})
    assert page.count("```json5\n" + CONFIG.read_text()) == 1
    assert CONFIG.read_text() in PAGE
    assert sorted(b.output for b in BLOCKS if b.output) == sorted(OUTPUTS)
    assert {b.language for b in BLOCKS} <= {"sh", "text", "json5", "python"}
    assert all(b.output for b in BLOCKS if b.language == "text"), "a text block that no command fills"


@pytest.mark.parametrize(
    "command",
    [
        "zfunc train --num-layers 51",
        "zfunc train --clip 2",
        "rm -r runs",
        "zfunc tarin",
        "zfunc calibrate --turns 3",
    ],
)
def test_a_command_without_a_rule_is_refused(command: str) -> None:
    with pytest.raises(LookupError, match="got a"):
        here(shlex.split(command))


def test_lines_are_compared_by_their_form() -> None:
    assert doctest.testmod(make_tutorial) == (0, 2)


def test_figures_in_the_prose_are_those_of_the_outputs() -> None:
    """Memory and seconds: in a planned output of the page, or the sum of such, to 5 %."""
    outputs = "".join(b.body for b in BLOCKS if b.output in PLANNED)
    parameters = int(re.findall(r"([\d,]+) parameters", outputs)[0].replace(",", ""))
    derived = {
        "115 GiB": 12 * parameters / 2**30,
        "38.3 GiB": 4 * parameters / 2**30,
        "345 GiB": 36 * parameters / 2**30,
        "157 GiB": 153.9 + 3.6,
        "616 GiB": 456.3 + 159.4,
        "6.6 GiB": 30.5 - 23.9,
        "31.7 GiB": load_profile("v100-32gb").value("bytes", "device") / 2**30,
        "32 GB": 32,  # the name of the card
        "128 GB": 1.28e11 / 1e9,  # of --with bytes.host
    }
    assert all(f"{x} GiB" in outputs for x in (153.9, 3.6, 23.9, 19.1, 456.3, 159.4))
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)
    figures = re.findall(r"\b\d[\d.]*\s(?:GB|GiB|MiB|s)\b", prose)
    assert len(figures) > 8
    for figure in (" ".join(x.split()) for x in figures):
        if figure in derived:
            assert float(figure.split()[0]) == pytest.approx(derived[figure], rel=0.05), figure
        else:
            assert figure in outputs or figure.replace(" ", ".0 ") in outputs, figure


# --- at full size ----------------------------------------------------------------------------------------


def moments_that_fit() -> str:
    """The widest with which the job of the page fits into this machine; skips the test where none does."""
    device, host = available_bytes(torch.device("cuda")), 0.9 * available_host_bytes()
    if device < 30e9:
        pytest.skip(f"needs 30 GB of free device memory, {device / 1e9:.1f} are there")
    size = {"num_layers": 50, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 1024}
    size |= {"vocab_size": 50257, "batch_size": 10, "micro_batches": 2}
    least = 0
    for moments in ("fp32", "16bit", "8bit"):
        step = {"precision": "fp16", "bucket_size": 500_000_000, "moments": moments, "hardware": "v100-32gb"}
        memory = plan_model(PlanSettings(**size, **step)).planned.memory
        least = memory["host"] + memory["pinned"]
        if least < host and memory["device"] < device:
            return moments
    pytest.skip(
        f"needs {least / 1e9:.0f} GB of free host memory with 8-bit moments, {host / 1e9:.0f} are there"
    )


@pytest.mark.slow
@pytest.mark.gpu
def test_the_command_of_the_page_trains_at_full_size(tmp_path: Path) -> None:
    """Three steps of it, without a checkpoint. A bf16 card takes the fp16 of the page as well."""
    moments = moments_that_fit()
    (words,) = (words for words in map(shlex.split, COMMANDS) if "runs/ten" in words and "500" in words)
    given = {"--steps": "3", "--save-every": "0"}
    words = [given.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    np.random.default_rng(0).integers(0, 50_257, 400_000).astype("<u2").tofile(tmp_path / "tokens.bin")
    (tmp_path / CONFIG.name).write_text(CONFIG.read_text())
    done = subprocess.run(
        [*program(words), "--moments", moments], cwd=tmp_path, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "ten" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(np.isfinite(row["loss"]) and row["loss"] < 12 for row in rows)  # ln 50257 is 10.8
    summary = json.loads((tmp_path / "runs" / "ten" / "summary.json").read_text())
    assert summary["peak_bytes"]["device"] <= summary["planned_bytes"]["device"] + (96 << 20)
