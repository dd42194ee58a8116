"""What the segments of a GPT-2 cost, from its size alone: their parameters, and the costs of their passes.

A pass is the list of operations that torch runs, each with the memory that it reads and allocates; a layer is a
function that runs its forward and leaves its backward. So `zfunc plan` and `zfunc draw` need no torch, nor wait
until it has traced a model. The invariant: these costs equal those that `zfunc.engine.compile.cost_trace` finds.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

from attrs import Factory, define, evolve, field, frozen

from zfunc.core.layout import Parameter, round_up
from zfunc.core.settings import StepSettings
from zfunc.core.spec import ALLOCATION, SegmentCost, StepSpec
from zfunc.core.traffic import Traffic
from zfunc.engine.compile.step_spec import make_spec, passes_key, with_moments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.loss_pieces import LOGITS_BYTES, piece
from zfunc.optim.base import Optimizer

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


@frozen(eq=False)
class GPTCosts:
    """`zfunc.planner.cost_model.SegmentCosts` of a GPT, with one rank's batch of so many `rows`."""

    config: GPTConfig
    rows: int
    optimizer: Optimizer
    world: int = 1

    @property
    def tokens(self) -> int:
        """The tokens of a rank's batch."""
        return self.rows * self.config.seq_length

    def untraced(self, settings: StepSettings, *, on_gpu: bool) -> StepSpec:
        """The spec of these settings, with costs of 0."""
        optimizer = with_moments(self.optimizer, settings)
        return make_spec(gpt_parameters(self.config), optimizer, settings, world=self.world, on_gpu=on_gpu)

    def traced(self, settings: StepSettings, *, on_gpu: bool, grouped: bool = True) -> StepSpec:  # noqa: ARG002
        """The same with the costs of a micro-batch, known without a trace. The last segment, whose backward comes
        next, never recomputes. Raises ValueError for a GPT with dropout."""
        if self.config.dropout:
            got = f"dropout: got {self.config.dropout}, expected 0"
            raise ValueError(f"{got}: pass the segments to zfunc.plan")
        spec = self.untraced(settings, on_gpu=on_gpu)
        recompute, compiled, moving = passes_key(settings)
        of = _Batch(
            self.config,
            self.rows // settings.micro_batches,
            spec.element_bytes,
            recompute == "min-cut",
            on_gpu,
        )
        head = _head(of)
        segments = [_embed(of), *[_block(of)] * self.config.num_layers, head]
        cost = cache(_Passes.cost)  # blocks are alike
        costs = [
            cost(
                x,
                recompute == "all" and x is not head,
                moving,
                spec.grad_bytes(s) + x.inputs[0].memory.nbytes * (s > 0),
                bool(compiled),
            )
            for s, x in enumerate(segments)
        ]
        return evolve(spec, costs=costs, target_bytes=round_up(INT64 * of.tokens, ALLOCATION))


@frozen
class _Batch:
    """A micro-batch of `rows` sequences, in a precision of `element_bytes`, on the host unless `of_accelerator`.

    `functional`: the partitioner of min-cut makes what is written in place anew.
    """

    config: GPTConfig
    rows: int
    element_bytes: int
    functional: bool
    of_accelerator: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.config.seq_length


# --- operations on memory --------------------------------------------------------------------------------


@define(eq=False)
class _Memory:
    """An allocation; `given` is an input of the segment or a weight."""

    nbytes: int
    given: bool = False


@frozen(eq=False)
class _Tensor:
    """A view of memory that reaches over `extent` bytes of it, and has `nbytes` of them."""

    memory: _Memory
    extent: int
    nbytes: int = field(default=Factory(lambda self: self.extent, takes_self=True))


@frozen(eq=False)
class _Operation:
    reads: tuple[_Tensor, ...]
    writes: tuple[_Tensor, ...]
    flops: int = 0
    launches: int = 1
    kernel_bytes: int = 0  # that its kernel allocates beside what it writes
    attends: bool = False  # its FLOPs are of attention
    looks_up: bool = False  # as much of the first tensor as it writes
    changes: tuple[_Tensor, ...] = ()  # in place
    alone: bool = False  # no compiler fuses it

    @property
    def moves(self) -> tuple[list[tuple[_Memory, int]], list[tuple[_Memory, int]]]:
        """What its kernel reads and writes."""
        reads = [(t.memory, t.nbytes) for t in self.reads]
        writes = [(t.memory, t.nbytes) for t in self.writes]
        if self.looks_up:
            reads[0] = (reads[0][0], min(reads[0][1], writes[0][1]))
        return reads, [*writes, *((t.memory, t.nbytes) for t in self.changes)]


def _given(nbytes: int) -> _Tensor:
    return _Tensor(_Memory(round_up(nbytes, ALLOCATION), given=True), nbytes)


@define(eq=False)
@define(eq=False)
class _Passes:
    """Forward and backward of a segment in the order of torch. A layer of forward leaves its backward in `tape`."""

    batch: _Batch
    inputs: tuple[_Tensor, ...]
    output: _Tensor | None = None
    forward: list[_Operation] = field(factory=list["_Operation"])
    backward: list[_Operation] = field(factory=list["_Operation"])
    tape: list[Callable[[], None]] = field(factory=list[Callable[[], None]])
    grads: dict[_Tensor, _Tensor] = field(factory=dict[_Tensor, _Tensor])
    results: set[_Memory] = field(factory=set[_Memory])

    def run(self, reads: Iterable[_Tensor], *sizes: int, **of: Any) -> list[_Tensor]:
        """An operation that allocates tensors of so many bytes; `of` are other fields of it."""
        made = tuple(_Tensor(_Memory(round_up(n, ALLOCATION)), n) for n in sizes)
        (self.backward if self.output else self.forward).append(_Operation(tuple(reads), made, **of))
        return [*made]

    def one(self, reads: Iterable[_Tensor], size: int) -> _Tensor:
        """An operation that allocates one tensor."""
        return self.run(reads, size)[0]

    def product(
        self, a: _Tensor, b: _Tensor, m: int, k: int, n: int, *also: _Tensor, transposed: bool = False
    ) -> _Tensor:
        """The product of matrices [m, k] and [k, n], plus a bias among what it reads `also`."""
        own, size = self.kernel_bytes(m, n, transposed), m * n * self.batch.element_bytes
        return self.run((a, b, *also), size, flops=2 * m * k * n, kernel_bytes=own)[0]

    def kernel_bytes(self, m: int, n: int, transposed: bool) -> int:
        """What the host's kernel of a product [m, n] takes (`zfunc.engine.compile.cost_trace.cpu_kernel_bytes`)."""
        on_host = self.batch.element_bytes == 2 and not self.batch.of_accelerator
        return FP32 * m * n if on_host and transposed and m > 1 else 0

    def cast(self, t: _Tensor, nbytes: int) -> _Tensor:
        """To fp32 or from it."""
        return t if self.batch.element_bytes == FP32 else self.one((t,), nbytes)

    def changed(self, t: _Tensor, *reads: _Tensor) -> _Tensor:
        """`t`, written in place, or a new one."""
        if self.batch.functional:
            return self.one((t, *reads), t.extent)
        self.run((t, *reads), changes=(t,))
        return t

    def made(
        self, y: _Tensor, leaves: Sequence[_Tensor], pull: Callable[[_Tensor], Iterable[_Tensor]]
    ) -> _Tensor:
        """`y`, of whose gradient backward makes those of `leaves`, which are added to what they have."""

        def pulled() -> None:
            for leaf, grad in zip(leaves, pull(self.grads[y]), strict=True):
                known = self.grads.get(leaf)
                self.grads[leaf] = self.one((known, grad), leaf.extent) if known else grad

        self.tape.append(pulled)
        return y

    def ended(self, output: _Tensor, *leaves: _Tensor) -> "_Passes":
        """With backward, from the cotangent of the output to the gradients of `leaves`."""
        self.output, self.grads[output] = output, _given(output.extent)
        for pull in reversed(self.tape):
            pull()
        self.results = {self.grads[leaf].memory for leaf in leaves}
        return self

    def cost(self, repeats: bool, moving: bool, returned: int, compiled: bool) -> SegmentCost:
        """The cost of a micro-batch (`zfunc.engine.compile.cost_trace.Trace`, and `specialize` there)."""
        assert self.output
        own = {t.memory for operation in self.forward for t in operation.writes}
        read = {t.memory for op in self.backward for t in op.reads if t.memory in own or t.memory.given}
        residuals = set[_Memory]() if repeats else read - {self.grads[self.output].memory}
        kept = {x for x in residuals if not x.given}
        stashed = {x for x in residuals if not (moving and x.given)} | {self.inputs[0].memory}
        backward = [*self._needed_of_forward(), *self.backward] if repeats else self.backward
        ends = kept | {self.output.memory}
        residual_bytes = sum(x.nbytes for x in kept)
        return SegmentCost(
            flops=sum(x.flops for x in self.forward),
            backward_flops=sum(x.flops for x in backward),
            attention_flops=sum(x.flops for x in self.forward if x.attends),
            backward_attention_flops=sum(x.flops for x in backward if x.attends),
            moved_bytes=_moved(self.forward, ends, compiled),
            backward_moved_bytes=_moved(backward, self.results, compiled),
            input_bytes=self.inputs[0].memory.nbytes,
            residual_bytes=residual_bytes,
            stash_bytes=sum(x.nbytes for x in stashed),
            forward_workspace=max(0, _peak(self.forward, ends) - self.output.memory.nbytes - residual_bytes),
            backward_workspace=max(0, _peak(backward, self.results) - returned),
            forward_launches=0 if compiled else sum(x.launches for x in self.forward),
            backward_launches=0 if compiled else sum(x.launches for x in backward),
        )

    def _needed_of_forward(self) -> list[_Operation]:
        """The operations of forward that backward repeats."""
        needed = {t.memory for op in self.backward for t in op.reads}
        kept: list[_Operation] = []
        for operation in reversed(self.forward):
            if needed & {t.memory for t in operation.writes}:
                kept.append(operation)
                needed |= {t.memory for t in operation.reads}
        return kept[::-1]


def _moved(operations: Iterable[_Operation], results: Iterable[_Memory], compiled: bool) -> int:
    """The bytes that the kernels of a pass move."""
    traffic = Traffic(compiled)
    for operation in operations:
        if operation.launches:
            traffic.add(*operation.moves, fusable=not (operation.flops or operation.alone))
    return traffic.ended(results)


def _peak(operations: Sequence[_Operation], results: set[_Memory]) -> int:
    """The most that is allocated at once; what no later operation reads is freed, but for the `results`."""
    last = {t.memory: n for n, operation in enumerate(operations) for t in operation.writes}
    own = set(last)
    last |= {t.memory: n for n, op in enumerate(operations) for t in op.reads if t.memory in own}
    live = peak = 0
    for n, operation in enumerate(operations):
        live += sum(t.memory.nbytes for t in operation.writes)
        peak = max(peak, live + operation.kernel_bytes)
        touched = {t.memory for t in (*operation.writes, *operation.reads)} & own
        live -= sum(x.nbytes for x in touched if last[x] == n and x not in results)
    return peak


# --- layers: what forward runs, and what backward runs for it -----------------------------------------------


def _add(p: _Passes, a: _Tensor, b: _Tensor) -> _Tensor:
    return p.made(p.one((a, b), a.extent), (a, b), lambda grad: (grad, grad))


def _norm(p: _Passes, x: _Tensor, weight: _Tensor, bias: _Tensor) -> _Tensor:
    """A layer norm, which keeps the mean and deviation of each token."""
    size = p.batch.tokens * p.batch.element_bytes
    y, *stats = p.run((x, weight, bias), x.extent, size, size)
    sizes = x.extent, weight.extent, bias.extent
    return p.made(y, (x, weight, bias), lambda grad: p.run((grad, x, *stats, weight, bias), *sizes))


def _linear(p: _Passes, x: _Tensor, weight: _Tensor, bias: _Tensor) -> _Tensor:
    outputs = bias.extent // p.batch.element_bytes
    tokens, inputs = p.batch.tokens, weight.extent // bias.extent

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        grad_x = p.product(grad, weight, tokens, outputs, inputs)
        grad_weight = p.product(grad, x, outputs, tokens, inputs, transposed=True)
        return grad_x, grad_weight, p.one((grad,), bias.extent)

    return p.made(p.product(x, weight, tokens, inputs, outputs, bias), (x, weight, bias), pull)


def _gelu(p: _Passes, x: _Tensor) -> _Tensor:
    return p.made(p.one((x,), x.extent), (x,), lambda grad: (p.one((grad, x), x.extent),))


def _attention(p: _Passes, qkv: _Tensor) -> _Tensor:
    """Causal attention of queries, keys and values side by side, which keeps a number for each token and head."""
    config, tokens, stream = p.batch.config, p.batch.tokens, qkv.extent // 3
    row = config.hidden_size * p.batch.element_bytes
    heads = [_Tensor(qkv.memory, 3 * row * (tokens - 1) + row, stream) for _ in range(3)]
    pairs = p.batch.rows * config.seq_length**2 * config.hidden_size  # FLOPs of a causal product
    sums = FP32 * tokens * config.num_attention_heads
    mixed, log_sums = p.run(heads, stream, sums, flops=2 * pairs, attends=True)

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        reads, sizes = (grad, *heads, mixed, log_sums), (stream, stream, stream)
        return [p.one(p.run(reads, *sizes, flops=5 * pairs, attends=True), qkv.extent)]

    return p.made(_Tensor(mixed.memory, stream), (qkv,), pull)  # the same, with the heads side by side


def _lookup(p: _Passes, tokens: _Tensor, tok: _Tensor, pos: _Tensor) -> _Tensor:
    """The embeddings of tokens and of their positions, added."""
    size = p.batch.tokens * p.batch.config.hidden_size * p.batch.element_bytes

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        summed = p.one((grad,), pos.extent)
        return [*p.run((grad, tokens), tok.extent, alone=True), p.one((summed,), pos.extent)]

    return p.made(p.one((*p.run((tok, tokens), size, looks_up=True), pos), size), (tok, pos), pull)


def _loss(p: _Passes, x: _Tensor, weight: _Tensor, targets: _Tensor) -> _Tensor:
    """Cross entropy of all logits at once."""
    tokens, vocab, hidden = p.batch.tokens, p.batch.config.vocab_size, p.batch.config.hidden_size
    logits = FP32 * tokens * vocab
    y = p.cast(p.product(x, weight, tokens, hidden, vocab), logits)
    log_softmax = p.one((y,), logits)
    loss, counted = p.run((log_softmax, targets), FP32, FP32, looks_up=True)

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        grad = p.one((grad, log_softmax, targets, counted), logits)
        grad = p.cast(p.one((grad, log_softmax), logits), tokens * vocab * p.batch.element_bytes)
        grad_weight = p.product(grad, x, vocab, tokens, hidden, transposed=True)
        return p.product(grad, weight, tokens, vocab, hidden), grad_weight

    return p.made(loss, (x, weight), pull)


def _loss_in_pieces(p: _Passes, x: _Tensor, weight: _Tensor, targets: _Tensor) -> _Tensor:
    """The same in pieces: forward of some tokens at a time, backward of some of the vocabulary."""
    tokens, vocab, hidden = p.batch.tokens, p.batch.config.vocab_size, p.batch.config.hidden_size
    losses: list[_Tensor] = []
    log_sums: list[_Tensor] = []
    row = hidden * p.batch.element_bytes
    for rows in _pieces(tokens, vocab):
        some = evolve(targets, nbytes=INT64 * rows)
        logits = p.product(evolve(x, nbytes=rows * row), weight, rows, hidden, vocab)
        y = p.cast(logits, FP32 * rows * vocab)
        own, _ = p.run((p.one((y,), FP32 * rows * vocab), some), FP32 * rows, FP32, looks_up=True)
        ignored = p.one((some,), BOOL * rows)
        labels = p.one((some, ignored), INT64 * rows)
        (at_label,) = p.run((y, labels), FP32 * rows, looks_up=True)
        at_label = p.one((at_label, own), FP32 * rows)
        losses.append(own)
        log_sums.append(p.one((at_label, ignored), FP32 * rows))
    joined, joined_sums = p.one(losses, FP32 * tokens), p.one(log_sums, FP32 * tokens)
    total = p.one((joined,), FP32)
    counted = p.one((p.one((targets,), BOOL * tokens),), INT64)
    loss = p.one((total, counted), FP32)

    def pull(grad: _Tensor) -> Iterable[_Tensor]:
        grad = p.one((grad, counted), FP32)
        (grad_x,) = p.run((x,), FP32 * tokens * hidden)
        (grad_weight,) = p.run((weight,), weight.extent, launches=0)
        for columns in _pieces(vocab, tokens):
            some, grad_some = (evolve(t, nbytes=columns * row) for t in (weight, grad_weight))
            at_label = p.one((targets, p.one((), INT64 * columns)), BOOL * tokens * columns)
            y = p.cast(p.product(x, some, tokens, hidden, columns), FP32 * tokens * columns)
            # minus the log-sum-exp, exponential, minus 1 at the label, times the gradient
            y = p.changed(p.changed(p.changed(p.changed(y, joined_sums)), at_label), grad)
            part = p.cast(y, tokens * columns * p.batch.element_bytes)
            grad_x = p.changed(grad_x, p.product(part, some, tokens, columns, hidden))
            if p.batch.functional:
                grad_part = p.product(part, x, columns, tokens, hidden, transposed=True)
                grad_weight = p.one((grad_weight, grad_part), weight.extent)
            else:
                own, flops = p.kernel_bytes(columns, hidden, transposed=True), 2 * columns * tokens * hidden
                p.run((part, x, grad_some), flops=flops, kernel_bytes=own, changes=(grad_some,))
        return p.cast(grad_x, tokens * row), grad_weight

    return p.made(loss, (x, weight), pull)


def _pieces(total: int, width: int) -> Iterable[int]:
    """The sizes of the pieces of so many rows, which are so wide."""
    size = piece(total, width, LOGITS_BYTES)
    return (min(size, total - start) for start in range(0, total, size))


# --- the segments of zfunc.models.gpt --------------------------------------------------------------------


def _embed(batch: _Batch) -> _Passes:
    """Embed, the first segment: nothing below it is trained."""
    config, row = batch.config, batch.config.hidden_size * batch.element_bytes
    p = _Passes(batch, (_given(INT64 * batch.tokens),))
    weights = _given(config.vocab_size * row), _given(config.seq_length * row)
    return p.ended(_lookup(p, *p.inputs, *weights), *weights)


def _block(batch: _Batch) -> _Passes:
    """Block: attention, then MLP, each behind a norm and added to its input."""
    size = batch.element_bytes
    x = _given(batch.tokens * batch.config.hidden_size * size)
    p = _Passes(batch, (x,))
    weights = [_given(prod(q.shape) * size) for q in gpt_parameters(batch.config)[1]]
    ln_1, qkv, out, ln_2, up, down = zip(weights[::2], weights[1::2], strict=True)
    middle = _add(p, x, _linear(p, _attention(p, _linear(p, _norm(p, x, *ln_1), *qkv)), *out))
    y = _add(p, middle, _linear(p, _gelu(p, _linear(p, _norm(p, middle, *ln_2), *up)), *down))
    return p.ended(y, *weights, x)


def _head(batch: _Batch) -> _Passes:
    """Head: the logits at once, or in pieces where they are many (`zfunc.models.loss`)."""
    row = batch.config.hidden_size * batch.element_bytes
    x, targets = _given(batch.tokens * row), _given(INT64 * batch.tokens)
    p = _Passes(batch, (x, targets))
    weights = _given(row), _given(row), _given(batch.config.vocab_size * row)
    whole = FP32 * batch.tokens * batch.config.vocab_size <= LOGITS_BYTES
    loss = (_loss if whole else _loss_in_pieces)(p, _norm(p, x, *weights[:2]), weights[2], targets)
    return p.ended(loss, x, *weights)
