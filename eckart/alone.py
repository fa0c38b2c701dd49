"""What each target's factors do alone: the dense model with one target after the other replaced.

To set beside what a rank search predicts of a target, which knows nothing of the others either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.layers import replace
from eckart.losses import Batch, Objective, logits_error
from eckart.modes import eval_mode
from eckart.targets import Target


@torch.no_grad()
def losses_alone(
    dense: PreTrainedModel,
    small: PreTrainedModel,
    targets: Iterable[Target],
    batches: Sequence[Batch],
    objective: Objective,
) -> dict[str, float]:
    """Target → distance of the answers from the dense model's: a divergence of classes in nats, or the mean square of
    the differences of values; a mean over predictions. It is of second order, and needs no labels.

    Args:
        dense: comes back as it was.
        small: the same model with factors.
        batches: model inputs, each tensor `(batch, …)`.
    """
    with eval_mode(dense):
        answers = [objective.predictions(dense(**batch), batch) for batch in batches]
        found: dict[str, float] = {}
        for target in targets:
            present = {each.name: dense.get_submodule(each.name) for each in target.maps}
            for name in present:
                replace(dense, name, small.get_submodule(name))
            others = [objective.predictions(dense(**batch), batch) for batch in batches]
            for name, module in present.items():
                replace(dense, name, module)
            found[target.name] = _distance(others, answers, objective.classes)
        return found


def _distance(others: Sequence[Tensor], answers: Sequence[Tensor], classes: bool) -> float:
    sums = [
        len(one) * float(logits_error(one, other, 1.0 if classes else None))
        for one, other in zip(others, answers, strict=True)
    ]
    return sum(sums) / sum(map(len, answers))
