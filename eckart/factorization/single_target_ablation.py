"""Ablation of single targets: measures how much the original model changes if only one target is factorized.

The pipeline compares the result with the losses that a rank search predicts, which also consider each target alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch, Objective, logits_error
from eckart.model.layers import replace
from eckart.model.module_context import eval_mode
from eckart.model.targets import Target


@torch.no_grad()
def losses_alone(
    dense: PreTrainedModel,
    small: PreTrainedModel,
    targets: Iterable[Target],
    batches: Sequence[Batch],
    objective: Objective,
) -> dict[str, float]:
    """Measure, for each target, how far the model's predictions move if only this target is factorized.

    The distance is averaged over predictions: the KL divergence in nats for classes, the squared error for values.
    No labels are needed.

    Args:
        dense: the original model; it is restored afterwards.
        small: the factorized model.
        batches: model inputs, each tensor `(batch, …)`.

    Returns:
        Name of the target → distance.
    """

    def predict() -> list[Tensor]:
        return [objective.predictions(dense(**batch), batch) for batch in batches]

    with eval_mode(dense):
        expected = predict()
        losses: dict[str, float] = {}
        for target in targets:
            modules = {layer.name: dense.get_submodule(layer.name) for layer in target.layers}
            for name in modules:
                replace(dense, name, small.get_submodule(name))
            losses[target.name] = _distance(predict(), expected, objective.classes)
            for name, module in modules.items():
                replace(dense, name, module)
        return losses


def _distance(predictions: Sequence[Tensor], expected: Sequence[Tensor], classes: bool) -> float:
    """Return the mean KL divergence (for classes) or squared error over the predictions of all batches."""
    temperature = 1.0 if classes else None
    sums = [len(a) * float(logits_error(a, b, temperature)) for a, b in zip(predictions, expected, strict=True)]
    return sum(sums) / sum(map(len, expected))
