"""Finds how a model's loss combines examples, to get the sum of the examples' losses from any model.

The loss of an example is the loss that the model returns for this example alone. For a batch, most heads return the
mean over examples, some return the sum, and token heads return the mean over all tokens, so that long examples weigh
more. To find out which, the model's loss for a few examples together is compared with its losses for each of them
alone. The gradients by the logits and by the model's one-dimensional parameters are compared in the same way, because
an untrained model has nearly the same loss for all examples, but not the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from eckart.calibration.losses import (
    Loss,
    Objective,
    causal_loss,
    mean_loss_times_batch,
    objective_with,
    span_loss,
    sum_loss,
    sum_of_means,
    token_loss,
)
from eckart.model.batches import IGNORED, LABELS, Batch, batch_size, first_examples, masks_of, row_of
from eckart.model.module_context import eval_mode, without_cache
from eckart.model.probing import shortened

_SPAN_LABELS, _SPAN_LOGITS = LABELS - {"labels"}, {"start_logits", "end_logits"}
_EXAMPLES = 4  # maximum number of examples whose loss is computed together and alone


def objective_of(model: PreTrainedModel, data: Sequence[Batch], need: str) -> Objective:
    """Return the loss and the predictions of the task of `model`, found by running it on a few examples of `data`.

    Args:
        need: name of the part of a recipe that needs the loss, for the error message.

    Raises:
        ValueError: the model returns no finite loss, no label counts, or the loss of several examples is neither the
            mean of their losses, nor the sum, nor a mean over tokens.
    """
    _check_labels(data)
    with eval_mode(model), _differentiable(model):
        without_cache(model)  # into which RWKV writes in place
        examples = _uneven_examples(model, data)
        short = _short(model, examples[0])
        name = type(model).__name__
        with torch.no_grad():  # so that no graph stays in memory
            outputs = model(**short)
        if not isinstance(outputs, ModelOutput):
            raise ValueError(
                f"{name} returns a {type(outputs).__name__}: let it return names, as a ModelOutput has them"
            )
        if outputs.get("loss") is None:
            raise ValueError(f"{need} needs the loss, but {name} returns none: {_advice(outputs)}")
        spans = set(examples[0]) >= _SPAN_LABELS and set(outputs) >= _SPAN_LOGITS
        loss = span_loss if spans else _loss_of(model, examples, short)
    return objective_with(loss, model.config.problem_type)


def check_loss(model: PreTrainedModel, data: Sequence[Batch], loss: Loss) -> None:
    """Check that a loss is a function that returns a tensor.

    Raises:
        ValueError: it is not.
    """
    advice = "give a function of the model and a batch that returns the sum of the examples' losses as a tensor"
    if not callable(loss):
        raise ValueError(f"loss={loss!r} is not a function: {advice}")
    with eval_mode(model), torch.enable_grad():
        returned = loss(model, data[0])
    if not isinstance(returned, Tensor):
        raise ValueError(f"the loss returned {returned!r}: {advice}")


def mean_warning(model: PreTrainedModel, data: Sequence[Batch], loss: Loss) -> str | None:
    """Return a warning if a loss of two examples is a mean of their losses, rather than the sum."""
    pair = first_examples(next((batch for batch in data if batch_size(batch) > 1), data[0]), 2)
    batches = [pair, *(row_of(pair, place) for place in range(batch_size(pair)))]
    try:
        with eval_mode(model), torch.enable_grad():
            together, *alone = (float(loss(model, batch).detach().sum()) for batch in batches)
    except Exception:  # it may need whole batches, such as a loss that compares their examples
        return None
    is_sum = abs(together - sum(alone)) <= 1e-2 * max(map(abs, alone))
    if is_sum or not min(alone) <= together <= max(alone):
        return None
    losses = " and ".join(f"{value:.4g}" for value in alone)
    return (
        f"loss returned {together:.4g} for two examples whose losses are {losses}, as a mean does. Return their sum: "
        "otherwise the predicted loss, and the weight of each example, depend on how examples are batched"
    )


def _advice(outputs: Any) -> str:
    """Return what to do about a model that returns no loss."""
    drone = "use the recipe drone, which only reads inputs"
    if "logits" not in outputs and "last_hidden_state" in outputs:
        return (
            'for embeddings, which need no labels, give loss=eckart.embedding_loss("mean"), or another pooling; for a '
            f"task, load the model with its head, as AutoModelForSequenceClassification does; or {drone}"
        )
    return f"add labels to each batch; load the model with the head of its task; give loss=; or {drone}"


def _check_labels(data: Sequence[Batch]) -> None:
    """Check that at least one label counts (is not -100); if each example has a single label, check that all count."""
    labels = {number: batch["labels"] for number, batch in enumerate(data) if "labels" in batch}
    classes = {number: values for number, values in labels.items() if not values.is_floating_point()}
    if classes and all(bool((values == IGNORED).all()) for values in classes.values()):
        raise ValueError(f"every label of every batch is {IGNORED}, so none counts: give other labels")
    for number, values in classes.items():
        if values.dim() == 1 and bool((values == IGNORED).any()):
            raise ValueError(
                f"batch {number} has examples with the label {IGNORED}, which count for nothing: leave them out"
            )


def _uneven_examples(model: PreTrainedModel, data: Sequence[Batch]) -> Sequence[Batch]:
    """Return up to _EXAMPLES labeled examples, each as a batch, of the batch whose examples differ most in length."""
    ignored = _ignored(model)

    def unevenness(counted: tuple[Batch, Tensor, Tensor]) -> tuple[int, float, int]:
        _, counts, labeled = counted
        return min(int(labeled.sum()), 2), float(counts.max() - counts.min()), len(counts)

    batch, counts, labeled = max(((batch, *_counts(batch, ignored)) for batch in data), key=unevenness)
    if not labeled.any():
        raise ValueError("no label of any batch counts: give labels that the loss does not ignore")
    places = [int(place) for place in counts.argsort(stable=True) if labeled[place]]
    return [row_of(batch, place) for place in dict.fromkeys((places[-1], places[0], *places[1:-1]))][:_EXAMPLES]


def _ignored(model: PreTrainedModel) -> set[int]:
    """Return the labels that do not count."""
    return {IGNORED, getattr(model.config, "semantic_loss_ignore_index", IGNORED)}


def _short(model: PreTrainedModel, example: Batch) -> Batch:
    """Return the last tokens of a long example if their labels count, else `example` itself.

    They are enough to recognize a loss per token, and the passes through the model take most of the time.
    """
    short = shortened(model, example)
    predicted = {name: values[:, 1:] for name, values in short.items() if values.dim() > 1}  # by a causal model
    return short if predicted and bool(_counts(predicted, _ignored(model))[1].all()) else example


def _counts(batch: Batch, ignored: set[int]) -> tuple[Tensor, Tensor]:
    """Return two tensors `(batch,)`: how many tokens and labels of each example count, and whether a label counts."""
    counts, labeled = torch.zeros(batch_size(batch)), torch.ones(batch_size(batch), dtype=torch.bool)
    masks = masks_of(batch)
    for name, values in batch.items():
        flat = values.flatten(1).cpu() if values.dim() > 1 else values[:, None].cpu()
        if name in masks or values.dtype == torch.bool:
            counts += flat.ne(0).sum(1)
        elif name == "labels" and not values.is_floating_point():
            count = torch.stack([flat.ne(label) for label in ignored]).all(0).sum(1)
            counts, labeled = counts + count, count > 0
    return counts, labeled


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Enable gradients by all parameters while the context lasts, even if the model is frozen."""
    frozen = [weight for weight in model.parameters() if weight.is_floating_point() and not weight.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@dataclass(frozen=True)
class _Answer:
    """Loss and logits that a model returns for a batch, with gradients of the loss.

    Attributes:
        logits: name → logits; a head for spans has several.
        gradients: name of logits → gradient of the loss by these logits.
        vector_gradient: gradient of the loss by all one-dimensional parameters of the model, joined. It also shows
            terms of the loss that do not depend on the logits, such as a router's balance.
        gradient_by_vectors: function that computes, for another loss, the gradient by the same parameters.
    """

    batch: Batch
    loss: Tensor
    logits: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    vector_gradient: Tensor
    gradient_by_vectors: Callable[[Tensor], Tensor]

    def without_graph(self) -> _Answer:
        """Return a copy without the autograd graph, to free the memory of the forward pass."""
        logits = {name: value.detach() for name, value in self.logits.items()}
        return replace(self, loss=self.loss.detach(), logits=logits)

    def has_loss(self, loss: Tensor) -> bool:
        """Return whether the model's own loss equals `loss`, in value and gradients, and depends only on `logits`."""
        gradient, *_ = torch.autograd.grad(loss, self.logits["logits"], retain_graph=True)
        others = [gradient for name, gradient in self.gradients.items() if name != "logits"]
        return (
            self._close(self.loss, loss)
            and self._close(self.gradients["logits"], gradient)
            and self._close(self.vector_gradient, self.gradient_by_vectors(loss))
            and not any(bool(gradient.any()) for gradient in others)
        )

    def is_sum(self, factor: float, answers: Sequence[_Answer]) -> bool:
        """Return whether `factor` times the batch's loss is the sum of its examples' losses.

        Args:
            answers: the answers for each example of the batch alone.
        """
        loss, vector_gradient = (
            sum((getattr(answer, name) for answer in answers), 0 * getattr(self, name))
            for name in ("loss", "vector_gradient")
        )
        pairs = [(factor * self.loss, loss), (factor * self.vector_gradient, vector_gradient)]
        pairs += [
            (factor * gradient[place : place + 1], answer.gradients[name])
            for name, gradient in self.gradients.items()
            for place, answer in enumerate(answers)
        ]
        return all(self._close(together, alone) for together, alone in pairs)

    def _close(self, a: Tensor, b: Tensor) -> bool:
        """Return whether `a` and `b` are equal up to rounding in the coarsest dtype of `a`, `b` and the logits."""
        if a.shape != b.shape:
            return False
        types = [a.dtype, b.dtype, *(value.dtype for value in self.logits.values())]
        tolerance = max(1e-3, *(4 * torch.finfo(kind).eps for kind in types))
        return float((a - b).detach().float().norm()) <= tolerance * float(b.detach().float().norm()) + 1e-12


def _answer(model: PreTrainedModel, batch: Batch) -> _Answer:
    outputs: Any = model(**batch)
    loss = outputs["loss"]
    if loss.numel() != 1 or not bool(loss.isfinite()):
        values = (name for name, values in model.named_parameters() if not bool(values.isfinite().all()))
        if (name := next(values, None)) is not None:
            raise ValueError(f"{name} has values that are not finite: give a model without them")
        raise ValueError(
            f"the loss of {type(model).__name__} for an example is not a number ({loss}): leave out examples without a "
            "label that counts"
        )
    tensors = {name: value for name, value in outputs.items() if name != "loss" and isinstance(value, Tensor)}
    floats = {name: value for name, value in tensors.items() if value.is_floating_point() and value.requires_grad}
    logits = {name: value for name, value in floats.items() if "logits" in name} or floats
    parameters = [values for values in model.parameters() if values.requires_grad and not values.is_meta]
    vectors = [values for values in parameters if values.dim() == 1]

    def gradient_by_vectors(value: Tensor) -> Tensor:
        gradients = _gradients(value, vectors)
        return torch.cat([gradient.flatten().float() for gradient in gradients] or [value.new_zeros(0)])

    gradients = dict(zip(logits, _gradients(loss, list(logits.values())), strict=True))
    return _Answer(batch, loss.reshape(()), logits, gradients, gradient_by_vectors(loss), gradient_by_vectors)


def _gradients(value: Tensor, by: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of `value` by each tensor; zeros for a tensor that `value` does not depend on."""
    if not by or not value.requires_grad:
        return [torch.zeros_like(tensor) for tensor in by]
    gradients = torch.autograd.grad(value, by, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(t) if gradient is None else gradient for t, gradient in zip(by, gradients, strict=True)]


def _loss_of(model: PreTrainedModel, examples: Sequence[Batch], short: Batch) -> Loss:
    """Find the Loss that returns, for a batch, the sum of the losses that the model returns for each example alone.

    Args:
        short: the first example, or its last tokens.
    """
    if short is not examples[0] and (loss := _token_loss(_answer(model, short))):
        return loss
    answers: list[_Answer] = []
    for example in examples:
        answer = _answer(model, example)
        if loss := _token_loss(answer):
            return loss
        answers.append(answer.without_graph())
    if len(examples) == 1:
        return mean_loss_times_batch
    together = _answer(model, {name: torch.cat([example[name] for example in examples]) for name in examples[0]})
    for loss, factor in ((mean_loss_times_batch, float(len(examples))), (sum_loss, 1.0)):
        if together.is_sum(factor, answers):
            return loss
    raise ValueError(
        f"the loss of {type(model).__name__} for several examples is neither the mean nor the sum of theirs, so "
        "statistics would depend on how examples are batched. Give batches of one example each; or give loss=, a "
        "function of the model and a batch that returns the sum of its examples' losses, as those of "
        "eckart.calibration.losses do"
    )


def _token_loss(answer: _Answer) -> Loss | None:
    """Return the Loss of a head that labels each token or predicts the next token; None for other heads."""
    labels, logits = answer.batch.get("labels"), answer.logits.get("logits")
    if labels is None or logits is None or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        return None
    if labels.dim() != 2 or logits.shape[1] < 2:
        return None
    if answer.has_loss(sum_of_means(logits, labels)):
        return token_loss
    return causal_loss if answer.has_loss(sum_of_means(logits[:, :-1], labels[:, 1:])) else None
