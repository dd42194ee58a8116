"""zfunc beside its peers, and steps planned beside measured, as the lists of `make gpu` run them: `make gpu-toy`
trains; here is what each result rests on."""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zfunc
from benchmarks import apart, planned, published, side_by_side, step
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import num_parameters

RESULTS = Path(side_by_side.ROOT, "benchmarks/results")


def arguments(*words: str) -> argparse.Namespace:
    return side_by_side.parser().parse_args([*words, "--device", "cpu"])


def job(*words: str) -> argparse.Namespace:
    return side_by_side.job_of(arguments(*words))


def test_all_contestants_begin_with_the_same_weights() -> None:
    """Those of a module, and those of a State; of numbers that bf16 has, so that no copy of them rounds."""
    of = job("--size", "toy")
    model = side_by_side.filled(of, torch.float32)
    segments = side_by_side.with_drawn(
        gpt_segments(side_by_side.config_of(of)), of.num_layers, torch.device("cpu")
    )
    program = zfunc.compile(segments, precision="fp32", device="cpu")
    own = zfunc.params(program, zfunc.init(program))
    theirs = {name.removeprefix("parts."): p for name, p in model.named_parameters()}
    assert own.keys() == theirs.keys()
    for name, value in own.items():
        assert torch.equal(value, theirs[name])
        assert torch.equal(value, value.bfloat16().float())
    assert model.parts["head"].out.weight is model.parts["embed"].tok.weight


@pytest.mark.parametrize(
    "name", ["zfunc", "zfunc defer", "zfunc params on host", "zfunc 16bit", "zfunc 8bit"]
)
def test_the_host_bytes_of_our_contestants_are_those_of_their_plan(name: str) -> None:
    way = side_by_side.WAYS[name]
    settings = dict(getattr(way.build, "keywords", {}))
    optimizer = zfunc.AdamW(moments=settings.pop("moments", "fp32"))
    tokens = torch.empty((1, 8), dtype=torch.int64, device="meta")
    sizes = list[tuple[int, int]]()
    for layers in (2, 4):
        config = side_by_side.config_of(job("--size", "2.7b", "--num-layers", str(layers)))
        given = {"optimizer": optimizer, "hardware": "h200", "precision": "bf16", "clip_norm": 1.0}
        plan = zfunc.plan(gpt_segments(config), (tokens, tokens), advice=False, **given, **settings)
        sizes.append((num_parameters(config), plan.memory["host"] + plan.memory["pinned"]))
    (few, less), (many, more) = sizes
    assert (more - less) / (many - few) == pytest.approx(way.host_bytes(1), rel=2e-3)


@pytest.mark.parametrize("name", [name for name in side_by_side.WAYS if name.startswith("zfunc")])
def test_each_of_our_contestants_trains(name: str) -> None:
    row = side_by_side.measure(
        name, job("--size", "toy", "--seq-length", "8", "--steps", "2", "--warmup", "1")
    )
    assert [math.isfinite(x) for x in row["losses"]] == [True] * 2


def test_the_largest_model_fits_the_host_and_a_layer_more_does_not() -> None:
    of = job("--size", "largest")
    for name, way in side_by_side.WAYS.items():
        if way.host_bytes(1e9):
            layers = side_by_side.layers_of(name, of)
            sizes = [
                num_parameters(side_by_side.config_of(side_by_side.evolved(of, num_layers=n)))
                for n in (layers, layers + 1)
            ]
            assert way.host_bytes(sizes[0]) <= of.host_gb * 1e9 < way.host_bytes(sizes[1])


def test_losses_that_are_apart_are_named_and_another_size_is_not_compared() -> None:
    def row(name: str, *losses: float, parameters: int = 1) -> apart.Row:
        return {"name": name, "losses": losses, "parameters": parameters}

    near = [
        row("a", 5.0, 4.0),
        row("b", 5.0, 4.01),
        row("c", 9.0, parameters=2),
        {"name": "d", "error": "no"},
    ]
    assert "NOT" not in side_by_side.compared(near, 0.01)
    assert near[1]["loss_difference"] == pytest.approx(0.0025)
    for wrong in (4.1, float("nan")):
        assert "NOT within 0.01: e" in side_by_side.compared([*near, row("e", 5.0, wrong)], 0.01)
    assert side_by_side.compared(near[:1], 0.01) == "losses: nothing to compare"


def test_a_row_has_a_process_of_its_own_that_may_fail_or_run_over(tmp_path: Path) -> None:
    def run(*words: str, limit: float = 60.0) -> apart.Row:
        return apart.run_apart(words[0], words[1:], device="cpu", limit=limit)

    assert "No module named no_such_module" in run("no_such_module")["error"]
    assert run("http.server", "0", limit=0.5)["error"] == "stopped after 0 s"
    words = ["--size", "toy", "--steps", "1", "--warmup", "0", "--device", "cpu", "--batch-size", "1"]
    row = run("benchmarks.side_by_side", *words, "--seq-length", "8", "--alone", "zfunc")
    assert len(row["losses"]) == 1
    assert row["host_resident_bytes"] > 1e8
    assert row["planned"]["host"] > 0


@pytest.mark.parametrize(
    "launched",
    [{}, {"WORLD_SIZE": "2"}, {x: f"of a launcher: {x}" for x in step.ALONE}],
    ids=["none set", "one left over", "all of a launcher's set"],
)
def test_deepspeed_is_alone_where_no_launcher_is(
    launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it asks MPI, which may end the process."""
    others = {x: v for x, v in os.environ.items() if x not in step.ALONE}
    monkeypatch.setattr(os, "environ", others | launched)
    seen = dict[str, str]()
    package = SimpleNamespace(initialize=lambda **_: (seen.update(os.environ), None))
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    own = job("--size", "toy")
    step.with_deepspeed(step.config_of(own), own)
    assert {x: seen[x] for x in step.ALONE} == (launched if "RANK" in launched else step.ALONE)


def test_what_no_time_is_left_for_is_noted() -> None:
    rows = list[apart.Row]()
    apart.each_apart(["a", "b"], lambda name, limit: {"limit": limit}, seconds=60, limit=30, keep=rows.append)
    assert [row["name"] for row in rows] == ["a", "b"]
    assert all(row["limit"] <= 30 for row in rows)
    apart.each_apart(["c"], lambda *_: {}, seconds=5, limit=30, keep=rows.append)
    assert rows[-1]["error"] == "not started: 5 s in all were given"


def told(name: str, **more: Any) -> apart.Row:
    return {
        **{"name": name, "parameters": 1_310_000_000, "tokens_per_second": 12_345.6, "seconds": 0.6},
        **{"device_bytes": 5_000_000_000, "host_used_bytes": 20_000_000_000, "losses": [10.0, 9.5]},
        **more,
    }


def test_the_table_of_peers_is_made_from_the_newest_results(tmp_path: Path) -> None:
    """And a page without results says nothing of it."""
    assert side_by_side.page(side_by_side.stored(tmp_path)) == ""
    about = {"accelerator": "NVIDIA H200", "cores": 16}
    for day, name in (("2026-11-02", "old"), ("2026-12-01", "zfunc")):
        rows = [told(name), {"name": "torchao bf16", "error": "torchao is not | installed"}]
        results = {
            "arguments": vars(arguments("--size", "1.3b")),  # as the command writes them
            "about": about,
            "rows": rows,
            "compared": "losses: x",
        }
        text = json.dumps({"results": results})
        (tmp_path / f"side-by-side-1.3b-nvidia-h200-{day}.json").write_text(text)
    text = side_by_side.page(side_by_side.stored(tmp_path))
    assert "| zfunc | 1.31 B | 12,346 | 0.600 | 5.0 | 20.0 | 9.5000 |" in text
    assert "| torchao bf16 |  |  |  |  |  | torchao is not |" in text
    assert "old" not in text
    assert (
        "8 x 1,024 tokens a step, bf16, clipped, blocks recomputed, on one NVIDIA H200 beside 16 cores"
        in text
    )
    whole = side_by_side.with_page(text, f"a\n{side_by_side.BEGIN}\nolder\n{side_by_side.END}\nb")
    assert whole == f"a\n{side_by_side.BEGIN}\n\n{text}\n\n{side_by_side.END}\nb"


def test_docs_have_the_results_that_are_stored() -> None:
    """Where they have not: python -m benchmarks.side_by_side --page."""
    page = side_by_side.PAGE.read_text()
    assert side_by_side.with_page(side_by_side.page(side_by_side.stored(RESULTS)), page) == page
    assert page.count(side_by_side.BEGIN) == 1


def test_the_plot_has_every_contestant_that_ran(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [told("zfunc"), told("FSDP2", host_used_bytes=3e10), {"name": "torchao bf16", "error": "no"}]
    side_by_side.plot({"1.3b": {"rows": rows}}, str(tmp_path / "plot.svg"))
    text = (tmp_path / "plot.svg").read_text()
    assert "zfunc, 1.3b" in text
    assert "FSDP2, 1.3b" in text
    assert "torchao" not in text


def test_a_later_run_of_others_keeps_the_rows_of_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "run_apart", lambda *_, **__: {"error": "no"})

    def run(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["side_by_side", "--json", str(tmp_path), *words])
        side_by_side.main()
        (path,) = tmp_path.glob("side-by-side-*.json")
        return [row["name"] for row in json.loads(path.read_text())["results"]["rows"]]

    assert run("--size", "toy", "--contestants", "zfunc,FSDP2") == ["zfunc", "FSDP2"]
    assert run("--size", "toy", "--contestants", "FSDP2,zfunc defer") == ["zfunc", "FSDP2", "zfunc defer"]
    assert run("--size", "toy", "--steps", "3", "--contestants", "zfunc") == ["zfunc"]


def test_our_own_steps_are_rows_of_the_page_of_published_ones(tmp_path: Path) -> None:
    assert planned.own_steps(tmp_path) == ""
    job = planned.jobs("ten")["a long row in tiles"]
    measured = {"tokens": 65_536, "seconds": 2.0, "planned_seconds": 1.0, "time_ratio": 0.5}
    memory = {"device_bytes": 3_000_000_000, "planned_memory": {"device": 3_100_000_000}}
    rows = [
        {"name": "a long row", "job": job, **measured, **memory},
        {"name": "x", "job": job, "error": "no | way"},
    ]
    results = {"about": {"accelerator": "NVIDIA H200", "cores": 16, "torch": "2.11.0"}, "rows": rows}
    (tmp_path / "planned-ten-nvidia-h200-2026-12-01.json").write_text(json.dumps({"results": results}))
    text = planned.own_steps(tmp_path)
    assert "| a long row | llama-3-8b, 2 layers | 1 x 65,536 | 32,768 | 65,536 | 0.50 | 3.00 | 3.10 |" in text
    assert "| x | llama-3-8b, 2 layers | 1 x 65,536 | no / way |  |  |  |  |" in text
    assert text in published.page(
        [x | {"facts": []} for x in json.loads((RESULTS / "published.json").read_text())["results"]], {}, text
    )


def test_every_job_to_be_planned_names_a_model_and_settings_that_there_are() -> None:
    pytest.importorskip("peft")
    names = ("ten", "hf-8b", "toy", "hf-toy")
    assert len(planned.jobs("ten")) == 10
    for job in (job for name in names for job in planned.jobs(name).values()):
        assert job["model"] in planned.models()
        zfunc.core.settings.settings_with(None, {"precision": "bf16", **job.get("way", {})})


def test_an_earlier_profile_of_the_machine_serves_where_the_days_is_not_there(tmp_path: Path) -> None:
    day = tmp_path / "machine-nvidia-h200-2026-12-03.toml"
    for date in ("2026-11-26", "2026-12-01"):
        (tmp_path / f"machine-nvidia-h200-{date}.toml").touch()
    (tmp_path / "machine-cpu2-2026-12-02.toml").touch()
    assert planned.profile_of(day).name == "machine-nvidia-h200-2026-12-01.toml"
    day.touch()
    assert planned.profile_of(day) == day
    with pytest.raises(SystemExit, match="expected what zfunc calibrate wrote"):
        planned.profile_of(tmp_path / "machine-other-2026-12-03.toml")


def test_a_process_that_would_take_the_hosts_last_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has been low for a while: some virtual machines get more when they need it."""
    monkeypatch.setattr(apart, "PATIENCE", 0.3)
    for later, error in (
        (1 << 30, "stopped, as 1.1 GB of host memory were left"),
        (9 << 30, "stopped after 1 s"),
    ):
        free = iter([100 << 30, 1 << 30, 1 << 30, *[later] * 1000])
        monkeypatch.setattr(apart, "host_memory", lambda free=free: (0, next(free)))
        assert apart.run_apart("http.server", ["0"], device="cpu", limit=1.0)["error"] == error
    assert apart.RESULT not in os.environ
