"""The input of a recovery: the factorized model and what it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from eckart.training.problem import Problem


@dataclass(frozen=True)
class RecoveryProblem(Problem):
    """The model is factorized.

    Attributes:
        teacher: loads the dense model of the study to where the factorized one is.
        source: loads the dense model whose weights were factorized: the teacher, or what shaping or search made of it.
    """

    teacher: Callable[[], PreTrainedModel]
    source: Callable[[], PreTrainedModel]
