"""Losses as evidence needs them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from eckart.batch import Batch

IGNORED = -100
"""The label of a token that no loss counts."""

Loss = Callable[[PreTrainedModel, Batch], Tensor]
"""Sum over samples of each sample's loss `()`: the sum, as evidence must not depend on how samples are batched."""


def mean_loss_times_batch(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The Loss of heads whose own is the mean over samples."""
    return model(**batch).loss * _batch_size(batch)


def _batch_size(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def token_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Sum over samples of each sample's mean loss over its labelled tokens, for heads that label each token.

    The model's own loss is a mean over the tokens of the batch, so it weighs a sample by its length.
    """
    labels = batch["labels"]
    logits = model(**batch).logits.float()
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counts = (labels != IGNORED).sum(1).clamp(min=1)
    return (losses.view_as(labels).sum(1) / counts).sum()
