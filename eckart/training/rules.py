"""Training rules: what a method adds to the training loop, so that there is one loop for all of them.

The loop (tasks/training/loop.py) is transformers.Trainer. For every step it calls, in this order, `before_forward`, the
model, `extra_loss`, the backward pass, `after_backward`, the optimizer and `after_update`. Steps count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import Batch


class Rule:
    """Every hook does nothing by default."""

    settings: BaseModel | None = None
    """What decides how it acts, for telling one training from another."""

    forward_options: Mapping[str, Any] = {}
    """What the model is called with besides the batch."""

    def before_forward(self, step: int) -> None:
        """Set up the model for this step."""

    def recomputation(self) -> AbstractContextManager[None]:
        """What holds the model as it is now, for a part of this forward that is computed again on the way back."""
        return nullcontext()

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor | None:
        """What is added to the task loss `outputs.loss`."""

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
        """Parameters that are not the model's, as groups of a torch optimizer; their rates follow the schedule.

        The loop clears and clips the gradients of its model alone: these are cleared in `before_forward`.
        """
        return ()

    def measures(self) -> dict[str, float]:
        """Numbers of the last step for the training curve, by names that no other rule uses."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What a resumed training needs besides the model and the optimizer; empty if nothing."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""


def module_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module that belongs to a rule, for `Rule.state`."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
