"""The three kinds of segments of a model of transformers: its own forward, of which everything else is skipped.

Positions, masks and all else that a layer is given are made by the model's own code, in every segment again: they
follow from the shape of the hidden states. So only these pass from one segment to the next, and with them, if there
are any, the other inputs of the model and the sums of routers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from zfunc.models.hf.attention import PastTokens, documents
from zfunc.models.hf.experts import balance_loss, router_sums
from zfunc.models.loss import linear_next_token_loss, next_token_loss
from zfunc.models.sequences import KVCache

ROUTER = "router sums"
Passed = Tensor | tuple[Tensor, dict[str, Tensor]]
"""Hidden states [batch, seq, hidden], and what else there is by name."""


class _Reached(Exception):  # noqa: N818  no error
    """Ends a forward whose rest is not needed."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class Stop(nn.Module):
    """Ends the forward with what it is given; may stand for a linear layer, which is applied later."""

    def __init__(self, linear: Any = None) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> Tensor:
        """That of the linear layer: models look at its dtype."""
        return self.linear.weight

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raise `_Reached`."""
        raise _Reached(with_hidden(None, args, kwargs)[0])


class Skipped(nn.Module):
    """Stands for a layer that another segment runs."""

    def __init__(self, layer: nn.Module, as_tuple: bool) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(layer).items() if isinstance(v, (str, int, float))}
        vars(self).update(
            plain, as_tuple=as_tuple
        )  # what the model reads of a layer, such as its attention_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states it is given, as the layer would return them."""
        x = with_hidden(None, args, kwargs)[0]
        return (x,) if self.as_tuple else x


class Entry(nn.Module):
    """The place where hidden states enter: with the layer that gets them, after which the forward ends, or none."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.x: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `_Reached` with the layer's output; or return the hidden states."""
        _, args, kwargs = with_hidden(self.x, args, kwargs)
        y = self.layer(*args, **kwargs)
        if isinstance(self.layer, Skipped):
            return y
        raise _Reached(y[0] if isinstance(y, tuple) else y)


def with_hidden(
    x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The hidden states among the arguments of a layer, and the arguments with `x` instead."""
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"], args, {**kwargs, "hidden_states": x}
    return args[0], (x, *args[1:]), kwargs


@frozen
class Call:
    """How a model is called: the name of its main input, and that input's shape and dtype in an example."""

    main: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    past: bool  # whether it takes `past_key_values`
    replaced: bool  # whether its attention and masks are zfunc's
    carries: bool = False  # whether segments need the values of the main input
    packs: bool = True  # whether layers keep the documents of a sequence apart

    def inputs(self, x: Tensor, carried: Mapping[str, Tensor], past: PastTokens) -> dict[str, Any]:
        """Arguments for hidden states `x`; a main input that is not carried is zeros, as only its shape matters."""
        given: dict[str, Any] = {k: t for k, t in carried.items() if k != ROUTER}
        if self.main not in given:
            shape = x.shape[:2] if self.tokens else (len(x), *self.shape[1:])
            given[self.main] = torch.zeros(
                shape, dtype=self.dtype if self.tokens else x.dtype, device=x.device
            )
        return self.with_past(given, past)

    def with_past(self, given: dict[str, Any], past: PastTokens) -> dict[str, Any]:
        """The arguments with `past`; without, a model looks itself for documents, in the positions."""
        needs = self.past and (self.replaced or "position_ids" not in given)
        return {**given, "past_key_values": past} if needs else given

    @property
    def tokens(self) -> bool:
        """Whether the main input is token ids."""
        return not self.dtype.is_floating_point


class _Part(nn.Module):
    """`model` without the parameters of other segments, which are `absent`, with their shapes."""

    def __init__(self, model: nn.Module, call: Call, absent: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.model, self.call, self.absent = model, call, absent

    def run(self, inputs: dict[str, Any], like: Tensor) -> Any:
        """What the model returns, or what its forward ends with."""
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        absent = {name: zero.expand(shape) for name, shape in self.absent.items()}
        try:
            with documents(inputs.get("position_ids")):
                return torch.func.functional_call(self.model, absent, (), inputs, tie_weights=False)
        except _Reached as reached:
            return reached.value


class EmbedPart(_Part):
    """Everything before the first layer, whose place has a `Stop`."""

    def __init__(self, *args: Any, longest: int | None, experts: int) -> None:
        super().__init__(*args)
        self.longest = longest  # tokens, with learned positions
        self.experts = experts  # of a router whose sums are passed on

    def forward(self, inputs: Tensor | dict[str, Tensor], cache: KVCache | None = None) -> Passed:
        """Embed tokens that follow those in `cache`. Raises ValueError beyond the learned positions."""
        call = self.call
        given = dict(inputs) if isinstance(inputs, dict) else {call.main: inputs}
        main = given[call.main]
        carried = {k: t for k, t in given.items() if call.carries or k != call.main}
        if not call.packs and "position_ids" in given:
            raise ValueError(
                f"got position_ids of several documents, which a {type(self.model).__name__} does not keep apart, "
                "expected input_ids alone: use the packing 'stream', or a document a row"
            )
        past = PastTokens()
        if call.tokens:
            first = 0 if cache is None else cache.advanced(main.shape[-1])
            seq, past = first + main.shape[-1], PastTokens(cache, first)
            if self.longest is not None and seq > self.longest:
                raise ValueError(
                    f"got {seq} tokens, expected at most the {self.longest} learned positions: shorten the sequence"
                )
        x = self.run(call.with_past(given, past), next(self.parameters()))
        if self.experts:
            carried[ROUTER] = torch.zeros(2, self.experts, device=x.device)
        return (x, carried) if carried else x


class LayerPart(_Part):
    """One layer, as the `entry`."""

    def __init__(self, *args: Any, entry: Entry, router: nn.Module | None, top_k: int) -> None:
        super().__init__(*args)
        self.entry, self.router, self.top_k = entry, router, top_k

    def forward(self, passed: Passed, cache: KVCache | None = None) -> Passed:
        """Hidden states after the layer; `cache` has the tokens before those of `passed`."""
        x, carried = passed if isinstance(passed, tuple) else (passed, {})
        first = 0 if cache is None else cache.advanced(x.shape[1])
        self.entry.x = x
        try:
            y = self.run(self.call.inputs(x, carried, PastTokens(cache, first)), x)
        finally:
            self.entry.x = None
        if self.router is not None:
            logits = vars(self.router).pop("recorded")
            if ROUTER in carried:
                sums = router_sums(logits, self.top_k, carried.get("attention_mask"))
                carried = {**carried, ROUTER: carried[ROUTER] + sums}
        return (y, carried) if carried else y


class HeadPart(_Part):
    """Everything after the last layer, with the loss: the last segment."""

    def __init__(
        self,
        *args: Any,
        entry: Entry,
        linear: Any,
        softcap: float | None,
        loss: Callable[..., Tensor] | None,
        routers: int,
        balance: float,
    ) -> None:
        super().__init__(*args)
        self.entry, self.loss = entry, loss
        self.linear = linear  # makes the logits; in the model a `Stop` has its place
        self.softcap = softcap  # of these
        self.routers, self.balance = routers, balance  # layers with routers, and the weight of their loss

    def forward(self, passed: Passed, targets: Any = None) -> Any:
        """The mean loss, an fp32 scalar; the logits, or what the model has instead, without targets."""
        x, carried = passed if isinstance(passed, tuple) else (passed, {})
        self.entry.x = x
        try:
            y = self.run(self.call.inputs(x, carried, PastTokens()), x)
        finally:
            self.entry.x = None
        if targets is None:
            return self._logits(y)
        if self.loss is not None:
            return self.loss(y, targets)
        if type(self.linear) is nn.Linear and self.linear.bias is None:
            loss = linear_next_token_loss(y, self.linear.weight, targets, softcap=self.softcap)
        else:
            loss = next_token_loss(self._logits(y).float(), targets)
        if ROUTER in carried:
            mask = carried.get("attention_mask")
            tokens = x.shape[0] * x.shape[1] if mask is None else mask.sum()
            loss = loss + self.balance * balance_loss(carried[ROUTER], tokens * self.routers)
        return loss

    def _logits(self, y: Any) -> Any:
        if self.linear is not None:
            y = self.linear(y)
            return y if self.softcap is None else torch.tanh(y / self.softcap) * self.softcap
        return y.logits if hasattr(y, "logits") else y[0]


def record_router(module: nn.Module, _: Any, output: Any) -> None:
    """A forward hook that keeps the logits of a router for `LayerPart`."""
    vars(module)["recorded"] = output[module.recorded_index] if isinstance(output, tuple) else output
