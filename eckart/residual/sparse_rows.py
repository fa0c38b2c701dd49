"""Sparse rows beside the factors: W = left right + S, where whole rows of S are pruned while recovery trains.

Source: LoSparse (Li et al., ICML 2023), sections 2.2, 2.3, 3 and algorithm 1. The paper's neurons are the columns of W
in its forward pass Y = X W; here they are the rows of a weight `(out, in)`.

(choice) The paper keeps a share of the neurons of all targets. Rows of different targets have different lengths, so
here the share is a share of parameters. It falls to the part of the budget that the factors leave. A target counts with
its final size: if its factors and rows together are as large as the dense weight, the target stays dense and keeps all
rows.

Rows can also be chosen by their movement (Sanh, Wolf and Rush, NeurIPS 2020, section 4), for whole rows as in block
pruning (Lagunas et al., EMNLP 2021). Without factors, this is movement pruning, a baseline of LoSparse's tables 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from eckart.model.layers import LowRankLinear, factorized, gradient_of, low_rank_layers, matrix_of, merge
from eckart.ranks.budget import allowance
from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.training.problem import Problem
from eckart.training.rules import Rule
from eckart.training.schedules import cubic, exceeding, steps_in

_MEAN, _KEPT = ".mean", ".kept"  # in the rule's state, these follow the name of a target


class SparseRows(Method):
    """Settings of a residual S that starts as W − left right and loses whole rows while recovery trains.

    With the score `sensitivity` and without a `window`, this is algorithm 1 as printed. Scores are computed before each
    update and smoothed, and rows are pruned at every step.

    With a `window`, it is the authors' code. Scores are computed after each update, averaged over `window` steps and
    then smoothed. Rows are pruned after each window, and at every step once the schedule has ended. Between two
    prunings, pruned rows train like the others, so they get scores and may come back.

    With the score `movement`, pruned rows are only masked until training ends (`RowMasking`).
    """

    captions: ClassVar = {"rows": "Share of the sparse rows that are left."}

    kind: Literal["sparse_rows"] = Field(
        "sparse_rows", description="rows of the remainder W − Ŵ; training prunes some of them (LoSparse)"
    )
    low_rank: float = Field(
        0.1, ge=0, le=1, description="share of the budget for the factors; 0: pruning only, 1: factors only"
    )
    score: Literal["sensitivity", "movement"] = Field(
        "sensitivity",
        description="score of a row of weights w with gradients g. sensitivity: mean of |g w|, smoothed over steps; "
        "movement: Σ −g w over all steps, also while the row is masked",
    )
    smoothing: float = Field(0.85, ge=0, lt=1, description="smoothing β of sensitivities over steps (eq. 3)")
    start: float = Field(0.1, ge=0, le=1, description="share of the steps before pruning begins")
    end: float = Field(0.3, ge=0, le=1, description="share of the steps after pruning has ended")
    window: int | None = Field(
        None,
        ge=1,
        description="steps between two rounds of pruning; pruned rows may come back between them; null: every step; "
        "for sensitivities only",
    )

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.ranks.leaves_low_rank:
            yield "residual", f"{recipe.ranks.kind} leaves low-rank weights, so sparse rows would be zero; write null"
        if self.low_rank == 0 and not recipe.ranks.by_size:
            yield "ranks", "all ranks are 0 because residual.low_rank is 0; write uniform"
        if recipe.storage == "pivoted":
            yield "storage", "is pivoted, but sparse rows need factors; write factors"
        if not recipe.recovery.trains:
            yield "recovery.steps", "is 0, but the residual is pruned while recovery trains; write at least 1"
        yield from exceeding("residual", self.start, self.end)
        if self.window is not None and self.score == "movement":
            yield "residual.window", f"is {self.window}, but by movement rows are masked anew at every step; write null"
            return
        steps = next((training.steps for training in recipe.recovery.trainings.values()), 0)  # of the first training
        if self.window is not None and self.window > (most := steps - _cool_down(self, steps)):
            yield (
                "residual.window",
                f"is {self.window}, but all pruning is done after {most} steps; write at most {most}",
            )

    def rule(self, problem: Problem, steps: int) -> RowPruning:
        """Return the rule that prunes rows in a training of `steps` steps until the targets meet their budget."""
        low_rank = factorized(problem.model)
        dense = sum(target.parameters for target in problem.targets if target.name not in low_rank)
        rule = RowMasking if self.score == "movement" else RowPruning
        return rule(problem.model, self, allowance(problem.targets, problem.keep) - dense, steps)


def _cool_down(settings: SparseRows, steps: int) -> int:
    """Return the number of steps after pruning has ended, at least 1."""
    return max(1, steps_in(settings.end, steps))


@dataclass
class _Rows:
    """State of the rows of one target.

    Attributes:
        layer: the low-rank layer; its residual has all rows.
        scores: smoothed importance of each row, `(out,)`.
        kept: whether each row is kept, `(out,)`.
        mean: mean score of each row since the window began, `(out,)`.
        gradient: gradient of the residual `(out, in)`, stored from the backward pass until the update is done.
    """

    layer: LowRankLinear
    scores: Tensor
    kept: Tensor
    mean: Tensor
    gradient: Tensor | None = None

    @property
    def dense(self) -> int:
        """Number of parameters of the dense weight."""
        return self.layer.out_features * self.layer.in_features

    @property
    def factors(self) -> int:
        """Number of parameters of the target without any row, at most that of the dense weight."""
        return min(self.dense, sum(factor.numel() for factor in self.layer.factors))

    def price(self, count: Tensor) -> Tensor:
        """Return the number of parameters that `count` rows add to the factors, up to the size of the dense weight."""
        return (count * self.layer.in_features).clamp(max=self.dense - self.factors)

    def prices(self) -> Tensor:
        """Return the number of parameters that each row adds if all rows with higher scores are kept, `(out,)`."""
        places = _order(self.scores).argsort()
        return self.price(places + 1) - self.price(places)

    @property
    def weight(self) -> Tensor:
        """The residual S `(out, in)`; writing to it changes the layer."""
        assert self.layer.residual is not None
        return matrix_of(self.layer.residual).detach()

    @property
    def slope(self) -> Tensor | None:
        """The gradient by S `(out, in)`, if there is one; writing to it changes what the optimizer reads."""
        assert self.layer.residual is not None
        return gradient_of(self.layer.residual)

    @property
    def pruned(self) -> Tensor:
        """Whether each row is not kept, `(out,)`, on the device of the weight."""
        return ~self.kept.to(self.weight.device)

    def is_dense(self, kept: Tensor) -> Tensor:
        """Return, as a tensor `()`, whether factors and rows `kept` `(out,)` are as large as the dense weight."""
        return self.price(kept.sum()) == self.dense - self.factors


class RowPruning(Rule):
    """Training rule that prunes the least important rows of S until factors and rows of all targets meet the budget.

    The residuals of all low-rank layers have all `out` rows at first. While the model trains, pruned rows are zeros.
    `finish` removes them, and merges the parts of a target that stays dense.
    """

    def __init__(self, model: PreTrainedModel, settings: SparseRows, budget: int, steps: int) -> None:
        """
        Args:
            budget: number of parameters that all factorized targets together may have at the end, without biases.
            steps: number of steps of the training.

        Raises:
            ValueError: `steps` is 0, no layer has a residual, or the factors exceed the budget.
        """
        if steps < 1:
            raise ValueError("rows are pruned while the model trains, and there is no step: raise recovery.steps")
        self.settings = settings
        self.model = model
        self.window = settings.window
        self.steps = steps
        self.end = _cool_down(settings, steps)
        self.start = min(steps_in(settings.start, steps), steps - self.end)
        self.targets: dict[str, _Rows] = {}
        for name, layer in low_rank_layers(model).items():
            if layer.rows is not None:
                zeros = torch.zeros(layer.out_features, device=layer.rows.device)
                self.targets[name] = _Rows(layer, zeros, kept=torch.ones_like(zeros, dtype=torch.bool), mean=zeros)
        if not self.targets:
            raise ValueError("no target has sparse rows to prune: lower keep, or set residual to null")
        taken = sum(rows.factors for rows in self.targets.values())
        if taken > budget:
            raise ValueError(
                f"the factors have {taken} parameters, more than the {budget} of all targets: lower residual.low_rank "
                "or raise keep"
            )
        self.at_first = sum(rows.dense - rows.factors for rows in self.targets.values())
        """Number of parameters that all rows together add to the factors, before pruning."""
        # at low_rank 1 no rows are wanted, although the ranks, rounded down, may leave some of the budget
        self.room = min(budget - taken, self.at_first) if settings.low_rank < 1 else 0

    def after_backward(self, step: int) -> None:
        """Score the rows by eq. 2 to 4; with a window, only store the gradients, for the scores in `after_update`.

        The mean over a row and the smoothing are linear, so the mean is taken first and then smoothed. Smoothing starts
        from 0 (choice; the paper does not say), so all scores are too small by the same factor 1 − β^t.
        """
        for rows in self.targets.values():
            if self.window is None:
                self._smooth(rows, _sensitivity(rows, rows.slope))
            else:
                rows.gradient = rows.slope

    def after_update(self, step: int) -> None:
        """Prune the rows by eq. 9 after the update, with scores from before the update.

        The optimizer also moves pruned rows, by gradient and momentum, so they are set to zero again. Without a window,
        they do not come back: the sensitivity of a zero row is zero, so its score shrinks by the factor β at each step,
        and no score shrinks faster. With a window, a pruned row moves until the next pruning, and its score is the
        effect that it has on the loss meanwhile.

        t counts from 0 (choice, as in the authors' code).
        """
        if self.window is not None:
            self._average(step % self.window)
            if step % self.window and step < self.steps - self.end:
                return
        self._prune(self._room_at(step))

    def finish(self) -> None:
        """Store only the surviving rows. The outputs of the model are the same as with zeros for the other rows."""
        self._prune(self.room)
        for name, rows in self.targets.items():
            if rows.is_dense(rows.kept):
                merge(self.model, name)
                continue
            rows.layer.keep_rows(rows.kept.to(rows.weight.device))

    def measures(self) -> dict[str, float]:
        """Return the share of the rows that are kept."""
        kept = sum(int(rows.kept.sum()) for rows in self.targets.values())
        return {"rows": kept / sum(len(rows.kept) for rows in self.targets.values())}

    def state(self) -> dict[str, Tensor]:
        scores = {name: rows.scores.clone() for name, rows in self.targets.items()}
        if self.window is None:
            return scores
        means = {f"{name}{_MEAN}": rows.mean.clone() for name, rows in self.targets.items()}
        return scores | means | {f"{name}{_KEPT}": rows.kept.clone() for name, rows in self.targets.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, rows in self.targets.items():
            rows.scores = state[name].clone()
            rows.mean = state.get(f"{name}{_MEAN}", rows.mean).clone()
            rows.kept = state.get(f"{name}{_KEPT}", rows.kept).clone()

    def _smooth(self, rows: _Rows, score: Tensor) -> None:
        smoothing = self.settings.smoothing
        rows.scores = smoothing * rows.scores.to(score.device) + (1 - smoothing) * score

    def _average(self, steps: int) -> None:
        """Add the scores of this step to the mean over the window, which has `steps` steps so far.

        As in the authors' code, the mean of a window is smoothed at the first step of the next window, and rows are
        pruned at that step. The gradients are already clipped here (choice; the authors' code does not clip): by one
        factor for all rows of a step.
        """
        for rows in self.targets.values():
            score, rows.gradient = _sensitivity(rows, rows.gradient), None
            mean = rows.mean.to(score.device)
            if not steps:
                self._smooth(rows, mean)
            rows.mean = (mean * steps + score) / (steps + 1)

    def _room_at(self, step: int) -> int:
        """Return the number of parameters that all rows together may have at this step, by the cubic schedule."""
        share = cubic(step, self.steps, self.start, self.end, self.room / self.at_first if self.at_first else 1.0)
        return max(self.room, math.floor(share * self.at_first))

    def _prune(self, room: int) -> None:
        """Choose the rows that are kept, and set the others to zero."""
        self._choose(room)
        for rows in self.targets.values():
            rows.weight[rows.pruned] = 0

    def _choose(self, room: int) -> None:
        """Keep rows of all targets in descending order of score until `room` parameters are used."""
        targets = list(self.targets.values())
        order = _order(torch.cat([rows.scores for rows in targets]))
        prices = torch.cat([rows.prices() for rows in targets])
        kept = torch.empty_like(order, dtype=torch.bool)
        kept[order] = prices[order].cumsum(0) <= room
        for rows, mask in zip(targets, kept.split([len(rows.scores) for rows in targets]), strict=True):
            rows.kept = mask | rows.is_dense(mask)


class RowMasking(RowPruning):
    """Training rule of movement pruning: each row is multiplied by a mask of 0 or 1, and its score learns the mask.

    Source: Sanh, Wolf and Rush, NeurIPS 2020, section 4. The rows with the best scores s have mask m = 1. The gradient
    by m_i is used as the gradient by s_i (straight-through), so after all steps s_i = −Σ_t ∂L/∂m_i, which is the sum of
    −w ∂L/∂(m_i w) over the weights w of the row. Masked rows have it, too. Their weights are not
    lost, so that a masked row can come back. They get no gradient; the optimizer's momentum and weight decay move them.

    (choice) s starts at 0 and its learning rate is 1, since only the order of scores matters. Rows of all targets
    compete, as they do for their sensitivities; the paper chooses within each matrix. The number of rows follows
    LoSparse's schedule.
    """

    hidden: Mapping[str, Tensor] = {}
    """Target name → the masked rows of its residual, from before the forward pass until after the backward pass."""

    def before_forward(self, step: int) -> None:
        """Choose the masks of this step, and set the masked rows to zero for its forward and backward passes."""
        self._choose(self._room_at(step))
        self.hidden = {name: rows.weight[rows.pruned] for name, rows in self.targets.items()}
        for rows in self.targets.values():
            rows.weight[rows.pruned] = 0

    def after_backward(self, step: int) -> None:
        """Restore the masked rows, add −Σ w g to the score of each row, and clear the gradients of the masked rows."""
        for name, rows in self.targets.items():
            weight, gradient = rows.weight, rows.slope
            weight[rows.pruned] = self.hidden[name]
            if gradient is not None:
                rows.scores = rows.scores.to(weight.device) - (weight.float() * gradient.float()).sum(1)
                gradient[rows.pruned] = 0
        self.hidden = {}

    def after_update(self, step: int) -> None:
        """Do nothing: the masks of the next step are chosen before its forward pass."""


def _sensitivity(rows: _Rows, gradient: Tensor | None) -> Tensor:
    """Return the mean of |S ⊙ ∂L/∂S| over each row, `(out,)`, for the current S; 0 if there is no gradient."""
    weight = rows.weight
    if gradient is None:
        return torch.zeros(len(weight), device=weight.device)
    return (weight.float() * gradient.float()).abs().mean(dim=1)


def _order(scores: Tensor) -> Tensor:
    """Return the indices of the scores from the highest to the lowest; equal scores keep their order."""
    return scores.argsort(descending=True, stable=True)
