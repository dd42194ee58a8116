"""What the segments of a GPT-2 cost, from its size alone: their parameters, and the costs of their passes.

`gpt2.toml` has the parameters of each segment, and what torch runs in its passes, an operation a line; here lines
are read and costed. So `zfunc plan` and `zfunc draw` need no torch, nor wait until it has traced a model. The
invariant: these costs equal those that `zfunc.engine.trace.cost_trace` finds.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from attrs import define, field, frozen

from zfunc.core.dtypes import DTYPES
from zfunc.core.layout import Parameter, round_up
from zfunc.core.setting_values import tile_counts
from zfunc.core.spec import ALLOCATION, PassCost, SegmentCost, StepSpec
from zfunc.core.traffic import Traffic
from zfunc.engine.trace.pass_options import PassOptions, pass_options
from zfunc.errors import refuse
from zfunc.models.gpt_config import GPTConfig
from zfunc.models.loss_pieces import LOGITS_BYTES, piece
from zfunc.optim.base import Optimizer
from zfunc.planner.cost_model import SegmentCosts, StepCosts

TABLE: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("gpt2.toml").read_text())


def gpt_parameters(config: GPTConfig) -> list[list[Parameter]]:
    """The parameters of every segment of a GPT-2, in order; a tied head's projection is the embedding's.

    >>> [p.name for p in gpt_parameters(GPTConfig(num_layers=1))[2]]
    ['head.ln_f.weight', 'head.ln_f.bias', 'embed.tok.weight']
    """
    sizes = _sizes(config)

    def own(kind: str, name: str) -> list[Parameter]:
        shapes = (x.split(":") for x in TABLE[kind]["parameters"].split())
        return [Parameter(f"{name}.{x}", tuple(_product(n, sizes) for n in y.split(","))) for x, y in shapes]

    embed, (*norm, out) = own("embed", "embed"), own("head", "head")
    blocks = (own("block", f"block{n}") for n in range(config.num_layers))
    return [embed, *blocks, [*norm, embed[0] if config.tied else out]]


def gpt_costs(config: GPTConfig, rows: int, optimizer: Optimizer, world: int = 1) -> SegmentCosts:
    """The costs of a GPT-2 on each of `world` ranks for a batch of `rows` sequences, from the table
    gpt2.toml; from a trace, if rows pass in tiles or some parameters are in fp32 beside others in 16 bits.

    `SegmentCosts.trace` computes the costs of one step's settings, the last segment's without recomputation,
    as its backward follows at once; it raises ValueError for a GPT with dropout.
    """

    @cache
    def traced() -> SegmentCosts:
        import torch

        from zfunc.models.gpt import gpt_segments
        from zfunc.planner.traced_costs import traced_costs

        tokens = torch.empty((rows, config.seq_length), dtype=torch.int64, device="meta")
        return traced_costs(gpt_segments(config), (tokens, tokens), optimizer, world)

    def trace(spec: StepSpec, on_gpu: bool, grouped: bool) -> StepCosts:
        settings = spec.settings
        if config.dropout:
            refuse("dropout", str(config.dropout), "0", "pass the segments to zfunc.plan")
        # The table's parameters have the precision, and its rows are whole.
        if any(x.in_fp32 for x in spec.layout.all_buckets) or settings.tiles != 1:
            return traced().trace(spec, on_gpu, grouped)
        tokens = rows // settings.micro_batches * config.seq_length
        sizes = {**_sizes(config), "T": tokens, "e": DTYPES[settings.precision].nbytes}

        @cache  # blocks are alike
        def cost(kind: str, grads: int, options: PassOptions) -> SegmentCost:
            # The partitioner of min-cut makes what is written in place anew.
            in_place, repeats = options.recompute != "min-cut", options.recompute == "all" and kind != "head"
            passes = _Passes(kind, dict(sizes), in_place=in_place, on_gpu=on_gpu)
            how = {"moving": options.moving, "compiled": bool(options.compiled), "split": options.split}
            return passes.cost(grads, repeats=repeats, ahead=options.ahead, **how)

        kinds = ["embed", *["block"] * config.num_layers, "head"]
        of_all = zip(kinds, spec.grad_bytes, pass_options(spec), strict=True)
        costs = [cost(kind, grads, options.priced) for kind, grads, options in of_all]
        return StepCosts(costs, _held(8 * tokens))

    return SegmentCosts(
        gpt_parameters(config),
        optimizer,
        rows,
        rows * config.seq_length,
        trace,
        world,
        tile_counts=tile_counts(config.seq_length),
        resized=lambda count: gpt_costs(config, count, optimizer, world),
    )


def _sizes(config: GPTConfig) -> dict[str, int]:
    sizes = {"H": config.hidden_size, "A": config.num_attention_heads}
    return {**sizes, "S": config.seq_length, "V": config.vocab_size}


def _product(factors: str, sizes: Mapping[str, int]) -> int:
    """The product of `factors`: a number, then names of sizes; an element count or FLOPs.

    >>> _product("16TH", {"T": 10, "H": 3})
    480
    """
    return math.prod(int(x) if x.isdigit() else sizes[x] for x in re.findall(r"\d+|\D", factors))


def _held(nbytes: int) -> int:
    return round_up(nbytes, ALLOCATION)


# --- the operations of a segment --------------------------------------------------------------------------


@frozen(eq=False)
class _Tensor:
    """A tensor of `nbytes` bytes that a pass of a segment allocates; if `given`, an input or a weight."""

    nbytes: int
    given: bool = False

    @property
    def held(self) -> int:
        return _held(self.nbytes)


_Part = tuple[_Tensor, int]  # of a tensor, so many bytes


@frozen(eq=False)
class _Operation:
    reads: list[_Part]
    writes: list[_Part]  # among them those that it makes
    makes: list[_Tensor]
    flops: int
    words: list[str]
    kernel_bytes: int  # that its kernel allocates beside what it makes

    @property
    def launched(self) -> bool:
        return "unlaunched" not in self.words


def _pieces(total: int, width: int) -> Iterable[int]:
    """Yield numbers of rows: the pieces in which `total` rows of `width` logits each are computed."""
    size = piece(total, width, LOGITS_BYTES)
    return (min(size, total - start) for start in range(0, total, size))


@define(eq=False)
class _Passes:
    """The passes of a segment of `kind`, read from gpt2.toml; `tensors` has tensors made so far, by name."""

    kind: str
    sizes: dict[str, int]
    in_place: bool
    on_gpu: bool
    tensors: dict[str, list[_Tensor]] = field(factory=dict[str, list[_Tensor]])

    def cost(
        self, grads: int, *, repeats: bool, moving: bool, compiled: bool, split: bool, ahead: bool
    ) -> SegmentCost:
        """The segment's costs for one micro-batch, equal to those of a trace. Backward makes `grads` bytes of
        weight gradients. With `repeats` forward is recomputed, before backward if `ahead`, else in it.
        `split` adds the costs of the input and the weight half of backward; residuals in memory that is
        `moving` are copied by the first."""
        parameters = TABLE[self.kind]["parameters"].replace(":", ":e").replace(",", "")
        given = dict(self._sized(f"{TABLE[self.kind]['inputs']} {parameters}"))
        self.tensors |= {x: [_Tensor(n, given=True)] for x, n in given.items()}
        (inputs, *weights), (of_forward, of_backward) = [self.tensors[x][0] for x in given], self._lines()
        forward, (y,) = [*self._read(of_forward)], self.tensors["y"]
        self.tensors["d_y"] = [_Tensor(y.nbytes)]
        backward = [*self._read(of_backward)]
        below, *made = (self.tensors.get(f"d_{x}", [])[-1:] for x in given)
        below, made = {*below}, {t for one in made for t in one}
        own, read = {t for x in forward for t in x.makes}, {t for x in backward for t, _ in x.reads}
        again = _needed(forward, read) if repeats else []
        residuals = {t for t in read if (ahead or not repeats) and (t in own or t.given)}
        left = {t for t in residuals if not t.given}
        kept = set[_Tensor]() if repeats else left
        backward = [*(() if ahead else again), *backward]
        first, second, pending = _halves(
            backward, below, made, {*weights} if repeats and not ahead else set()
        )
        copies = {
            t: _Tensor(t.nbytes) for t in pending & residuals if moving
        }  # of memory that is filled anew
        first += [_Operation([(t, t.nbytes)], [(x, x.nbytes)], [x], 0, [], 0) for t, x in copies.items()]
        pending = pending - {*copies} | {*copies.values()}
        waits, recomputed = (set(), sum(t.held for t in left)) if repeats else (residuals, 0)
        residual_bytes, passed, pending_bytes = (sum(t.held for t in x) for x in (kept, below, pending))
        halves = (
            _cost(first, below | pending, passed + pending_bytes, compiled),
            _cost(second, made, grads, compiled),
        )
        return SegmentCost(
            _cost(forward, kept | {y}, y.held + residual_bytes, compiled),
            _cost(backward, below | made, grads + passed, compiled),
            *(halves if split else ()),
            recompute=_cost(again, left, recomputed, compiled) if ahead else PassCost(),
            recomputed_bytes=recomputed,
            pending_bytes=pending_bytes if split else 0,
            input_bytes=inputs.held,
            gradient_bytes=passed,
            residual_bytes=residual_bytes,
            stash_bytes=sum(t.held for t in {inputs, *(t for t in waits if not (moving and t.given))}),
        )

    def _lines(self) -> tuple[str, str]:
        """The segment's lines of gpt2.toml for forward and backward; logits above 256 MiB pass in pieces."""
        own, loss, pieces = (TABLE[x] for x in (self.kind, "loss", "loss_in_pieces"))
        forward, backward, tokens, vocab = [], [], self.sizes["T"], self.sizes["V"]
        if self.kind == "head" and 4 * tokens * vocab <= LOGITS_BYTES:
            forward, backward = [loss["forward"]], [loss["backward"]]
        elif self.kind == "head":
            columns = f"{pieces['columns']}\n{pieces['in_place' if self.in_place else 'anew']}"
            rows = (f"R := {n}\n{pieces['rows']}" for n in _pieces(tokens, vocab))
            each = (f"C := {n}\n{columns}" for n in _pieces(vocab, tokens))
            forward = [*rows, pieces["after_rows"]]
            backward = [pieces["before_columns"], *each, pieces["after_columns"]]
        return "\n".join([own["forward"], *forward]), "\n".join([*backward, own["backward"]])

    def _sized(self, told: str) -> Iterator[tuple[str, int]]:
        """Names of tensors and their bytes, from `told`: words "name:SIZE" such as "y:eTH"."""
        return ((x, _product(size, self.sizes)) for x, _, size in (y.partition(":") for y in told.split()))

    def _read(self, lines: str) -> Iterator[_Operation]:
        for line in filter(None, map(str.strip, lines.splitlines())):
            names, sign, rest = re.split(r" (=|<-|:=) ?", line)
            told, _, work = rest.partition("|")
            if sign == ":=":
                self.sizes[names] = int(rest)
            elif "cast" in work and self.sizes["e"] == 4:  # it is what is read
                self.tensors[names.partition(":")[0]] = [self._parts(told.strip())[0][0]]
            else:
                yield self._operation(names, told.split(), work.split(), changes=sign == "<-")

    def _operation(self, names: str, told: list[str], words: list[str], *, changes: bool) -> _Operation:
        changed = self._parts(names) if changes else []
        reads = [*(x for name in told for x in self._parts(name)), *changed]
        # The CPU's kernel of a transposed product sums in fp32 (`operation_kernels.cpu_kernel_bytes`).
        sums = "transposed" in words and reads[0][1] > _product("eT", self.sizes)
        sums = sums and self.sizes["e"] == 2 and not self.on_gpu
        made = dict[str, int]() if changes else dict(self._sized(names))
        if changes and not self.in_place:
            made = {names: changed[0][0].nbytes}
        makes = [_Tensor(n) for n in made.values()]
        for name, t in zip(made, makes, strict=True):
            self.tensors.setdefault(name, []).append(t)
        writes = [(t, t.nbytes) for t in makes] or changed
        flops = sum(_product(x, self.sizes) for x in words if x[0].isdigit())
        return _Operation(reads, writes, makes, flops, words, 2 * writes[0][1] * sums)

    def _parts(self, told: str) -> list[_Part]:
        """The tensors in the text `told`, each with the bytes of it that an operation touches: all of "x",
        the last tensor named x; SIZE of "x[SIZE]"; all of every tensor named x for "x*"."""
        name, _, size = told.rstrip("]").partition("[")
        if name.endswith("*"):
            return [(t, t.nbytes) for t in self.tensors[name[:-1]]]
        t = self.tensors[name][-1]
        return [(t, min(t.nbytes, _product(size, self.sizes)) if size else t.nbytes)]


def _needed(operations: list[_Operation], needed: set[_Tensor]) -> list[_Operation]:
    """The operations, in order, that write `needed` tensors, and all operations whose results these read."""
    kept: list[_Operation] = []
    for operation in reversed(operations):
        if not needed.isdisjoint(t for t, _ in operation.writes):
            kept.append(operation)
            needed = needed | {t for t, _ in operation.reads}
    return kept[::-1]


def _halves(
    backward: list[_Operation], below: set[_Tensor], made: set[_Tensor], weights: set[_Tensor]
) -> tuple[list[_Operation], list[_Operation], set[_Tensor]]:
    """Cut a backward as `graph_cuts.split_backward` does: the first half makes gradients `below` (of inputs),
    the second the remaining gradients `made` (of weights). Returns both halves, and the tensors that the
    first leaves for the second. Only the first reads `weights`."""
    held = weights | {t for x in backward if not x.makes for t, _ in x.writes}
    touches = (x for x in backward if not held.isdisjoint(t for t, _ in (*x.reads, *x.writes)))
    early = below | {t for x in touches for t, _ in x.writes}
    first = {*_needed(backward, early)}
    early |= {t for t in made if not any(x.flops for x in _needed(backward, {t}) if x not in first)}
    first = _needed(backward, early)
    second = [x for x in backward if x not in {*first}]
    read = {t for x in second for t, _ in x.reads}
    return first, second, (read | made) - {t for x in second for t in x.makes}


def _cost(operations: list[_Operation], results: set[_Tensor], known: int, compiled: bool) -> PassCost:
    """The cost of one pass with `operations`, `compiled` or not. Its workspace is the peak above `known`
    bytes, which are counted elsewhere; tensors other than `results` are freed after their last use."""
    touched = [{*x.makes, *(t for t, _ in x.reads)} for x in operations]
    last = {t: n for n, tensors in enumerate(touched) for t in tensors}
    own, traffic, live, peak = {t for x in operations for t in x.makes}, Traffic(compiled), 0, 0
    for n, x in enumerate(operations):
        if x.launched:
            traffic.add(x.reads, x.writes, fusable="unfused" not in x.words and not x.flops)
        live += sum(t.held for t in x.makes)
        peak = max(peak, live + x.kernel_bytes)
        live -= sum(t.held for t in touched[n] & own - results if last[t] == n)
    return PassCost(
        flops=sum(x.flops for x in operations),
        nbytes=traffic.total_bytes(results),
        workspace=max(0, peak - known),
        launches=0 if compiled else sum(x.launched for x in operations),
        attention_flops=sum(x.flops for x in operations if "attention" in x.words),
    )
