"""The input of a recovery: a factorized model, and access to the dense models behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from eckart.training.problem import Problem


@dataclass(frozen=True)
class RecoveryProblem(Problem):
    """Input of a recovery; `model` is factorized.

    Attributes:
        teacher: loads the original model of the study onto the device of `model`.
        source: loads the dense model that was factorized: the model that the recipe begins with, or if shaping or the
            rank search changed its weights, the result of that.
    """

    teacher: Callable[[], PreTrainedModel]
    source: Callable[[], PreTrainedModel]
