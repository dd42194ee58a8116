"""The tour runs from top to bottom, cell by cell as a notebook does, and is stored without outputs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
PRINTS = (
    "Graph(35 operations",
    "Op(load[0], h2d: batch[0]",
    "<img",
    "forgets_to_return: schedule: got None",
    "forgets_an_operation: load[0]: got it on the lanes 0 times",
    "race on",
    "Serial ",
    "<table>",
    "loss ",
    "<iframe",
    "RTX 4090",
)


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell, and print what its last expression is, as HTML where it has that."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tour", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "tour", "eval"), names)
        print(value._repr_html_() if hasattr(value, "_repr_html_") else "" if value is None else repr(value))


def test_every_cell_runs_and_shows_what_its_prose_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    tour = json.loads(TOUR.read_text())
    for cell in tour["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            run_cell("".join(cell["source"]), names)
    printed, place = capsys.readouterr().out, 0
    for text in PRINTS:
        place = printed.find(text, place)
        assert place >= 0, text
    losses = [m.loss for m in names["history"]]
    assert losses[-1] < losses[0] / 2
