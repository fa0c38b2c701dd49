"""Preparation of the user's calibration batches: checks, the move to the model's device, missing decoder inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.model.batches import ATTENTION, IGNORED, NOT_TEXT, Batch, labels_are_tokens


def prepare_batches(model: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]) -> list[Batch]:
    """Check the user's batches and return them on the model's device, with decoder inputs if the model needs them.

    A batch without an attention mask has no padding. It gets one if others have one.

    Args:
        batches: mappings of input names to tensors `(batch, …)`.

    Raises:
        ValueError: there is no batch; a batch is not a mapping, or its values are not tensors with the same number of
            examples; or batches differ in the names of their inputs.
    """
    if isinstance(batches, Mapping):
        raise ValueError("batches is one batch: give a list of batches")
    try:
        given = enumerate(batches)
    except TypeError as error:
        raise ValueError(f"batches is a {type(batches).__name__}: give a list of batches") from error
    data = [_prepare(model, number, batch) for number, batch in given]
    if not data:
        raise ValueError("there is no batch to calibrate with: give some hundred examples")
    if any(ATTENTION in batch for batch in data):
        data = [_with_mask(batch) for batch in data]
    for number, batch in enumerate(data):
        if others := set(batch) ^ set(data[0]):
            raise ValueError(f"only one of batch {number} and batch 0 has {', '.join(sorted(others))}: give it to both")
    return data


def _with_mask(batch: Batch) -> Batch:
    if ATTENTION in batch or "input_ids" not in batch:
        return batch
    return {**batch, ATTENTION: torch.ones_like(batch["input_ids"])}


def _prepare(model: PreTrainedModel, number: int, batch: Mapping[str, Tensor]) -> Batch:
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(f"batch {number} is a {type(batch).__name__}: give a mapping of input names to tensors")
    if wrong := [f"{name}: {type(value).__name__}" for name, value in batch.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"batch {number} has {', '.join(wrong)}: give tensors, as return_tensors='pt' does")
    ids = batch.get("input_ids")
    alone = ids is not None and ids.shape[:1] == (1,)  # a single example may have any number of patches
    counted = [values for name, values in batch.items() if not (alone and NOT_TEXT.match(name))]
    if len({len(values) if values.dim() else 0 for values in counted}) > 1:
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in batch.items())
        advice = "; if the patches of all images are in one tensor (Qwen2-VL), give batches of one example"
        raise ValueError(
            f"batch {number} has tensors that differ in their number of examples: {shapes}"
            + advice * any(name.startswith("pixel") for name in batch)
        )
    if not batch.get("input_ids", next(iter(batch.values()))).numel():
        raise ValueError(f"batch {number} has no example, or examples without a token: leave it out")
    prepared = {name: values.to(model.device) for name, values in batch.items()}
    generates = model.config.is_encoder_decoder and model.can_generate()
    if labels_are_tokens(prepared) and generates and "decoder_attention_mask" not in prepared:
        return prepared | decoder_inputs(model, prepared["labels"]) | prepared
    return prepared


def decoder_inputs(model: PreTrainedModel, labels: Tensor) -> dict[str, Tensor]:
    """Return decoder inputs for `labels` `(batch, tokens)`: the labels shifted by one token, and their padding mask.

    Padding is what follows a text's last label. Labels before it may be ignored, too, such as those of a prompt, but
    later tokens read theirs.

    Raises:
        AttributeError, TypeError, ValueError: the model does not say with which token a text begins; the type of the
            error depends on the model family.
    """
    if own := getattr(model, "prepare_decoder_input_ids_from_labels", None):
        shifted = own(labels=labels.clone())  # FSMT's writes into them
    else:
        shifted = labels.roll(1, dims=1)
        config = model.config if hasattr(model.config, "decoder_start_token_id") else model.config.get_text_config()
        shifted[:, 0] = config.decoder_start_token_id
        shifted = shifted.masked_fill(shifted == IGNORED, config.pad_token_id)
    labels_from_here = (labels != IGNORED).flip(1).cumsum(1).flip(1)
    return {"decoder_input_ids": shifted, "decoder_attention_mask": (labels_from_here > 0).to(torch.long)}
