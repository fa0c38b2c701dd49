"""Losses as sums over examples, and the predictions of each kind of head."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss
from transformers.modeling_outputs import ModelOutput

Batch = Mapping[str, Tensor]
"""The inputs of a model: name → values, each `(batch, …)`."""
IGNORED = -100
"""The label of a token that no loss counts."""
_NEVER = -1e4  # the logit of what is impossible; finite, so that a KL divergence of two such logits is 0

Model = Callable[..., Any]
"""Anything that returns a ModelOutput when it is called with a batch."""

Loss = Callable[[Model, Batch], Tensor]
"""The sum over examples of each one's loss `()`: a sum, so that statistics do not depend on how examples are batched.

For calibration statistics alone it may return several losses `(k,)`, whose squared gradients are summed."""

Predictions = Callable[[ModelOutput, Batch], Tensor]
"""The logits `(predictions, classes)` that the labels of a batch are for, or the values `(batch, values)`."""


@dataclass(frozen=True)
class Objective:
    """The losses and predictions of a model's task.

    Attributes:
        loss: by which a rank search judges a model.
        calibration_loss: whose gradients calibration statistics are made of.
        training_loss: whose mean over examples is minimised in training; None: the model's own loss is that mean.
        predictions: the logits that distillation compares.
        classes: whether these are logits of classes; otherwise they are values.
    """

    loss: Loss
    calibration_loss: Loss
    training_loss: Loss | None
    predictions: Predictions
    classes: bool


def logits_of(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits of a head that has one answer for each example.

    Raises:
        ValueError: the model returns no logits.
    """
    logits = outputs.get("logits")
    if logits is None:
        raise ValueError("the model returns no logits: set distillation.logits to 0")
    return logits


def logits_error(student: Tensor, teacher: Tensor, temperature: float | None) -> Tensor:
    """Return temperature² · KL(teacher ‖ student), averaged over predictions (Hinton et al., 2015).

    Without a temperature it is the mean squared error.

    Args:
        student, teacher: `(predictions, classes)`, or `(batch, values)` without a temperature.

    Raises:
        ValueError: their shapes differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"logits of the model {tuple(student.shape)} and of the teacher {tuple(teacher.shape)} differ in shape: "
            "set distillation.logits to 0"
        )
    student, teacher = student.float(), teacher.float()
    if temperature is None:
        return mse_loss(student, teacher)
    logs, teacher_logs = log_softmax(student / temperature, dim=-1), log_softmax(teacher / temperature, dim=-1)
    return temperature**2 * kl_div(logs, teacher_logs, reduction="batchmean", log_target=True)


def mean_loss_times_batch(model: Model, batch: Batch) -> Tensor:
    """Loss for heads whose own loss is the mean over examples."""
    return model(**batch).loss * batch_size(batch)


def sum_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads whose own loss is the sum over examples."""
    loss: Tensor = model(**batch).loss
    return loss


def mean_loss(loss: Loss | None, outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the mean of `loss` over examples, for outputs that are already computed; None: the model's own loss."""
    return outputs["loss"] if loss is None else loss(lambda **_: outputs, batch) / batch_size(batch)


def batch_size(batch: Batch) -> int:
    """Return the number of examples."""
    return next(iter(batch.values())).shape[0]


def row_of(batch: Batch, row: int) -> dict[str, Tensor]:
    """Return one example as a batch."""
    return {name: values[row : row + 1] for name, values in batch.items()}


def expected_losses(model: Model, batch: Batch) -> Tensor:
    """Loss for heads with one answer for each example: `(classes,)`, one loss for each label that there is.

    The batch needs no labels. Each loss is weighted by √p, p the label's probability. So G_n ⊙ G_n and Δ_nᵀ Δ_n of a
    label are weighted by p, and their sum over labels is the expectation under the model: the Fisher in place of the
    empirical Fisher.
    """
    logits = logits_of(model(**{name: values for name, values in batch.items() if name != "labels"}), batch)
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -((logs / 2).exp().detach() * logs).sum(0)


def drawn_loss(predictions: Predictions, seed: int) -> Loss:
    """Return a Loss by labels drawn from the model's own probabilities, the mean over an example's predictions.

    A draw depends on `seed` and on the example's tokens, not on its batch, so every pass over the same model draws the
    same. For heads with as many predictions for each example, in the order of the examples.
    """

    def loss(model: Model, batch: Batch) -> Tensor:
        logits = predictions(model(**batch), batch).unflatten(0, (batch_size(batch), -1))
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        ids, mask = batch["input_ids"].cpu(), batch["attention_mask"].cpu() != 0
        seeds = [zlib.crc32(tokens[real].numpy().tobytes(), seed) for tokens, real in zip(ids, mask, strict=True)]
        drawn = torch.stack(list(map(_draw, logs.detach().exp().cpu(), seeds)))
        return -logs.gather(-1, drawn.to(logs.device)).mean(1).sum()

    return loss


def _draw(probabilities: Tensor, seed: int) -> Tensor:
    """Draw a class for each prediction: `(predictions, classes)` → `(predictions, 1)`."""
    return probabilities.multinomial(1, generator=torch.Generator().manual_seed(seed))


def token_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that label each token: the sum over examples of each one's mean over its labelled tokens.

    The model's own loss is a mean over the tokens of the batch, which weighs an example by its length.
    """
    return sum_of_means(model(**batch).logits, batch["labels"])


def causal_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that predict the next token, as `token_loss`; the labels are the tokens themselves.

    Predictions made at padding do not count, such as that of the first token of a text that is padded on the left.
    """
    labels, mask = batch["labels"][:, 1:], batch.get("attention_mask")
    if mask is not None:
        labels = labels.masked_fill(mask[:, :-1] == 0, IGNORED)
    return sum_of_means(model(**batch).logits[:, :-1], labels)


def sum_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum each example's mean cross-entropy; logits `(batch, tokens, classes)`, labels `(batch, tokens)`."""
    losses = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counts = (labels != IGNORED).sum(1).clamp(min=1)
    return (losses.view_as(labels).sum(1) / counts).sum()


def span_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that point at a span of tokens: the sum over examples of the mean cross-entropy of start and end.

    The model's own loss lets a span start or end at padding, so it depends on the longest example. A position after the
    last token, such as that of an answer that was cut off, does not count.
    """
    logits = span_logits(model(**batch), batch)
    positions = torch.cat([batch["start_positions"], batch["end_positions"]])
    positions = positions.masked_fill(positions >= logits.shape[1], IGNORED)
    return cross_entropy(logits, positions, ignore_index=IGNORED, reduction="sum") / 2


def span_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits of the starts of spans, then those of their ends, `(2 batch, tokens)`, without padding."""
    logits = torch.cat([outputs["start_logits"], outputs["end_logits"]])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    mask = batch.get("attention_mask")
    return logits if mask is None else logits.masked_fill(mask.repeat(2, 1) == 0, _NEVER)
