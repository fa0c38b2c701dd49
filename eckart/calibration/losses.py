"""Losses of models as sums over examples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.predictions import (
    Predictions,
    binary_logits,
    labeled_logits,
    logits_of,
    logits_without_padding,
    next_token_logits,
    span_logits,
)
from eckart.model.batches import IGNORED, LABELS, Batch, batch_size, next_labels, real_tokens, without_labels
from eckart.precision import at_least_float32

Model = Callable[..., Any]
"""A model, or any function that takes the inputs of a batch and returns a ModelOutput."""

Loss = Callable[[Model, Batch], Tensor]
"""Function that returns the sum of the examples' losses `()`: a sum, because statistics must not depend on batching.

For calibration statistics it may also return several losses `(k,)`; their squared gradients are then summed."""


@dataclass(frozen=True)
class Objective:
    """Losses and predictions of a model's task.

    Attributes:
        loss: loss that a rank search uses to judge a model.
        calibration_loss: loss that gives the gradients in calibration statistics.
        training_loss: loss that training minimizes, as a mean over examples; None: the model's own loss.
        predictions: function that returns the predictions that distillation compares.
        classes: whether the predictions are logits of classes; otherwise they are values.
        dropout: whether training uses the model's dropout.
    """

    loss: Loss
    calibration_loss: Loss
    training_loss: Loss | None
    predictions: Predictions
    classes: bool
    dropout: bool = True


def predictions_of(loss: Loss, problem_type: str | None) -> Predictions:
    """Return the function that gives the predictions that a loss judges.

    Args:
        loss: a loss of this module, or any other. With another loss, the predictions of a head for tokens count at all
            tokens of the texts.
        problem_type: entry `problem_type` of the model's config.json.
    """
    heads = ((span_loss, span_logits), (token_loss, labeled_logits), (causal_loss, next_token_logits))
    others = binary_logits if problem_type == "multi_label_classification" else logits_without_padding
    return next((predictions for known, predictions in heads if loss is known), others)


def objective_with(loss: Loss, problem_type: str | None) -> Objective:
    """Return the objective in which `loss` is every loss.

    Args:
        problem_type: as in `predictions_of`.
    """
    return Objective(loss, loss, loss, predictions_of(loss, problem_type), problem_type != "regression")


def logits_error(student: Tensor, teacher: Tensor, temperature: float | None) -> Tensor:
    """Return the distillation loss temperature² · KL(teacher ‖ student), a mean over predictions (Hinton et al., 2015).

    If the temperature is None, return the mean squared error.

    Args:
        student, teacher: logits `(predictions, classes)`; or values `(batch, values)`, if the temperature is None.

    Raises:
        ValueError: their shapes differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"logits of the model {tuple(student.shape)} and of the teacher {tuple(teacher.shape)} differ in shape: "
            "set distillation.logits to 0"
        )
    student, teacher = student.float(), teacher.float()
    if not len(student):  # a batch without a labeled token, whose mean would not be a number
        return student.sum()
    if temperature is None:
        return mse_loss(student, teacher)
    logs, teacher_logs = log_softmax(student / temperature, dim=-1), log_softmax(teacher / temperature, dim=-1)
    return temperature**2 * kl_div(logs, teacher_logs, reduction="batchmean", log_target=True)


def mean_loss_times_batch(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that themselves return the mean loss over examples: this mean times the number of examples."""
    return model(**batch).loss * batch_size(batch)


def sum_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that themselves return the sum of the examples' losses: this sum."""
    loss: Tensor = model(**batch).loss
    return loss


def mean_loss(loss: Loss | None, outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the mean loss over the examples of `batch`, from the model's `outputs`, without another forward pass.

    Args:
        loss: loss of the task; None: the model's own loss, which is among the outputs.
    """
    return outputs["loss"] if loss is None else loss(lambda **_: outputs, batch) / batch_size(batch)


def expected_losses(model: Model, batch: Batch) -> Tensor:
    """Return losses `(classes,)`, one for each possible label, for statistics of the true Fisher information.

    For heads with one answer for each example; the batch needs no labels. Each loss is weighted by √p, where p is the
    model's probability of the label. So p weighs a label's squared gradients G_n ⊙ G_n and Δ_nᵀ Δ_n, and their sum over
    labels is the expectation under the model's own predictions.
    """
    logits = logits_of(model(**without_labels(batch)), batch)
    logs = at_least_float32(logits).log_softmax(-1)
    return -((logs / 2).exp().detach() * logs).sum(0)


@dataclass(frozen=True)
class DrawnLoss:
    """Loss for labels that are drawn from the model's own predictions: for second moments of gradients.

    Classes are drawn by their probabilities, values from a normal distribution of variance 1 around the predicted ones.
    An example's loss is −log p of its label, up to a constant; of several predictions, the mean. A draw depends on
    `seed` and the example's tokens, but not on the rest of the batch, so every pass over the same model draws the same
    labels. All examples must have the same number of predictions, and these must be in the order of the examples.

    Neither the loss nor its mean gradient says anything about a model: the expected gradient is 0, and the loss of
    predicted values is ½ ‖noise‖² for every model.

    Attributes:
        classes: whether the predictions are logits of classes; otherwise they are values.
    """

    predictions: Predictions
    seed: int
    classes: bool = True

    def __call__(self, model: Model, batch: Batch) -> Tensor:
        """Return the sum of the examples' losses `()`.

        Raises:
            ValueError: the batch has no `input_ids`.
        """
        predicted = at_least_float32(self.predictions(model(**batch), batch).unflatten(0, (batch_size(batch), -1)))
        draw = self._of_classes if self.classes else self._of_values
        return draw(predicted, _generators(batch, self.seed)).mean(1).sum()

    @staticmethod
    def _of_classes(logits: Tensor, generators: Iterable[torch.Generator]) -> Tensor:
        """Return −log p of labels that are drawn from `logits` `(batch, predictions, classes)`."""
        logs = logits.log_softmax(-1)
        chances = zip(logs.detach().exp().cpu(), generators, strict=True)
        drawn = torch.stack([shares.multinomial(1, generator=generator) for shares, generator in chances])
        return -logs.gather(-1, drawn.to(logs.device)).squeeze(-1)

    @staticmethod
    def _of_values(values: Tensor, generators: Iterable[torch.Generator]) -> Tensor:
        """Return −log p, up to a constant, of labels drawn around `values` `(batch, predictions, values)`."""
        noise = torch.stack([torch.randn(values.shape[1:], generator=generator) for generator in generators])
        return (values - values.detach() - noise.to(values)).square().sum(-1) / 2


def _generators(batch: Batch, seed: int) -> Iterator[torch.Generator]:
    """Yield a generator of random numbers for each example, which depends on its tokens and `seed`."""
    if "input_ids" not in batch:
        raise ValueError("labels are drawn by the tokens of an example, but a batch has no input_ids: add them")
    for tokens, real in zip(batch["input_ids"].cpu(), real_tokens(batch, batch["input_ids"]).cpu(), strict=True):
        yield torch.Generator().manual_seed(zlib.crc32(tokens[real].numpy().tobytes(), seed))


def token_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that label each token: an example's loss is the mean over its labeled tokens.

    The model's own loss is a mean over all tokens of the batch, in which long examples weigh more.
    """
    return sum_of_means(model(**batch).logits, batch["labels"])


def causal_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that predict the next token: an example's loss is the mean over its tokens.

    The labels are the tokens themselves. Predictions made at padding do not count, such as the prediction of a text's
    first token after padding on the left.
    """
    labels = next_labels(batch)
    inputs = {name: values for name, values in batch.items() if name not in LABELS}  # the model computes no second loss
    return sum_of_means(model(**inputs).logits[:, :-1], labels)


def sum_of_means(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over examples of the mean cross-entropy of an example's labeled tokens.

    Args:
        logits: `(batch, tokens, classes)`.
        labels: `(batch, tokens)`.
    """
    counts = (labels != IGNORED).sum(1).clamp(min=1)
    return (token_losses(logits, labels).sum(1) / counts).sum()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each token `(batch, tokens)`, in float32 or better; 0 where it has no label.

    Args:
        logits: `(batch, tokens, classes)`.
        labels: `(batch, tokens)`.
    """
    # one example at a time: with a large vocabulary, (batch, classes, tokens) takes several times as long
    losses = [
        cross_entropy(at_least_float32(row), of_row, ignore_index=IGNORED, reduction="none")
        for row, of_row in zip(logits, labels, strict=True)
    ]
    return torch.stack(losses)


def span_loss(model: Model, batch: Batch) -> Tensor:
    """Loss for heads that predict a span of tokens: an example's loss is the mean cross-entropy of start and end.

    The model's own loss lets a span start or end at padding, so that loss depends on the longest example of the batch.
    A position at padding or beyond it, such as the end of an answer that was cut off, does not count.
    """
    outputs = model(**batch)
    logits = span_logits(outputs, batch)
    positions, last = torch.cat([batch["start_positions"], batch["end_positions"]]), logits.shape[1] - 1
    real = real_tokens(batch, outputs["start_logits"]).repeat(2, 1).gather(1, positions.clamp(0, last)[:, None])[:, 0]
    positions = positions.masked_fill(~real | (positions > last), IGNORED)
    return cross_entropy(logits, positions, ignore_index=IGNORED, reduction="sum") / 2
