"""The three kinds of segments of a model of transformers: its own forward, of which everything else is skipped.

Positions, masks and all else that a layer is given are made by the model's own code, in every segment again. So
hidden states and the model's inputs pass from one segment to the next, and with them the sums of routers.
"""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from zfunc.models.hf.attention import PastTokens, inputs_given
from zfunc.models.hf.experts import balance_loss, router_sums
from zfunc.models.hf.rotary import LENGTHS, follows_length
from zfunc.models.loss import COUNTED, linear_next_token_loss, next_token_loss, summed_targets
from zfunc.models.sequences import KVCache

ROUTER = "router sums"
Passed = tuple[Tensor, dict[str, Tensor]]
"""Hidden states [batch, seq, hidden], and the model's inputs by name."""


class _Reached(Exception):  # noqa: N818  no error
    """Raised to leave a model's forward early with `value`, when a segment needs none of what follows."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class LayerPlace(nn.Module):
    """A stand-in for a layer in a segment's copy of a model. It returns the hidden states it is called with.

    With `x` set it returns `x` instead, or `layer` of `x`; if it `stops`, the model's forward ends there.
    """

    def __init__(self, own: nn.Module, values: int, *, stops: bool = False, layer: Any = None) -> None:
        super().__init__()
        # What the model reads of a layer, such as its attention_type.
        vars(self).update({k: v for k, v in vars(own).items() if isinstance(v, (str, int, float))})
        self.values, self.stops, self.layer = (
            values,
            stops,
            layer,
        )  # in the tuple of the layer; 0: it has none
        self.x: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states as the layer returns them; raises `_Reached` with them if this stand-in `stops`."""
        y, args, kwargs = with_hidden(self.x, args, kwargs)
        if self.layer is not None:
            y = self.layer(*args, **kwargs)
            y = y[0] if isinstance(y, tuple) else y
        elif self.x is not None:
            y = self.x
        if self.stops:
            raise _Reached(y)
        return (y, *[None] * (self.values - 1)) if self.values else y


def with_hidden(
    x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The hidden states among the arguments of a layer, and the arguments with `x` instead."""
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"], args, {**kwargs, "hidden_states": x}
    return args[0], (x, *args[1:]), kwargs


def stop_before(module: nn.Module) -> None:
    """Hook `module`, so that calling it ends the model's forward and `_Reached` has the module's input."""

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        raise _Reached(args[0])

    module.register_forward_pre_hook(stop)


@frozen
class Call:
    """How a model is called: the name of its main input, and whether it takes `past_key_values`."""

    main: str
    past: bool
    replaced: bool  # whether its attention and masks are zfunc's
    packs: bool  # whether layers keep the documents of a sequence apart

    def arguments(self, given: dict[str, Tensor], past: PastTokens) -> dict[str, Any]:
        """The model's arguments for inputs `given`, and cache `past` unless position ids tell documents apart."""
        given = {k: t for k, t in given.items() if k not in (ROUTER, LENGTHS, COUNTED)}
        needs = self.past and (self.replaced or "position_ids" not in given)
        return {**given, "past_key_values": past} if needs else given


class _Part(nn.Module):
    """A segment's copy of a model without the parameters of other segments; `absent` has their shapes by name."""

    def __init__(
        self, model: nn.Module, place: LayerPlace, call: Call, absent: dict[str, tuple[int, ...]]
    ) -> None:
        super().__init__()
        self.layer = place.layer  # before the model, so that its names do not depend on it
        self.model, self.place, self.call, self.absent = model, place, call, absent

    def run(self, x: Tensor | None, given: dict[str, Tensor], past: PastTokens, like: Tensor) -> Any:
        """Run the model's copy on `inputs` given by name and, in place of its layer's input, `x`. Returns the
        model's output, or the hidden states at which a stand-in stopped the forward."""
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        absent = {name: zero.expand(shape) for name, shape in self.absent.items()}
        self.place.x = x
        try:
            with inputs_given(given):
                inputs = self.call.arguments(given, past)
                return torch.func.functional_call(self.model, absent, (), inputs, tie_weights=False)
        except _Reached as reached:
            return reached.value
        finally:
            self.place.x = None


class EmbedPart(_Part):
    """The first segment of a model of transformers: everything before the first layer."""

    def __init__(self, *args: Any, longest: int | None, experts: int) -> None:
        super().__init__(*args)
        self.longest = longest  # tokens, with learned positions
        self.by_length = any(map(follows_length, self.model.modules()))
        self.experts = experts  # of a router whose sums are passed on

    def forward(self, inputs: Tensor | dict[str, Tensor], cache: KVCache | None = None) -> Passed:
        """Embed tokens that follow those in `cache`. Raises ValueError beyond the learned positions."""
        given = dict(inputs) if isinstance(inputs, dict) else {self.call.main: inputs}
        if not self.call.packs and "position_ids" in given:
            raise ValueError(
                f"got position_ids of several documents, which the segments of a {type(self.model).__name__} do "
                "not keep apart, expected input_ids alone: use the packing 'stream', or a document a row"
            )
        if self.by_length and "position_ids" in given:
            places = given["position_ids"]
            given[LENGTHS] = (places.amax() + 1).expand_as(places).contiguous()
        tokens = given[self.call.main].shape[-1]
        past = PastTokens(cache, 0 if cache is None else cache.advanced(tokens))
        if self.longest is not None and past.first + tokens > self.longest:
            raise ValueError(
                f"got {past.first + tokens} tokens, expected at most the {self.longest} learned positions: "
                "shorten the sequence"
            )
        x = self.run(None, given, past, next(self.parameters()))
        if self.experts:
            given[ROUTER] = torch.zeros(2, self.experts, device=x.device)
        return x, given


class LayerPart(_Part):
    """The segment of one layer. With `router`, the name of a module in the layer, it also adds up, for the
    router loss, how often that router chose each expert, and the probabilities."""

    def __init__(self, *args: Any, router: str | None, index: int, top_k: int) -> None:
        super().__init__(*args)
        self.router, self.index, self.top_k = router, index, top_k  # where its logits are in what it returns

    def forward(self, passed: Passed, cache: KVCache | None = None) -> Passed:
        """Hidden states after the layer, from `passed` before it; `cache` has past tokens' keys and
        values."""
        x, given = passed
        past = PastTokens(cache, 0 if cache is None else cache.advanced(x.shape[1]))
        if self.router is None or ROUTER not in given:
            return self.run(x, given, past, x), given
        logits: list[Tensor] = []
        hook = self.layer.get_submodule(self.router).register_forward_hook(
            lambda _, __, y: logits.append(y[self.index] if isinstance(y, tuple) else y)
        )
        try:
            y = self.run(x, given, past, x)
        finally:
            hook.remove()
        sums = router_sums(logits[0], self.top_k, _counted(given))
        return y, {**given, ROUTER: given[ROUTER] + sums}


def _counted(given: dict[str, Tensor]) -> Tensor | None:
    """The mask [batch, seq], 1 for tokens that count in the routers' loss; None if all tokens do."""
    return given.get(COUNTED, given.get("attention_mask"))


class HeadPart(_Part):
    """The last segment of a model of transformers: everything after the last layer, with the loss."""

    def __init__(
        self,
        *args: Any,
        linear: str | None,
        softcap: float | None,
        routers: int,
        balance: float,
    ) -> None:
        super().__init__(*args)
        self.linear, self.softcap = linear, softcap  # linear makes the logits, before their cap
        self.routers, self.balance = routers, balance  # layers with routers, and the weight of their loss
        self.summed_targets = None if routers else summed_targets

    def forward(self, passed: Passed, targets: Any = None) -> Any:
        """The mean loss, an fp32 scalar; without targets, the model's output, such as logits."""
        x, given = passed
        y = self.run(x, given, PastTokens(), x)
        linear: Any = None if self.linear is None else self.model.get_submodule(self.linear)
        if targets is not None and type(linear) is nn.Linear and linear.bias is None:
            loss = linear_next_token_loss(y, linear.weight, targets, softcap=self.softcap)
        else:
            if linear is not None:
                y = linear.forward(y)  # past the hook that stops before it
                y = y if self.softcap is None else torch.tanh(y / self.softcap) * self.softcap
            else:
                y = y.logits if hasattr(y, "logits") else y[0]
            if targets is None:
                return y
            loss = next_token_loss(y.float(), targets)
        if ROUTER in given and (isinstance(loss, tuple) or not loss.dim()):  # a loss, not a reference
            mask = _counted(given)
            tokens = x.shape[0] * x.shape[1] if mask is None else mask.sum()
            balance = self.balance * balance_loss(given[ROUTER], tokens * self.routers)
            loss = (loss[0] + balance, loss[1]) if isinstance(loss, tuple) else loss + balance
        return loss
