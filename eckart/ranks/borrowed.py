"""Borrowed: a rank search under another weighting, for a recipe that factorizes under its own weighting.

With this, weightings can be compared at the same ranks. DRONE's tables do so (Chen et al., NeurIPS 2021, section 4.2):
they show plain SVD at the ranks that algorithm 2 chose with the weighting by inputs.

The recipe contains the settings of that search, and runs the search again. It cannot just name another recipe whose
ranks to take: the DVC stages of all recipes must read the same kinds of files, and with such a name, a stage of one
recipe would depend on the stages of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from pydantic import Field

from eckart.factorization.weightings import Inputs, Weighting
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.ranks.uniform import Uniform
from eckart.ranks.waterfill import Waterfill
from eckart.recipe_parts import Contradiction, Method, RecipeParts

if TYPE_CHECKING:
    from eckart.ranks import RankSearch
    from eckart.recipe import Recipe


class Borrowed(Method):
    """Settings of a rank search under another `weighting`; the recipe takes only the ranks that the search finds."""

    alone = True

    kind: Literal["borrowed"] = Field(
        "borrowed", description="ranks that a search finds under a weighting other than the recipe's"
    )
    weighting: Weighting = Field(Inputs(), description="weighting of that search")
    ranks: RankSearch = Field(Uniform(), description="that search")

    @property
    def statistics(self) -> tuple[str, ...]:
        return (*self.weighting.statistics, *self.ranks.statistics)

    @property
    def trains(self) -> bool:
        return self.ranks.trains

    @property
    def one_pass(self) -> bool:
        return self.ranks.one_pass

    @property
    def asks_frozen(self) -> bool:
        return self.ranks.asks_frozen

    @property
    def judges_by_loss(self) -> bool:
        return self.ranks.judges_by_loss

    @property
    def pairs(self) -> bool:
        return self.weighting.pairs and self.ranks.pairs

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        lender = cast("Recipe", recipe).model_copy(update={"weighting": self.weighting, "ranks": self.ranks})
        for part in (self.weighting, self.ranks):
            for path, mistake in part.contradictions(lender):
                yield path if path.startswith(("shaping", "storage")) else f"ranks.{path}", mistake
        if isinstance(self.ranks, Waterfill) and self.ranks.narrow:
            yield "ranks.ranks", "has narrow, but borrowed takes ranks only, and no widths; write narrow: false"

    def search(self, problem: SearchProblem) -> SearchResult:
        before = {name: value.clone() for name, value in problem.model.state_dict().items()}
        result = self.ranks.search(replace(problem, weighting=self.weighting))
        if result.changed:
            problem.model.load_state_dict(before)
        return SearchResult(result.ranks, problem.spectra(), remark=result.remark)
