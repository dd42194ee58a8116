"""What the segments of a GPT-2 cost, from its size alone: their parameters, and the costs of their passes.

A pass is the list of operations that torch runs, each with the memory that it reads and allocates; a layer is a
function that runs its forward and leaves its backward. So `zfunc plan` and `zfunc draw` need no torch, nor wait
until it has traced a model. The invariant: these costs equal those that `zfunc.engine.compile.cost_trace` finds.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

from attrs import define, evolve, field, frozen

from zfunc.core.layout import Parameter, round_up
from zfunc.core.settings import StepSettings
from zfunc.core.spec import ALLOCATION, SegmentCost, StepSpec
from zfunc.core.traffic import Traffic
from zfunc.engine.compile.step_spec import passes_key
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.loss_pieces import LOGITS_BYTES, piece
from zfunc.optim.base import Optimizer
from zfunc.planner.cost_model import SegmentCosts, StepCosts

INT64, FP32, BOOL = 8, 4, 1  # bytes of an element
# The layers of a block with parameters, by their widths in hidden sizes: of a norm one, of a matrix out and in.
BLOCK: dict[str, tuple[int, ...]] = {
    **{"ln_1": (1,), "qkv": (3, 1), "attn_out": (1, 1)},
    **{"ln_2": (1,), "up": (4, 1), "down": (1, 4)},
}


def gpt_parameters(config: GPTConfig) -> list[list[Parameter]]:
    """The parameters of every segment, in its order; the tied projection of the head is the embedding's.

    >>> [p.name for p in gpt_parameters(GPTConfig(num_layers=1))[2]]
    ['head.ln_f.weight', 'head.ln_f.bias', 'embed.tok.weight']
    """
    vocab, hidden = config.vocab_size, config.hidden_size

    def layer(name: str, widths: tuple[int, ...]) -> list[Parameter]:
        shape = tuple(n * hidden for n in widths)
        return [Parameter(f"{name}.weight", shape), Parameter(f"{name}.bias", shape[:1])]

    tok = Parameter("embed.tok.weight", (vocab, hidden))
    return [
        [tok, Parameter("embed.pos.weight", (config.seq_length, hidden))],
        *(
            [p for name, widths in BLOCK.items() for p in layer(f"block{n}.{name}", widths)]
            for n in range(config.num_layers)
        ),
        [*layer("head.ln_f", (1,)), tok if config.tied else evolve(tok, name="head.out.weight")],
    ]


def gpt_costs(config: GPTConfig, rows: int, optimizer: Optimizer, world: int = 1) -> SegmentCosts:
    """The costs of a GPT with one rank's batch of `rows`, known without a trace.

    They are asked for under settings, and the last segment, whose backward comes next, never recomputes. Raises
    ValueError then for a GPT with dropout.
    """
    parameters = gpt_parameters(config)

    def trace(settings: StepSettings, spec: StepSpec, on_gpu: bool, _grouped: bool) -> StepCosts:
        if config.dropout:
            got = f"dropout: got {config.dropout}, expected 0"
            raise ValueError(f"{got}: pass the segments to zfunc.plan")
        tokens, size = rows // settings.micro_batches * config.seq_length, spec.element_bytes
        recompute, compiled, moving = passes_key(settings)

        @cache  # blocks are alike
        def cost(
            layers: Callable[..., _Tensor], inputs: tuple[int, ...], weights: tuple[int, ...], returned: int
        ) -> SegmentCost:
            p = _Passes(config, tokens, size, functional=recompute == "min-cut", on_gpu=on_gpu)
            p.run_both(layers, *([_Tensor(n, given=True) for n in sizes] for sizes in (inputs, weights)))
            return p.cost(recompute == "all" and layers is not _head, moving, returned, bool(compiled))

        ids, x = INT64 * tokens, tokens * config.hidden_size * size
        segments = [(_embed, (ids,)), *[(_block, (x,))] * config.num_layers, (_head, (x, ids))]
        costs = [
            cost(layers, inputs, tuple(p.numel * size for p in own), spec.grad_bytes(s) + _held(x) * (s > 0))
            for s, (own, (layers, inputs)) in enumerate(zip(parameters, segments, strict=True))
        ]
        return StepCosts(costs, _held(ids))

    return SegmentCosts(parameters, optimizer, rows, rows * config.seq_length, trace, world)


# --- operations on memory --------------------------------------------------------------------------------


@frozen(eq=False)
class _Tensor:
    """An allocation; `given` is an input of the segment or a weight."""

    nbytes: int
    given: bool = False

    @property
    def held(self) -> int:
        return _held(self.nbytes)


def _held(nbytes: int) -> int:
    return round_up(nbytes, ALLOCATION)


_Part: TypeAlias = tuple[_Tensor, int]  # of a tensor, so many bytes
_Read: TypeAlias = _Tensor | _Part


def _parts(given: Iterable[_Read]) -> list[_Part]:
    return [(t, t.nbytes) if isinstance(t, _Tensor) else t for t in given]


@frozen(eq=False)
class _Operation:
    reads: list[_Part] = field(converter=_parts)
    makes: list[_Tensor]
    changes: list[_Part] = field(default=(), converter=_parts)  # in place
    flops: int = 0
    attention_flops: int = 0  # of these
    launched: bool = True
    fusable: bool = True  # by a compiler, unless it has FLOPs
    kernel_bytes: int = 0  # that its kernel allocates beside what it makes


@define(eq=False)
class _Passes:
    """Forward and backward of a segment in the order of torch, for a micro-batch in a precision of `size` bytes.

    A layer of forward leaves its backward in `tape`. `functional`: the partitioner of min-cut makes what is written
    in place anew.
    """

    config: GPTConfig
    tokens: int
    size: int
    functional: bool
    on_gpu: bool
    forward: list[_Operation] = field(factory=list["_Operation"])
    backward: list[_Operation] = field(factory=list["_Operation"])
    tape: list[Callable[[], None]] = field(factory=list[Callable[[], None]])
    grads: dict[_Tensor, _Tensor] = field(factory=dict[_Tensor, _Tensor])
    input: _Tensor = field(init=False)
    output: _Tensor | None = None
    results: set[_Tensor] = field(init=False)

    def run(self, reads: Iterable[_Read], *sizes: int, **of: Any) -> list[_Tensor]:
        """An operation that allocates tensors of so many bytes; `of` are other fields of it."""
        made = [_Tensor(n) for n in sizes]
        (self.backward if self.output else self.forward).append(_Operation(reads, made, **of))
        return made

    def one(self, reads: Iterable[_Read], size: int) -> _Tensor:
        """An operation that allocates one tensor."""
        return self.run(reads, size)[0]

    def product(
        self, sizes: tuple[int, int, int], *reads: _Read, transposed: bool = False, into: _Part | None = None
    ) -> _Tensor:
        """The product of matrices [m, k] and [k, n], plus a bias among what it reads, added to `into` if given.

        The host's kernel of a transposed one sums in fp32 (`zfunc.engine.compile.cost_trace.cpu_kernel_bytes`).
        """
        m, k, n = sizes
        sums = FP32 * m * n * (transposed and m > 1 and self.size == 2 and not self.on_gpu)
        own = {"flops": 2 * m * k * n, "kernel_bytes": sums}
        if into is None:
            return self.run(reads, m * n * self.size, **own)[0]
        self.run((*reads, into), changes=(into,), **own)
        return into[0]

    def cast(self, t: _Tensor, nbytes: int) -> _Tensor:
        """To fp32 or from it."""
        return t if self.size == FP32 else self.one((t,), nbytes)

    def changed(self, t: _Tensor, *reads: _Tensor) -> _Tensor:
        """`t`, written in place, or a new one."""
        if self.functional:
            return self.one((t, *reads), t.nbytes)
        self.run((t, *reads), changes=(t,))
        return t

    def made(
        self, y: _Tensor, leaves: Sequence[_Tensor], pull: Callable[[_Tensor], Iterable[_Tensor]]
    ) -> _Tensor:
        """`y`, of whose gradient backward makes those of `leaves`, which are added to what they have."""

        def pulled() -> None:
            for leaf, grad in zip(leaves, pull(self.grads[y]), strict=True):
                known = self.grads.get(leaf)
                self.grads[leaf] = self.one((known, grad), leaf.nbytes) if known else grad

        self.tape.append(pulled)
        return y

    def run_both(self, layers: Callable[..., _Tensor], inputs: list[_Tensor], weights: list[_Tensor]) -> None:
        """Forward of the layers, and backward from the cotangent of their output to the gradients of the rest."""
        self.input = inputs[0]
        self.output = output = layers(self, *inputs, *weights)
        self.grads[output] = _Tensor(output.nbytes, given=True)
        for pull in reversed(self.tape):
            pull()
        self.results = {self.grads[leaf] for leaf in (*inputs, *weights) if leaf in self.grads}

    def cost(self, repeats: bool, moving: bool, returned: int, compiled: bool) -> SegmentCost:
        """The cost of a micro-batch (`zfunc.engine.compile.cost_trace.Trace`, and `specialize` there)."""
        assert self.output
        own = {t for operation in self.forward for t in operation.makes}
        read = {t for operation in self.backward for t, _ in operation.reads}
        residuals = {t for t in read if t in own or t.given} - {self.grads[self.output]}
        residuals = set[_Tensor]() if repeats else residuals
        kept = {t for t in residuals if not t.given}
        stashed = {t for t in residuals if not (moving and t.given)} | {self.input}
        backward = [*self._needed_of_forward(read), *self.backward] if repeats else self.backward
        ends, residual_bytes = kept | {self.output}, sum(t.held for t in kept)
        return SegmentCost(
            flops=sum(x.flops for x in self.forward),
            backward_flops=sum(x.flops for x in backward),
            attention_flops=sum(x.attention_flops for x in self.forward),
            backward_attention_flops=sum(x.attention_flops for x in backward),
            moved_bytes=_moved(self.forward, ends, compiled),
            backward_moved_bytes=_moved(backward, self.results, compiled),
            input_bytes=self.input.held,
            residual_bytes=residual_bytes,
            stash_bytes=sum(t.held for t in stashed),
            forward_workspace=max(0, _peak(self.forward, ends) - self.output.held - residual_bytes),
            backward_workspace=max(0, _peak(backward, self.results) - returned),
            forward_launches=0 if compiled else sum(x.launched for x in self.forward),
            backward_launches=0 if compiled else sum(x.launched for x in backward),
        )

    def _needed_of_forward(self, needed: set[_Tensor]) -> list[_Operation]:
        """The operations of forward that backward repeats."""
        kept: list[_Operation] = []
        for operation in reversed(self.forward):
            if needed & {*operation.makes}:
                kept.append(operation)
                needed = needed | {t for t, _ in operation.reads}
        return kept[::-1]


def _moved(operations: Iterable[_Operation], results: Iterable[_Tensor], compiled: bool) -> int:
    """The bytes that the kernels of a pass move."""
    traffic = Traffic(compiled)
    for x in operations:
        if x.launched:
            made = [(t, t.nbytes) for t in x.makes]
            traffic.add(x.reads, [*made, *x.changes], fusable=x.fusable and not x.flops)
    return traffic.ended(results)


def _peak(operations: Sequence[_Operation], results: set[_Tensor]) -> int:
    """The most that is allocated at once; what no later operation reads is freed, but for the `results`."""
    touched = [[*x.makes, *(t for t, _ in x.reads)] for x in operations]
    last = {t: n for n, tensors in enumerate(touched) for t in tensors}
    own = {t for x in operations for t in x.makes}
    live = peak = 0
    for n, operation in enumerate(operations):
        live += sum(t.held for t in operation.makes)
        peak = max(peak, live + operation.kernel_bytes)
        live -= sum(t.held for t in {*touched[n]} & own - results if last[t] == n)
    return peak


# --- layers: what forward runs, and what backward runs for it -----------------------------------------------


def _add(p: _Passes, a: _Tensor, b: _Tensor) -> _Tensor:
    return p.made(p.one((a, b), a.nbytes), (a, b), lambda grad: (grad, grad))


def _norm(p: _Passes, x: _Tensor, weight: _Tensor, bias: _Tensor) -> _Tensor:
    """A layer norm, which keeps the mean and deviation of each token."""
    y, *stats = p.run((x, weight, bias), x.nbytes, p.tokens * p.size, p.tokens * p.size)
    sizes = x.nbytes, weight.nbytes, bias.nbytes
    return p.made(y, (x, weight, bias), lambda grad: p.run((grad, x, *stats, weight, bias), *sizes))


def _linear(p: _Passes, x: _Tensor, weight: _Tensor, bias: _Tensor) -> _Tensor:
    tokens, out, wide = p.tokens, bias.nbytes // p.size, weight.nbytes // bias.nbytes

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        grad_x = p.product((tokens, out, wide), grad, weight)
        grad_weight = p.product((out, tokens, wide), grad, x, transposed=True)
        return grad_x, grad_weight, p.one((grad,), bias.nbytes)

    return p.made(p.product((tokens, wide, out), x, weight, bias), (x, weight, bias), pull)


def _gelu(p: _Passes, x: _Tensor) -> _Tensor:
    return p.made(p.one((x,), x.nbytes), (x,), lambda grad: (p.one((grad, x), x.nbytes),))


def _attention(p: _Passes, qkv: _Tensor) -> _Tensor:
    """Causal attention of queries, keys and values side by side, which keeps a number for each token and head."""
    stream, heads = qkv.nbytes // 3, [(qkv, qkv.nbytes // 3)] * 3
    pairs = p.tokens * p.config.seq_length * p.config.hidden_size  # FLOPs of a causal product

    def run(reads: Iterable[_Read], products: int, *sizes: int) -> list[_Tensor]:
        return p.run(reads, *sizes, flops=products * pairs, attention_flops=products * pairs)

    mixed, sums = run(heads, 2, stream, FP32 * p.tokens * p.config.num_attention_heads)

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        return [p.one(run((grad, *heads, mixed, sums), 5, stream, stream, stream), qkv.nbytes)]

    return p.made(mixed, (qkv,), pull)


def _loss(p: _Passes, x: _Tensor, weight: _Tensor, targets: _Tensor) -> _Tensor:
    """Cross entropy of all logits at once."""
    tokens, vocab, hidden = p.tokens, p.config.vocab_size, p.config.hidden_size
    logits = FP32 * tokens * vocab
    log_softmax = p.one((p.cast(p.product((tokens, hidden, vocab), x, weight), logits),), logits)
    loss, counted = p.run(((log_softmax, FP32), targets), FP32, FP32)

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        grad = p.one((grad, log_softmax, targets, counted), logits)
        grad = p.cast(p.one((grad, log_softmax), logits), tokens * vocab * p.size)
        grad_weight = p.product((vocab, tokens, hidden), grad, x, transposed=True)
        return p.product((tokens, vocab, hidden), grad, weight), grad_weight

    return p.made(loss, (x, weight), pull)


def _loss_in_pieces(p: _Passes, x: _Tensor, weight: _Tensor, targets: _Tensor) -> _Tensor:
    """The loss in pieces: forward of some tokens at a time, backward of some of the vocabulary."""
    tokens, vocab, hidden = p.tokens, p.config.vocab_size, p.config.hidden_size
    row, losses, log_sums = hidden * p.size, list[_Tensor](), list[_Tensor]()
    for rows in _pieces(tokens, vocab):
        some = targets, INT64 * rows
        logits = p.product((rows, hidden, vocab), (x, rows * row), weight)
        y = p.cast(logits, FP32 * rows * vocab)
        own, _ = p.run(((p.one((y,), FP32 * rows * vocab), FP32 * rows), some), FP32 * rows, FP32)
        ignored = p.one((some,), BOOL * rows)
        labels = p.one((some, ignored), INT64 * rows)
        at_label = p.one(((y, FP32 * rows), labels), FP32 * rows)
        at_label = p.one((at_label, own), FP32 * rows)
        losses.append(own)
        log_sums.append(p.one((at_label, ignored), FP32 * rows))
    joined, joined_sums = p.one(losses, FP32 * tokens), p.one(log_sums, FP32 * tokens)
    total = p.one((joined,), FP32)
    counted = p.one((p.one((targets,), BOOL * tokens),), INT64)
    loss = p.one((total, counted), FP32)

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        grad = p.one((grad, counted), FP32)
        grad_x = p.one((x,), FP32 * tokens * hidden)
        (grad_weight,) = p.run((weight,), weight.nbytes, launched=False)
        for columns in _pieces(vocab, tokens):
            some, pairs = (weight, columns * row), tokens * columns
            at_label = p.one((targets, p.one((), INT64 * columns)), BOOL * pairs)
            y = p.cast(p.product((tokens, hidden, columns), x, some), FP32 * pairs)
            # minus the log-sum-exp, exponential, minus 1 at the label, times the gradient
            y = p.changed(p.changed(p.changed(p.changed(y, joined_sums)), at_label), grad)
            part = p.cast(y, pairs * p.size)
            grad_x = p.changed(grad_x, p.product((tokens, columns, hidden), part, some))
            into = None if p.functional else (grad_weight, columns * row)
            made = p.product((columns, tokens, hidden), part, x, transposed=True, into=into)
            grad_weight = p.one((grad_weight, made), weight.nbytes) if p.functional else made
        return p.cast(grad_x, tokens * row), grad_weight

    return p.made(loss, (x, weight), pull)


def _pieces(total: int, width: int) -> Iterable[int]:
    """The sizes of the pieces of so many rows, which are so wide."""
    size = piece(total, width, LOGITS_BYTES)
    return (min(size, total - start) for start in range(0, total, size))


# --- the segments of zfunc.models.gpt --------------------------------------------------------------------


def _embed(p: _Passes, tokens: _Tensor, tok: _Tensor, pos: _Tensor) -> _Tensor:
    """The embeddings of tokens and of their positions, added."""
    size = p.tokens * p.config.hidden_size * p.size

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        summed = p.one((grad,), pos.nbytes)
        return [*p.run((grad, tokens), tok.nbytes, fusable=False), p.one((summed,), pos.nbytes)]

    looked_up = p.one(((tok, min(tok.nbytes, size)), tokens), size)
    return p.made(p.one((looked_up, pos), size), (tok, pos), pull)


def _block(p: _Passes, x: _Tensor, *weights: _Tensor) -> _Tensor:
    """Attention, then MLP, each behind a norm and added to its input."""
    ln_1, qkv, out, ln_2, up, down = zip(weights[::2], weights[1::2], strict=True)
    middle = _add(p, x, _linear(p, _attention(p, _linear(p, _norm(p, x, *ln_1), *qkv)), *out))
    return _add(p, middle, _linear(p, _gelu(p, _linear(p, _norm(p, middle, *ln_2), *up)), *down))


def _head(p: _Passes, x: _Tensor, targets: _Tensor, *weights: _Tensor) -> _Tensor:
    """The logits at once, or in pieces where they are many (`zfunc.models.loss`)."""
    whole = FP32 * p.tokens * p.config.vocab_size <= LOGITS_BYTES
    return (_loss if whole else _loss_in_pieces)(p, _norm(p, x, *weights[:2]), weights[2], targets)
