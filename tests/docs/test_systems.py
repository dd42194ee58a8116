"""Published systems in examples/systems: each is what it says it is, by zfunc's own recipes, PyTorch or NumPy."""

import ast
import random
import re
import runpy
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trained
from attrs import evolve
from pairs import in_pairs
from trained import steps
from zfunc.schedules import Overlapped, RoundPipe

import zfunc
from zfunc.core.graph import Graph, Op, Region
from zfunc.errors import PlanError

FOLDER = Path(__file__).parents[2] / "examples" / "systems"
sys.path.append(str(FOLDER))
sys.path.append(str(FOLDER.parents[1] / "docs"))
import fpdt  # noqa: E402
import make_systems  # noqa: E402
import round_pipe  # noqa: E402
import show  # noqa: E402
import staged  # noqa: E402
import super_offload  # noqa: E402
import vertical  # noqa: E402
import zero_infinity  # noqa: E402
import zero_offload  # noqa: E402

Out = pytest.CaptureFixture[str]
MOST = 60  # lines of code of a recipe or order, and as many of functions for its operations
FILES = sorted(x for x in FOLDER.glob("*.py") if x.stem != "show")
AS_BUILT_IN: dict[str, tuple[Callable[..., Iterable[Op]], dict[str, Any]]] = {
    "zero_offload": (zero_offload.zero_offload, zero_offload.SETTINGS),
    "zero_offload, one micro-batch": (zero_offload.zero_offload, {"clip_norm": 1.0}),
    "zero_offload, two ranks": (zero_offload.zero_offload, zero_offload.SETTINGS | {"world": 2}),
    "zero_infinity": (zero_infinity.zero_infinity, zero_infinity.SETTINGS),
    "zero_infinity, two ranks": (zero_infinity.zero_infinity, zero_infinity.SETTINGS | {"world": 2}),
    "vertical": (vertical.vertical, vertical.SETTINGS),
    "staged": (staged.staged, staged.SETTINGS),
}


@pytest.mark.parametrize("name", AS_BUILT_IN)
@pytest.mark.parametrize("segments", [1, 5])
def test_a_recipe_is_the_built_in_one_operation_by_operation(name: str, segments: int) -> None:
    recipe, settings = AS_BUILT_IN[name]
    own = zfunc.step_graph(segments, recipe=recipe, **settings)
    built_in = zfunc.step_graph(segments, **settings)
    assert [repr(op) for op in own] == [repr(op) for op in built_in]


def test_round_pipe_is_that_of_the_schedules_pass_by_pass() -> None:
    for devices, layers, micro_batches in np.ndindex(6, 7, 9):
        sizes = devices + 1, layers + 2, micro_batches + 1
        assert round_pipe.round_pipe(*sizes) == [list(x) for x in RoundPipe()(*sizes)]


def speculated(
    clip_norm: float, model: str = "pairs", **more: Any
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses, norms and weights of six steps, whose norms are between 0.5 and 0.9."""
    settings = {"precision": "fp32", "moments": "fp32", "bucket_size": 40, "clip_norm": clip_norm, **more}
    program, batch = trained.compiled(model, **settings)
    state, seen = steps(program, zfunc.init(program, seed=1), batch, 0, 6)
    return seen, zfunc.params(program, state)


@pytest.mark.parametrize(
    ("clip_norm", "more"),  # all steps are clipped, some, none
    in_pairs([0.1, 0.55, 1e6], [{}, {"micro_batches": 2}, {"model": "odd sizes"}]),
)
def test_speculation_has_the_bits_of_zero_offload(clip_norm: float, more: dict[str, Any]) -> None:
    given = {"recipe": super_offload.speculative, "stages": super_offload.FUNCTIONS}
    seen, weights = speculated(clip_norm, **more)
    for schedule in ("Serial", "Interleaved"):
        other, own = speculated(clip_norm, schedule=schedule, **more, **given)
        assert repr([x[:4] for x in other]) == repr([x[:4] for x in seen])
        assert all(torch.equal(own[name], x) for name, x in weights.items())


def test_speculation_undoes_a_step_whose_gradient_is_not_finite() -> None:
    settings = {"precision": "fp32", "moments": "fp32", "clip_norm": 1.0}
    given = {"recipe": super_offload.speculative, "stages": super_offload.FUNCTIONS}
    program, batch = trained.compiled("odd sizes", **settings, **given)
    state, _ = steps(program, zfunc.init(program, seed=1), batch, 0, 2)
    before = zfunc.params(program, state)
    inputs, targets = batch(2)
    state, metrics = zfunc.train_step(program, state, (inputs * float("inf"), targets))
    assert metrics.skipped
    assert all(torch.equal(x, before[name]) for name, x in zfunc.params(program, state).items())
    plain, plain_batch = trained.compiled("odd sizes", **settings)
    expected, _ = steps(plain, zfunc.init(plain, seed=1), plain_batch, 0, 2)
    for n in (3, 4):  # of training as if the step had not been
        state, metrics = zfunc.train_step(program, state, batch(n))
        expected, other = zfunc.train_step(plain, expected, batch(n))
        assert metrics.loss == other.loss


# --- a row in chunks, computed in NumPy --------------------------------------------------------------------------


class Layer:
    """The operations of fpdt.py on arrays, and the same layer on the whole row at once."""

    def __init__(self, chunks: int, tokens: int, hidden: int) -> None:
        draw = np.random.default_rng(0)
        self.tokens = tokens
        self.row = draw.standard_normal((chunks * tokens, hidden))
        self.q, self.k, self.v, self.out = draw.standard_normal((4, hidden, hidden)) / hidden**0.5
        self.mem: dict[Region, Any] = {
            Region("input_on_host", (c,)): x for c, x in enumerate(np.split(self.row, chunks))
        }

    def run(self, op: Op) -> None:
        """One operation, on what it declares alone."""
        given = {r.buffer: self.mem[r] for r in op.reads}
        made = getattr(self, op.verb, self.copy)(*given.values())
        made = made if isinstance(made, tuple) and op.verb == "project" else (made,)
        self.mem |= dict(zip(op.writes, made, strict=True))

    @staticmethod
    def copy(x: Any) -> Any:
        return x

    def project(self, x: Any) -> Any:
        return x @ self.q, (x @ self.k, x @ self.v)

    def attend_self(self, q: Any, keys: Any) -> Any:
        return self.attended(q, keys, np.tril(np.ones((self.tokens, self.tokens))) > 0)

    def attend(self, q: Any, keys: Any, sums: Any) -> Any:
        (largest, total, values), (other, more, brought) = sums, self.attended(q, keys, True)
        top = np.maximum(largest, other)
        old, new = np.exp(largest - top), np.exp(other - top)
        return top, old * total + new * more, old * values + new * brought

    @staticmethod
    def attended(q: Any, keys: Any, seen: Any) -> Any:
        """The largest score of each token, the sum of exponentials, and the values they weigh."""
        scores = np.where(seen, q @ keys[0].T / q.shape[1] ** 0.5, -np.inf)
        largest = scores.max(1, keepdims=True)
        weights = np.exp(scores - largest)
        return largest, weights.sum(1, keepdims=True), weights @ keys[1]

    def rest(self, x: Any, sums: Any) -> Any:
        return x + sums[2] / sums[1] @ self.out

    def whole(self) -> Any:
        x, n = self.row, len(self.row)
        scores = np.where(
            np.tril(np.ones((n, n))) > 0, x @ self.q @ (x @ self.k).T / x.shape[1] ** 0.5, -np.inf
        )
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return x + weights / weights.sum(1, keepdims=True) @ (x @ self.v) @ self.out


def in_any_order(graph: Graph, seed: int) -> list[Op]:
    """The operations in a random order in which none comes before one that it conflicts with."""
    draw, left, done, order = random.Random(seed), set(range(len(graph))), set[int](), list[Op]()
    while left:
        i = draw.choice(sorted(i for i in left if done.issuperset(graph.predecessors[i])))
        left.remove(i)
        done.add(i)
        order.append(graph.ops[i])
    return order


@pytest.mark.parametrize("seed", range(3))
def test_a_row_in_chunks_is_the_layer_of_the_whole_row(seed: int) -> None:
    chunks, sizes = 5, (7, 8)  # tokens of a chunk, features
    layer = Layer(chunks, *sizes)
    for op in in_any_order(Graph(fpdt.fpdt(chunks, *sizes)), seed):
        layer.run(op)
    made = np.concatenate([layer.mem[Region("output_on_host", (c,))] for c in range(chunks)])
    np.testing.assert_allclose(made, layer.whole(), atol=1e-12)


# --- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", show.SYSTEMS)
def test_a_plan_of_it_verifies_and_without_a_wait_does_not(name: str) -> None:
    plan = Overlapped()(show.graph_of(name)).verify()
    waits = [(i, n) for i, own in enumerate(plan.waits) for n in own]
    for i, n in random.Random(0).sample(waits, min(4, len(waits))):
        fewer = list(plan.waits)
        fewer[i] = tuple(x for x in fewer[i] if x != n)
        with pytest.raises(PlanError, match="race"):
            evolve(plan, waits=fewer).verify()


def test_the_table_of_the_page_is_what_is_printed(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["show.py"])
    runpy.run_path(str(FOLDER / "show.py"), run_name="__main__")
    assert f"```text\n{capsys.readouterr().out}```" in (FOLDER / "README.md").read_text()


def test_one_is_drawn_with_what_was_published(capsys: Out, tmp_path: Path) -> None:
    show.main("zero_offload", str(tmp_path / "picture.svg"))
    out = capsys.readouterr().out
    assert re.search(r"^host +\d+% \|·+A", out, re.MULTILINE)
    assert "\nZ1  DeepSpeed ZeRO-2 Offload [1, 2], gpt-10b, v100-32gb: published 361, planned " in out
    assert "ZeRO-3" not in out
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")
    with pytest.raises(SystemExit, match="got 'zero', expected one of zero_offload, "):
        show.main("zero")


@pytest.mark.parametrize("name", show.SYSTEMS)
def test_each_has_rows_of_what_was_published_or_says_why_not(name: str) -> None:
    """And each row that a file names is on the page."""
    module = import_module(name)
    rows = [[cell.strip() for cell in x.strip("| ").split("|")] for x in show.PAGE.read_text().splitlines()]
    for row in module.PUBLISHED:
        assert any(len(x) > 7 and show._is(x, row) for x in rows), row
    assert bool(module.PUBLISHED) != ("No row of docs/published.md" in " ".join(module.__doc__.split()))


@pytest.mark.parametrize("file", FILES, ids=lambda x: x.stem)
def test_it_can_be_held_in_a_hand(file: Path) -> None:
    assert file.stem in show.SYSTEMS
    tree = ast.parse(file.read_text())
    functions = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
    of_operations = [x for x in functions if x.args.args[:1] and x.args.args[0].arg == "op"]
    lines = {x.name: (x.end_lineno or 0) - x.lineno + 1 for x in functions}
    in_recipe = sum(n for name, n in lines.items() if name not in {x.name for x in of_operations})
    assert max(in_recipe, sum(lines.values()) - in_recipe) <= MOST


def test_the_page_and_its_pictures_are_what_the_script_writes() -> None:
    for name, text in make_systems.files():
        assert (make_systems.DOCS / name).read_text() == text, f"{name}: run python docs/make_systems.py"
