"""Mixed-rank fine-tuning: each step runs each target at random with its factors or with the weight that they replaced.

Source: LPAF (Ren and Zhu, LREC-COLING 2024), section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import log_softmax, mse_loss
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import Loss, mean_loss
from eckart.calibration.predictions import Predictions, logits_of
from eckart.model.batches import Batch
from eckart.model.layers import LowRankLinear, low_rank_layers
from eckart.model.targets import weight_of
from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.recovery.distillation import Distillation
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.training import schedules
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule


class MixedRank(Optimization, Method):
    """Settings of mixed-rank fine-tuning.

    A target runs with its dense weight at a probability p that falls linearly to 0. While p is above 0, each step runs
    the model twice, with different draws, and trains the two passes to agree.
    """

    alone = True
    captions: ClassVar = {
        "p": "Probability that a target runs as the weight it was factorized from.",
        "consistency": "How far two passes of different rank disagree, before it is weighted.",
        **Distillation.captions,
    }

    kind: Literal["mixed_rank"] = Field(
        "mixed_rank", description="runs each target at random as its factors or as its dense weight (LPAF)"
    )
    initial: float = Field(0.5, ge=0, le=1, description="probability p of the dense weight in the first step")
    until: float = Field(0.5, ge=0, le=1, description="share of the steps after which p is 0")
    consistency: float = Field(1.0, ge=0, description="weight in the loss of the disagreement of two passes")
    consistency_after: bool = Field(False, description="whether two passes go on after p is 0")
    distillation: Distillation | None = Field(
        None,
        description="distillation from the original model: {layers: 1.0, logits: 1.0, temperature: 2.0}; null: none",
    )

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.ranks.leaves_low_rank:
            yield (
                "recovery",
                f"mixed_rank needs full-rank weights, but {recipe.ranks.kind} leaves low-rank weights; write finetune",
            )
        if recipe.residual is not None:
            yield "recovery", "mixed_rank and a residual both use the dense weight beside factors; write finetune"
        if self.distillation:
            yield from self.distillation.contradictions()

    def rules(self, problem: RecoveryProblem) -> Iterator[Rule]:
        source, task = problem.source(), problem.objective
        weights = {name: weight_of(source.get_submodule(name)) for name in low_rank_layers(problem.model)}
        yield MixedRankRule(
            problem.model, weights, self, task.classes, problem.seed, task.predictions, task.training_loss
        )
        if self.distillation:
            yield self.distillation.rule(problem)


class MixedLinear(nn.Module):
    """Layer x_out = (1 − z) left right x + z W x, plus the bias (section 4.3), with z 0 or 1.

    W is not a parameter and not part of the state dict. The paper does not say whether W (T_sparse) goes on training.
    Here it is frozen (choice), so that the factors are drawn to a fixed point.

    Only the product that z selects is computed. The other product has no gradient, so AdamW skips its weights. If both
    were computed and multiplied by z and 1 − z, AdamW's momentum and weight decay would go on changing these weights.
    """

    weight: Tensor

    def __init__(self, low: LowRankLinear, weight: Tensor) -> None:
        super().__init__()
        self.low = low
        self.dense = False
        """z: whether the layer uses W."""
        self.register_buffer("weight", weight.detach().to(low.left.weight), persistent=False)
        self.train(low.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.dense:
            return self.low.run_dense(x, self.weight)
        return self.low(x)


class MixedRankRule(Rule):
    """Training rule that trains the factors of targets while some targets, drawn at random, run with dense weights.

    Args:
        weights: target name → weight W `(out, in)` that its factors approximate; other targets run as they are.
        classes: whether the logits are those of classes (disagreement by KL) or values of a regression (by MSE).
        seed: seed of the draws of z.
        predictions: picks the logits to compare from a model's outputs.
        loss: loss of the task; None: the model's own.
    """

    settings: MixedRank

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Mapping[str, Tensor],
        settings: MixedRank,
        classes: bool,
        seed: int,
        predictions: Predictions = logits_of,
        loss: Loss | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.classes = classes
        self.predictions = predictions
        self.loss = loss
        self.until = schedules.steps_in(settings.until, settings.steps)
        self.generator = torch.Generator().manual_seed(seed)
        self.p = settings.initial
        self.disagreement = 0.0
        self.first: list[bool] = []
        self.second: list[bool] | None = None
        """z of the two passes of the present step; None: it has one pass."""
        layers = low_rank_layers(model)
        self.layers = {name: MixedLinear(layers[name], weight) for name, weight in weights.items()}
        for name, layer in self.layers.items():
            model.set_submodule(name, layer)

    def before_forward(self, step: int) -> None:
        """Set p = max(0, p_init − d·t), and draw z of both passes; all micro-batches of the step use the same two.

        d is p_init ÷ the number of steps until p is 0.
        """
        self.p = schedules.linear(step, self.until, self.settings.initial)
        self.first = self._draw()
        self.second = self._draw() if self.p or self.settings.consistency_after else None
        self._set(self.first)

    def recomputation(self) -> AbstractContextManager[None]:
        """Return a context that restores the z of the current forward pass.

        The backward pass may recompute a forward pass (gradient checkpointing). By then the second pass has drawn its
        own z.
        """
        drawn = [layer.dense for layer in self.layers.values()]

        @contextmanager
        def as_drawn() -> Iterator[None]:
            now = [layer.dense for layer in self.layers.values()]
            self._set(drawn)
            try:
                yield
            finally:
                self._set(now)

        return as_drawn()

    def extra_loss(self, model: PreTrainedModel, batch: Batch, outputs: ModelOutput) -> Tensor | None:
        """Return the term that makes the loss ½ (L_task(z¹) + L_task(z²)) + `consistency` · D(y(z¹), y(z²)).

        D is the disagreement of the two passes. The mean of both task losses is ours (choice): the paper adds D and
        does not say to which task loss. z² is drawn independently, so it can equal z¹. Once p is 0, the two passes
        differ only by dropout.
        """
        if self.second is None:
            self.disagreement = 0.0
            return None
        self._set(self.second)
        second = model(**batch)
        self._set(self.first)
        disagreement = self._disagreement(self.predictions(outputs, batch), self.predictions(second, batch))
        self.disagreement = float(disagreement.detach())
        first_loss, second_loss = (mean_loss(self.loss, result, batch) for result in (outputs, second))
        return (second_loss - first_loss) / 2 + self.settings.consistency * disagreement

    def reads(self) -> dict[str, Tensor]:
        return {name: layer.weight for name, layer in self.layers.items()}

    def finish(self) -> None:
        for name, layer in self.layers.items():
            self.model.set_submodule(name, layer.low)

    def measures(self) -> dict[str, float]:
        """Return p, and the disagreement D of the last step, not multiplied by its weight."""
        return {"p": self.p, "consistency": self.disagreement}

    def state(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])

    def _draw(self) -> list[bool]:
        """Draw z ~ Bernoulli(p) for each target."""
        return [draw < self.p for draw in torch.rand(len(self.layers), generator=self.generator).tolist()]

    def _set(self, dense: Sequence[bool]) -> None:
        for layer, z in zip(self.layers.values(), dense, strict=True):
            layer.dense = z

    def _disagreement(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the disagreement D of the logits `(predictions, classes)` of two passes, a mean over the predictions.

        The paper's KL has no direction. Here D is the mean of both directions (choice), because neither pass is the
        better one: ½ (KL(p‖q) + KL(q‖p)) = ½ Σ (p − q)(log p − log q).
        """
        if not self.classes:
            return mse_loss(first, second)
        if not len(first):  # a batch without a labeled token
            return (first + second).float().sum()
        p, q = log_softmax(first.float(), -1), log_softmax(second.float(), -1)
        return ((p.exp() - q.exp()) * (p - q)).sum(-1).mean() / 2
