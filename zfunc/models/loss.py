"""The loss of next-token prediction, with ignored labels, and row weights that make it exact over micro-batches;
and of preferences between answers.

Logits are the largest tensor of a model with a large vocabulary, so the loss of a last linear layer takes them in
pieces: forward some tokens at a time, backward some of the vocabulary.

The loss of a batch is the mean over all its tokens that count. The mean over the means of micro-batches differs if
they have unequally many, so `weighted_batch` weights every row by what counts in the whole batch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zfunc.errors import refuse
from zfunc.models.loss_pieces import IGNORE_INDEX, LOGITS_BYTES, piece

COUNTED = "tokens that count"  # for the loss of routers: 0 for padding, [batch, seq]
_DIVISOR = "num_items_in_batch"
Batch = tuple[Any, tuple[Tensor, Tensor]]


class Preferences(NamedTuple):
    """Targets of DPO: rows in pairs, the preferred answer in the first row, the rejected in the second.

    `labels` [rows, seq] are as for `next_token_loss`, -100 in the prompt. `reference` [rows] fp32 has the sum over
    each row of the labels' log-probabilities under the frozen reference model: without it the loss functions return
    those sums of this model. `beta` is the strength of the tie to the reference; `ipo` asks for IPO's loss.
    """

    labels: Tensor
    reference: Tensor | None = None
    beta: float = 0.1
    ipo: bool = False

    def loss(self, losses: Tensor) -> Any:
        """The mean over pairs of DPO's loss (Rafailov et al. 2023, eq. 7), and auxiliary outputs, of the cross
        entropies `losses` [tokens]. With `ipo`, IPO's loss (Azar et al. 2023, eq. 17), of means over a row's labels
        as in TRL. Raises ValueError for an odd number of rows.
        """
        found = -losses.view(self.labels.shape).sum(1)  # [rows] fp32
        if self.reference is None:
            return found
        if len(found) % 2:
            raise ValueError(
                f"batch: got {len(found)} rows of preferences in a micro-batch, expected pairs, the preferred "
                "answer first: give rows for whole pairs, or fewer micro-batches"
            )
        change = found - self.reference
        chosen, rejected = (self.beta * change).view(-1, 2).unbind(1)  # [pairs]
        margin = chosen - rejected
        each = -F.logsigmoid(margin)
        if self.ipo:
            first, second = (change / (self.labels != IGNORE_INDEX).sum(1)).view(-1, 2).unbind(1)
            each = (first - second - 1 / (2 * self.beta)).square()
        rewards = {
            "chosen": chosen,
            "rejected": rejected,
            "margins": margin,
            "accuracies": (margin > 0).float(),
        }
        return each.mean(), {f"rewards/{name}": x.detach().mean() for name, x in rewards.items()}


Targets = Tensor | tuple[Tensor, Tensor] | Preferences


def next_token_loss(logits: Tensor, targets: Targets) -> Any:
    """Cross entropy of `logits` [batch, seq, vocab], where labels [batch, seq] of -100 do not count.

    If `targets` are labels, each the next token, the result is the mean over tokens that count. If they are
    labels and weights [batch], as `weighted_batch` makes them, it is the mean over rows of weight times the
    sum of the row's losses. With `Preferences` it is their loss, and auxiliary outputs.

    >>> logits, labels = torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3], [4, -100, -100]])
    >>> weighted = next_token_loss(logits, (labels, torch.full((2,), 2 / 4)))
    >>> torch.isclose(next_token_loss(logits, labels), weighted)
    tensor(True)
    """
    labels, weights = _labels_and_weights(targets)
    flat, reduction = logits.flatten(0, -2), "mean" if weights is None else "none"
    if paired := isinstance(targets, Preferences):
        reduction = "none"
    losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
    if paired:
        return targets.loss(losses)
    return losses if weights is None else _weighted_mean(losses, labels, weights)


def summed_targets(targets: Targets) -> Targets:
    """Labels and row weights, made from `targets`, with which a row's loss is the sum of its tiles' losses."""
    if isinstance(targets, Preferences):
        refuse("tiles", "preferences, whose loss is of whole rows", "a loss of tokens", "leave `tiles` out")
    labels, weights = _labels_and_weights(targets)
    if weights is None:
        per_row = (labels != IGNORE_INDEX).sum() / labels.shape[0]
        weights = (1 / per_row).float().expand(labels.shape[0])
    return labels, weights


def linear_next_token_loss(
    x: Tensor,
    weight: Tensor,
    targets: Targets,
    *,
    softcap: float | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> Any:
    """`next_token_loss` of the logits `x @ weight.T`, of which `logits_bytes` or a 64th exist at once, in fp32.

    `x` is [batch, seq, hidden], `weight` [vocab, hidden]; with a `softcap` logits are
    `softcap * tanh(logits / softcap)`. What fits into `logits_bytes` is computed whole, as torch would. With more,
    backward computes the logits again, and loss and gradients equal those of the whole up to rounding.

    >>> x, weight, labels = torch.ones(2, 3, 4), torch.ones(8, 4), torch.tensor([[1, 2, 3], [4, -100, -100]])
    >>> in_pieces = linear_next_token_loss(x, weight, labels, logits_bytes=0)
    >>> torch.isclose(in_pieces, next_token_loss(x @ weight.T, labels))
    tensor(True)
    """
    labels, weights = _labels_and_weights(targets)
    if 4 * labels.numel() * weight.shape[0] <= logits_bytes:
        return next_token_loss(_logits(x, weight, softcap), targets)
    flat = labels.flatten()
    losses, _ = _LossesInPieces.apply(x.flatten(0, -2), weight, flat, softcap, logits_bytes)
    if isinstance(targets, Preferences):
        return targets.loss(losses)
    if weights is None:
        return losses.sum() / (flat != IGNORE_INDEX).sum()
    return _weighted_mean(losses, labels, weights)


def _labels_and_weights(targets: Targets) -> tuple[Tensor, Tensor | None]:
    if isinstance(targets, Preferences):
        return targets.labels, None
    return (targets[0], targets[1]) if isinstance(targets, (tuple, list)) else (targets, None)


def _weighted_mean(losses: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (losses.view(labels.shape).sum(1) * weights).mean()


def _logits(x: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    y = F.linear(x, weight)
    return (y if softcap is None else torch.tanh(y / softcap) * softcap).float()


class _LossesInPieces(torch.autograd.Function):
    """The losses of tokens and the log-sum-exp of their logits, 0 and inf where ignored: both fp32 [tokens].

    Forward computes the logits of some tokens at a time, so the loss of a token does not depend on the size
    of a piece. Backward takes a part of the vocabulary at a time: the part's gradient of `weight` is complete
    at once, and only the gradient of `x` is summed over parts, in fp32, which takes less memory and traffic.
    """

    @staticmethod
    def forward(
        x: Tensor,  # [tokens, hidden]
        weight: Tensor,  # [vocab, hidden]
        labels: Tensor,  # [tokens]
        softcap: float | None,
        logits_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        rows = piece(x.shape[0], weight.shape[0], logits_bytes)
        pieces = zip(x.split(rows), labels.split(rows), strict=True)
        losses, log_sums = zip(*(_losses(some, weight, own, softcap) for some, own in pieces), strict=True)
        return torch.cat(losses), torch.cat(log_sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, labels, ctx.softcap, ctx.logits_bytes = inputs
        ctx.save_for_backward(x, weight, labels, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        x, weight, labels, log_sums = ctx.saved_tensors
        grad, log_sums = grad[:, None], log_sums[:, None]
        grad_x = torch.zeros_like(x, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        columns = piece(weight.shape[0], x.shape[0], ctx.logits_bytes)
        for start in range(0, weight.shape[0], columns):
            part = weight[start : start + columns]
            own = torch.arange(start, start + part.shape[0], device=x.device)
            grad_logits = _grad_logits(x, part, labels[:, None] == own, log_sums, grad, ctx.softcap)
            grad_x += grad_logits @ part
            if grad_weight is not None:
                torch.mm(grad_logits.mT, x, out=grad_weight[start : start + columns])
            del grad_logits  # before the next
        return grad_x.to(x.dtype), grad_weight, None, None, None


def _losses(x: Tensor, weight: Tensor, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    logits = _logits(x, weight, softcap)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    ignored = labels == IGNORE_INDEX
    at_label = logits.gather(1, labels.masked_fill(ignored, 0)[:, None])[:, 0]
    return losses, (at_label + losses).masked_fill(ignored, torch.inf)


def _grad_logits(
    x: Tensor, weight: Tensor, at_label: Tensor, log_sums: Tensor, grad: Tensor, softcap: float | None
) -> Tensor:
    """The gradient of some of the logits before their soft cap, [tokens, part of the vocabulary]."""
    logits = _logits(x, weight, softcap)
    slope = None if softcap is None else 1 - (logits / softcap).square()
    result = logits.sub_(log_sums).exp_().add_(at_label, alpha=-1).mul_(grad)
    return (result if slope is None else result.mul_(slope)).to(x.dtype)


def weighted_batch(input_ids: Any, labels: Tensor, *, tokens_per_row: float | None = None) -> Batch:
    """`(input_ids, (labels, weights))` for `train_step` and `evaluate`, with any number of micro-batches.

    `input_ids` and `labels` are int64 [batch, seq]; `labels[:, t]` is the token that follows `input_ids[:, t]`, or
    -100 if it does not count. Pad at the end: positions count from the first token, and attention is causal. The
    weight is rows over tokens that count, so the mean over rows, and over micro-batches, is the mean over tokens.

    Instead of `input_ids` there may be several inputs by name. With "input_ids" and "position_ids" that start at 0
    in each document, a row may have several documents, which do not attend to each other; the last token of each
    gets the label -100.

    On several ranks, call it with the whole batch and give each rank its rows; or call it with a rank's rows and
    the `tokens_per_row` of the whole batch (tokens that count over all ranks, divided by all rows). Otherwise the
    loss is the mean of the ranks' means.

    Raises ValueError for shapes that differ, and where no token counts.

    >>> ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    >>> _, (_, weights) = weighted_batch(ids, torch.tensor([[6, 7, 2], [2, -100, -100]]))
    >>> weights
    tensor([0.5000, 0.5000])
    """
    ids: Tensor = input_ids["input_ids"] if isinstance(input_ids, dict) else input_ids
    if ids.dim() != 2 or ids.shape != labels.shape:
        raise ValueError(
            f"batch: got input_ids of shape {tuple(ids.shape)} and labels of {tuple(labels.shape)}, expected "
            "one [batch, seq] for both: labels[:, t] is the token that follows input_ids[:, t]"
        )
    rows = labels.shape[0]
    per_row = int((labels != IGNORE_INDEX).sum()) / rows if tokens_per_row is None else float(tokens_per_row)
    if not per_row > 0:
        raise ValueError(
            f"batch: got no token that counts (labels are all {IGNORE_INDEX}), expected at least one: leave it out"
        )
    return input_ids, (labels, torch.full((rows,), 1 / per_row, dtype=torch.float32, device=labels.device))


def collated_batch(collated: Mapping[str, Any], *, typed: bool = False, counts: bool = False) -> Batch:
    """`weighted_batch` of what a collator of transformers makes for a causal model.

    `collated` has `input_ids` and `labels`, both [batch, seq]: `labels[:, t]` is the token `input_ids[:, t]`,
    or -100; labels are shifted here, as by the model itself. With an `attention_mask`, rows have to be padded
    at the end. Documents in a row, each with `position_ids` from 0 on, do not attend to each other.
    `num_items_in_batch` divides the sum of the losses of this batch, in place of the number of its tokens.

    With `typed` the inputs keep `token_type_ids`, else dropped. With `counts` they have the mask, too, as "tokens
    that count", for the loss of routers. Raises ValueError for other names, and for padding at the beginning.

    >>> row = torch.tensor([[5, 6, 7, 0]])
    >>> ids, (labels, _) = collated_batch({"input_ids": row, "labels": row, "attention_mask": row > 0})
    >>> labels
    tensor([[   6,    7,    0, -100]])
    """
    names, more = {"input_ids", "labels"}, {"attention_mask", "position_ids", "token_type_ids", _DIVISOR}
    if not names <= collated.keys() <= names | more:
        raise ValueError(
            f"batch: got a dict of {sorted(collated)}, expected input_ids and labels, and at most "
            f"{', '.join(sorted(more))}: let the tokenizer and the collator return these"
        )
    ids, mask, divisor = collated["input_ids"], collated.get("attention_mask"), collated.get(_DIVISOR)
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "batch: got rows padded at the beginning, expected padding at the end, because positions count from "
            "the first token: set tokenizer.padding_side = 'right'"
        )
    labels = F.pad(collated["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    inputs = {"input_ids": ids}
    if mask is not None and bool(((labels != IGNORE_INDEX) & (mask == 0)).any()):
        inputs["attention_mask"] = mask  # padding learns from what it attends to
    if counts and mask is not None:
        inputs[COUNTED] = mask
    if typed and "token_type_ids" in collated:
        inputs["token_type_ids"] = collated["token_type_ids"]
    if "position_ids" in collated:
        places = _places(
            collated["position_ids"].expand_as(ids), torch.ones_like(ids) if mask is None else mask
        )
        inputs |= {"position_ids": places} if bool((places[:, 1:] == 0).any()) else {}
    per_row = None if divisor is None else float(divisor) / ids.shape[0]
    return weighted_batch(inputs if len(inputs) > 1 else ids, labels, tokens_per_row=per_row)


def _places(position_ids: Tensor, mask: Tensor) -> Tensor:
    """`position_ids` [batch, seq] with padding, where `mask` is 0, numbered on from the document before it.
    Raises ValueError unless positions count from 0 in each document."""
    at = torch.arange(position_ids.shape[1], device=position_ids.device)
    places = at - torch.where((position_ids == 0) & (mask != 0), at, 0).cummax(1).values
    if not bool(((places == position_ids) | (mask == 0)).all()):
        raise ValueError(
            "batch: got position_ids that do not count from 0 in each document of a row, expected 0, 1, 2, ... "
            "and 0 again where another one begins: leave them out for a document a row"
        )
    return places
