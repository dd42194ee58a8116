"""What forward makes of no input, as tables of positions, is the row's in each tile, as in torch; or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import in_pairs
from tile_law import far, passes_of
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc

TOKENS, WIDTH = 16, 8


def angles(x: Tensor) -> Tensor:
    """Of each token and half as many features."""
    at, of_feature = torch.arange(x.shape[1]), torch.arange(1, WIDTH // 2 + 1) / WIDTH
    return torch.outer(at.float(), of_feature)


def by_slices(x: Tensor) -> Tensor:
    table = torch.zeros(x.shape[1], WIDTH)
    table[:, 0::2] = angles(x).sin()
    table[:, 1::2] = angles(x).cos()
    return table


def begun(make: Callable[..., Tensor], edit: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """x plus a table that is made, and then written into."""

    def run(x: Tensor) -> Tensor:
        table = make(x.shape[1], WIDTH)
        edit(table, x)
        return x + table

    return run


def rotated(x: Tensor) -> Tensor:
    cos, sin = (t.repeat(1, 2) for t in (angles(x).cos(), angles(x).sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def read_between(x: Tensor) -> Tensor:
    table = torch.zeros(x.shape[1], WIDTH)
    one = x + table
    table[:, 0] = torch.arange(x.shape[1]) / x.shape[1]
    two = x - table.sin()
    table.T.mul_(torch.arange(x.shape[1]) - 2)
    return one + two - table


def grown(x: Tensor) -> Tensor:
    """A table that is written before and after what is made of the input."""
    both = torch.zeros(x.shape)
    both[..., :1] = torch.arange(x.shape[1])[:, None]
    both[..., 1:] = x[..., :-1]
    both[..., 2] += torch.arange(x.shape[1])
    return both.sin()


def joined(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]).float()
    at += x[0, 0, 0].detach() * 0
    return x + at[:, None]


def copied(x: Tensor) -> Tensor:
    table = torch.zeros(x.shape[1], WIDTH)
    table[:] = torch.arange(x.shape[1])[:, None]
    return x + table.double().to(x.dtype)


def narrowed(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1]).float()
    at.clamp_(max=9).sub_(at.mean())
    return x + at[:, None]


def in_two(x: Tensor) -> Tensor:
    left, right = torch.ones(x.shape[1], WIDTH).split(WIDTH // 2, 1)
    left.mul_(angles(x))
    return torch.cat((x[..., : WIDTH // 2] * left, x[..., WIDTH // 2 :] * right), -1)


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "slices": lambda x: x + by_slices(x),
    "slices in another dtype": copied,
    "arange": lambda x: x + torch.arange(x.shape[1])[:, None] / 7,
    "arange backwards": lambda x: x + torch.arange(x.shape[1]).flip(0)[:, None] / 7,
    "arange, changed": narrowed,
    "outer": lambda x: x + torch.outer(torch.arange(x.shape[1]).cos(), torch.ones(WIDTH)),
    "rotary": rotated,
    "stack": lambda x: x + torch.stack((angles(x).sin(), angles(x).cos()), -1).flatten(-2),
    "cat": lambda x: x * torch.cat((angles(x).sin(), angles(x).cos()), -1),
    "cat of tokens": lambda x: x + torch.cat((torch.zeros(1, WIDTH), by_slices(x)[1:])),
    "index_copy_": begun(torch.zeros, lambda t, x: t.index_copy_(0, torch.arange(3), by_slices(x)[:3])),
    "index_put_": begun(torch.ones, lambda t, _: t.__setitem__((torch.arange(1, 3), 2), 5.0)),
    "scatter_": begun(
        torch.zeros, lambda t, x: t.scatter_(1, torch.arange(x.shape[1])[:, None] % WIDTH, 1.0)
    ),
    "masked_fill_": begun(torch.ones, lambda t, x: t.masked_fill_(angles(x).repeat(1, 2) > 3, 0.5)),
    "out=": begun(torch.empty, lambda t, x: torch.mul(by_slices(x), 2, out=t)),
    "one token": begun(torch.zeros, lambda t, _: t[3].fill_(2.0)),
    "rows of a view": begun(torch.zeros, lambda t, x: t.T[2:4].copy_(torch.arange(x.shape[1]))),
    "empty": begun(torch.empty, lambda t, x: t.copy_(by_slices(x))),
    "read between writes": read_between,
    "parts of one": in_two,
    "beside the input": grown,
    "a sum so far": lambda x: x + torch.ones(x.shape[1], WIDTH).cumsum(0),
    "of the number of tokens": lambda x: x * torch.arange(x.shape[1]).float().mean(),
    "a mask of tokens": lambda x: x.masked_fill((torch.arange(x.shape[1]) % 3 == 0)[:, None], 0.0),
    "zeros of rows": lambda x: torch.cat((x[..., 1:], torch.zeros(*x.shape[:2], 1)), -1),
    "full": lambda x: x + torch.full((x.shape[0], x.shape[1], 1), 0.5),
}
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a causal mask": (
        lambda x: (
            (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -9e9).softmax(-1) @ x
        ),
        r"a constant of shape \[8, 8\] .*attention by hand",
    ),
    "a causal mask of attention": (
        lambda x: F.scaled_dot_product_attention(
            *3 * [x[:, None]], attn_mask=torch.full((x.shape[1], x.shape[1]), -9e9).triu(1)
        )[:, 0],
        "attention with a mask",
    ),
    "twice as many": (
        lambda x: x + torch.arange(2 * x.shape[1]).view(-1, 2).mul_(x.new_ones(1)).sum(1)[:, None],
        r"a constant of shape \[16\] in a tile and \[32\] in a row",
    ),
    "moved into the tokens": (
        lambda x: torch.zeros(x.shape).index_copy_(1, torch.arange(x.shape[1]).flip(0), x),
        "index_copy_",
    ),
    "tokens of the input before": (
        begun(torch.zeros, lambda t, x: t[1:].copy_(x[0, :-1])),
        "aten.slice.Tensor",
    ),
}


class Own(nn.Module):
    def __init__(self, made: Callable[[Tensor], Tensor], attends: bool) -> None:
        super().__init__()
        self.first, self.made, self.attends = nn.Linear(WIDTH, WIDTH), made, attends

    def forward(self, x: Tensor) -> Tensor:
        x = self.made(self.first(x))
        if self.attends:
            x = x + F.scaled_dot_product_attention(*3 * [x[:, None]], is_causal=True)[:, 0]
        return x * 2 + self.made(x)


@pytest.mark.parametrize(
    ("what", "way"), in_pairs(MADE, [(True, 4), (True, 2), (False, 4), (True, 1)], meet=1)
)
def test_what_is_made_in_forward_is_that_of_the_row(what: str, way: tuple[bool, int]) -> None:
    """Before attention and after it: outputs and gradients of torch's autograd, whatever the number of tiles."""
    attends, tiles = way
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)) / 2
    module = Own(MADE[what], attends)
    segment = zfunc.segment("own", module)
    values, leaf = segment.initial(0), x.clone().requires_grad_()
    module.load_state_dict({full.removeprefix("own."): t for full, t in values.items()})
    y = module(leaf)
    given = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    expected = y.detach(), *torch.autograd.grad(y, [*module.parameters(), leaf], given)
    got = passes_of(segment, values, x, tiles)
    off = {name: far(t, other) for (name, t), other in zip(got.items(), expected, strict=True)}
    assert max(off.values()) < 3e-5, off  # tables are large


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_slice_of_the_row_s_is_refused_by_name(what: str) -> None:
    made, said = REFUSED[what]
    segment = zfunc.segment("own", Own(made, attends=False))
    with pytest.raises(ValueError, match=said):
        passes_of(segment, segment.initial(0), torch.randn(2, TOKENS, WIDTH), 2)
