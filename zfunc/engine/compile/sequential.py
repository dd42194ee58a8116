"""An `nn.Sequential` as segments: one for each child that has parameters, with those after it that have none."""

import inspect
from typing import Any

from attrs import evolve
from torch import Tensor, nn

from zfunc.engine.compile.segment import Segment, Values, segment


class InOrder(nn.Module):
    """Modules that run one after the other; if the last is a loss, it gets the targets."""

    def __init__(self, children: dict[str, nn.Module], *, loss: bool) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.order = tuple(children)
        self.loss = loss

    def forward(self, x: Any, *targets: Any) -> Any:
        """The loss with targets; without, what it would get."""
        *before, last = (getattr(self, name) for name in self.order)
        for child in before:
            x = child(x)
        return x if self.loss and not targets else last(x, *targets)


def segments_of_sequential(module: nn.Sequential) -> tuple[Segment, ...]:
    """The children of `module` as segments. Parameters have the names of its state dict, tied ones the first.

    Raises ValueError unless the last child is a loss of (x, targets).
    """
    children = dict(module._modules)
    if not children:
        return ()
    loss = module[-1]
    try:
        inspect.signature(loss.forward).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"segments: got an nn.Sequential that ends in a {type(loss).__name__}, expected a loss of (x, targets) "
            "as the last: append such as nn.CrossEntropyLoss()"
        ) from error
    groups: list[dict[str, Any]] = [{}]
    for name, child in children.items():
        if _has_parameters(child) and any(map(_has_parameters, groups[-1].values())):
            groups.append({})
        groups[-1][name] = child
    known: dict[int, str] = {}  # the name of each parameter so far
    return tuple(_segment(InOrder(group, loss=group is groups[-1]), known) for group in groups)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _segment(module: InOrder, known: dict[int, str]) -> Segment:
    prefix = next((x for x in module.order if _has_parameters(getattr(module, x))), module.order[0])
    named = dict(module.named_parameters(remove_duplicate=False))
    share = {short: known[id(p)] for short, p in named.items() if id(p) in known}
    made = segment(prefix, module, share=share)

    def own(full: str) -> str:
        return full if full in made.shared else full.removeprefix(f"{prefix}.")

    def initial(seed: int) -> Values:
        values: dict[str, Tensor] = made.initial(seed)
        return {own(full): t for full, t in values.items()}

    for full, p in made.origins.items():
        known.setdefault(id(p), own(full))
    return evolve(
        made,
        parameters=tuple(evolve(p, name=own(p.name)) for p in made.parameters),
        origins={own(full): t for full, t in made.origins.items()},
        initial=initial,
    )
