"""Units of the losses that a rank search predicts: half the squared weighted error of a truncated target."""

from __future__ import annotations

_UNITS = {
    "kfac": "nats per example",
    "inputs": "squared error of the layer's outputs, per example",
    "none": "squared error of the weights",
    "fisher": "squared error of the weights × Fisher score",
    "taylor": "squared error of the weights × Taylor score",
    "movement": "squared error of the weights × squared pruning score",
    "fisher_inputs": "squared error of the layer's outputs × Fisher score, per example",
}


def loss_unit(weighting: str, classes: bool = True) -> str:
    """Return the unit of the loss that is predicted under a weighting.

    Args:
        weighting: `kind` of the recipe's weighting.
        classes: whether the task's loss is a cross-entropy; otherwise it is a squared error (regression), and what kfac
            predicts has the unit of its square.
    """
    return _UNITS[weighting] if classes or weighting != "kfac" else "squared unit of the loss"


def is_loss(weighting: str, classes: bool = True) -> bool:
    """Whether the predicted loss has the unit of the task's loss, so that it can equal a measured one."""
    return weighting == "kfac" and classes
