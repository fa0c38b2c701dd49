"""Run a model on a split in batches, and return its outputs in the order of the examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.model.batches import IGNORED, LABELS, Batch
from tasks.artifacts.errors import StageError
from tasks.models.device import to_device

if TYPE_CHECKING:
    from datasets import Dataset

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Function that makes a padded batch of tensors from examples."""
Columns = Mapping[str, Any]
"""Unpadded model inputs: name → list with the value for each example."""


def by_length(data: Columns | Dataset) -> np.ndarray:
    """Return the indices that sort the examples by length, so that batches have little padding."""
    return np.argsort([len(ids) for ids in data["input_ids"]], kind="stable")


@torch.no_grad()
def predict(
    model: PreTrainedModel,
    data: Columns,
    collate: Collate,
    batch_size: int,
    read: Callable[[Any, Batch], tuple[Tensor, ...]],
    **generation: Any,
) -> tuple[np.ndarray, ...]:
    """Run a model on all examples of `data`, in batches of examples of similar length.

    Args:
        read: function that selects the tensors to keep, `(batch, …)` each, from the model's outputs and the batch.
        generation: arguments of `model.generate`. If there are any, the model generates text, and `read` gets the
            generated token ids `(batch, tokens)` instead of the model's outputs. Those of an encoder-decoder begin with
            its start token.

    Returns:
        An array for each tensor that `read` selects, with all examples in the order of `data`. Batches with fewer
        tokens than the longest are padded with -100.

    Raises:
        StageError: an output is not finite.
    """
    order, device = by_length(data), to_device(model.eval())
    accepted = inspect.signature(model.forward).parameters.keys() - LABELS
    parts: list[tuple[np.ndarray, ...]] = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = collate([{name: values[row] for name, values in data.items()} for row in rows])
        batch = {name: values.to(device) for name, values in batch.items()}
        if generation:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            outputs = model.generate(**inputs, **generation)  # type: ignore[operator]
        else:
            outputs = model(**{name: values for name, values in batch.items() if name in accepted})
        values_read = (values.float() if values.dtype == torch.bfloat16 else values for values in read(outputs, batch))
        parts.append(tuple(values.cpu().numpy() for values in values_read))
    back = np.argsort(order, kind="stable")
    arrays = tuple(_joined(values)[back] for values in zip(*parts, strict=True))
    if not all(np.isfinite(values).all() for values in arrays):
        raise StageError("the model's outputs are not finite: lower the learning rate, or raise keep")
    return arrays


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Pad the arrays of all batches with -100 to the same number of tokens, and concatenate them."""
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    rest = [(0, 0)] * (parts[0].ndim - 2)
    return np.concatenate(
        [np.pad(part, [(0, 0), (0, width - part.shape[1]), *rest], constant_values=IGNORED) for part in parts]
    )
