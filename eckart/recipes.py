"""Recipes: shaping + weighting + rank search + residual + recovery, frozen values that stand in full in params.yaml.

There are no defaults here: every hyperparameter is written where the user sees it and DVC tracks it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from eckart.ranks import RankSearch
from eckart.ranks.hypernetwork import Hypernetwork
from eckart.ranks.threshold import Threshold
from eckart.ranks.tolerance import Tolerance
from eckart.ranks.uniform import Uniform
from eckart.recovery import MixedRank, Recovery
from eckart.residual import Residual
from eckart.shaping import Shaping
from eckart.weighting import Movement, Plain, Weighting


class Recipe(BaseModel):
    """How a model is compressed: what matters, who gets how much, and how it heals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shaping: Shaping | None
    weighting: Weighting
    ranks: RankSearch
    residual: Residual | None
    sequential: int | None = Field(ge=1)
    """Layers that are factorized between two captures of the evidence; None takes that of the dense model."""
    recovery: Recovery


def contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Parts that make no sense together: the path of one of them, and what is wrong and what to write."""
    yield from _of_weighting(recipe)
    yield from _of_ranks(recipe)
    yield from _of_residual(recipe)
    yield from _of_order(recipe)
    yield from _of_schedules(recipe)


def _of_weighting(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if isinstance(recipe.weighting, Movement) and recipe.shaping is None:
        yield (
            "weighting",
            "movement reads the scores of pruning, and shaping is null; add a shaping of kind pruning",
        )


def _of_ranks(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if isinstance(recipe.ranks, Threshold):
        if not isinstance(recipe.weighting, Plain):
            yield "weighting", "threshold cuts the singular values of W itself, so a weighting has no say; write none"
        if recipe.shaping is not None:
            yield "shaping", "threshold trains all weights and would fill the pruned ones again; write null"
    if isinstance(recipe.recovery, MixedRank) and _leaves_low_rank(recipe):
        yield (
            "recovery",
            "mixed_rank runs the weight that was factorized, and this one has its rank already; write finetune",
        )
    if isinstance(recipe.ranks, Tolerance) and isinstance(recipe.weighting, Movement):
        yield (
            "weighting",
            "tolerance gathers evidence anew on its way, and movement has none to gather; write another",
        )


def _of_residual(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.residual is None:
        return
    if _leaves_low_rank(recipe):
        yield (
            "residual",
            f"{recipe.ranks.kind} leaves weights of low rank, which have no rest for sparse rows; write null",
        )
    if recipe.residual.low_rank == 0 and not isinstance(recipe.ranks, Uniform):
        yield "ranks", "all ranks are 0 where residual.low_rank is, so there is nothing to search; write uniform"
    if isinstance(recipe.recovery, MixedRank):
        yield "recovery", "mixed_rank runs the dense weight beside the factors, and so does a residual; write finetune"
    if not recipe.recovery.steps:
        yield "recovery.steps", "is 0, but the residual is pruned while recovery trains; write at least 1"


def _of_order(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.sequential is None:
        return
    if isinstance(recipe.weighting, Plain | Movement):
        yield "sequential", f"weighting {recipe.weighting.kind} has no evidence to gather anew; write null"
    if _leaves_low_rank(recipe):
        yield "sequential", f"{recipe.ranks.kind} leaves weights of low rank, which evidence cannot change; write null"
    if recipe.residual is not None:
        yield "sequential", "factors and residual are W together, so no layer reads anything new; write null"


def _leaves_low_rank(recipe: Recipe) -> bool:
    """Whether the search itself reduces the dense weights to their ranks."""
    of_elements = isinstance(recipe.ranks, Hypernetwork) and recipe.ranks.selection == "elements"
    return of_elements or isinstance(recipe.ranks, Threshold | Tolerance)


def _of_schedules(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for name, part in (("shaping", recipe.shaping), ("residual", recipe.residual)):
        if part is not None and part.start + part.end > 1:
            yield name, f"start and end are shares of the steps and sum to {part.start + part.end:g}; write at most 1"
