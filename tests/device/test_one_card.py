"""What else one card can show: two stages on it, packed documents, and collectives of a single rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_training import compiled, run, train

import zfunc
from zfunc.engine import compile as compiling
from zfunc.models.gpt import gpt_segments
from zfunc.models.gpt_config import GPTConfig
from zfunc.runtime.collectives import RankGroup


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("odd sizes", {"precision": "bf16"}),
        ("odd sizes", {"order": "GPipe", "defer": True, "bucket_size": 500}),
        ("tied GPT", {"params_on": "host", "activations_on": "host"}),
        ("tied GPT", {"order": "RoundPipe", "params_on": "host", "activations_on": "host"}),
    ],
)
def test_two_stages_on_one_card_have_the_bits_of_one(
    device: str, model: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compile` takes as many devices as there are, so the card is named twice here: it sends to itself."""
    alike = {"micro_batches": 2, "clip_norm": 1.0, "precision": "fp32"} | {
        k: v for k, v in more.items() if k in ("precision", "defer")
    }
    losses, params = train(model, device, **alike)
    monkeypatch.setattr(compiling, "devices_from", lambda one, count: (one,) * count)
    program, data = compiled(model, device, devices=2, **{**alike, **more})
    assert [x.type for x in program.devices] == [device] * 2
    again, same = run(program, data)
    assert repr(again) == repr(losses)
    assert torch.equal(same, params)


@pytest.mark.parametrize("tiles", [1, 4])
def test_packed_documents_on_a_device_train_as_on_the_cpu(device: str, tiles: int) -> None:
    """In 16 bits a GPU has a kernel of ranges for them: losses and gradients are the CPU's within rounding, and a
    document's tokens have no part in another's loss."""
    times, width = (1, 16) if device == "pretend" else (4, 64)  # of a head, for whose kernel 16 are few
    lengths = [times * n for n in (10, 1, 21, 16, 75, 5)]  # within a tile, and over several
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    sizes = {"seq_length": 128 * times, "hidden_size": 4 * width}
    config = GPTConfig(vocab_size=64, num_layers=2, num_attention_heads=4, **sizes)
    draw = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(64, (1, 128 * times), generator=draw) for _ in "il")
    batch = {"input_ids": ids, "position_ids": places}, labels

    def trained(place: str) -> list[float]:
        program = zfunc.compile(
            gpt_segments(config), device=place, precision="bf16", tiles=tiles, example=batch, clip_norm=1.0
        )
        state, told = zfunc.init(program, seed=1), list[float]()
        for _ in range(2):
            state, metrics = zfunc.train_step(program, state, batch)
            told += [metrics.loss, metrics.grad_norm]
        last, before = labels.clone(), len(places[0]) - lengths[-1]
        last[:, :before] = -100
        other = torch.where(torch.arange(len(places[0])) < before, (ids + 1) % 64, ids)
        rows = [{"input_ids": x, "position_ids": places} for x in (ids, other)]
        seen, same = (zfunc.evaluate(program, state, (row, last)) for row in rows)
        assert seen == pytest.approx(same, rel=1e-6)
        return told

    assert trained(device) == pytest.approx(trained("cpu"), rel=2e-2)


@contextmanager
def one_rank(device: str) -> Iterator[RankGroup]:
    """The group of one rank, with the device's own collectives (NCCL on a GPU) beside gloo's."""
    backend = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield RankGroup.of()
    finally:
        dist.destroy_process_group()


def test_collectives_of_one_rank_give_it_what_it_has(device: str) -> None:
    mine, full = torch.zeros(1000, device=device), torch.randn(1000).to(device)
    expected = full.cpu()
    with one_rank(device) as group:
        group.reduce_scatter(mine, full)
        whole, total = torch.zeros(1000, device=device), mine.clone()
        group.all_gather(whole, mine)
        group.all_reduce(total)
        group.settle()
        assert not group.queued
        assert all(torch.equal(x.cpu(), expected) for x in (mine, whole, total))
        assert group.sums([2.5]) == [2.5]
        assert group.sent == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_of_one_rank_changes_no_bit(device: str, stage: int) -> None:
    given: dict[str, Any] = {"precision": "fp32", "clip_norm": 1.0}
    alone, params = train("odd sizes", device, **given)
    with one_rank(device):
        losses, same = train("odd sizes", device, stage=stage, **given)
    assert repr(losses) == repr(alone)
    assert torch.equal(params, same)
