"""The choice of the rank of every target, after the weights are shaped if the recipe asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eckart.calibration.statistics import Statistics
from eckart.model.mlps import narrowed
from eckart.model.targets import Storage, Target
from eckart.ranks import RankSearch
from eckart.ranks.budget import NoRank, allowance, stored, total
from eckart.ranks.search_problem import SearchProblem, SearchResult, losses_of_components
from eckart.residual import Residual
from eckart.shaping import Shaping
from eckart.shaping.weight_measures import average_rank, empty_rows, share_left


@dataclass(frozen=True)
class Shaped:
    """Result of shaping the targets' weights.

    Attributes:
        scores: statistics that the shaping gathered, for a weighting that reads them.
        share_left: share of the weights that are not zero.
        average_rank: mean numerical rank of the weights.
        empty_rows: number of rows of the weights `(out, in)` that are all zero.
    """

    scores: Statistics
    share_left: float
    average_rank: float
    empty_rows: int


@dataclass(frozen=True, kw_only=True)
class ChosenRanks(SearchResult):
    """Ranks that a search chose, and the loss predicted for them.

    Attributes:
        targets: the targets, each with the recipe's storage, which decides how many parameters a rank costs.
        predicted_loss: target name → half the squared weighted error after truncation to its rank, ½ Σ_{k>r} S_k²; the
            down layer of a narrowed MLP has the loss of its width besides. None if the search itself reduced the
            weights to their ranks, or if all ranks are 0.
        shaped: result of the shaping, or None if nothing was shaped.
    """

    targets: tuple[Target, ...]
    predicted_loss: dict[str, float] | None
    shaped: Shaped | None

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of parameters of all targets before and after compression, without biases and the residual."""
        before = sum(target.parameters for target in self.targets)
        return before, total(narrowed(self.targets, self.widths), self.ranks)


def search_ranks(
    problem: SearchProblem,
    method: RankSearch,
    *,
    shaping: Shaping | None = None,
    residual: Residual | None = None,
    storage: Storage = "factors",
) -> ChosenRanks:
    """Choose ranks within `problem.keep`, after shaping the weights if `shaping` is given.

    Shaping and some searches change the weights of `problem.model` in place.

    Args:
        method: the rank search.
        residual: sparse rows beside the factors, which take a part of the budget.
        storage: storage of the factors, which decides how many parameters a rank costs.

    Raises:
        NoRank: `keep` is too small for the smallest ranks.
        ValueError: a weight or its statistics cannot be decomposed, or `method` exceeded the budget.
    """
    problem, shaped = replace(problem, targets=stored(problem.targets, storage)), None
    if shaping:
        scores = shaping.shape(problem)
        modules = [problem.model.get_submodule(target.name) for target in problem.targets]
        shaped = Shaped(scores, share_left(modules), average_rank(modules), empty_rows(modules))
        problem = replace(problem, statistics={**problem.statistics, **scores})
    result = _search_beside(residual, problem, method) if residual else method.search(problem)
    predicted_loss = None
    if result.spectra is not None:
        predicted_loss = {
            name: (0.0 if rank is None else float(losses_of_components(result.spectra[name][rank:]).sum()))
            + (result.widths[name].loss if name in result.widths else 0.0)
            for name, rank in result.ranks.items()
        }
    chosen = ChosenRanks(**vars(result), targets=problem.targets, predicted_loss=predicted_loss, shaped=shaped)
    keep = problem.keep * (residual.low_rank if residual else 1)
    if keep and (after := chosen.parameters[1]) > allowance(problem.targets, keep):
        raise ValueError(f"the ranks keep {after} parameters, more than keep={keep:g} allows")
    return chosen


def _search_beside(residual: Residual, problem: SearchProblem, method: RankSearch) -> SearchResult:
    """Choose ranks for the factors within their part of the budget; the sparse rows of `residual` get the rest."""
    if not residual.low_rank:
        return SearchResult({target.name: 0 for target in problem.targets})
    try:
        return method.search(replace(problem, keep=problem.keep * residual.low_rank))
    except NoRank as error:
        raise NoRank(f"for the factors, residual.low_rank · keep: {error}, or raise residual.low_rank") from error
