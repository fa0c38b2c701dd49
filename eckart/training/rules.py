"""Training rules: what a method adds to the training loop, so that there is one loop for all of them.

The loop (tasks/training/loop.py) is transformers.Trainer. For every step it calls, in this order, `before_forward`, the
model, `extra_loss`, the backward pass, `after_backward`, the optimizer and `after_update`. Steps count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import Batch


class Rule:
    """Base class of training rules; every hook does nothing."""

    settings: Any = None
    """The settings by which a resumed training is recognized: all that decides what the rule does, with a `repr`."""

    forward_options: Mapping[str, Any] = {}
    """Keyword arguments of the model besides the batch."""

    def before_forward(self, step: int) -> None:
        """Set up the model for this step."""

    def recomputation(self) -> AbstractContextManager[None]:
        """Return a context that keeps the model as it is now, for a part of the forward that backward recomputes."""
        return nullcontext()

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor | None:
        """Return what is added to the task loss `outputs.loss`, or None."""

    def after_backward(self, step: int) -> None:
        """Read the gradients; they are not clipped yet."""

    def after_update(self, step: int) -> None:
        """Read or project the weights that the optimizer left."""

    def finish(self) -> None:
        """After the last step: leave a model that can be saved."""

    @property
    def done(self) -> bool:
        """Whether training may stop before its last step."""
        return False

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """Return parameters that are not the model's, as groups of a torch optimizer; their rates follow the schedule.

        The loop clears and clips the gradients of its model alone: these are cleared in `before_forward`.
        """
        return ()

    def measures(self) -> dict[str, float]:
        """Return numbers of the last step for the training curve, by names that no other rule uses."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return what a resumed training needs besides the model and the optimizer; empty if nothing."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""


def module_state(module: nn.Module) -> dict[str, Tensor]:
    """Copy the state of a module that belongs to a rule, for `Rule.state`."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
