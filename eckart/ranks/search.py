"""Choose the rank of every target, after shaping the weights where a recipe says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eckart.calibration.statistics import Statistics
from eckart.model.targets import Storage, Target
from eckart.ranks import RankSearch
from eckart.ranks.budget import NoRank, Ranks, allowance, stored, total
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.residual import Residual
from eckart.shaping import Shaping
from eckart.shaping.outcome import average_rank, empty_rows, share_left


@dataclass(frozen=True)
class Shaped:
    """The result of shaping the targets' weights.

    Attributes:
        scores: statistics that shaping gathered.
        share_left: share of the weights that are not zero.
        average_rank: mean numerical rank of the weights.
        empty_rows: rows of the weights `(out, in)` that are all zero.
    """

    scores: Statistics
    share_left: float
    average_rank: float
    empty_rows: int


@dataclass(frozen=True)
class ChosenRanks:
    """The ranks that a search chose, and what it expects of them.

    Attributes:
        targets: as the recipe's storage counts their parameters.
        ranks: target → rank; None where it stays dense.
        predicted_loss: target → half the weighted error that its rank leaves, ½ Σ_{k>r} S_k²; None where the search
            itself reduced the weights to their ranks, or all ranks are 0.
        shaped: None where nothing was shaped.
        changed: whether the search changed the model's weights.
    """

    targets: tuple[Target, ...]
    ranks: Ranks
    predicted_loss: dict[str, float] | None
    shaped: Shaped | None
    changed: bool

    @property
    def parameters(self) -> tuple[int, int]:
        """Parameters of all targets, before and after; without biases and a residual."""
        return sum(target.parameters for target in self.targets), total(self.targets, self.ranks)


def search_ranks(
    problem: SearchProblem,
    method: RankSearch,
    *,
    shaping: Shaping | None = None,
    residual: Residual | None = None,
    storage: Storage = "factors",
) -> ChosenRanks:
    """Choose ranks within `problem.keep`; shaping, and searches that train, change `problem.model` in place.

    Args:
        method: the search that shares the budget out.
        residual: sparse rows beside the factors, which take their part of the budget.
        storage: how factors will be stored, which decides what a rank costs.

    Raises:
        NoRank: `keep` leaves some target no rank.
        ValueError: a weight or its statistics are not fit; or `method` exceeded the budget.
    """
    problem, shaped = replace(problem, targets=stored(problem.targets, storage)), None
    if shaping:
        shaped = _shape(problem, shaping)
        problem = replace(problem, statistics={**problem.statistics, **shaped.scores})
    result = _search_beside(residual, problem, method) if residual else method.search(problem)
    predicted_loss = None
    if result.spectra is not None:
        predicted_loss = {
            name: 0.0 if rank is None else float(result.spectra[name][rank:].square().sum() / 2)
            for name, rank in result.ranks.items()
        }
    chosen = ChosenRanks(problem.targets, result.ranks, predicted_loss, shaped, result.changed)
    keep = problem.keep * (residual.low_rank if residual else 1)
    if keep and (after := chosen.parameters[1]) > allowance(problem.targets, keep):
        raise ValueError(f"the ranks keep {after} parameters, more than {keep:g} of all allows")
    return chosen


def _shape(problem: SearchProblem, shaping: Shaping) -> Shaped:
    scores = shaping.shape(problem)
    modules = [problem.model.get_submodule(target.name) for target in problem.targets]
    rank = average_rank(problem.model, problem.targets)
    return Shaped(scores, share_left(modules), rank, empty_rows(problem.model, problem.targets))


def _search_beside(residual: Residual, problem: SearchProblem, method: RankSearch) -> SearchResult:
    """Choose ranks within the part of the budget that `residual` leaves to the factors."""
    if not residual.low_rank:
        return SearchResult({target.name: 0 for target in problem.targets})
    try:
        return method.search(replace(problem, keep=problem.keep * residual.low_rank))
    except NoRank as error:
        raise NoRank(f"for the factors, residual.low_rank · keep: {error}, or raise residual.low_rank") from error
