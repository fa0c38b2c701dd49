"""Pruning: a training that zeroes single weights of every target until a given share is left.

Source: LPAF (Ren and Zhu, LREC-COLING 2024), section 2.2 and step 1 of section 4.1.

The paper uses first-order scores, because they tend to empty whole rows, so that the remaining weights have low rank;
magnitudes do not (its section 3). `sensitivity` is the same product without its sign. It is in a draft in the paper's
source but not in its text (choice, for our use). Signed scores prune weights that training moved towards zero, however
large they are. In trainings of 60 steps, that leaves the model at chance level, whether it starts from the pre-trained
model, as in the paper, or from the fine-tuned one. So the recipe `lpaf`, which has signed scores, trains for many steps
(docs/explanation/methods/lpaf.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from eckart.calibration.statistics import Statistics
from eckart.model.layers import by_outputs
from eckart.model.targets import Target, weight_of
from eckart.precision import sum_dtype
from eckart.ranks.search_problem import SearchProblem
from eckart.recipe_parts import Contradiction, Method, RecipeParts
from eckart.shaping.weight_measures import share_left
from eckart.training.optimizer_settings import Optimization
from eckart.training.rules import Rule
from eckart.training.schedules import cubic, exceeding, steps_in

_FLOOR = 0.01  # smallest score of a row, ÷ the mean score of the rows


class Pruning(Optimization, Method):
    """Settings of a training that zeroes all but a share of the weights of every target."""

    captions: ClassVar = {"remaining": "Share of the targets’ weights that are not zero."}

    kind: Literal["pruning"] = Field(
        "pruning", description="trains the model and zeroes weights of every target (LPAF)"
    )
    steps: int = Field(60, ge=1, description="optimizer steps")
    score: Literal["first_order", "sensitivity", "zero_order"] = Field(
        "sensitivity",
        description="score of a weight w with gradient g. first_order: Σ −g w over the steps, as in the paper; "
        "sensitivity: Σ |g w| over the steps; zero_order: |w|",
    )
    remaining: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = Field(
        (0.5, 0.25, 0.1),
        description="shares of each target's weights that are left; each keep takes the smallest that is not "
        "below it, and a keep above all takes the largest",
    )
    start: float = Field(0.1, ge=0, le=1, description="share of the steps before pruning begins")
    end: float = Field(0.3, ge=0, le=1, description="share of the steps after pruning has ended")

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        yield from exceeding("shaping", self.start, self.end)

    def shape(self, problem: SearchProblem) -> Statistics:
        """Prune the targets of the model in place, and return the scores of the rows of their weights."""
        rule = WeightPruning(problem.model, problem.targets, self, self.share_at(problem.keep))
        problem.train(self, rule)
        return rule.statistics()

    def share_at(self, keep: float) -> float:
        """Return the share of the weights to leave for this `keep`: the smallest of `remaining` not below `keep`."""
        return min((share for share in self.remaining if share >= keep), default=max(self.remaining))


class WeightPruning(Rule):
    """Training rule that scores the weights of every target and zeroes those with the lowest scores after each update.

    There is no mask. The optimizer goes on updating a zeroed weight, and the weight is not zeroed again if its score is
    among the best by then. This can happen with signed scores and with magnitudes. A sensitivity never falls, and it
    does not change while the weight is zero.

    Args:
        share: share of each target's weights that is left at the end.

    Raises:
        ValueError: a target would be left without weights.
    """

    def __init__(self, model: nn.Module, targets: Sequence[Target], settings: Pruning, share: float) -> None:
        for target in targets:
            if not round(share * target.parameters):
                raise ValueError(f"shaping leaves {target.name} no weight: raise shaping.remaining")
        self.settings = (settings, share, tuple(targets))
        self.method = settings
        self.share = share
        self.modules = {target.name: model.get_submodule(target.name) for target in targets}
        self.scores: dict[str, Tensor] = {}
        """Target name → its scores S `(out, in)`, summed so far; targets that no gradient has reached are missing."""

    def after_backward(self, step: int) -> None:
        """Subtract ∂L/∂W_ij · W_ij from the score S_ij (section 2.2), or add its magnitude for `sensitivity`.

        W are the weights at which the gradient was taken, before the update.
        """
        if self.method.score == "zero_order":
            return
        for name, module in self.modules.items():
            gradient = module.get_parameter("weight").grad
            if gradient is None:
                continue
            change = -by_outputs(module, gradient) * weight_of(module)
            signed = self.method.score == "first_order"
            self.scores[name] = self._score(name) + (change if signed else change.abs())

    def after_update(self, step: int) -> None:
        """Zero all weights of each matrix but the share v_t with the best scores; v_t falls cubically (section 2.2).

        t is the number of updates that are done (choice). With the index of the step, pruning without a cool-down would
        end one step before v_f.
        """
        start, end = (steps_in(part, self.method.steps) for part in (self.method.start, self.method.end))
        share = cubic(step + 1, self.method.steps, start, end, self.share)
        for name, module in self.modules.items():
            weight = weight_of(module)
            if dropped := weight.numel() - round(share * weight.numel()):
                weight.masked_fill_(_lowest(self._score(name), dropped), 0)

    def statistics(self) -> Statistics:
        """Return the scores of all rows, `(out,)` for each target, as statistics `movement` under `TARGET.output`.

        The score of row i is Ŝ_i = Σ_j S_ij ÷ Σ_n Σ_j S_nj (section 4.2). S can be negative and a row can be empty, and
        the paper does not say what to do then. Here only nonzero weights with a positive score count (choice): pruning
        chose to ignore the errors of zeroed weights, and a negative score would reward errors. A row's score is at
        least a hundredth of the mean (choice), so that the weights left in it are not given up for nothing, and diag(Ŝ)
        has an inverse.

        Raises:
            ValueError: a score is not finite.
        """
        return {"movement": {f"{name}.output": self._row_scores(name) for name in self.modules}}

    def _row_scores(self, name: str) -> Tensor:
        scores = self._score(name)
        if not torch.isfinite(scores).all():
            raise ValueError(f"the pruning scores of {name} are not finite: lower shaping.learning_rate")
        nonzero = weight_of(self.modules[name]) != 0
        rows = (scores.clamp(min=0) * nonzero).float().sum(1)
        rows = rows.clamp(min=_FLOOR * float(rows.mean())) if rows.any() else torch.ones_like(rows)
        return rows / rows.sum()

    def measures(self) -> dict[str, float]:
        """Return the share of all targets' weights that are not zero."""
        return {"remaining": share_left(self.modules.values())}

    def state(self) -> dict[str, Tensor]:
        return dict(self.scores)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.scores = dict(state)

    def _score(self, name: str) -> Tensor:
        """Return a target's scores S `(out, in)` on its weight's device, which the training loop may have changed."""
        weight = weight_of(self.modules[name])
        if self.method.score == "zero_order":
            return weight.abs()
        precision = sum_dtype(weight)
        scores = self.scores.get(name)
        return torch.zeros_like(weight, dtype=precision) if scores is None else scores.to(weight.device)


def _lowest(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` lowest scores; among equal scores, the first are chosen."""
    flat = scores.flatten()
    bound = flat.kthvalue(count).values
    lowest = flat < bound
    equal = (flat == bound).nonzero().squeeze(1)
    lowest[equal[: count - int(lowest.sum())]] = True
    return lowest.view_as(scores)
