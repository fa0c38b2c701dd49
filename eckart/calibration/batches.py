"""Calibration batches as people give them: checked, on the model's device, a decoder's inputs added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import IGNORED, Batch


def checked(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> list[Batch]:
    """The batches, ready for the model.

    Args:
        batches: each input name → tensor `(batch, …)`.

    Raises:
        ValueError: there is none, one is no mapping of tensors with the same number of rows, or one has other inputs.
    """
    if isinstance(batches, Mapping):
        raise ValueError("batches is one batch: give a list of them")
    data = [_ready(model, number, batch) for number, batch in enumerate(batches)]
    if not data:
        raise ValueError("there is no batch to calibrate with: give some hundred rows")
    for number, batch in enumerate(data):
        if others := set(batch) ^ set(data[0]):
            raise ValueError(f"of batch {number} and batch 0 only one has {', '.join(sorted(others))}: give both it")
    return data


def _ready(model: PreTrainedModel, number: int, batch: Mapping[str, Tensor]) -> Batch:
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(f"batch {number} is a {type(batch).__name__}: give a mapping of input names to tensors")
    if wrong := [f"{name}: {type(one).__name__}" for name, one in batch.items() if not isinstance(one, Tensor)]:
        raise ValueError(f"batch {number} has {', '.join(wrong)}: give tensors, as return_tensors='pt' does")
    if len({len(values) if values.dim() else 0 for values in batch.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in batch.items())
        raise ValueError(f"batch {number} has tensors of other numbers of rows: {shapes}")
    found = {name: values.to(model.device) for name, values in batch.items()}
    labels = found.get("labels")
    tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
    if tokens and _reads_summaries(model) and "decoder_attention_mask" not in found:
        found |= decoder_inputs(model, found["labels"]) | {
            name: values for name, values in found.items() if name == "decoder_input_ids"
        }
    return found


def _reads_summaries(model: PreTrainedModel) -> bool:
    """Whether a decoder reads what it is to write, token by token."""
    return bool(model.config.is_encoder_decoder) and model.can_generate()


def decoder_inputs(model: PreTrainedModel, labels: Tensor) -> dict[str, Tensor]:
    """What the decoder reads where it is to write `labels` `(batch, tokens)`: the token before each, and which count.

    Raises:
        AttributeError, TypeError, ValueError: the model does not say with which token a text begins; each family has
            an error of its own.
    """
    if own := getattr(model, "prepare_decoder_input_ids_from_labels", None):
        shifted = own(labels=labels)
    else:
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = model.config.decoder_start_token_id
        shifted = shifted.masked_fill(shifted == IGNORED, model.config.pad_token_id)
    return {"decoder_input_ids": shifted, "decoder_attention_mask": (labels != IGNORED).to(torch.long)}
