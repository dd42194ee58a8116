"""Whether two functions have the same gradients, by the graphs that autograd makes of them, without computing any.

A trace may lose what autograd does: an autograd.Function's own backward, no_grad, detach, requires_grad_() inside.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def gradient_graphs(function: Callable[..., Any], params: Mapping[str, Tensor], x: Any) -> dict[str, Any]:
    """The autograd nodes of the loss `function(params, x)` with a path to one of `params`, by a hex digest of the
    node and such nodes below it."""
    with torch.enable_grad():
        loss = function(params, x)
    names = {id(t): name for name, t in params.items()}
    digests: dict[Any, str] = {}
    left = [loss.grad_fn] if loss.grad_fn is not None else []
    while left:
        node = left[-1]
        below = [(f, n) for f, n in node.next_functions if f is not None]
        if unknown := [f for f, _ in below if f not in digests]:
            left += unknown
            continue
        left.pop()
        name = names.get(id(getattr(node, "variable", None)))
        paths = [(digests[f], n) for f, n in below if digests[f]]
        own = repr((node.name(), name, paths)).encode()
        digests[node] = hashlib.blake2b(own, digest_size=12).hexdigest() if name or paths else ""
    return {digest: f for f, digest in digests.items() if digest}
