"""Tensors of a batch on whose values a trace depends, such as masks: their marks, and what traces get of them."""

import hashlib

from attrs import frozen
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_constant, register_pytree_node


@frozen(eq=False)
class ByValue:
    """Marks a tensor of a batch on whose values, not only its shape, a trace depends; `whole` if it has no
    rows. If `counted`, the trace depends only on how many elements are set in masks made of it, and batches
    of equal shapes share it."""

    tensor: Tensor
    whole: bool = False
    counted: bool = False

    def read(self) -> "Values | BySample":
        """The tensor as a trace takes it: a `BySample` if it is `counted`, else its `Values`."""
        return BySample(self.tensor, Values(self.tensor)) if self.counted else Values(self.tensor)


class Values:
    """The values of a tensor on which a trace depends. It is not a leaf of a pytree but part of the
    structure, so other values make another structure."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().cpu().clone()
        self.key = self.tensor.dtype, tuple(self.tensor.shape), self.tensor.numpy().tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        dtype, shape, values = self.key
        return f"Values({dtype}, {shape}, {hashlib.blake2b(values, digest_size=12).hexdigest()})"


@frozen(eq=False)
class BySample:
    """A tensor of a batch and its values, of which a trace depends only on counts; pytrees with other values
    have equal structures."""

    tensor: Tensor
    sample: Values


class _AnySample(list[Values]):
    """The pytree context of a `BySample`: has the values of one batch, and equals any other such context."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AnySample)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "BySample"


register_constant(Values)
register_pytree_node(
    BySample,
    lambda x: ([x.tensor], _AnySample([x.sample])),
    lambda children, context: BySample(*children, context[0]),
    flatten_with_keys_fn=lambda x: ([(GetAttrKey("tensor"), x.tensor)], _AnySample([x.sample])),
)
