"""The input of a recovery: a factorized model, and access to the dense models behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from eckart.recovery.teacher_logits import TeacherLogits
from eckart.training.problem import Problem


@dataclass(frozen=True)
class RecoveryProblem(Problem):
    """Input of a recovery; `model` is factorized.

    Attributes:
        teacher: loads the original model of the study onto the device of `model`.
        source: loads the dense model that was factorized: the model that the recipe begins with, or if shaping or the
            rank search changed its weights, the result of that.
        teacher_logits: returns the original model's most probable classes, k of them at a temperature, for all examples
            of the training; None outside of one.
    """

    teacher: Callable[[], PreTrainedModel]
    source: Callable[[], PreTrainedModel]
    teacher_logits: Callable[[int, float], TeacherLogits] | None = None
