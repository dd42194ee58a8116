"""docs/published.md has what `python -m benchmarks.published` prints, and its rows are those of the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import asdict, evolve

from benchmarks import published
from benchmarks.planned import own_steps
from zfunc.core.graph import Op
from zfunc.core.settings import StepSettings
from zfunc.optim.adamw import AdamW
from zfunc.planner.traced_costs import traced_costs

pytest.importorskip("transformers")

ROWS, APART = published.read_rows()
STORED = Path(published.__file__).parent / "results" / "published.json"
RESULTS: list[dict[str, Any]] = json.loads(STORED.read_text())["results"]


def test_every_row_is_stored_and_on_the_page_as_the_command_writes_it() -> None:
    """Where they are not: `make published`."""
    told = {published.identity(asdict(row)): json.loads(json.dumps(asdict(row))) for row in ROWS}
    for x in RESULTS:
        row = told[published.identity(x)]
        assert {name: x[name] for name in row} == row
    assert len(RESULTS) == len(ROWS)
    assert (
        published.with_page(published.page(RESULTS, APART, own_steps(published.RESULTS)))
        == published.PAGE.read_text()
    )


@pytest.mark.parametrize("n", [n for n, row in enumerate(ROWS) if row.id in ("Z1", "Z2")])
def test_a_row_is_planned_as_it_is_stored(n: int) -> None:
    """Rows that need no trace; one that differs says that the page is to be made anew: `make published`."""
    key = published.identity(asdict(ROWS[n]))
    stored = next(x for x in RESULTS if published.identity(x) == key)
    now = published.result(ROWS[n], search=False)
    assert now["planned"] == pytest.approx(stored["planned"], rel=1e-3)
    assert now["published"] == pytest.approx(stored["published"])


def test_the_plan_is_near_what_was_published() -> None:
    """A row far off has a fact that says why."""
    errors = [published.error(x) for x in RESULTS]
    assert len(errors) >= 35
    assert sorted(errors)[len(errors) // 2] <= 1.15
    assert all(x["facts"] for x, e in zip(RESULTS, errors, strict=True) if e > published.WIDE)


# Milliseconds of forward and backward of a layer, 4 rows of 2,048 tokens, products summed in fp16 on an RTX 4090:
# RoundPipe-artifact, pp-simulate/run.sh, its rows by roundpipe-timing/run.sh.
LAYERS = {"qwen3-1.7b": (7.429, 15.831), "llama-3-8b": (18.504, 41.207), "qwen3-32b": (40.561, 91.174)}


@pytest.mark.parametrize(
    "model", [pytest.param(x, marks=[] if x == "llama-3-8b" else pytest.mark.slow) for x in LAYERS]
)
def test_a_layer_takes_an_rtx_4090_what_others_measured(model: str) -> None:
    """The two shares of its profile that were chosen by these six times."""
    row = evolve(
        next(x for x in ROWS if x.id == "R1"), model=model, length=2048, micro_batch=4, micro_batches=1
    )
    settings = StepSettings(precision="fp16", recompute="none")
    _, layer, *_ = published.costs(row).traced(settings, on_gpu=True).costs
    on = published.profile(row).hardware("fp16")
    for cost, measured in zip((layer.forward, layer.backward), LAYERS[model], strict=True):
        op = Op("forward", (), "compute", (), (), **asdict(cost))
        assert on.seconds(op) * 1e3 == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("recompute", ["all", "min-cut"])
def test_layers_that_repeat_cost_what_all_of_them_traced_cost(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128},
    }
    monkeypatch.setattr(published, "models", lambda: {"small": small})
    row = evolve(ROWS[0], model="small", length=32, micro_batch=2)
    repeated = published.costs(row)
    tokens = torch.empty((2, 32), dtype=torch.int64, device="meta")
    full = traced_costs(published.described(small), (tokens, tokens), AdamW())
    settings = StepSettings(recompute=recompute)
    a, b = (x.traced(settings, on_gpu=True, grouped=True) for x in (repeated, full))
    assert a.costs == b.costs
    assert a.layout.numel == b.layout.numel
