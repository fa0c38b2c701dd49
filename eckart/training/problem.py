"""What a method is asked: a model, of whose targets so much may be kept, and what the model is for.

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
