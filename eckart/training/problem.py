"""The input of a method: a model, its targets, the share of their parameters to keep, and the losses of the task.

Two subclasses add what only methods before the factorization get (eckart/ranks/search_problem.py), or only those after
it (eckart/recovery/recovery_problem.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from eckart.calibration.losses import Objective
from eckart.model.targets import Target


@dataclass(frozen=True)
class Problem:
    """Input of a method, which may change `model` in place.

    Attributes:
        targets: in order of execution.
        keep: share of the targets' parameters that may be kept, in (0, 1].
        seed: seed of all random draws.
        objective: losses and predictions of the task.
    """

    model: PreTrainedModel
    targets: tuple[Target, ...]
    keep: float
    seed: int
    objective: Objective
