"""What the segments of a GPT-2 cost, from its size alone: their parameters, and the costs of their passes.

A pass is the list of operations that torch runs, each with the memory that it reads and allocates. So `zfunc plan`
and `zfunc draw` need no torch, nor wait until it is imported and has traced a model. The invariant: these costs
equal those that `zfunc.engine.cost_trace` finds.
"""

from collections.abc import Callable, Iterable, Sequence

from attrs import define, evolve, field, frozen

from zfunc.core.layout import Parameter, round_up
from zfunc.core.settings import Recompute, StepSettings
from zfunc.core.spec import ALLOCATION, SegmentCost, StepSpec
from zfunc.engine.step_spec import make_spec, with_moments
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.loss_pieces import LOGITS_BYTES, piece
from zfunc.optim.base import Optimizer
from zfunc.planner.cost_model import passes_key

INT64, FP32, BOOL = 8, 4, 1  # bytes of an element


def gpt_parameters(config: GPTConfig) -> list[list[Parameter]]:
    """The parameters of every segment, in its order; the tied projection of the head is the embedding's.

    >>> [p.name for p in gpt_parameters(GPTConfig(num_layers=1))[2]]
    ['head.ln_f.weight', 'head.ln_f.bias', 'embed.tok.weight']
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    block = {
        **_vectors("ln_1", hidden),
        **_linear("qkv", 3 * hidden, hidden),
        **_linear("attn_out", hidden, hidden),
        **_vectors("ln_2", hidden),
        **_linear("up", 4 * hidden, hidden),
        **_linear("down", hidden, 4 * hidden),
    }
    out = "embed.tok.weight" if config.tied else "head.out.weight"
    return [
        [
            Parameter("embed.tok.weight", (vocab, hidden)),
            Parameter("embed.pos.weight", (config.seq_length, hidden)),
        ],
        *(
            [Parameter(f"block{n}.{name}", shape) for name, shape in block.items()]
            for n in range(config.num_layers)
        ),
        [
            *(Parameter(f"head.{x}", s) for x, s in _vectors("ln_f", hidden).items()),
            Parameter(out, (vocab, hidden)),
        ],
    ]


def _vectors(name: str, features: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (features,), f"{name}.bias": (features,)}


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


@frozen
class GPTBatch:
    """A micro-batch of `rows` sequences as long as the GPT's, in a precision of `element_bytes`.

    On the host, unless `of_accelerator`, a product of 16-bit matrices whose first one is transposed takes memory.
    """

    config: GPTConfig
    rows: int
    element_bytes: int
    of_accelerator: bool

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch."""
        return self.rows * self.config.seq_length


def gpt_costs(
    batch: GPTBatch, recompute: Recompute, *, graphs: bool, moving: bool, grad_bytes: Callable[[int], int]
) -> tuple[SegmentCost, ...]:
    """The costs of the segments, all of which `recompute` the same; but the last, whose backward is next, keeps.

    `graphs` and `moving` say whether passes are device graphs, and whether residuals leave the device.
    `grad_bytes(s)` are the bytes of the gradients of segment `s`. Raises ValueError for a GPT with dropout.
    """
    if batch.config.dropout:
        raise ValueError(f"dropout: got {batch.config.dropout}, expected 0: pass the segments to zfunc.plan")
    last = recompute if recompute != "all" else "min-cut" if graphs else "none"
    block, count = _block(batch), batch.config.num_layers
    segments = [_embed(batch), *[block] * count, _head(batch, functional=last == "min-cut")]
    repeats = [recompute == "all"] * (count + 1) + [False]
    costs: dict[tuple[int, int], SegmentCost] = {}  # by the passes and what they return: blocks are alike
    inputs = [passes.inputs[0].memory.nbytes for passes in segments]
    returned = [grad_bytes(s) + (nbytes if s else 0) for s, nbytes in enumerate(inputs)]
    for passes, repeat, size in zip(segments, repeats, returned, strict=True):
        if (id(passes), size) not in costs:
            costs[id(passes), size] = passes.cost(repeat, moving, size)
    return tuple(costs[id(passes), size] for passes, size in zip(segments, returned, strict=True))


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

    def traced(self, settings: StepSettings, *, on_gpu: bool) -> StepSpec:
        """The same with the costs of a micro-batch, known without a trace."""
        spec = self.untraced(settings, on_gpu=on_gpu)
        recompute, _, graphs, moving = passes_key(settings)
        rows = self.rows // settings.micro_batches
        batch = GPTBatch(self.config, rows, spec.element_bytes, of_accelerator=on_gpu)
        costs = gpt_costs(batch, recompute, graphs=graphs, moving=moving, grad_bytes=spec.grad_bytes)
        fixed = {s for s in spec.graphed if not any(spec.streamed(b) for b in spec.layout.weights_of(s))}
        target_bytes = round_up(INT64 * batch.tokens, ALLOCATION)
        return evolve(spec, costs=costs, target_bytes=target_bytes, graphed=fixed)


# --- operations on memory --------------------------------------------------------------------------------


@define(eq=False)
class _Memory:
    """An allocation; `fixed` is a weight, `given` an input of the segment or a weight."""

    nbytes: int
    given: bool = False
    fixed: bool = False


@frozen(eq=False)
class _Tensor:
    """A view of memory that reaches over `extent` bytes of it."""

    memory: _Memory
    extent: int


@frozen(eq=False)
class _Operation:
    reads: tuple[_Tensor, ...]
    writes: tuple[_Memory, ...]
    flops: int
    launches: int
    kernel_bytes: int  # that its kernel allocates beside what it writes


def _given(nbytes: int, *, fixed: bool = False) -> _Tensor:
    return _Tensor(_Memory(round_up(nbytes, ALLOCATION), given=True, fixed=fixed), nbytes)


@define(eq=False)
class _Passes:
    """Forward and backward of a segment in the order of torch."""

    batch: GPTBatch
    inputs: tuple[_Tensor, ...]
    functional: bool = False  # the partitioner of min-cut makes what is written in place anew
    output: _Tensor | None = None
    gradients: tuple[_Tensor, ...] = ()
    forward: list[_Operation] = field(factory=list["_Operation"])
    backward: list[_Operation] = field(factory=list["_Operation"])
    cotangent: _Tensor | None = None

    def run(
        self, reads: Iterable[_Tensor], *sizes: int, flops: int = 0, launches: int = 1, kernel_bytes: int = 0
    ) -> list[_Tensor]:
        """An operation that allocates tensors of so many bytes."""
        made = [_Tensor(_Memory(round_up(n, ALLOCATION)), n) for n in sizes]
        operation = _Operation(tuple(reads), tuple(t.memory for t in made), flops, launches, kernel_bytes)
        (self.backward if self.cotangent else self.forward).append(operation)
        return made

    def one(self, reads: Iterable[_Tensor], size: int) -> _Tensor:
        """An operation that allocates one tensor."""
        return self.run(reads, size)[0]

    def product(
        self, a: _Tensor, b: _Tensor, m: int, k: int, n: int, *also: _Tensor, transposed: bool = False
    ) -> _Tensor:
        """The product of matrices [m, k] and [k, n], plus a bias among what it reads `also`."""
        size = self.batch.element_bytes
        return self.run(
            (a, b, *also), m * n * size, flops=2 * m * k * n, kernel_bytes=self.kernel_bytes(m, n, transposed)
        )[0]

    def kernel_bytes(self, m: int, n: int, transposed: bool) -> int:
        """What the host's kernel of a product [m, n] allocates (`zfunc.engine.cost_trace.cpu_kernel_bytes`)."""
        on_host = self.batch.element_bytes == 2 and not self.batch.of_accelerator
        return FP32 * m * n if on_host and transposed and m > 1 else 0

    def changed(self, t: _Tensor, *reads: _Tensor) -> _Tensor:
        """`t`, written in place, or a new one."""
        return next(iter(self.run((t, *reads), *[t.extent] * self.functional)), t)

    def layer_norm(self, x: _Tensor, weight: _Tensor, bias: _Tensor) -> list[_Tensor]:
        """What is normalised, and mean and deviation of each token."""
        size = self.batch.tokens * self.batch.element_bytes
        return self.run((x, weight, bias), size * self.batch.config.hidden_size, size, size)

    def end_forward(self, output: _Tensor) -> _Tensor:
        """The cotangent of the output, with which backward begins."""
        self.output, self.cotangent = output, _given(output.extent)
        return self.cotangent

    def cost(self, repeats: bool, moving: bool, returned: int) -> SegmentCost:
        """The cost of a micro-batch (`zfunc.engine.cost_trace.Trace`, `zfunc.engine.specialize`)."""
        assert self.output
        assert self.cotangent
        own = {x for operation in self.forward for x in operation.writes}
        read = dict.fromkeys(t for op in self.backward for t in op.reads if t.memory in own or t.memory.given)
        read.pop(self.cotangent, None)
        residuals = [t for t in read if not repeats]
        kept = {t.memory for t in residuals if not t.memory.given}
        backward = [*self._needed_of_forward(), *self.backward] if repeats else self.backward
        results = {t.memory for t in self.gradients}
        forward_peak = _peak(self.forward, kept | {self.output.memory})
        stashed = {t.memory for t in residuals if not (moving and t.memory.given)} | {self.inputs[0].memory}
        residual_bytes = sum(x.nbytes for x in kept)
        copied = (
            _copied(self.inputs, kept | {self.output.memory}),
            _copied((*(self.inputs if repeats else residuals), self.cotangent), results),
        )
        return SegmentCost(
            flops=sum(x.flops for x in self.forward),
            backward_flops=sum(x.flops for x in backward),
            input_bytes=self.inputs[0].memory.nbytes,
            residual_bytes=residual_bytes,
            stash_bytes=sum(x.nbytes for x in stashed),
            forward_workspace=max(0, forward_peak - self.output.memory.nbytes - residual_bytes),
            backward_workspace=max(0, _peak(backward, results) - returned),
            forward_launches=sum(x.launches for x in self.forward),
            backward_launches=sum(x.launches for x in backward),
            copied_bytes=max(copied),
        )

    def _needed_of_forward(self) -> list[_Operation]:
        """The operations of forward that backward repeats."""
        needed = {t.memory for op in self.backward for t in op.reads}
        kept: list[_Operation] = []
        for operation in reversed(self.forward):
            if needed & {*operation.writes}:
                kept.append(operation)
                needed |= {t.memory for t in operation.reads}
        return kept[::-1]


def _copied(arguments: Iterable[_Tensor], results: Iterable[_Memory]) -> int:
    """What a device graph copies in, but for weights, and out."""
    moved = (round_up(t.extent, ALLOCATION) for t in arguments if not t.memory.fixed)
    return sum(moved) + sum(x.nbytes for x in results)


def _peak(operations: Sequence[_Operation], results: set[_Memory]) -> int:
    """The most that is allocated at once; what no later operation reads is freed, but for the `results`."""
    last = {x: n for n, operation in enumerate(operations) for x in operation.writes}
    own = set(last)
    last |= {t.memory: n for n, op in enumerate(operations) for t in op.reads if t.memory in own}
    live = peak = 0
    for n, operation in enumerate(operations):
        live += sum(x.nbytes for x in operation.writes)
        peak = max(peak, live + operation.kernel_bytes)
        touched = {*operation.writes, *(t.memory for t in operation.reads)} & own
        live -= sum(x.nbytes for x in touched if last[x] == n and x not in results)
    return peak


# --- the segments of zfunc.models.gpt --------------------------------------------------------------------


def _embed(batch: GPTBatch) -> _Passes:
    """Embed, the first segment: nothing below it is trained."""
    config, size = batch.config, batch.element_bytes
    tokens, out = _given(INT64 * batch.tokens), batch.tokens * config.hidden_size * size
    tok = _given(config.vocab_size * config.hidden_size * size, fixed=True)
    pos = _given(config.seq_length * config.hidden_size * size, fixed=True)
    p = _Passes(batch, (tokens,))
    grad = p.end_forward(p.one((p.one((tok, tokens), out), pos), out))
    summed, grad_tok = p.one((grad,), pos.extent), p.one((grad, tokens), tok.extent)
    p.gradients = grad_tok, p.one((summed,), pos.extent)
    return p


def _block(batch: GPTBatch) -> _Passes:
    """Block: attention, then MLP, each behind a norm and added to its input."""
    hidden, tokens, size = batch.config.hidden_size, batch.tokens, batch.element_bytes
    stream = tokens * hidden * size  # bytes of the residual stream
    x = _given(stream)
    p = _Passes(batch, (x,))
    weights = {
        q.name.partition(".")[2]: _given(_numel(q) * size, fixed=True)
        for q in gpt_parameters(batch.config)[1]
    }

    def norm(t: _Tensor, name: str) -> list[_Tensor]:
        return p.layer_norm(t, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(t: _Tensor, name: str, inputs: int, outputs: int) -> _Tensor:
        return p.product(t, weights[f"{name}.weight"], tokens, inputs, outputs, weights[f"{name}.bias"])

    def linear_backward(grad: _Tensor, t: _Tensor, name: str, inputs: int, outputs: int) -> list[_Tensor]:
        """The gradients of input, weight and bias."""
        return [
            p.product(grad, weights[f"{name}.weight"], tokens, outputs, inputs),
            p.product(grad, t, outputs, tokens, inputs, transposed=True),
            p.one((grad,), outputs * size),
        ]

    def norm_backward(grad: _Tensor, t: _Tensor, stats: list[_Tensor], name: str) -> list[_Tensor]:
        reads = grad, t, *stats, weights[f"{name}.weight"], weights[f"{name}.bias"]
        return p.run(reads, stream, hidden * size, hidden * size)

    normed, *stats = norm(x, "ln_1")
    qkv = linear(normed, "qkv", hidden, 3 * hidden)
    heads = [_Tensor(qkv.memory, (3 * hidden * (tokens - 1) + hidden) * size) for _ in range(3)]
    mixed, log_sums = p.run(heads, stream, FP32 * tokens * batch.config.num_attention_heads)
    flat = _Tensor(mixed.memory, stream)  # the same, with the heads side by side
    middle = p.one((x, linear(flat, "attn_out", hidden, hidden)), stream)
    normed_2, *stats_2 = norm(middle, "ln_2")
    up = linear(normed_2, "up", hidden, 4 * hidden)
    active = p.one((up,), 4 * stream)
    y = p.one((middle, linear(active, "down", 4 * hidden, hidden)), stream)

    grad_y = p.end_forward(y)
    grad_active, *grads_down = linear_backward(grad_y, active, "down", 4 * hidden, hidden)
    grad_up = p.one((grad_active, up), 4 * stream)
    del grad_active
    grad_normed, *grads_up = linear_backward(grad_up, normed_2, "up", hidden, 4 * hidden)
    grad_branch, *grads_ln_2 = norm_backward(grad_normed, middle, stats_2, "ln_2")
    grad_middle = p.one((grad_y, grad_branch), stream)
    grad_flat, *grads_out = linear_backward(grad_middle, flat, "attn_out", hidden, hidden)
    grad_heads = p.run((grad_flat, *heads, mixed, log_sums), stream, stream, stream)
    grad_qkv = p.one(grad_heads, 3 * stream)
    grad_normed, *grads_qkv = linear_backward(grad_qkv, normed, "qkv", hidden, 3 * hidden)
    grad_branch, *grads_ln_1 = norm_backward(grad_normed, x, stats, "ln_1")
    grad_x = p.one((grad_middle, grad_branch), stream)
    p.gradients = *grads_ln_1, *grads_qkv, *grads_out, *grads_ln_2, *grads_up, *grads_down, grad_x
    return p


def _numel(parameter: Parameter) -> int:
    result = 1
    for n in parameter.shape:
        result *= n
    return result


def _head(batch: GPTBatch, *, functional: bool) -> _Passes:
    """Head: the logits at once, or in pieces where they are many (`zfunc.models.loss`)."""
    hidden, size = batch.config.hidden_size, batch.element_bytes
    x, targets = _given(batch.tokens * hidden * size), _given(INT64 * batch.tokens)
    p = _Passes(batch, (x, targets), functional)
    ln = [_given(hidden * size, fixed=True) for _ in range(2)]
    weight = _given(batch.config.vocab_size * hidden * size, fixed=True)
    normed, *stats = p.layer_norm(x, *ln)
    whole = FP32 * batch.tokens * batch.config.vocab_size <= LOGITS_BYTES
    grad, grad_weight = (_loss if whole else _loss_in_pieces)(p, normed, weight, targets)
    p.gradients = *p.run((grad, x, *stats, *ln), x.extent, hidden * size, hidden * size), grad_weight
    return p


def _loss(p: _Passes, x: _Tensor, weight: _Tensor, targets: _Tensor) -> tuple[_Tensor, _Tensor]:
    """Cross entropy of the whole; the gradients of `x` and of the weight."""
    tokens, vocab, hidden = p.batch.tokens, p.batch.config.vocab_size, p.batch.config.hidden_size
    logits = FP32 * tokens * vocab
    y = _in_fp32(p, p.product(x, weight, tokens, hidden, vocab), tokens * vocab)
    log_softmax = p.one((y,), logits)
    loss, counted = p.run((log_softmax, targets), FP32, FP32)
    grad = p.one((p.end_forward(loss), log_softmax, targets, counted), logits)
    grad = _from_fp32(p, p.one((grad, log_softmax), logits), tokens * vocab)
    grad_weight = p.product(grad, x, vocab, tokens, hidden, transposed=True)
    return p.product(grad, weight, tokens, vocab, hidden), grad_weight


def _loss_in_pieces(p: _Passes, x: _Tensor, weight: _Tensor, targets: _Tensor) -> tuple[_Tensor, _Tensor]:
    """The same in pieces: forward of some tokens at a time, backward of some of the vocabulary."""
    tokens, vocab, hidden = p.batch.tokens, p.batch.config.vocab_size, p.batch.config.hidden_size
    losses: list[_Tensor] = []
    log_sums: list[_Tensor] = []
    for rows in _pieces(tokens, vocab):
        y = _in_fp32(p, p.product(x, weight, rows, hidden, vocab), rows * vocab)
        own, _ = p.run((p.one((y,), FP32 * rows * vocab), targets), FP32 * rows, FP32)
        ignored = p.one((targets,), BOOL * rows)
        labels = p.one((targets, ignored), INT64 * rows)
        at_label = p.one((p.one((y, labels), FP32 * rows), own), FP32 * rows)
        losses.append(own)
        log_sums.append(p.one((at_label, ignored), FP32 * rows))
    joined, joined_sums = p.one(losses, FP32 * tokens), p.one(log_sums, FP32 * tokens)
    total = p.one((joined,), FP32)
    counted = p.one((p.one((targets,), BOOL * tokens),), INT64)
    grad = p.one((p.end_forward(p.one((total, counted), FP32)), counted), FP32)
    (grad_x,) = p.run((x,), FP32 * tokens * hidden)
    (grad_weight,) = p.run((weight,), weight.extent, launches=0)
    for columns in _pieces(vocab, tokens):
        at_label = p.one((targets, p.one((), INT64 * columns)), BOOL * tokens * columns)
        y = _in_fp32(p, p.product(x, weight, tokens, hidden, columns), tokens * columns)
        # minus the log-sum-exp, exponential, minus 1 at the label, times the gradient
        y = p.changed(p.changed(p.changed(p.changed(y, joined_sums)), at_label), grad)
        part = _from_fp32(p, y, tokens * columns)
        grad_x = p.changed(grad_x, p.product(part, weight, tokens, columns, hidden))
        if p.functional:
            grad_part = p.product(part, x, columns, tokens, hidden, transposed=True)
            grad_weight = p.one((grad_weight, grad_part), weight.extent)
        else:
            kernel = p.kernel_bytes(columns, hidden, transposed=True)
            p.run((part, x, grad_weight), flops=2 * columns * tokens * hidden, kernel_bytes=kernel)
    return _from_fp32(p, grad_x, tokens * hidden), grad_weight


def _pieces(total: int, width: int) -> Iterable[int]:
    """The sizes of the pieces of so many rows, which are so wide."""
    size = piece(total, width, LOGITS_BYTES)
    return (min(size, total - start) for start in range(0, total, size))


def _in_fp32(p: _Passes, t: _Tensor, numel: int) -> _Tensor:
    return t if p.batch.element_bytes == FP32 else p.one((t,), FP32 * numel)


def _from_fp32(p: _Passes, t: _Tensor, numel: int) -> _Tensor:
    return t if p.batch.element_bytes == FP32 else p.one((t,), p.batch.element_bytes * numel)
