"""Functions that return the predictions of each kind of head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from eckart.model.batches import ATTENTION, IGNORED, Batch, next_labels
from eckart.precision import at_least_float32

Predictions = Callable[[ModelOutput, Batch], Tensor]
"""Function that returns a model's predictions: logits `(predictions, classes)`, or values `(batch, values)`."""
_NEVER = -1e4  # logit of an impossible prediction; finite, so that the KL divergence of two such logits is 0


def logits_of(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the predictions of a head that has one answer for each example: its logits.

    Raises:
        ValueError: the model returns no logits.
    """
    logits = outputs.get("logits")
    if logits is None:
        raise ValueError(
            "the model returns no logits: to compress embeddings, give loss=eckart.embedding_loss(…); in the pipeline, "
            "set distillation.logits to 0"
        )
    return logits


def labeled_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits of a token head at those tokens of a batch that have a label, `(labeled tokens, classes)`."""
    logits: Tensor = outputs["logits"]
    return logits[batch["labels"] != IGNORED]


def next_token_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits that predict the labeled tokens, `(labeled tokens, classes)`, of a head for the next token."""
    logits: Tensor = outputs["logits"]
    return logits[:, :-1][next_labels(batch) != IGNORED]


def binary_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the predictions of a multi-label head, which gives each label the probability σ(z) for its logit z.

    Returns:
        The two logits z and 0 for each label, `(batch · labels, 2)`. Because softmax(z, 0) = (σ(z), 1 − σ(z)), each
        label becomes a choice between two classes, and code for classes also works for labels.
    """
    logits = logits_of(outputs, batch).flatten()
    return torch.stack([logits, torch.zeros_like(logits)], dim=-1)


def logits_without_padding(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits of any head; those of a head for tokens only where the text is not padding."""
    if "start_logits" in outputs:
        return span_logits(outputs, batch)
    logits = logits_of(outputs, batch)
    if logits.dim() != 3:
        return logits
    if "encoder_last_hidden_state" in outputs:  # `attention_mask` is about the encoder's tokens
        labels = batch.get("labels")
        masks = [batch.get("decoder_attention_mask"), None if labels is None else labels != IGNORED]
    else:
        masks = [batch.get(ATTENTION)]
    # one of another length is about other tokens, such as those of the text after those of an image
    mask = next((mask for mask in masks if mask is not None and mask.shape == logits.shape[:2]), None)
    return logits.flatten(0, 1) if mask is None else logits[mask != 0]


def span_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits of a question-answering head: first those of all starts, then those of all ends.

    The shape is `(2 × batch, tokens)`. Padding gets the logit −10⁴.
    """
    logits = at_least_float32(torch.cat([outputs["start_logits"], outputs["end_logits"]]))
    mask = batch.get(ATTENTION)
    return logits if mask is None else logits.masked_fill(mask.repeat(2, 1) == 0, _NEVER)
