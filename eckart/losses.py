"""What is computed of a model's outputs: losses, as evidence needs them, and predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import ModelOutput

Batch = Mapping[str, Tensor]
"""What a model is called with: name of an input → values, each `(batch, …)`."""
IGNORED = -100
"""The label of a token that no loss counts."""
_NEVER = -1e4  # the logit of what cannot be; finite, so that a divergence of two of them is 0

Model = Callable[..., Any]
"""What gives a ModelOutput when it is called with a batch."""

Loss = Callable[[Model, Batch], Tensor]
"""Sum over samples of each sample's loss `()`: the sum, as evidence must not depend on how samples are batched."""

Predictions = Callable[[ModelOutput, Batch], Tensor]
"""The logits `(predictions, classes)` of a batch that its labels are for, or the values `(batch, values)`."""


@dataclass(frozen=True)
class Objective:
    """What a model is for.

    training_loss: whose mean over samples training minimises; None: the model's own loss is that mean.
    predictions: the logits that a teacher teaches.
    classes: whether these are of classes; otherwise they are values.
    """

    loss: Loss
    training_loss: Loss | None
    predictions: Predictions
    classes: bool


def logits_of(outputs: ModelOutput, batch: Batch) -> Tensor:
    """The Predictions of a head that answers once a sample.

    Raises:
        ValueError: the model returns no logits.
    """
    logits = outputs.get("logits")
    if logits is None:
        raise ValueError("the model returns no logits: set distillation.logits to 0")
    return logits


def mean_loss_times_batch(model: Model, batch: Batch) -> Tensor:
    """The Loss of heads whose own is the mean over samples."""
    return model(**batch).loss * batch_size(batch)


def mean_loss(loss: Loss | None, outputs: ModelOutput, batch: Batch) -> Tensor:
    """Mean over samples of `loss`, of outputs that are there already; None: the model's own."""
    return outputs["loss"] if loss is None else loss(lambda **_: outputs, batch) / batch_size(batch)


def batch_size(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def token_loss(model: Model, batch: Batch) -> Tensor:
    """Sum over samples of each sample's mean loss over its labelled tokens, for heads that label each token.

    The model's own loss is a mean over the tokens of the batch, so it weighs a sample by its length.
    """
    labels = batch["labels"]
    logits = model(**batch).logits.float()
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counts = (labels != IGNORED).sum(1).clamp(min=1)
    return (losses.view_as(labels).sum(1) / counts).sum()


def span_loss(model: Model, batch: Batch) -> Tensor:
    """Sum over samples of the mean cross-entropy of start and end, for heads that point at a span of tokens.

    The model's own loss takes padding for tokens where a span may start or end, so it depends on the longest sample.
    """
    positions = torch.cat([batch["start_positions"], batch["end_positions"]])
    return cross_entropy(span_logits(model(**batch), batch), positions, reduction="sum") / 2


def span_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """The logits `(2 batch, tokens)` of the starts, then of the ends, of spans; padding is neither."""
    logits = torch.cat([outputs["start_logits"], outputs["end_logits"]])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.masked_fill(batch["attention_mask"].repeat(2, 1) == 0, _NEVER)
