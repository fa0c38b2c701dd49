"""Pruning: training that leaves a share of every target's weights, wherever they stand.

Source: LPAF (Ren and Zhu, LREC-COLING 2024), section 2.2 and step 1 of section 4.1. First-order scores
are what the paper uses: they tend to empty whole rows, so that what is left has low rank; magnitudes do not (its
section 3). `sensitivity` is the same product without its sign, which a draft in the paper's source has and its text has
not (choice, for our use): signed scores prune weights, however large, that training drew towards zero. In our short
trainings that leaves chance level, from the pre-trained model, which is the paper's start, and from the fine-tuned one
alike (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from eckart.calibration.statistics import Statistics
from eckart.model.targets import Target, weight_of
from eckart.ranks.search_problem import SearchProblem
from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.shaping.outcome import share_left
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule
from eckart.training.schedules import cubic, exceeding, steps_in

_FLOOR = 0.01  # least score of a row, relative to the mean row


class Pruning(Optimization, Method):
    """Zero all but a share of every target's weights while the model trains."""

    captions: ClassVar = {"remaining": "Share of the targets’ weights that are not zero."}

    kind: Literal["pruning"] = Field(
        "pruning", description="zero weights of every target while the model trains (LPAF)"
    )
    steps: int = Field(60, ge=1, description="optimizer steps")
    score: Literal["first_order", "sensitivity", "zero_order"] = Field(
        "sensitivity",
        description="score of a weight w with gradient g, summed over steps: first_order −g w, as in the paper; "
        "sensitivity |g w|; zero_order |w|, not summed",
    )
    remaining: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = Field(
        (0.5, 0.25, 0.1),
        description="shares of each target's weights that are left: each keep takes the least that is not below it",
    )
    start: float = Field(0.1, ge=0, le=1, description="share of the steps before pruning begins")
    end: float = Field(0.3, ge=0, le=1, description="share of the steps after pruning has ended")

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        yield from exceeding("shaping", self.start, self.end)

    def shape(self, problem: SearchProblem) -> Statistics:
        """Prune the model in place; return the scores of its weights."""
        rule = WeightPruning(problem.model, problem.targets, self, self.share_at(problem.keep))
        problem.train(self, rule)
        return rule.statistics()

    def share_at(self, keep: float) -> float:
        """Return the share of the weights that is left where the factors are to have `keep` of the parameters."""
        return min((share for share in self.remaining if share >= keep), default=max(self.remaining))


class WeightPruning(Rule):
    """Scores the weights of every target and, after each update, sets all but the best of each matrix to zero.

    There is no mask: a zeroed weight goes on being updated, and stays if its score is among the best again. That can be
    with signed scores and with magnitudes; a sensitivity never falls, and stands still where the weight is zero.

    Args:
        share: of each target's weights that is left at the end.

    Raises:
        ValueError: a target would be left without weights.
    """

    def __init__(self, model: nn.Module, targets: Sequence[Target], settings: Pruning, share: float) -> None:
        for target in targets:
            if not round(share * target.parameters):
                raise ValueError(f"shaping leaves {target.name} no weight: raise shaping.remaining")
        self.settings = (settings, share, tuple(targets))
        self.pruning = settings
        self.share = share
        self.modules = {target.name: model.get_submodule(target.name) for target in targets}
        self.scores: dict[str, Tensor] = {}
        """Target → first-order scores S `(out, in)`; a target that no gradient has reached is missing."""

    def after_backward(self, step: int) -> None:
        """S_ij −= ∂L/∂W_ij · W_ij (section 2.2), of the weights that the gradient was taken at; or += its magnitude."""
        if self.pruning.score == "zero_order":
            return
        for name, module in self.modules.items():
            gradient = module.get_parameter("weight").grad
            if gradient is not None:
                gradient = gradient.T if isinstance(module, Conv1D | nn.Embedding) else gradient
                change = -gradient * weight_of(module)
                signed = self.pruning.score == "first_order"
                self.scores[name] = self._score(name) + (change if signed else change.abs())

    def after_update(self, step: int) -> None:
        """Leave the top v_t of each matrix, v_t by the cubic schedule (section 2.2).

        t counts the updates that are done (choice): with the step's own number, pruning would end one step short of
        v_f where the cool-down is 0.
        """
        steps, settings = self.pruning.steps, self.pruning
        start, end = steps_in(settings.start, steps), steps_in(settings.end, steps)
        share = cubic(step + 1, steps, start, end, self.share)
        for name, module in self.modules.items():
            weight = weight_of(module)
            if dropped := weight.numel() - round(share * weight.numel()):
                weight.masked_fill_(_lowest(self._score(name), dropped), 0)

    def statistics(self) -> Statistics:
        """Return Ŝ_i = Σ_j S_ij ÷ Σ_n Σ_j S_nj (section 4.2), `(out,)`, as kind `movement` under `TARGET.output`.

        S can be negative and a row empty, where the paper says nothing. Only weights that are left count, and of them
        those with a positive score (choice: the error of a zeroed weight is what pruning chose to ignore, and a
        negative weight on an error would reward it). A row weighs at least a hundredth of the mean (choice: its
        weights, if any are left, may not be lost for nothing, and diag(Ŝ) has an inverse).

        Raises:
            ValueError: a score is not finite.
        """
        return {"movement": {f"{name}.output": self._row_scores(name) for name in self.modules}}

    def measures(self) -> dict[str, float]:
        """Return the share of all weights that is not zero."""
        return {"remaining": share_left(self.modules.values())}

    def state(self) -> dict[str, Tensor]:
        return dict(self.scores)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.scores = dict(state)

    def _score(self, name: str) -> Tensor:
        """Return S `(out, in)` on the device of the weight, which the loop may have moved."""
        weight = weight_of(self.modules[name])
        if self.pruning.score == "zero_order":
            return weight.abs()
        precision = torch.promote_types(weight.dtype, torch.float32)
        scores = self.scores.get(name)
        return torch.zeros_like(weight, dtype=precision) if scores is None else scores.to(weight.device)

    def _row_scores(self, name: str) -> Tensor:
        scores = self._score(name)
        if not torch.isfinite(scores).all():
            raise ValueError(f"the pruning scores of {name} are not finite: lower shaping.learning_rate")
        left = weight_of(self.modules[name]) != 0
        rows = (scores.clamp(min=0) * left).float().sum(1)
        rows = rows.clamp(min=_FLOOR * float(rows.mean())) if rows.any() else torch.ones_like(rows)
        return rows / rows.sum()


def _lowest(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` lowest scores; of equal ones the first are chosen."""
    flat = scores.flatten()
    bound = flat.kthvalue(count).values
    lowest = flat < bound
    equal = (flat == bound).nonzero().squeeze(1)
    lowest[equal[: count - int(lowest.sum())]] = True
    return lowest.view_as(scores)
