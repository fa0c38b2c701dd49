"""Batches, which are the inputs of a model: their examples, labels, masks and tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]
"""Inputs of a model: name → values `(batch, …)`."""
IGNORED = -100
"""Label of tokens that do not count in any loss."""
LABELS = frozenset({"labels", "start_positions", "end_positions"})
"""Names of the entries of a batch that only the loss reads."""
ATTENTION = "attention_mask"
"""Name of the batch entry that is 0 at padding tokens of the text. The names of other masks end with this name, such as
`decoder_attention_mask`."""
PICTURES = "pixel_mask"
"""Name of the batch entry that is 0 at padding pixels of pictures; no layer's inputs can be matched to pixels."""
_NO_PADDING = "global_attention_mask"
"""Name of a batch entry that looks like a padding mask but is none."""
NOT_TEXT = re.compile("(pixel|visual|video|image(?!_embeds_position_mask))")
"""Beginnings of the names of batch entries that do not hold tokens of a text; Kosmos-2 marks tokens for images."""


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
    labels, mask = batch["labels"][:, 1:], batch.get(ATTENTION)
    return labels if mask is None else labels.masked_fill(mask[:, :-1] == 0, IGNORED)


def real_tokens(batch: Batch, like: Tensor) -> Tensor:
    """Return which tokens of the texts are not padding, `(batch, tokens)`; without an attention mask, all are.

    Args:
        like: any tensor `(batch, tokens, …)`.
    """
    mask = batch.get(ATTENTION)
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if mask is None else mask != 0


def masks_of(batch: Batch) -> list[str]:
    """Return the names of a batch's padding masks: `(batch, tokens)`, or `(batch, choices, tokens)` like input_ids."""
    ids = batch.get("input_ids")
    shapes = [] if ids is None else [ids.shape]
    names = [name for name in batch if name.endswith(ATTENTION) and name != _NO_PADDING]
    return sorted(name for name in names if batch[name].dim() == 2 or batch[name].shape in shapes)


def columns(batch: Batch, mask: str, places: Tensor) -> dict[str, Tensor]:
    """Return the batch without labels, and with only the tokens at `places` in all entries that belong to `mask`.

    An entry belongs to a mask if it has the mask's shape (and possibly further dimensions) and its name begins like the
    mask's name: `decoder_input_ids` belongs to `decoder_attention_mask`. All other entries of this shape belong to
    `attention_mask`, the text's mask, unless their names say that they are not text.
    """
    shape, beginnings = batch[mask].shape, [name.removesuffix(ATTENTION) for name in masks_of(batch)]
    others = [*filter(None, beginnings), "decoder_"]
    own = mask.removesuffix(ATTENTION)

    def is_masked(name: str) -> bool:
        return name.startswith(own) if own else not (name.startswith(tuple(others)) or NOT_TEXT.match(name))

    return {
        name: values.index_select(len(shape) - 1, places.to(values.device))
        if values.shape[: len(shape)] == shape and is_masked(name)
        else values
        for name, values in without_labels(batch).items()
    }
