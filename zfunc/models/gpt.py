"""GPT-2 as independent modules: the model of the command line and of the examples.

The embedding, each block and the head are built, initialised and run one at a time, so a model that fits nowhere as
a whole can still be made segment by segment. `reset_parameters` of each sets *every* parameter under it, and draws
the same random numbers whether the module was just built or comes from the meta device.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zfunc.engine.rows.row_attention import attend_row
from zfunc.engine.trace.segment import Segment, segment
from zfunc.errors import refuse, setting
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.loss import Targets, linear_next_token_loss, summed_targets
from zfunc.models.sequences import KVCache, documents_of

_INIT_STD = 0.02
Passed = Tensor | tuple[Tensor, Tensor]
"""Hidden states [batch, seq, hidden]; for sequences of several documents, with position_ids [batch, seq]."""


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in the precision of its weight, which may be fp32 beside activations in 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` over its last dimension: [..., hidden] -> [..., hidden], in the dtype of the input."""
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class Embed(nn.Module):
    """Token plus learned position embedding, then dropout: int64 [batch, seq] -> [batch, seq, hidden].

    A dict of "input_ids" and "position_ids", for rows of several documents that do not attend to each other,
    gives the pair of hidden states and position ids.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok = _embedding(config.vocab_size, config.hidden_size)
        self.pos = _embedding(config.seq_length, config.hidden_size)
        _materialise(self)

    def reset_parameters(self) -> None:
        """Set every parameter of the embedding from GPT-2's normal distribution with deviation 0.02."""
        nn.init.normal_(self.tok.weight, std=_INIT_STD)
        nn.init.normal_(self.pos.weight, std=_INIT_STD)

    def forward(self, tokens: Tensor | dict[str, Tensor], cache: KVCache | None = None) -> Passed:
        """Embed `tokens`, which follow those in `cache`. Raises ValueError beyond the learned positions."""
        positions = None
        if isinstance(tokens, dict):
            tokens, positions = tokens["input_ids"], tokens["position_ids"]
        first = 0 if cache is None else cache.advanced(tokens.shape[-1])
        seq = first + tokens.shape[-1]
        if seq > self.config.seq_length:
            most = setting("seq_length", self.config.seq_length)
            do = "cut the sequence, or build the model with a longer `seq_length`"
            refuse((), f"{seq} tokens", f"at most {most}", do)
        at = self.pos.weight[first:seq] if positions is None else self.pos(positions)
        x = F.dropout(self.tok(tokens) + at, self.config.dropout, self.training)  # [batch, seq, hidden]
        return x if positions is None else (x, positions)


class Block(nn.Module):
    """A pre-LayerNorm GPT-2 block, attention then MLP: [batch, seq, hidden] -> [batch, seq, hidden]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.ln_1 = LayerNorm(hidden, device="meta")
        self.qkv = nn.Linear(hidden, 3 * hidden, device="meta")
        self.attn_out = nn.Linear(hidden, hidden, device="meta")
        self.ln_2 = LayerNorm(hidden, device="meta")
        self.up = nn.Linear(hidden, 4 * hidden, device="meta")
        self.down = nn.Linear(4 * hidden, hidden, device="meta")
        _materialise(self)

    def reset_parameters(self) -> None:
        """Set every parameter of the block: normal 0.02, residual projections divided by sqrt(2 num_layers)."""
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers)
        self.ln_1.reset_parameters()
        _reset_linear(self.qkv, _INIT_STD)
        _reset_linear(self.attn_out, residual_std)
        self.ln_2.reset_parameters()
        _reset_linear(self.up, _INIT_STD)
        _reset_linear(self.down, residual_std)

    def forward(self, passed: Passed, cache: KVCache | None = None) -> Passed:
        """Apply causal attention, then the MLP, to hidden states `passed`; `cache` has earlier keys and values."""
        x, positions = _parts(passed)
        rate = self.config.dropout
        x = x + F.dropout(self._attend(self.ln_1(x), cache, positions), rate, self.training)
        y = self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        x = x + F.dropout(y, rate, self.training)
        return x if positions is None else (x, positions)

    def _attend(self, x: Tensor, cache: KVCache | None, positions: Tensor | None) -> Tensor:
        heads = (self.config.num_attention_heads, self.config.head_size)
        rate = self.config.dropout if self.training else 0.0
        q, k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        # [batch, heads, seq, head_size]
        alone = cache is None or not cache.advanced(x.shape[1])  # else one token, which sees all before it
        if cache is not None:
            k, v = cache.extended(k, v)
        seen = None if positions is None else documents_of(positions)
        if seen is not None and not rate:
            y = attend_row(q, k, v, seen.first)
        else:
            mask = None if seen is None else seen.mask(q)
            y = F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p=rate, is_causal=alone and mask is None
            )
        return self.attn_out(y.transpose(1, 2).flatten(-2))


class Head(nn.Module):
    """Final LayerNorm, projection to the vocabulary, mean cross entropy: the last segment of the model."""

    summed_targets = staticmethod(summed_targets)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_f = LayerNorm(config.hidden_size, device="meta")
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
        _materialise(self)

    def reset_parameters(self) -> None:
        """Set every parameter of the head; a tied `out.weight` is drawn too, and dropped by the caller."""
        self.ln_f.reset_parameters()
        _reset_linear(self.out, _INIT_STD)

    def logits(self, x: Tensor) -> Tensor:
        """The logits of hidden states: [batch, seq, hidden] -> fp32 [batch, seq, vocab]."""
        return self.out(self.ln_f(x)).float()

    def forward(self, passed: Passed, targets: Targets | None = None) -> Any:
        """The mean cross entropy of the targets in nats, an fp32 scalar; without targets, the logits.

        `targets` is int64 [batch, seq], in which -100 is ignored (a micro-batch of -100 alone gives NaN), or
        a pair of labels and weights [batch], as `zfunc.hf.batch` makes it, or
        `zfunc.models.loss.Preferences`.
        """
        x, _ = _parts(passed)
        if targets is None:
            return self.logits(x)
        return linear_next_token_loss(self.ln_f(x), self.out.weight, targets)


def modules(config: GPTConfig) -> tuple[tuple[str, nn.Module], ...]:
    """Build the modules, with their names, in the order they run; under `torch.device("meta")` they take no memory.

    They are untied: with `config.tied`, "out.weight" of "head" is to be shared with "embed.tok.weight".

    >>> [name for name, _ in modules(GPTConfig(num_layers=2))]
    ['embed', 'block0', 'block1', 'head']
    """
    blocks = ((f"block{index}", Block(config)) for index in range(config.num_layers))
    return (("embed", Embed(config)), *blocks, ("head", Head(config)))


def gpt_segments(config: GPTConfig) -> tuple[Segment, ...]:
    """The segments of a GPT-2 on the meta device, which take no memory until `zfunc.init` fills them."""
    with torch.device("meta"):
        built = modules(config)
    tied = {"out.weight": "embed.tok.weight"} if config.tied else None
    return tuple(segment(name, module, share=tied if name == "head" else None) for name, module in built)


def _parts(passed: Passed) -> tuple[Tensor, Tensor | None]:
    return passed if isinstance(passed, tuple) else (passed, None)


def _reset_linear(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _embedding(rows: int, columns: int) -> nn.Embedding:
    # nn.Embedding(rows, columns, device="meta") calls normal_, which on meta imports all of torch._dynamo: 2 s.
    return nn.Embedding.from_pretrained(torch.empty(rows, columns, device="meta"), freeze=False)


def _materialise(module: nn.Module) -> None:
    # Children are made on meta, where torch's own initialisation draws nothing from the generator: building here
    # and materialising later give the same numbers.
    device = torch.get_default_device()
    if device.type != "meta":
        module.to_empty(device=device)
        module.reset_parameters()  # type: ignore[operator]
