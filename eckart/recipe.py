"""Recipes: source + shaping + weighting + rank search + residual + storage + recovery, frozen values of params.yaml.

There are no defaults here: every hyperparameter is written where the user sees it and DVC tracks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict

from eckart.factorization.factorize import InOrder
from eckart.factorization.weightings import Weighting
from eckart.model.targets import Storage
from eckart.ranks import RankSearch
from eckart.recipe_parts import Contradiction, Method, Source
from eckart.recovery import Recovery
from eckart.residual import Residual
from eckart.shaping import Shaping


class Recipe(BaseModel):
    """How a model is compressed: what matters, who gets how much, and how it heals.

    Attributes:
        source: the dense model that it begins with.
        shaping: training that gives the dense weights a structure first; None: none.
        weighting: the norm in which a target's error is small.
        ranks: the search that shares the budget out.
        residual: what stands beside the factors; None: nothing.
        storage: how a map of low rank is stored.
        recovery: the training that heals the factorized model.

    Raises:
        pydantic.ValidationError: a part is missing, unknown or out of its range; a ValueError that names them all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Source
    shaping: Shaping | None
    weighting: Weighting
    ranks: RankSearch
    residual: Residual | None
    storage: Storage
    sequential: InOrder | None
    """How targets are factorized in order; None: all at once, under the statistics of the dense model."""
    recovery: Recovery

    @property
    def methods(self) -> list[Method]:
        """The parts that are methods."""
        parts = (self.shaping, self.weighting, self.ranks, self.residual, self.recovery)
        return [part for part in parts if part is not None]


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Parts that make no sense together: the path of one of them, and what is wrong and what to write."""
    for method in recipe.methods:
        yield from method.contradictions(recipe)
    if recipe.source == "base":
        yield from _of_source(recipe)
    if recipe.sequential is not None:
        yield from _of_order(recipe)


def _of_source(recipe: Recipe) -> Iterator[Contradiction]:
    for part in (recipe.weighting, recipe.ranks):
        if part.statistics:
            yield "source", f"is base, but {part.kind} reads statistics, which are the teacher's; write teacher"
    if recipe.ranks.asks_frozen and recipe.shaping is None:
        yield (
            "source",
            f"is base, whose loss {recipe.ranks.kind} would ask before it has learned the task; write teacher, or add "
            "a shaping",
        )


def _of_order(recipe: Recipe) -> Iterator[Contradiction]:
    if "inputs" not in recipe.weighting.statistics:
        yield (
            "sequential",
            f"is about inputs, by which weighting {recipe.weighting.kind} does not weigh; write null, or one of "
            f"the weightings {', '.join(_reading_inputs())}",
        )
    if recipe.ranks.leaves_low_rank:
        yield (
            "sequential",
            f"{recipe.ranks.kind} leaves weights of low rank, which statistics cannot change; write null",
        )
    if recipe.residual is not None:
        yield "sequential", "factors and residual are W together, so no layer reads anything new; write null"


def _reading_inputs() -> list[str]:
    """The names of the weightings that read inputs."""
    every = [one.model_construct(kind=kind) for one in _members(Weighting) for kind in _kinds(one)]
    return [one.kind for one in every if "inputs" in one.statistics]


def captions() -> dict[str, str]:
    """Measure of a training rule → what a reader is told of it, for all methods that there are."""
    families = (Shaping, RankSearch, Residual, Recovery)
    return {name: text for family in families for each in _members(family) for name, text in each.captions.items()}


def _members(family: Any) -> tuple[type[Method], ...]:
    """The methods of a registry, which is a union of them, or the only one."""
    union, *_ = get_args(family) or (family,)
    return get_args(union) or (union,)


def _kinds(method: type[Method]) -> tuple[str, ...]:
    """Its names in params.yaml."""
    return get_args(method.model_fields["kind"].annotation)
