"""What a plan says of rows in tiles: work, memory, and what is tried of a few."""

from pathlib import Path
from typing import Any

import pytest
import shared_traces
import torch
from attrs import evolve
from hf_models import CONFIGS, transformers
from pairs import in_pairs
from torch import nn

import zfunc
import zfunc.models.hf  # pyright: ignore[reportUnusedImport]
from zfunc.cli.commands.plan import PlanSettings, plan_model
from zfunc.core.hardware import ROUND
from zfunc.core.setting_values import tile_counts
from zfunc.core.settings import StepSettings
from zfunc.engine.rows import tile_attention
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.optim.adamw import AdamW
from zfunc.planner.cost_model import CostModel, SegmentCosts
from zfunc.planner.profile import load_profile
from zfunc.planner.traced_costs import traced_costs

TOKENS, HIDDEN, LAYERS = 2048, 64, 3
GPT = GPTConfig(512, TOKENS, LAYERS, HIDDEN, 4)
WAYS = [(False, True), (True, True), (True, False)]  # on the CPU, on CUDA, on another accelerator


def costs_of(segments: Any, tokens: int = TOKENS) -> SegmentCosts:
    x = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    return traced_costs(segments, (x, x), AdamW())


def hf_segments(name: str) -> Any:
    return zfunc.hf.segments(transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()))


@pytest.mark.parametrize(
    ("way", "of"),
    in_pairs(
        [*((*x, "device") for x in WAYS), (*WAYS[1], "host")],
        [("GPT", 5), ("GPT", 6), ("Mistral, window", 5)],
    ),
)
def test_a_few_tiles_stand_for_all(way: Any, of: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    (on_gpu, grouped, keys_on), (name, count) = way, of
    segments, tokens = (gpt_segments(GPT), 720) if name == "GPT" else (hf_segments(name), 40)
    settings = StepSettings(tiles=count, keys_on=keys_on)
    few = costs_of(segments, tokens).traced(settings, on_gpu=on_gpu, grouped=grouped).costs
    monkeypatch.setattr(shared_traces, "_shareable", lambda _: False)  # anew, not what is kept of the few
    monkeypatch.setattr(tile_attention, "FEW", count)
    monkeypatch.setattr(tile_attention, "_times", lambda count, **_: [1] * count)
    every = costs_of(segments, tokens).traced(settings, on_gpu=on_gpu, grouped=grouped).costs
    # Where forward begins again, two parts of the keys are still there: of few tiles one is seen, the other copied.
    again = 2 * 2 * tokens // count * HIDDEN if (name, keys_on) == ("GPT", "host") else 0
    for cost, as_few in zip(every[1:-1], few[1:-1], strict=True):
        copied = cost.backward.copied_bytes + again
        assert evolve(cost, backward=evolve(cost.backward, copied_bytes=copied)) == as_few
    assert (every[0], every[-1]) == (few[0], few[-1])


class Summed(nn.Linear):
    """A loss that is a sum over tokens."""

    summed_targets = staticmethod(lambda y: y)

    def forward(self, x: Any, y: Any) -> Any:
        return (super().forward(x)[..., 0] - y).square().sum()


@pytest.mark.parametrize("tiles", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_a_loss_in_many_tiles_takes_no_memory_for_each(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [zfunc.segment("body", nn.Linear(8, 8)), zfunc.segment("loss", Summed(8, 1))]
    x = torch.empty(1, 2 * tiles, 8, device="meta"), torch.empty(1, 2 * tiles, device="meta")
    found = list[Any]()
    for few in (3, tiles):
        monkeypatch.setattr(tile_attention, "FEW", few)
        found.append(traced_costs(segments, x, AdamW()).traced(StepSettings(tiles=tiles), on_gpu=True).costs)
    assert found[0] == found[1]


def test_work_of_attention_is_that_of_a_causal_row_and_memory_follows_the_tile() -> None:
    costs, once = costs_of(gpt_segments(GPT)), 2 * TOKENS**2 * HIDDEN
    found = [costs.traced(StepSettings(tiles=n), on_gpu=True).costs[1] for n in (4, 8, 16)]
    assert {x.forward.attention_flops for x in found} == {once}
    assert {x.backward.attention_flops for x in found} == {once + 5 * once // 2}  # forward of a tile again
    for four, eight, sixteen in zip(
        *((x.forward.workspace, x.backward.workspace) for x in found), strict=True
    ):
        assert four - eight == pytest.approx(2 * (eight - sixteen), rel=0.05)  # peaks of several moments


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow), 16])
def test_keys_on_the_host_are_pinned_and_copied_once_a_pair(count: int) -> None:
    """To the byte: keys and values, and twice as much for the sums. No pass is faster than its copies."""
    row, costs = 2 * 2 * TOKENS * HIDDEN, costs_of(gpt_segments(GPT))
    model = CostModel(costs, evolve(ROUND, rates={**ROUND.rates, "d2h": 1e6}))
    there, here = (model.step(StepSettings(tiles=count, keys_on=place)) for place in ("host", "device"))
    assert there.held["pinned"]["host_keys"] == 3 * row
    assert "host_keys" not in here.held["pinned"]
    cost, before, pairs = there.spec.costs[1], here.spec.costs[1], (count + 1) / 2  # of a tile with all parts
    assert cost.forward.copied_bytes == row * (1 + pairs - 1)  # put once; a tile's own are still there
    # Put once, and the final sums; again forward; sums come and go. The last two parts are still there when forward
    # begins again; where one part stands for several, the trace sees one of them.
    still_there = 2 if count == 2 else 1
    assert cost.backward.copied_bytes == row * (1 + 2 + pairs - still_there / count + (1 + 2 * 2) * pairs)
    freed = before.backward.workspace - cost.backward.workspace
    assert 3 * row * (1 - 3 / count) <= freed <= 3 * row  # but two slots and the final sums
    passes = [op for op in there.plan.graph if op.copied_bytes]
    assert len(passes) == 2 * LAYERS
    assert all(model.hardware(there.settings).seconds(op) >= op.copied_bytes / 1e6 for op in passes)


def test_a_step_with_all_of_a_row_on_the_host_needs_three_activations_a_token_and_its_target() -> None:
    """To the byte, at equal tiles: the input of the loss, the gradient, the slot of what backward needs."""
    there: Any = {"keys_on": "host", "activations_on": "host"}
    models = {n: CostModel(costs_of(gpt_segments(GPT), n), ROUND) for n in (TOKENS // 2, TOKENS)}
    half, whole = (x.step(StepSettings(tiles=n // 128, **there)).memory["device"] for n, x in models.items())
    assert whole - half == (TOKENS // 2) * (3 * 2 * HIDDEN + 8)


@pytest.mark.parametrize("count", [1, 4])
def test_activations_on_the_host_free_layers_x_tokens_x_hidden_x_2_bytes_of_the_device(count: int) -> None:
    """To the byte. The host has the tokens, too; the device has as many slots for any number of layers."""
    freed: dict[int, int] = {}
    for layers in (LAYERS, LAYERS + 4):
        model = CostModel(costs_of(gpt_segments(evolve(GPT, num_layers=layers))), ROUND)
        device, host = (
            model.step(StepSettings(tiles=count, activations_on=place)) for place in ("device", "host")
        )
        freed[layers] = device.memory["device"] - host.memory["device"]
        assert host.held["pinned"]["host_act"] == layers * TOKENS * HIDDEN * 2 + TOKENS * 8
    assert freed[LAYERS + 4] - freed[LAYERS] == 4 * TOKENS * HIDDEN * 2


def test_where_a_row_is_too_long_as_few_tiles_as_fit_are_advised_and_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zfunc.planner.plan_step._larger_batch", lambda *_: ())
    x = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    given: Any = {"params_on": "host", "activations_on": "host", "precision": "bf16"}
    needed = {
        n: zfunc.plan(gpt_segments(GPT), (x, x), hardware=ROUND, tiles=n, advice=False, **given).memory[
            "device"
        ]
        for n in (1, 4, 16)
    }
    assert needed[16] < needed[4] < needed[1]
    room = evolve(ROUND, memory={"device": (needed[1] + needed[4]) // 2})
    whole = zfunc.plan(gpt_segments(GPT), (x, x), hardware=room, **given)
    assert not whole.fits
    assert {"tiles": 4} in [s.changes for s in whole.suggestions if s.step.fits]
    assert zfunc.plan(gpt_segments(GPT), (x, x), hardware=room, tiles="auto", **given).settings["tiles"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("card", "tokens", "count"), [("h100", 10**6, 64), ("h200", 4 * 10**6, 250)])
def test_million_tokens_of_llama_3_8b_fit_one_card(card: str, tokens: int, count: int) -> None:
    """With 1.9 TB of host memory; others publish 500,000 for one H100."""
    config = Path(__file__).parents[2] / "benchmarks" / "llama-3-8b.json"
    places: Any = {"params_on": "host", "activations_on": "host", "hardware": card, "batch_size": 1}
    answer = plan_model(PlanSettings(hf_config=config, seq_length=tokens, tiles=count, **places))
    assert answer.planned.fits
    assert answer.planned.memory["pinned"] + answer.planned.memory["host"] < 1.9e12


def test_advice_leaves_short_tiles_where_activations_on_the_host_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None that "auto" stands for has less than 512 tokens: attention is launched for every pair."""
    monkeypatch.setattr("zfunc.planner.plan_step._larger_batch", lambda *_: ())
    assert all(TOKENS * 16 // n >= 512 for n in tile_counts(TOKENS * 16))
    x = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    given: Any = {"params_on": "host", "precision": "bf16"}
    machine = evolve(load_profile("rtx4090").hardware("bf16"), launch=1e-4)
    segments = gpt_segments(evolve(GPT, num_layers=24))
    whole, short = (
        zfunc.plan(segments, (x, x), hardware=machine, advice=False, **given, **ways)
        for ways in ({"activations_on": "host"}, {"tiles": 16})
    )
    room = max(whole.memory["device"], short.memory["device"])
    fits = evolve(machine, memory={**machine.memory, "device": room})
    found = zfunc.plan(segments, (x, x), hardware=fits, tiles=16, **given)
    assert "in passes that the host launches no faster" in str(found)
    assert any("tiles" in s.changes and s.step.seconds < found.step_seconds for s in found.suggestions)
