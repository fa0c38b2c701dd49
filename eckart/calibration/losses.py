"""What is computed of a model's outputs: losses, as statistics needs them, and predictions."""

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
"""What a model is called with: name of an input → values, each `(batch, …)`."""
IGNORED = -100
"""The label of a token that no loss counts."""
_NEVER = -1e4  # the logit of what cannot be; finite, so that a divergence of two of them is 0

Model = Callable[..., Any]
"""What gives a ModelOutput when it is called with a batch."""

Loss = Callable[[Model, Batch], Tensor]
"""Sum over samples of each sample's loss `()`: the sum, as statistics must not depend on how samples are batched.

For statistics alone it may be several such `(k,)`, whose squares of gradients are summed."""

Predictions = Callable[[ModelOutput, Batch], Tensor]
"""The logits `(predictions, classes)` of a batch that its labels are for, or the values `(batch, values)`."""


@dataclass(frozen=True)
class Objective:
    """What a model is for.

    Attributes:
        loss: by which a search tells how good a model is.
        calibration_loss: of whose gradients statistics are.
        training_loss: whose mean over samples training minimises; None: the model's own loss is that mean.
        predictions: the logits that a teacher teaches.
        classes: whether these are of classes; otherwise they are values.
    """

    loss: Loss
    calibration_loss: Loss
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


def binary_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the Predictions of a head that decides each label by itself, by σ of its logit.

    They are two logits a label, z and 0, `(samples · labels, 2)`: softmax(z, 0) = (σ(z), 1 − σ(z)), so a divergence of
    the two classes is that of the label, and a class drawn is a label drawn.
    """
    logits = logits_of(outputs, batch).flatten()
    return torch.stack([logits, torch.zeros_like(logits)], dim=-1)


def predictions_of(problem_type: str | None) -> Predictions:
    """Return the Predictions of a head that answers once a sample, by what config.json calls its problem."""
    return binary_logits if problem_type == "multi_label_classification" else logits_of


def logits_error(student: Tensor, teacher: Tensor, temperature: float | None) -> Tensor:
    """temperature² · KL(teacher ‖ student), a mean over predictions (Hinton et al., 2015); without one the mean square.

    Args:
        student, teacher: `(predictions, classes)`, or `(batch, values)` where there is no temperature.

    Raises:
        ValueError: they differ in shape.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"logits of the model {tuple(student.shape)} and of the teacher {tuple(teacher.shape)} are not of the same "
            "shape: set distillation.logits to 0"
        )
    student, teacher = student.float(), teacher.float()
    if temperature is None:
        return mse_loss(student, teacher)
    some, others = log_softmax(student / temperature, dim=-1), log_softmax(teacher / temperature, dim=-1)
    return temperature**2 * kl_div(some, others, reduction="batchmean", log_target=True)


def mean_loss_times_batch(model: Model, batch: Batch) -> Tensor:
    """The Loss of heads whose own is the mean over samples."""
    return model(**batch).loss * batch_size(batch)


def sum_loss(model: Model, batch: Batch) -> Tensor:
    """The Loss of heads whose own is the sum over samples."""
    loss: Tensor = model(**batch).loss
    return loss


def mean_loss(loss: Loss | None, outputs: ModelOutput, batch: Batch) -> Tensor:
    """Mean over samples of `loss`, of outputs that are there already; None: the model's own."""
    return outputs["loss"] if loss is None else loss(lambda **_: outputs, batch) / batch_size(batch)


def batch_size(batch: Batch) -> int:
    """Its samples."""
    return next(iter(batch.values())).shape[0]


def row_of(batch: Batch, row: int) -> dict[str, Tensor]:
    """One sample of it, as a batch."""
    return {name: values[row : row + 1] for name, values in batch.items()}


def expected_losses(model: Model, batch: Batch) -> Tensor:
    """The losses `(classes,)` by each label that there is, for heads that answer once a sample; none need be given.

    Each sample counts by the root of the label's probability p: G_n ⊙ G_n is then p times that of the label, and the
    sum over labels is the expectation under the model. So it is of Δ_nᵀ Δ_n: the Fisher, not the empirical one.
    """
    logits = logits_of(model(**{name: values for name, values in batch.items() if name != "labels"}), batch)
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -((logs / 2).exp().detach() * logs).sum(0)


def drawn_loss(predictions: Predictions, seed: int) -> Loss:
    """The Loss by labels that are drawn from the model's own probabilities, the mean over a sample's predictions.

    A draw depends on `seed` and on a sample's tokens, not on its batch: it is the same in every pass, as long as the
    model is. For heads with as many predictions for each sample, in the order of samples.
    """

    def loss(model: Model, batch: Batch) -> Tensor:
        logits = predictions(model(**batch), batch).unflatten(0, (batch_size(batch), -1))
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        ids, mask = batch["input_ids"].cpu(), batch["attention_mask"].cpu() != 0
        lots = [zlib.crc32(row[real].numpy().tobytes(), seed) for row, real in zip(ids, mask, strict=True)]
        drawn = torch.stack([_drawn(one, lot) for one, lot in zip(logs.detach().exp().cpu(), lots, strict=True)])
        return -logs.gather(-1, drawn.to(logs.device)).mean(1).sum()

    return loss


def _drawn(probabilities: Tensor, lot: int) -> Tensor:
    """A class `(predictions, 1)` for each of `(predictions, classes)`."""
    return probabilities.multinomial(1, generator=torch.Generator().manual_seed(lot))


def token_loss(model: Model, batch: Batch) -> Tensor:
    """Sum over samples of each sample's mean loss over its labelled tokens, for heads that label each token.

    The model's own loss is a mean over the tokens of the batch, so it weighs a sample by its length.
    """
    return sum_of_means(model(**batch).logits, batch["labels"])


def causal_loss(model: Model, batch: Batch) -> Tensor:
    """As `token_loss`, for heads that say which token comes next: the labels are the tokens themselves. What would be
    said at padding, of the first token of a text that is padded on the left, counts for nothing."""
    labels, mask = batch["labels"][:, 1:], batch.get("attention_mask")
    if mask is not None:
        labels = labels.masked_fill(mask[:, :-1] == 0, IGNORED)
    return sum_of_means(model(**batch).logits[:, :-1], labels)


def sum_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    """Over samples, of each one's mean cross-entropy; `(batch, tokens, classes)` and `(batch, tokens)`."""
    losses = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counts = (labels != IGNORED).sum(1).clamp(min=1)
    return (losses.view_as(labels).sum(1) / counts).sum()


def span_loss(model: Model, batch: Batch) -> Tensor:
    """Sum over samples of the mean cross-entropy of start and end, for heads that point at a span of tokens.

    The model's own loss takes padding for tokens where a span may start or end, so it depends on the longest sample.
    A position behind the last token, as of an answer that was cut off, counts for nothing.
    """
    logits = span_logits(model(**batch), batch)
    positions = torch.cat([batch["start_positions"], batch["end_positions"]])
    positions = positions.masked_fill(positions >= logits.shape[1], IGNORED)
    return cross_entropy(logits, positions, ignore_index=IGNORED, reduction="sum") / 2


def span_logits(outputs: ModelOutput, batch: Batch) -> Tensor:
    """The logits `(2 batch, tokens)` of the starts, then of the ends, of spans; padding is neither."""
    logits = torch.cat([outputs["start_logits"], outputs["end_logits"]])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    mask = batch.get("attention_mask")
    return logits if mask is None else logits.masked_fill(mask.repeat(2, 1) == 0, _NEVER)
