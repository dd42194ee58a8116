"""Which tests run, in what order, and what is said of the others. Hypothesis is quiet about slow machines, and
tries fewer examples by day, where a test does not say how many."""

import atexit
import gc

atexit.register(gc.freeze)  # what is left needs no last search for garbage
gc.disable()  # until all is collected, as nearly all that is made till then stays

import logging
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import small_trainings
import torch
from bad_disks import small_disk  # noqa: F401
from device_fixtures import controls, device, device_kinds, pytest_configure  # noqa: F401
from forked import NIGHT
from hypothesis import settings
from shared_traces import share_traces
from small_trainings import at_step  # noqa: F401
from text_data import tokenizer_file  # noqa: F401

from zfunc.checkpoint import swap_file
from zfunc.runtime.thread_budget import default_threads

settings.register_profile("day", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("night", settings.get_profile("day"), max_examples=100)
settings.load_profile("day")
# These tensors are tiny; teams that spin on a busy machine would take all the time, here and in what tests start.
torch.set_num_threads(1)
# Smaller than a parameter, so that every law runs over several pieces of one: whole blocks of 64 elements or bytes.
for module, piece in {
    "optim.updates": "PIECE",
    "optim.adafactor": "PIECE",
    "engine.state.weights": "PART",
    "engine.state.restore": "PART",
    "engine.step.agreement": "PIECE",
    "checkpoint.export": "PIECE",
    "checkpoint.safetensors_file": "CHUNK",
}.items():
    found = import_module(f"zfunc.{module}")
    assert getattr(found, piece) > 640
    setattr(found, piece, 640)
swap_file.BATCH = 8192  # whole blocks of a drive
default_threads()  # chosen before, as it would follow that
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ZFUNC_CACHE"] = "off"  # costs that a plan keeps for the next one
# It formats everything, at any level, if it has a handler; pytest gives one to each logger that does not propagate.
trace_log = logging.getLogger("torch.__trace")
trace_log.propagate = True
trace_log.handlers.clear()
share_traces()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests ignore it: a script starts its background jobs so."""
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, ours)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory is NaN, as torch fills it with deterministic kernels: a result that depends on it is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test trains: its current folder."""
    small_trainings.move_into(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without it: advice plans tens of other steps, and traces larger batches."""
    for name in ("suggest", "_beyond_settings"):
        monkeypatch.setattr(f"zfunc.planner.plan_step.{name}", lambda *_, **__: ())


@pytest.fixture(scope="module")
def night(request: pytest.FixtureRequest) -> list[str]:
    """The arguments of a worker: NIGHT if a slow test of the file is to run."""
    own = [item for item in request.session.items if item.path == request.path]
    return [NIGHT] if any(item.get_closest_marker("slow") for item in own) else []


# What most mistakes break, in about a minute of one core: `make test` begins with it.
QUICK = [f"tests/test_{name}" for name in ("packages", "values", "display", "public", "mutants")]
QUICK += [f"tests/core/test_{name}" for name in ("settings", "layout", "recipe", "plan")]
QUICK += ["tests/engine/test_segments", "tests/engine/test_gradients"]
QUICK += ["tests/optim/test_betas", "tests/checkpoint/test_manifest"]
LONGEST = """
faults grading laws any_model hf tiles examples update ranks resume long_rows any_model_values tile_check passes
search labs plan_command hf_folders lora finetuning flops hf_plans saving pages quantized_folders rules_in_c
planner disk_faults wheel any_model_refused tile_constants deferred verify compile other_systems advice preferences
without_torch optimizers placement verify_exhaustively schedules whole_parameters steady_state pipelines
calibrate digests train_step train_command quantization threads disk replace compact batches blocks
import_adapters command_errors fp32_params corpus change_midway fuzz tile_attention import_run stream
import_torchtitan page_in_browser gpt_costs live_page graph side_by_side orders published hostile saving_ranks
tracking random_operations module_buffers delayed_recipe resume_disk purity config_flag loss
"""
SLOW = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("pretend",), help="load it, for tests/device")
    parser.addoption("--part", choices=("quick", "rest"), help="what `make test` runs first, or all but that")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick part imports no other test."""
    if config.getoption("--part") != "quick" or collection_path == config.rootpath / "tests":
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    return not any(f"{x}.py" == name or x.startswith(f"{name}/") for x in QUICK) or None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """By day rows that are slow are counted and made no items, unless there is no other or the command names a row:
    that would be a third of the collection's time."""
    device_kinds(metafunc)
    yield
    config, calls = metafunc.config, metafunc._calls
    quick = [call for call in calls if all(mark.name != "slow" for mark in call.marks)]
    if quick and config.option.markexpr == "not slow" and not any("[" in x for x in config.args):
        metafunc._calls = quick
        config.stash[SLOW] = config.stash.get(SLOW, 0) + len(calls) - len(quick)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that two workers end at one time; before them those that mostly
    wait, for time-outs: while the device half runs beside them, no core waits, too."""
    if part := config.getoption("--part"):
        items[:] = [x for x in items if any(x.nodeid.startswith(y) for y in QUICK) == (part == "quick")]
    names = [f"test_{name}.py" for name in LONGEST.split()]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """The garbage collector passes over the modules, which stay, and looks less often at what tests make."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor at what the tests of a file leave for those of the next: modules and traces that they share."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# --- what was left out, and why --------------------------------------------------------------------------


def table(skipped: Iterable[tuple[str, str]], slow: int = 0) -> list[str]:
    """A line for every reason, from pairs (file, reason), the most frequent first.

    >>> print(*table([("a.py", "no GPU"), ("b.py", "no GPU"), ("c.py", "no browser")], 9), sep="\\n")
        9  slow: make nightly runs them
        2  no GPU (a.py, b.py)
        1  no browser (c.py)
    """
    files: dict[str, list[str]] = {}
    for file, reason in skipped:
        files.setdefault(reason, []).append(file)
    lines = [(len(of), f"{reason} ({', '.join(dict.fromkeys(of))})") for reason, of in files.items()]
    if slow:
        lines.append((slow, "slow: make nightly runs them"))
    return [f"{count:5d}  {line}" for count, line in sorted(lines, key=lambda x: -x[0])]


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """In each worker too, where all files are collected."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.config.stash[SLOW] = item.config.stash.get(SLOW, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = session.config.stash.get(SLOW, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """A worker of xdist has ended: all have left out the same."""
    node.config.stash[SLOW] = getattr(node, "workeroutput", {}).get("slow", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    skipped = [(Path(r.longrepr[0]).name, r.longrepr[2].removeprefix("Skipped: ")) for r in reports]
    if lines := table(skipped, config.stash.get(SLOW, 0)):
        terminalreporter.section("left out, and why")
        for line in lines:
            terminalreporter.write_line(line)
