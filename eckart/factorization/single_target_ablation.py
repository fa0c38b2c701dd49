"""Ablation of single targets: the original model with one target at a time replaced by its factors.

Its result is compared with what a rank search predicts for a target, which does not know of the others either.
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
    """Return how far the predictions move from the original model's if one target alone is factorized.

    For classes that is the KL divergence in nats, for values the squared error, averaged over predictions. It needs no
    labels.

    Args:
        dense: the original model; it is restored afterwards.
        small: the same model with factors.
        batches: model inputs, each tensor `(batch, …)`.
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
    """Return the mean divergence or squared error over the predictions of all batches."""
    temperature = 1.0 if classes else None
    sums = [len(a) * float(logits_error(a, b, temperature)) for a, b in zip(predictions, expected, strict=True)]
    return sum(sums) / sum(map(len, expected))
