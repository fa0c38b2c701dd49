"""Ablation of single targets: measures how much the original model changes if only one target is factorized.

The pipeline compares the result with the losses that a rank search predicts, which also consider each target alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.losses import Objective, logits_error
from eckart.model.batches import Batch
from eckart.model.layers import replaced
from eckart.model.module_context import eval_mode
from eckart.model.targets import Target
from eckart.progress import Progress, silent


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
    factorized = {
        target.name: {layer.name: small.get_submodule(layer.name) for layer in target.layers} for target in targets
    }
    return losses_of_replacements(dense, factorized, batches, objective)


@torch.no_grad()
def losses_of_replacements(
    model: PreTrainedModel,
    replacements: Mapping[str, Mapping[str, nn.Module]],
    batches: Sequence[Batch],
    objective: Objective,
    progress: Progress = silent,
) -> dict[str, float]:
    """Measure how far the predictions of `model` move by each of several replacements of modules.

    In memory are the predictions of one batch with and without a replacement.

    Args:
        model: restored afterwards.
        replacements: any name → name of a module → the module to put in its place.
        batches: model inputs, each tensor `(batch, …)`.
        progress: shows how far the measurement has come, in batches.

    Returns:
        Name of the replacement → distance, as in `losses_alone`.
    """
    sums, count = dict.fromkeys(replacements, 0.0), 0
    with eval_mode(model):
        for batch in progress(batches, "Single targets", "batch"):
            expected = objective.predictions(model(**batch), batch)
            count += len(expected)
            for name, modules in replacements.items():
                with replaced(model, modules):
                    predictions = objective.predictions(model(**batch), batch)
                sums[name] += len(expected) * distance(predictions, expected, objective.classes)
    return {name: value / count for name, value in sums.items()}


def distance(predictions: Tensor, expected: Tensor, classes: bool) -> float:
    """Return the mean KL divergence (for classes) or squared error (for values) of predictions."""
    return float(logits_error(predictions, expected, 1.0 if classes else None))
