"""Parameters that no path of forward uses: torch's optimizers leave one alone whose `.grad` is None."""

import logging
from functools import partial
from typing import Any

import plain
import pytest
import torch
from small_models import bits
from torch import Tensor, nn
from torch.nn import functional as F
from trained import adam_of

import zfunc
from zfunc.engine.program.specialize import specialize


class Body(nn.Module):
    """Hands on two tensors, of which the next module uses one; a parameter that is never read, one that is
    detached, and one that only rows of more than four numbers use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.ignored = nn.Linear(4, 8), nn.Linear(4, 130)
        self.idle, self.cut, self.long = (nn.Parameter(torch.ones(n)) for n in (70, 8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.used(x[:, :4]) * self.cut.detach()
        return y + self.long if x.shape[1] > 4 else y, self.ignored(x[:, :4])


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)

    def forward(self, x: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        y = self.out(torch.tanh(x[0]))
        return F.mse_loss(y, targets.to(y.dtype))  # of two types it has no gradient before torch 2.13


class LossOfRows(Loss):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return super().forward((x, x), targets)


UNUSED = ["body.cut", "body.idle", "body.ignored.bias", "body.ignored.weight", "body.long"]
DECAY: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
# zfunc's optimizer, torch's, and how zfunc trains
ROWS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (zfunc.AdamW(**DECAY), torch.optim.AdamW, {"defer": True, "moments": "16bit", "clip_norm": 1.0}),
    "SGD": (
        zfunc.SGD(momentum=0.9, **DECAY),
        partial(torch.optim.SGD, momentum=0.9),
        {"update_on": "device", "micro_batches": 2},
    ),
    "Adafactor": (zfunc.Adafactor(**DECAY), torch.optim.Adafactor, {"params_on": "host", "ema": 0.9}),
    "groups": (zfunc.groups(("*.bias", zfunc.AdamW(**DECAY)), zfunc.AdamW(**DECAY)), torch.optim.AdamW, {}),
}


def batch(i: int, width: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randn(6, width, generator=g), torch.randn(6, 1, generator=g)


@pytest.mark.parametrize("name", ROWS)
def test_they_are_left_as_torch_leaves_them(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    modules = {"body": Body(), "loss": Loss()}
    own, theirs, way = ROWS[name]
    segments = [zfunc.segment(x, module) for x, module in modules.items()]
    given = {"precision": "fp32", "bucket_size": 128, "device": "cpu", **adam_of(optimizer=own, **way)}
    program = zfunc.compile(segments, **given)
    state = zfunc.init(program)
    first = zfunc.params(program, state)
    all_of_them = nn.ModuleDict(modules)
    optimizer = theirs(all_of_them.parameters(), **DECAY)
    with caplog.at_level(logging.WARNING, "zfunc"):
        for i in range(4):
            state, _ = zfunc.train_step(program, state, batch(i))
            optimizer.zero_grad()
            inputs, targets = batch(i)
            modules["loss"](modules["body"](inputs), targets).backward()
            nn.utils.clip_grad_norm_(all_of_them.parameters(), way.get("clip_norm", torch.inf))
            optimizer.step()
    got = zfunc.params(program, state)
    assert all(torch.equal(got[x], first[x]) for x in UNUSED)
    for x, value in all_of_them.state_dict().items():
        torch.testing.assert_close(got[x], value, rtol=0, atol=1e-2 if "moments" in way else 1e-6)
    (said,) = (x.message for x in caplog.records if "no path" in x.message)
    assert sorted(said.partition(":")[0].split(", ")) == UNUSED


def test_a_batch_whose_path_uses_one_updates_it_with_bits_of_any_other_way() -> None:
    """Each step's trace says what it uses, also where its update is made in the next."""
    seen: list[list[Tensor]] = []
    for way in ({}, {"defer": True}):
        torch.manual_seed(0)
        segments = [zfunc.segment("body", Body()), zfunc.segment("loss", Loss())]
        program = zfunc.compile(segments, optimizer=zfunc.AdamW(0.1, weight_decay=0.1), device="cpu", **way)
        state = zfunc.init(program)
        for i, width in enumerate((4, 6, 4)):
            before = zfunc.params(program, state)["body.long"] if not way else None
            state, _ = zfunc.train_step(program, state, batch(i, width))
            if before is not None:
                assert torch.equal(zfunc.params(program, state)["body.long"], before) == (width == 4)
        seen.append(bits(zfunc.flush(program, state)))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("tiles", [1, 2])
def test_rows_in_tiles_use_what_whole_rows_do(tiles: int) -> None:
    modules = {"below": nn.Linear(4, 4), "body": nn.Linear(4, 8), "loss": LossOfRows()}
    modules["body"].idle = nn.Parameter(torch.ones(4))
    segments = [zfunc.segment(name, m) for name, m in modules.items()]
    program = zfunc.compile(segments, tiles=tiles, device="cpu", precision="fp32")
    assert specialize(program, (torch.zeros(2, 8, 4), torch.zeros(2, 8, 1))).spec.unused == ("body.idle",)


@pytest.mark.parametrize("moments", ["fp32", "16bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_step_from_ties_of_bf16_is_plain_pytorchs_which_leaves_them(
    moments: str, precision: str
) -> None:
    """A weight between two of bf16 goes to the device as the even one, or away from zero where the host keeps
    halves that cannot tell the two ties apart; the oracle of the fuzzer does the same."""
    torch.manual_seed(0)
    modules = {"body": Body(), "loss": Loss()}
    segments = [zfunc.segment(x, module) for x, module in modules.items()]
    optimizer = plain.remembering(zfunc.AdamW(lr=0.1, weight_decay=0.1, moments=moments))
    given = {"precision": precision, "params_on": "host", "bucket_size": 128, "device": "cpu"}
    program = zfunc.compile(segments, optimizer=optimizer, **given)
    ties = {x.name: torch.full(x.shape, (1 + 2**-8) / 8) for x in program.layout.spans}
    state = zfunc.init(program, params=ties)
    parts = [plain.Part.of(x) for x in segments]
    plain.follow(program, state, parts, batch, steps=3, tolerance=1e-6 if moments == "fp32" else None)
