"""Distillation: the factorized model learns from the hidden states and logits of the original model, the teacher.

Source: LoSparse (Li et al., ICML 2023), section 4.5 and appendix E. The loss is the task loss plus α_layers times the
error of the hidden states plus α_logits times the error of the logits.

(choice) The paper does not define the error of the hidden states. Here, as in the authors' code, it is the mean squared
error over tokens and features, summed (not averaged) over all hidden states, including those of the embeddings. So the
paper's α = 15 means the same here. Unlike in that code, padding does not count. In an encoder-decoder, the hidden
states of both parts are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, no_grad
from torch.nn.functional import mse_loss
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import logits_error
from eckart.calibration.predictions import Predictions, logits_of
from eckart.model.batches import Batch, without_labels
from eckart.model.module_context import without_cache
from eckart.recipe_parts import Contradiction
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.recovery.teacher_logits import TeacherLogits, top_error
from eckart.training.rules import Rule

_STATES = {
    "hidden_states": ("attention_mask",),
    "encoder_hidden_states": ("attention_mask",),
    # a decoder may read the same tokens as the encoder
    "decoder_hidden_states": ("decoder_attention_mask", "attention_mask"),
}
"""Hidden states that a model may return → possible masks of them in a batch; the first one present is used."""


class Distillation(BaseModel):
    """Settings of distillation: the weights of the terms that it adds to the loss."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    captions: ClassVar[Mapping[str, str]] = {
        "distill_layers": "Error of the hidden states against the teacher’s, before it is weighted.",
        "distill_logits": "Error of the logits against the teacher’s, before it is weighted.",
    }

    layers: float = Field(1.0, ge=0, description="weight α in the loss of the hidden states' error; 0: none")
    logits: float = Field(1.0, ge=0, description="weight α in the loss of the logits' error; 0: none")
    temperature: float = Field(
        2.0, gt=0, description="temperature that divides the logits of classes; 2 in LoSparse's code"
    )

    top: int | None = Field(
        None,
        ge=1,
        description="number of most probable classes of each prediction for which the teacher's logits are saved once, "
        "for all candidates; the rest counts as one class; null: the teacher runs in every step. For language models, "
        "at temperature 1.0",
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield the contradiction between `top` and the other settings, if there is one."""
        if self.top is not None and (self.layers or not self.logits):
            yield (
                "recovery.distillation.top",
                "saves logits and no hidden states; write layers: 0.0 and logits above 0, or top: null",
            )

    def rule(self, problem: RecoveryProblem) -> Rule:
        if self.top is None:
            return DistillationRule(problem.teacher(), self, problem.objective.classes, problem.objective.predictions)
        assert problem.teacher_logits is not None
        return TopLogitsRule(problem.teacher_logits(self.top, self.temperature), self, problem.objective.predictions)


class DistillationRule(Rule):
    """Training rule that adds to the loss the distance between the outputs of the model and those of a teacher.

    The teacher runs in eval mode and is never trained.
    """

    runs_a_model = True

    def __init__(
        self,
        teacher: PreTrainedModel,
        settings: Distillation,
        classes: bool,
        predictions: Predictions = logits_of,
    ) -> None:
        """
        Args:
            teacher: model with the same number and width of hidden states, and the same logits, as the trained model.
            classes: whether the logits are those of classes; otherwise they are predicted values.
            predictions: picks the logits to compare from a model's outputs.
        """
        self.settings = settings
        self.teacher = teacher.eval()
        without_cache(teacher)
        self.temperature = settings.temperature if classes else None
        self.predictions = predictions
        self.forward_options = {"output_hidden_states": True} if settings.layers else {}
        self.errors: dict[str, Tensor] = {}

    def reads(self) -> dict[str, Tensor]:
        return self.teacher.state_dict()

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor | None:
        """Return the weighted sum of the terms with a weight above 0, or None if there is none.

        Args:
            batch: inputs of the model; `attention_mask` and `decoder_attention_mask`, each `(batch, tokens)`, mark
                tokens that are not padding.

        Raises:
            ValueError: a model does not return the outputs that a term compares, or those of the two models differ in
                shape.
        """
        layers, logits = self.settings.layers, self.settings.logits
        if not layers and not logits:
            return None
        of_teacher = self._run_teacher(batch)
        terms: list[Tensor] = []
        if layers:
            error = _layers_error(outputs, of_teacher, batch)
            self.errors["distill_layers"] = error.detach()
            terms.append(layers * error)
        if logits:
            error = logits_error(
                self.predictions(outputs, batch), self.predictions(of_teacher, batch), self.temperature
            )
            self.errors["distill_logits"] = error.detach()
            terms.append(logits * error)
        return sum(terms[1:], terms[0])

    def measures(self) -> dict[str, float]:
        """Return the errors of the last step, not multiplied by their weights."""
        return {name: float(error) for name, error in self.errors.items()}

    def _run_teacher(self, batch: Batch) -> ModelOutput:
        inputs = without_labels(batch)
        device = next(iter(inputs.values())).device
        if self.teacher.device != device:
            self.teacher.to(device)
        with no_grad():
            return self.teacher(**inputs, **self.forward_options)


class TopLogitsRule(Rule):
    """Training rule that adds to the loss the distance from the teacher's saved logits."""

    def __init__(self, saved: TeacherLogits, settings: Distillation, predictions: Predictions) -> None:
        """
        Args:
            saved: what the teacher predicts for all examples of the training.
            predictions: picks the logits to compare from a model's outputs.
        """
        self.settings = settings
        self.saved = saved
        self.predictions = predictions
        self.error: Tensor | None = None

    def reads(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self.saved, name)) for name in ("classes", "logs", "rest")}  # no copies

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor:
        """Return the weighted divergence.

        Raises:
            KeyError: the teacher has not seen an example of the batch.
        """
        error = top_error(self.predictions(outputs, batch), *self.saved.of(batch), self.settings.temperature)
        self.error = error.detach()
        return self.settings.logits * error

    def measures(self) -> dict[str, float]:
        """Return the error of the last step, not multiplied by its weight."""
        return {} if self.error is None else {"distill_logits": float(self.error)}


def hidden_error(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the mean squared distance between two models' hidden states, summed over the states.

    Args:
        student, teacher: hidden states, `(batch, tokens, features)` each.
        mask: `(batch, tokens)`, 0 for padding; None if there is no padding.

    Raises:
        ValueError: the states differ in number or shape, or the mask does not fit them.
    """
    if [state.shape for state in student] != [state.shape for state in teacher]:
        raise ValueError(
            f"{len(student)} hidden states of the model and {len(teacher)} of the teacher are not of the same shapes: "
            "set distillation.layers to 0"
        )
    return sum((_distance(*pair, mask) for pair in zip(student, teacher, strict=True)), student[0].new_zeros(()))


def _distance(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        if mask.shape != student.shape[:2]:
            raise ValueError(
                f"hidden states of {tuple(student.shape[:2])} tokens do not fit an attention_mask of "
                f"{tuple(mask.shape)}, so padding cannot be told from data: set distillation.layers to 0"
            )
        # select real tokens instead of multiplying padding by 0: its states may be inf or nan
        student, teacher = student[mask.bool()], teacher[mask.bool()]
    return mse_loss(student.float(), teacher.float())


def _layers_error(student: ModelOutput, teacher: ModelOutput, batch: Batch) -> Tensor:
    errors = [
        hidden_error(states, teacher[name], next((batch[mask] for mask in masks if mask in batch), None))
        for name, masks in _STATES.items()
        if (states := student.get(name))
    ]
    if not errors:
        raise ValueError("the model returns no hidden states: set distillation.layers to 0")
    return sum(errors[1:], errors[0])
