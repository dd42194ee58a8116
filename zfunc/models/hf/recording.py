"""What flows between the layers of a model, recorded in one call without data.

It is a call of a copy of the model whose tensors have no data, so a model of any size costs the time of a tiny one.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zfunc.errors import refuse
from zfunc.models.hf.attention import NAME, RECORDING, PastTokens, implementation_for
from zfunc.models.hf.families import BY_TRACE
from zfunc.models.hf.parts import Call, with_hidden


@frozen(eq=False)
class Recording:
    """Where a transformers model can be cut into segments: modules by name, parameters by id of tensor."""

    call: Call
    layers: str  # the list of layers
    before: frozenset[str]  # modules that run before the layers
    embed: frozenset[int]  # parameters that the input of the first layer depends on
    head: frozenset[int]  # parameters that the output depends on after the last layer
    places: tuple[int, ...]  # for each layer, the first one that is given the same
    values: int  # in the tuples that layers return; 0 if they return hidden states alone
    linear: str | None  # the module whose output is the logits, but for a soft cap


@define(eq=False)
class _Calls:
    """What hooks saw in one call of a model; each layer got a detached input, so gradients end at layers."""

    before: set[str] = field(factory=set[str])  # modules that ran before the layers
    entered: list[Tensor] = field(factory=list[Tensor])  # hidden states as they came to each layer
    returned: list[Tensor] = field(factory=list[Tensor])  # and as they left it
    more: list[list[Any]] = field(factory=list[list[Any]])  # what else each layer got
    values: int = 0  # in the tuple that a layer returned
    hands_on: bool = False  # whether a layer got what the one before returned beside hidden states
    others: list[Any] = field(factory=list[Any])  # what a layer returned beside hidden states
    projected: list[Tensor] = field(factory=list[Tensor])  # outputs of the module that makes logits

    @property
    def chained(self) -> bool:
        """Whether each layer was called once, with the hidden states that the one before it returned."""
        if not self.entered or self.entered[0].dim() != 3 or len(self.returned) != len(self.entered):
            return False
        return all(x is y for x, y in zip(self.entered[1:], self.returned[:-1], strict=True))


def record(model: Any, shadow: Any, ids: Tensor, *, packs: bool) -> Recording:
    """Record where `model` can be cut, in a call of `shadow`, its copy of fake tensors, with token ids like `ids`
    [batch, seq].

    `packs` says whether layers keep documents in a row apart. Raises ValueError if the model cannot be called with
    token ids alone, or has no list of layers that run in order.
    """
    name, main = type(model).__name__, model.main_input_name
    past = "past_key_values" in inspect.signature(model.forward).parameters
    call = Call(main, past, implementation_for(model) == NAME, packs)
    given = call.arguments({main: torch.empty_like(ids)}, PastTokens())
    for p in shadow.parameters():
        p.requires_grad_(True)
    linear = shadow.get_output_embeddings()
    lists = {path: m for path, m in shadow.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    for path in sorted(lists, key=lambda x: -sum(p.numel() for p in lists[x].parameters())):
        calls = _Calls()
        hooks = _watch(shadow, [*lists[path]], linear, calls)
        recording = RECORDING.set(True)
        try:
            output = shadow(**given)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0][:300]
            refuse(
                "model",
                f"a {name} that cannot be called with {main} alone ({reason})",
                do=BY_TRACE,
                cause=error,
            )
        finally:
            RECORDING.reset(recording)
            for undo in hooks:
                undo()
        if calls.chained and len(calls.entered) == len(lists[path]):
            break
    else:
        raise ValueError(
            f"model: got a {name}, expected a list of layers in it, each of which gets what the one before it "
            f"returns: {BY_TRACE}"
        )
    if calls.hands_on:
        got, expected = (
            f"a {name} whose layers hand on more than hidden states",
            "layers that hand on these alone",
        )
        refuse("model", got, expected, BY_TRACE)
    logits, projected = getattr(output, "logits", None), calls.projected
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    projects = len(projected) == 1 and logits is not None and (logits is projected[0] or softcap is not None)
    firsts: dict[Any, int] = {}
    return Recording(
        call,
        path,
        frozenset(calls.before),
        _reached(model, shadow, calls.entered[:1]),
        _reached(model, shadow, [t for t in tree_leaves(dict(output)) if isinstance(t, Tensor)]),
        tuple(firsts.setdefault(_key(x), n) for n, x in enumerate(calls.more)),
        calls.values,
        next(x for x, m in shadow.named_modules() if m is linear) if projects else None,
    )


def _watch(
    shadow: nn.Module, layers: list[nn.Module], linear: nn.Module | None, calls: _Calls
) -> list[Callable[[], Any]]:
    """Register hooks that fill `calls`; returns functions that remove the hooks. Of layers with equal modules
    and shapes only the first is run; later ones return their input, as only what layers get and return is
    recorded."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x, *more = with_hidden(None, args, kwargs)
        calls.entered.append(x)
        calls.more.append(more)
        others = {id(t) for t in tree_leaves(calls.others) if isinstance(t, Tensor)}
        calls.hands_on |= any(id(t) in others for t in tree_leaves(more))
        _, args, kwargs = with_hidden(x.detach(), args, kwargs)
        return args, kwargs

    def leave(_: nn.Module, __: Any, y: Any) -> Any:
        calls.values = len(y) if isinstance(y, tuple) else 0
        x, *calls.others = y if calls.values else (y,)
        calls.returned.append(x.detach())
        return (calls.returned[-1], *calls.others) if calls.values else calls.returned[-1]

    def hand_on(*args: Any, **kwargs: Any) -> Any:
        x = with_hidden(None, args, kwargs)[0]
        return (x, *calls.others) if calls.values else x

    inside = {id(m) for layer in layers for m in layer.modules()}
    hooks = [
        m.register_forward_pre_hook(lambda *_, x=x: None if calls.entered else calls.before.add(x))
        for x, m in shadow.named_modules()
        if id(m) not in inside and not [*m.children()]
    ]
    hooks += [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    if linear is not None:
        hooks.append(linear.register_forward_hook(lambda _, __, y: calls.projected.append(y)))
    undo: list[Callable[[], Any]] = [hook.remove for hook in hooks]
    known: list[Any] = []
    for layer in layers:
        kind = [(x, type(m)) for x, m in layer.named_modules()], [p.shape for p in layer.parameters()]
        if kind not in known:
            known.append(kind)
        elif "forward" not in vars(layer):
            vars(layer)["forward"] = hand_on
            undo.append(partial(vars(layer).pop, "forward"))
    return undo


def _reached(model: nn.Module, shadow: nn.Module, outputs: Sequence[Tensor]) -> frozenset[int]:
    """The ids of the parameters of `model` on which `outputs` of its copy `shadow` depend."""
    sums = [t.sum() for t in outputs if t.requires_grad]
    grads = (
        torch.autograd.grad(sums, [*shadow.parameters()], allow_unused=True, retain_graph=True)
        if sums
        else ()
    )
    return frozenset(id(p) for p, g in zip(model.parameters(), grads, strict=bool(sums)) if g is not None)


def _key(more: list[Any]) -> tuple[Any, ...]:
    """A key of `more`, the other arguments of a layer; keys are equal for the same objects or constants."""
    return tuple(x if isinstance(x, (str, int, float, type(None))) else id(x) for x in tree_leaves(more))
