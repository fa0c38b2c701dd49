"""Batches, which are the inputs of a model: their examples, labels and tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]
"""Inputs of a model: name → values `(batch, …)`."""
IGNORED = -100
"""Label of tokens that do not count in any loss."""
LABELS = frozenset({"labels", "start_positions", "end_positions"})
"""Names of the entries of a batch that only the loss reads."""


def batch_size(batch: Batch) -> int:
    """Return the number of examples in `batch`."""
    return batch.get("input_ids", next(iter(batch.values()))).shape[0]


def examples_of(batch: Batch, start: int, stop: int) -> dict[str, Tensor]:
    """Return some examples of `batch`. All entries of a single example belong to it, such as the patches of images."""
    if batch_size(batch) == 1:
        return dict(batch)
    return {name: values[start:stop] for name, values in batch.items()}


def first_examples(batch: Batch, count: int) -> dict[str, Tensor]:
    """Return the first `count` examples of `batch`."""
    return examples_of(batch, 0, count)


def row_of(batch: Batch, row: int) -> dict[str, Tensor]:
    """Return the example with number `row` as a batch of its own."""
    return examples_of(batch, row, row + 1)


def without_labels(batch: Batch) -> dict[str, Tensor]:
    """Return `batch` without its entry `labels`, so that a model computes no loss."""
    return {name: values for name, values in batch.items() if name != "labels"}


def labels_are_tokens(batch: Batch) -> bool:
    """Whether the labels of `batch` are whole numbers `(batch, tokens)`, as the ids of a text to write are."""
    labels = batch.get("labels")
    return labels is not None and labels.dim() == 2 and not labels.is_floating_point()


def next_labels(batch: Batch) -> Tensor:
    """Return the label of the token after each token but the last, `(batch, tokens − 1)`; IGNORED after padding."""
    labels, mask = batch["labels"][:, 1:], batch.get("attention_mask")
    return labels if mask is None else labels.masked_fill(mask[:, :-1] == 0, IGNORED)


def real_tokens(batch: Batch, like: Tensor) -> Tensor:
    """Return which tokens of the texts are not padding, `(batch, tokens)`; without an attention mask, all are.

    Args:
        like: any tensor `(batch, tokens, …)`.
    """
    mask = batch.get("attention_mask")
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if mask is None else mask != 0
