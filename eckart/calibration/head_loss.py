"""What a model's head is for: the loss of each sample, found by what a batch holds and what the model returns.

The loss of a sample is what the model itself returns for it alone. For a batch most heads return the mean over samples,
some the sum, and heads of tokens the mean over all tokens, which weighs a sample by its length. So the loss of some
samples, and its gradients by their logits and by the vectors among the model's parameters, are compared with those of
each alone: an untrained model has nearly the same loss for all, but not the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import (
    IGNORED,
    Batch,
    Loss,
    Objective,
    batch_size,
    causal_loss,
    mean_loss_times_batch,
    predictions_of,
    row_of,
    span_logits,
    span_loss,
    sum_loss,
    sum_of_means,
    token_loss,
)
from eckart.model.module_context import eval_mode
from eckart.model.probing import masks_of

_POSITIONS, _OF_SPANS = {"start_positions", "end_positions"}, {"start_logits", "end_logits"}
_ROWS = 4  # that are looked at together and alone


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
        rows = _uneven_rows(model, data)
        name = type(model).__name__
        with torch.no_grad():  # no graph stays while those of the rows are looked at
            outputs = model(**rows[0])
        if outputs.get("loss") is None:
            raise ValueError(
                f"{need} asks for the loss, and {name} returns none: add labels to each batch; load the "
                "model by its class for a task, with a head, such as AutoModelForSequenceClassification; give loss=; "
                "or take the recipe drone, which reads inputs alone"
            )
        spans = set(rows[0]) >= _POSITIONS and set(outputs) >= _OF_SPANS
        loss = span_loss if spans else _loss_of(model, rows)
    predictions = span_logits if loss is span_loss else predictions_of(model.config.problem_type)
    return Objective(loss, loss, loss, predictions, model.config.problem_type != "regression")


def _check_labels(data: Sequence[Batch]) -> None:
    every = [(number, batch["labels"]) for number, batch in enumerate(data) if "labels" in batch]
    some = [(number, labels) for number, labels in every if not labels.is_floating_point()]
    if some and all(bool((labels == IGNORED).all()) for _, labels in some):
        raise ValueError(f"every label of every batch is {IGNORED}, so none counts: give labels of some")
    for number, labels in some:
        if labels.dim() == 1 and bool((labels == IGNORED).any()):
            raise ValueError(
                f"batch {number} has rows with the label {IGNORED}, which count for nothing: leave them out"
            )


def _uneven_rows(model: PreTrainedModel, data: Sequence[Batch]) -> Sequence[Batch]:
    """Rows of one batch, of those that differ most in how many tokens and labels count; or the only one.

    Of rows with no label that counts there is no loss.
    """
    ignored = {IGNORED, getattr(model.config, "semantic_loss_ignore_index", IGNORED)}
    some = [(batch, *_counts(batch, ignored)) for batch in data]
    batch, counts, labelled = max(
        some, key=lambda one: (min(int(one[2].sum()), 2), float(one[1].max() - one[1].min()), len(one[1]))
    )
    if not labelled.any():
        raise ValueError("no label of any batch counts: give labels of some")
    places = [int(place) for place in counts.argsort(stable=True) if labelled[place]]
    return [row_of(batch, place) for place in dict.fromkeys((places[-1], places[0], *places[1:-1]))][:_ROWS]


def _counts(batch: Batch, ignored: set[int]) -> tuple[Tensor, Tensor]:
    """Of each row how many tokens, labels and what else is true count, and whether any label does, `(batch,)` each."""
    counts, labelled = torch.zeros(batch_size(batch)), torch.ones(batch_size(batch), dtype=torch.bool)
    masks = masks_of(batch)
    for name, values in batch.items():
        flat = values.flatten(1).cpu() if values.dim() > 1 else values[:, None].cpu()
        if name in masks or values.dtype == torch.bool:
            counts += flat.ne(0).sum(1)
        elif name == "labels" and not values.is_floating_point():
            count = torch.stack([flat.ne(label) for label in ignored]).all(0).sum(1)
            counts, labelled = counts + count, count > 0
    return counts, labelled


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
    """What a model returns for a batch: its loss and its logits, and gradients of the loss.

    gradients: by each of the logits.
    inner: by the vectors among the model's parameters, one after the other; what a loss adds that is not made of the
        logits, as of a router's balance, is in these.
    """

    batch: Batch
    loss: Tensor
    logits: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    inner: Tensor
    inner_of: Callable[[Tensor], Tensor]

    def without_graph(self) -> _Answer:
        """The same, with which the memory of its forward goes."""
        logits = {name: value.detach() for name, value in self.logits.items()}
        return replace(self, loss=self.loss.detach(), logits=logits)

    def is_as(self, loss: Tensor, name: str) -> bool:
        """Whether its own loss is `loss`, a function of the logits `name` alone."""
        found, *_ = torch.autograd.grad(loss, self.logits[name], retain_graph=True)
        others = [gradient for other, gradient in self.gradients.items() if other != name]
        return (
            self._near(self.loss, loss)
            and self._near(self.gradients[name], found)
            and self._near(self.inner, self.inner_of(loss))
            and not any(bool(gradient.any()) for gradient in others)
        )

    def times(self, factor: float, each: Sequence[_Answer]) -> bool:
        """Whether `factor` times its loss is the sum of the losses of the samples, of which `each` is one's answer."""
        sums = [sum((getattr(one, name) for one in each), 0 * getattr(self, name)) for name in ("loss", "inner")]
        pairs = [(factor * self.loss, sums[0]), (factor * self.inner, sums[1])]
        pairs += [
            (factor * gradient[place : place + 1], one.gradients[name])
            for name, gradient in self.gradients.items()
            for place, one in enumerate(each)
        ]
        return all(self._near(one, other) for one, other in pairs)

    def _near(self, one: Tensor, other: Tensor) -> bool:
        """Whether they are the same but for rounding, that of the coarsest type among what the model returns."""
        if one.shape != other.shape:
            return False
        types = [one.dtype, other.dtype, *(value.dtype for value in self.logits.values())]
        tolerated = max(1e-3, *(4 * torch.finfo(kind).eps for kind in types))
        return float((one - other).detach().float().norm()) <= tolerated * float(other.detach().float().norm()) + 1e-12


def _answer(model: PreTrainedModel, batch: Batch) -> _Answer:
    outputs: Any = model(**batch)
    loss = outputs["loss"]
    if loss.numel() != 1 or not bool(loss.isfinite()):
        raise ValueError(
            f"the loss of {type(model).__name__} is no number for a row of the batches ({loss}): leave out rows of "
            "which no label counts"
        )
    every = {name: value for name, value in outputs.items() if name != "loss" and isinstance(value, Tensor)}
    some = {name: value for name, value in every.items() if value.is_floating_point() and value.requires_grad}
    logits = {name: value for name, value in some.items() if "logits" in name} or some
    vectors = [one for one in model.parameters() if one.dim() == 1 and one.requires_grad and not one.is_meta]

    def inner_of(value: Tensor) -> Tensor:
        return torch.cat([one.flatten().float() for one in _gradients(value, vectors)] or [value.new_zeros(0)])

    gradients = dict(zip(logits, _gradients(loss, list(logits.values())), strict=True))
    return _Answer(batch, loss.reshape(()), logits, gradients, inner_of(loss), inner_of)


def _gradients(value: Tensor, by: Sequence[Tensor]) -> list[Tensor]:
    """Of `value` by each tensor; zeros where it does not depend on it."""
    if not by or not value.requires_grad:
        return [torch.zeros_like(one) for one in by]
    found = torch.autograd.grad(value, by, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(one) if each is None else each for one, each in zip(by, found, strict=True)]


def _loss_of(model: PreTrainedModel, rows: Sequence[Batch]) -> Loss:
    each: list[_Answer] = []
    for row in rows:
        one = _answer(model, row)
        if loss := _of_tokens(one):
            return loss
        each.append(one.without_graph())
    if len(rows) == 1:
        return mean_loss_times_batch
    both = _answer(model, {name: torch.cat([row[name] for row in rows]) for name in rows[0]})
    for loss, factor in ((mean_loss_times_batch, float(len(rows))), (sum_loss, 1.0)):
        if both.times(factor, each):
            return loss
    raise ValueError(
        f"the loss of {type(model).__name__} for several samples is neither the mean nor the sum of theirs, so "
        "statistics would depend on how samples are batched. Give batches of one row each; or give loss=, a function "
        "of the model and a batch that gives the sum of its samples' losses, as those of eckart.calibration.losses do"
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
