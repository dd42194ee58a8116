"""Laws of the GPT: causal, counted, the same values from the meta device, the deviations of GPT-2."""

import math

import attrs
import pytest
import torch
from torch import Tensor, nn

from zfunc.models.gpt import Block, Embed, Head, modules
from zfunc.models.gpt_config import GPTConfig, num_parameters

SMALL = GPTConfig(vocab_size=61, seq_length=12, num_layers=3, hidden_size=32, num_attention_heads=4)


def build(config: GPTConfig, seed: int = 0) -> tuple[tuple[str, nn.Module], ...]:
    torch.manual_seed(seed)
    return modules(config)


def tie(named: tuple[tuple[str, nn.Module], ...]) -> nn.ModuleDict:
    model = nn.ModuleDict(dict(named))
    model["head"].out.weight = model["embed"].tok.weight
    return model


def hidden_states(named: tuple[tuple[str, nn.Module], ...], tokens: Tensor) -> Tensor:
    x = tokens
    for _, module in named[:-1]:
        x = module(x)
    return x


def random_tokens(config: GPTConfig, batch: int = 2) -> Tensor:
    return torch.randint(config.vocab_size, (batch, config.seq_length))


def test_segments_fit_together() -> None:
    named = build(SMALL)
    assert [name for name, _ in named] == ["embed", "block0", "block1", "block2", "head"]
    x = hidden_states(named, random_tokens(SMALL))
    assert x.shape == (2, 12, 32)
    logits = named[-1][1](x)
    assert logits.shape == (2, 12, 61)
    assert torch.equal(logits, named[-1][1].logits(x))
    loss = named[-1][1](x, random_tokens(SMALL))
    assert loss.shape == ()
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_the_initial_loss_is_that_of_guessing(tied: bool) -> None:
    config = GPTConfig(tied=tied)
    named = build(config)
    if tied:
        tie(named)
    tokens = random_tokens(config, batch=4)
    loss = named[-1][1](hidden_states(named, tokens), random_tokens(config, batch=4))
    assert loss.item() == pytest.approx(math.log(config.vocab_size), rel=0.01)


TEN_BILLION = GPTConfig(50257, 1024, num_layers=50, hidden_size=4096, num_attention_heads=32)


@pytest.mark.parametrize(
    "config",
    [SMALL, attrs.evolve(SMALL, tied=False), GPTConfig(), attrs.evolve(SMALL, num_layers=1), TEN_BILLION],
)
def test_num_parameters_counts_what_is_built(config: GPTConfig) -> None:
    """On the meta device, where ten billion cost nothing."""
    with torch.device("meta"):
        named = modules(config)
        model = tie(named) if config.tied else nn.ModuleDict(dict(named))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Embed, Block, Head])
def test_a_module_from_the_meta_device_starts_with_the_same_values(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    direct = kind(SMALL)
    after_direct = torch.rand(())
    with torch.device("meta"):
        module = kind(SMALL)
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(math.nan)  # so that one left alone is noticed
    torch.manual_seed(3)
    module.reset_parameters()
    assert torch.equal(torch.rand(()), after_direct)
    expected = dict(direct.named_parameters())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.requires_grad


def test_initial_deviations_are_those_of_gpt2() -> None:
    config = GPTConfig(512, 512, num_layers=8, hidden_size=256, num_attention_heads=4)
    named = dict(build(config))
    residual = 0.02 / math.sqrt(16)
    block = named["block7"]
    for weight, deviation in [
        (named["embed"].tok.weight, 0.02),
        (named["embed"].pos.weight, 0.02),
        (block.qkv.weight, 0.02),
        (block.up.weight, 0.02),
        (block.attn_out.weight, residual),
        (block.down.weight, residual),
        (named["head"].out.weight, 0.02),
    ]:
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)
    for name, parameter in block.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(
                parameter, torch.full_like(parameter, float(name in ("ln_1.weight", "ln_2.weight")))
            )


def test_the_future_does_not_reach_the_past() -> None:
    named = build(SMALL)
    tokens = random_tokens(SMALL)
    head = named[-1][1]
    before = head.logits(hidden_states(named, tokens))
    for position in range(SMALL.seq_length):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % SMALL.vocab_size
        after = head.logits(hidden_states(named, changed))
        assert torch.allclose(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
        assert all((after[:, later] - before[:, later]).abs().max() > 1e-5 for later in range(position, 12))


def test_a_shorter_sequence_gives_the_same_logits() -> None:
    named = build(SMALL)
    tokens = random_tokens(SMALL)
    long, short = (named[-1][1].logits(hidden_states(named, x)) for x in (tokens, tokens[:, :5]))
    assert torch.allclose(long[:, :5], short, rtol=0, atol=1e-6)


def test_ignored_targets_leave_the_mean() -> None:
    named = build(SMALL)
    x, targets = hidden_states(named, random_tokens(SMALL)), random_tokens(SMALL)
    head = named[-1][1]
    targets[:, 7:] = -100
    assert torch.equal(head(x, targets), head(x[:, :7], targets[:, :7]))
    assert head(x, torch.full_like(targets, -100)).isnan()


def test_dropout_acts_in_training_only_and_follows_the_generator() -> None:
    config = attrs.evolve(SMALL, dropout=0.5)
    model = tie(build(config))
    named, tokens = tuple(model.items()), random_tokens(config)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return hidden_states(named, tokens)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers: got 0, expected a whole number of at least 1"),
        ({"vocab_size": 2.5}, "vocab_size: got 2.5, expected a whole number"),
        ({"seq_length": True}, "seq_length: got True, expected a whole number"),
        ({"dropout": 1.0}, "dropout: got 1.0, expected a finite number of at least 0 and below 1"),
        ({"hidden_size": 30}, "hidden_size: got 30 with num_attention_heads=4, .* try hidden_size=28 or 32"),
        ({"hidden_size": 3}, "try hidden_size=4$"),
    ],
)
def test_invalid_sizes_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attrs.evolve(SMALL, **changes)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="got 13 tokens, expected at most seq_length=12: cut"):
        Embed(SMALL)(torch.zeros(1, 13, dtype=torch.int64))
