"""Forward and backward of one segment as a value: what its passes take, return and leave for one another."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeGuard, TypeVar

from attrs import frozen
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves

from zfunc.core.pipeline import PASSES, W
from zfunc.engine.trace.graph_cuts import Paths
from zfunc.engine.trace.tensor_memory import Leaves, Tree, Values
from zfunc.errors import refuse, setting

Grads = tuple[Values, list[Tensor]]  # of weights; of floating-point leaves of the input, in their shapes
Inputs = tuple[Tree, ...]  # of a segment beside its weights: (x,), or (x, targets)
Cotangents = Sequence[Tensor]  # gradients of `differentiated(y)`, in its order
Pullback = Callable[[Cotangents], Grads]
Residuals = Leaves | Pullback | None  # from forward to backward; None: backward recomputes
Pending = tuple[Callable[..., Values], list[Tensor]]  # run(*pending) -> gradients of weights
T = TypeVar("T")


@frozen
class SegmentWeights:
    """The tensors that a segment's function gets, by short name: `trained` ones are differentiated, `fixed`
    ones (frozen parameters, constants) are not."""

    trained: Values
    fixed: Values
    name: str = ""  # of the segment


@frozen(eq=False)
class Detached:
    """Tensors in a segment's output that are not differentiated, and their `names`, the same for every batch."""

    names: tuple[str, ...]
    # Scalars [len(names)] fp32, a list of rows [rows, ...], or buffers by name.
    tensors: Tensor | list[Tensor] | dict[str, Tensor] | None


register_pytree_node(Detached, lambda x: ([x.tensors], x.names), lambda parts, names: Detached(names, *parts))


def differentiated(y: Tree) -> list[Tensor]:
    """The tensors of a segment's output that have a cotangent: floating-point tensors outside of `Detached`."""
    return [t for t in tree_leaves(y, is_leaf=lambda x: isinstance(x, Detached)) if floating(t)]


def floating(t: object) -> TypeGuard[Tensor]:
    """Whether `t` is a tensor of a floating-point dtype, and so may have a gradient."""
    return isinstance(t, Tensor) and t.is_floating_point()


Pull = Callable[..., tuple[Tree, Pullback]]  # of weights, inputs, and perhaps a list that receives `Paths`
Backward = Callable[[SegmentWeights, Inputs, Residuals, Cotangents], T]  # T: which gradients it returns


def _unsplit(*_: object) -> NoReturn:
    got = "a backward that cannot be traced, which the log explains"
    expected = "one that is split in two halves"
    refuse((), got, expected, f"pass {setting('order', 'OneFOneB')}, or another whose passes are all F or B")


@frozen
class SegmentVJP:
    """Forward and backward of a segment.

    - `forward(weights, inputs)` returns `(y, residuals)`; `inputs` is `(x,)` or `(x, targets)`. If the
      segment changes buffers, `y` is `(y, Detached buffers)`.
    - `backward(weights, inputs, residuals, cotangents)` returns the gradients of `weights.trained`, by name,
      and those of the input's floating-point leaves. `cotangents` are the gradients of `differentiated(y)`.
    - `backward_input`, with the arguments of `backward`, returns the gradients of the input, and `(run,
      pending)`; `run(*pending)` returns the gradients of the weights. Both equal those of `backward`.
    - `recompute(weights, inputs)` returns the residuals for a backward that recomputes, and may be called any
      time before it; None if `backward` recomputes by itself.
    - `keeps` is False if `forward` never returns residuals, because backward recomputes.
    - `prepare(weights, inputs, y)` traces forward and backward for the shapes of its arguments ahead of the
      first step; a `y` like the output saves a second trace. Returns, for each output, the trained weights
      and input leaves that it depends on.
    """

    forward: Callable[[SegmentWeights, Inputs], tuple[Tree, Residuals]]
    backward: Backward[Grads]
    keeps: bool
    prepare: Callable[[SegmentWeights, Inputs, Tree], Paths] = lambda _weights, _inputs, _y: []
    backward_input: Backward[tuple[list[Tensor], Pending]] = _unsplit
    recompute: Callable[[SegmentWeights, Inputs], Residuals] = lambda _weights, _inputs: None

    def run(
        self,
        way: str,
        weights: SegmentWeights,
        inputs: Inputs,
        residuals: Residuals | Pending,
        cotangents: Cotangents,
    ) -> Any:
        """Run the pass of kind `way`: "F" forward, "B" backward, "I" its input half, "W" its weight half
        (whose `residuals` are the second result of `backward_input`), "R" recomputation."""
        if way == W:
            run, pending = residuals
            return run(*pending)
        more = (residuals, cotangents) if "above" in PASSES[way].takes else ()
        return getattr(self, PASSES[way].verb)(weights, inputs, *more)


class NoGradientError(ValueError):
    """Raised for a segment whose output has no tensor that can be differentiated."""
