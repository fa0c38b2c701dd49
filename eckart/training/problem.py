"""The input of a method: a model, its targets, how much of them may be kept, and the task's loss.

More is known before the factorization (eckart/ranks/search_problem.py) and after it
(eckart/recovery/recovery_problem.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from eckart.calibration.losses import Objective
from eckart.model.targets import Target


@dataclass(frozen=True)
class Problem:
    """A method may change `model` in place.

    Attributes:
        targets: in order of execution.
        keep: share of the parameters of `targets`, in (0, 1].
        seed: of all that is drawn.
        objective: losses and predictions of the task.
    """

    model: PreTrainedModel
    targets: tuple[Target, ...]
    keep: float
    seed: int
    objective: Objective
