"""What a model's head is for: the loss of each sample, found by what a batch holds and what the model returns.

The loss of a sample is what the model itself returns for it alone. For a batch most heads return the mean over samples,
some the sum, and heads of tokens the mean over all tokens, which weighs a sample by its length. So the loss of two
samples and its gradient by their logits are compared with those of each: an untrained model has nearly the same loss
for all, but not the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.losses import (
    IGNORED,
    Batch,
    Loss,
    Objective,
    batch_size,
    causal_loss,
    logits_of,
    mean_loss_times_batch,
    row_of,
    span_logits,
    span_loss,
    sum_loss,
    sum_of_means,
    token_loss,
)
from eckart.modes import eval_mode
from eckart.probing import MASKS

_OF_SPANS = "start_logits", "end_logits"


def objective_of(model: PreTrainedModel, data: Sequence[Batch], need: str) -> Objective:
    """What `model` is for, by its loss on some rows of `data`.

    Args:
        need: what asks for the loss, in words.

    Raises:
        ValueError: the model returns no loss or none that is a number, no label counts, or its loss for two samples is
            neither the mean nor the sum of theirs nor a mean over tokens.
    """
    _check_labels(data)
    with eval_mode(model), _differentiable(model):
        rows = _uneven_rows(data)
        if model(**rows[0]).get("loss") is None:
            raise ValueError(
                f"{need} asks for the loss, and {type(model).__name__} returns none: add labels to each batch, give "
                "loss=, or take the recipe drone, which reads inputs alone"
            )
        loss = _loss_of(model, rows)
    predictions = span_logits if loss is span_loss else logits_of
    return Objective(loss, loss, loss, predictions, model.config.problem_type != "regression")


def _check_labels(data: Sequence[Batch]) -> None:
    labels = [batch["labels"] for batch in data if "labels" in batch]
    if labels and all(not some.is_floating_point() and bool((some == IGNORED).all()) for some in labels):
        raise ValueError(f"every label of every batch is {IGNORED}, so no token counts: give labels of some tokens")


def _uneven_rows(data: Sequence[Batch]) -> list[Batch]:
    """Two rows of one batch, of those that differ most in how many tokens and labels count; or the only one."""
    some = [(batch, _counts(batch)) for batch in data]
    batch, counts = max(some, key=lambda one: (float(one[1].max() - one[1].min()), len(one[1])))
    places = dict.fromkeys((int(counts.argmax()), int(counts.argmin()), len(counts) - 1))
    return [row_of(batch, place) for place in list(places)[:2]]


def _counts(batch: Batch) -> Tensor:
    """Of each row, the tokens and labels that count, `(batch,)`."""
    counts = torch.zeros(batch_size(batch))
    for name, values in batch.items():
        if name in MASKS:
            counts += values.flatten(1).cpu().ne(0).sum(1)
        elif name == "labels" and not values.is_floating_point() and values.dim() > 1:
            counts += values.flatten(1).cpu().ne(IGNORED).sum(1)
    return counts


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Gradients can be asked for, also of a model whose parameters are frozen."""
    frozen = [each for each in model.parameters() if each.is_floating_point() and not each.requires_grad]
    try:
        for each in frozen:
            each.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for each in frozen:
            each.requires_grad_(False)


@dataclass(frozen=True)
class _Answer:
    """What a model returns for a batch: its loss, its logits, and the gradient of the loss by each of them."""

    batch: Batch
    loss: Tensor
    logits: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def is_as(self, loss: Tensor, name: str) -> bool:
        """Whether its own loss is `loss`, a function of the logits `name` alone."""
        found, *_ = torch.autograd.grad(loss, self.logits[name], retain_graph=True)
        others = [gradient for other, gradient in self.gradients.items() if other != name]
        return (
            _near(self.loss, loss)
            and _near(self.gradients[name], found)
            and not any(bool(gradient.any()) for gradient in others)
        )

    def times(self, factor: float, each: Sequence[_Answer]) -> bool:
        """Whether `factor` times its loss is the sum of the losses of the samples, of which `each` is one's answer."""
        if not _near(factor * self.loss, sum((one.loss for one in each), torch.zeros_like(self.loss))):
            return False
        pairs = [
            (factor * gradient[place : place + 1], one.gradients[name])
            for name, gradient in self.gradients.items()
            for place, one in enumerate(each)
        ]
        return all(_near(gradient, alone) for gradient, alone in pairs)


def _answer(model: PreTrainedModel, batch: Batch) -> _Answer:
    outputs: Any = model(**batch)
    loss = outputs["loss"]
    if loss.numel() != 1 or not bool(loss.isfinite()):
        raise ValueError(f"the loss of {type(model).__name__} is no number for a row of the batches: {loss}")
    every = {name: value for name, value in outputs.items() if name != "loss" and isinstance(value, Tensor)}
    some = {name: value for name, value in every.items() if value.is_floating_point() and value.requires_grad}
    logits = {name: value for name, value in some.items() if "logits" in name} or some
    gradients: Sequence[Tensor | None] = (
        torch.autograd.grad(loss, list(logits.values()), retain_graph=True, allow_unused=True)
        if loss.requires_grad and logits
        else [None] * len(logits)
    )
    found = {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(logits.items(), gradients, strict=True)
    }
    return _Answer(batch, loss.reshape(()), logits, found)


def _loss_of(model: PreTrainedModel, rows: Sequence[Batch]) -> Loss:
    each = [_answer(model, row) for row in rows]
    if {"start_positions", "end_positions"} <= set(rows[0]) and {*_OF_SPANS} <= set(each[0].logits):
        return span_loss
    for one in each:
        if loss := _of_tokens(one):
            return loss
    if len(rows) == 1:
        return mean_loss_times_batch
    both = _answer(model, {name: torch.cat([row[name] for row in rows]) for name in rows[0]})
    for loss, factor in ((mean_loss_times_batch, float(len(rows))), (sum_loss, 1.0)):
        if both.times(factor, each):
            return loss
    raise ValueError(
        f"the loss of {type(model).__name__} for two samples is neither the mean nor the sum of theirs, so statistics "
        "would depend on how samples are batched. Give batches of one row each; or give loss=, a function of the model "
        "and a batch that gives the sum of its samples' losses, as those of eckart.losses do"
    )


def _of_tokens(one: _Answer) -> Loss | None:
    """The loss of a head that says something of each token, or of the one behind it; None of another head."""
    labels, logits = one.batch.get("labels"), one.logits.get("logits")
    if labels is None or logits is None or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        return None
    if labels.dim() != 2 or logits.shape[1] < 2:
        return None
    if one.is_as(sum_of_means(logits, labels), "logits"):
        return token_loss
    return causal_loss if one.is_as(sum_of_means(logits[:, :-1], labels[:, 1:]), "logits") else None


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether they are the same but for rounding, that of their type."""
    if one.shape != other.shape:
        return False
    tolerated = max(1e-3, 4 * torch.finfo(other.dtype).eps)
    return float((one - other).detach().float().norm()) <= tolerated * float(other.detach().float().norm()) + 1e-12
