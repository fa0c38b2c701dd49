"""The step that chooses ranks: it predicts the loss, leaves a residual its share, and holds a search to its budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter

from eckart.factorization.factorize import factorize_model
from eckart.factorization.weightings import Plain
from eckart.model.targets import find_targets, weight_of
from eckart.ranks import RankSearch
from eckart.ranks.budget import NoRank, allowance
from eckart.ranks.search import search_ranks
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.residual.sparse_rows import SparseRows
from tests import tiny

BATCH = tiny.collate(tiny.samples(4))
UNIFORM = TypeAdapter(RankSearch).validate_python({"kind": "uniform", "by": "share"})


def problem(keep: float = 0.5) -> SearchProblem:
    model = tiny.bert()
    return tiny.search_problem(model, find_targets(model, BATCH).targets, Plain(kind="none"), [], keep)


def test_the_predicted_loss_is_half_the_squared_error_of_the_factors() -> None:
    case = problem()
    chosen = search_ranks(case, UNIFORM)
    dense = {target.name: weight_of(case.model.get_submodule(target.name)).clone() for target in case.targets}
    factorize_model(case.model, chosen.targets, chosen.ranks, case.weighting, case.statistics)
    assert chosen.predicted_loss is not None
    for name, weight in dense.items():
        error = weight - case.model.get_submodule(name).dense()
        assert chosen.predicted_loss[name] == pytest.approx(float(error.detach().square().sum() / 2), rel=1e-4)
    assert (chosen.shaped, chosen.changed) == (None, False)


def test_pivoted_storage_pays_for_larger_ranks() -> None:
    factors, pivoted = (search_ranks(problem(), UNIFORM, storage=storage) for storage in ("factors", "pivoted"))
    assert all((pivoted.ranks[name] or 0) >= (rank or 0) for name, rank in factors.ranks.items())
    assert factors.ranks != pivoted.ranks
    assert pivoted.parameters[1] <= allowance(pivoted.targets, 0.5)


def test_factors_beside_sparse_rows_get_their_share_of_the_budget() -> None:
    beside, alone = (
        search_ranks(problem(0.8), UNIFORM, residual=SparseRows(low_rank=0.5)),
        search_ranks(problem(0.4), UNIFORM),
    )
    assert beside.ranks == alone.ranks
    assert set(search_ranks(problem(), UNIFORM, residual=SparseRows(low_rank=0.0)).ranks.values()) == {0}
    with pytest.raises(NoRank, match=r"raise residual\.low_rank"):
        search_ranks(problem(), UNIFORM, residual=SparseRows(low_rank=0.01))


def test_a_search_that_exceeds_its_budget_is_refused() -> None:
    class Greedy(type(UNIFORM)):  # type: ignore[misc]
        def search(self, problem: SearchProblem) -> SearchResult:
            result: SearchResult = super().search(replace(problem, keep=0.9))
            return result

    with pytest.raises(ValueError, match=r"more than keep=0\.5"):
        search_ranks(problem(), Greedy(kind="uniform", by="share"))


def test_shaping_gives_the_search_its_scores_and_the_whole_budget() -> None:
    class Halving:
        def shape(self, problem: SearchProblem) -> dict[str, dict[str, torch.Tensor]]:
            assert problem.keep == 0.5
            for target in problem.targets:
                weight_of(problem.model.get_submodule(target.name))[0] = 0
            return {"movement": {target.name: torch.ones(target.out_features) for target in problem.targets}}

    case = problem()
    chosen = search_ranks(case, UNIFORM, shaping=Halving(), residual=SparseRows(low_rank=0.5))  # type: ignore[arg-type]
    assert chosen.shaped is not None
    assert chosen.shaped.empty_rows == len(case.targets)
    assert 0 < chosen.shaped.share_left < 1
    assert case.statistics == {}
