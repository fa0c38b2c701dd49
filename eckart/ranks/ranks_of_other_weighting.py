"""Borrowed: the ranks that a search finds under another weighting, for factors under the recipe's own.

So weightings are compared at the same ranks. DRONE's tables compare so (Chen et al., NeurIPS 2021, section 4.2): SVD at
the ranks that algorithm 2 chose under the inputs.

The search is written out and runs again here, rather than named: what a stage reads must be the same files for all
recipes, and a name would tie it to the stages of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from eckart.factorization.weightings import Inputs, Weighting
from eckart.model.targets import Storage
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.ranks.uniform import Uniform
from eckart.recipe_parts import Contradiction, Method, RecipeParts

if TYPE_CHECKING:
    from eckart.ranks import RankSearch


class Borrowed(Method):
    """Search as a recipe of this `weighting` and these `ranks` does, and take nothing but the ranks."""

    alone = True

    kind: Literal["borrowed"] = Field("borrowed", description="the ranks that a search finds under another weighting")
    weighting: Weighting = Field(Inputs(), description="the weighting of the search")
    ranks: RankSearch = Field(Uniform(), description="the search whose ranks are taken")

    @property
    def statistics(self) -> tuple[str, ...]:
        return (*self.weighting.statistics, *self.ranks.statistics)

    @property
    def trains(self) -> bool:
        return self.ranks.trains

    @property
    def asks_frozen(self) -> bool:
        return self.ranks.asks_frozen

    @property
    def pairs(self) -> bool:
        return self.weighting.pairs and self.ranks.pairs

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        lender = _Lender(recipe.shaping, self.weighting, self.ranks, recipe.residual, recipe.storage, recipe.recovery)
        for part in (self.weighting, self.ranks):
            for path, mistake in part.contradictions(lender):
                yield path if path.startswith(("shaping", "storage")) else f"ranks.{path}", mistake

    def search(self, problem: SearchProblem) -> SearchResult:
        before = {name: value.clone() for name, value in problem.model.state_dict().items()}
        result = self.ranks.search(replace(problem, weighting=self.weighting))
        if result.changed:
            problem.model.load_state_dict(before)
        return SearchResult(result.ranks, problem.spectra())


@dataclass(frozen=True)
class _Lender:
    """The recipe whose ranks are borrowed."""

    shaping: Method | None
    weighting: Method
    ranks: Method
    residual: Method | None
    storage: Storage
    recovery: Method
