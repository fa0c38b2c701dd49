"""Training rules: hooks with which a method changes the training loop, so that all methods share one loop.

The loop (tasks/training/loop.py) is transformers.Trainer. At every step it calls, in this order, `before_forward`, the
model, `extra_loss`, the backward pass, `after_backward`, the optimizer and `after_update`. Steps count from 0.

A step may run its examples in micro-batches, to save memory. Then the model, `extra_loss` and the backward pass come
once for each micro-batch, and the other hooks still once in a step. Gradients add up, each weighted by the share of the
examples that its micro-batch has. So a term of `extra_loss` must be a mean over examples, with a graph of its own; a
mean over tokens becomes one over the tokens of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.model.batches import Batch


class Rule:
    """Base class of training rules. Here no hook does anything."""

    settings: Any = None
    """Value that contains everything but tensors that decides what the rule does.

    A training resumes from a checkpoint only if the `repr` of this value and the tensors that `reads` returns are the
    same.
    """

    forward_options: Mapping[str, Any] = {}
    """Keyword arguments of the model, in addition to the batch."""

    runs_a_model: bool = False
    """Whether `extra_loss` runs a model other than the trained one, in the precision of the training."""

    done: bool = False
    """Whether training may stop before its last step."""

    def reads(self) -> Mapping[str, Tensor]:
        """Return the tensors outside the model that decide what the rule does, such as those of a teacher."""
        return {}

    def before_forward(self, step: int) -> None:
        """Hook before the first forward pass of a step, to prepare the model for this step."""

    def recomputation(self) -> AbstractContextManager[None]:
        """Return a context that puts the model back into the state that it has now, during the forward pass.

        The backward pass enters it to recompute a part of that forward pass (gradient checkpointing).
        """
        return nullcontext()

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor | None:
        """Return a term that the loop adds to the task loss, or None."""

    def after_backward(self, step: int) -> None:
        """Hook after the last backward pass of a step, to use the gradients, which are not clipped yet."""

    def after_update(self, step: int) -> None:
        """Hook after the optimizer's update, to use or change the weights."""

    def finish(self) -> None:
        """Hook after the last step, to turn the model into one that can be saved."""

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """Return parameters outside the model that are trained with it, as groups of a torch optimizer.

        Their learning rates follow the schedule. The loop clears and clips only the gradients of the model, so the rule
        clears these gradients in `before_forward`.
        """
        return ()

    def measures(self) -> dict[str, float]:
        """Return measures of the last step or its last micro-batch, for the training curve: name → value.

        No other rule may use these names.
        """
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed training needs besides the model and the optimizer."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the rule from the tensors that `state` returned."""


def module_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the state dict of a module that a rule trains, as a part of the rule's own `state`."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
