"""Laws of the rank searches, and waterfill against brute force and against cases solved by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from eckart.model.targets import Storage, Target
from eckart.ranks import RankSearch
from eckart.ranks.budget import NoRank, Rank, Ranks, allowance, cost, largest_rank, rank_or_dense, total
from eckart.ranks.search_problem import ByFormula
from eckart.ranks.waterfill import Waterfill

UNIFORM: ByFormula = TypeAdapter(RankSearch).validate_python({"kind": "uniform", "by": "share"})
ONE_RANK: ByFormula = TypeAdapter(RankSearch).validate_python({"kind": "uniform", "by": "rank"})
WATERFILL = Waterfill(kind="waterfill", multiple=1, embedding_price=1.0)
BY_FOUR = Waterfill(kind="waterfill", multiple=4, embedding_price=1.0)
METHODS = pytest.mark.parametrize("method", [UNIFORM, ONE_RANK, BY_FOUR], ids=["share", "rank", "waterfill"])
MULTIPLES = pytest.mark.parametrize("multiple", [1, 4])

Problem = tuple[list[Target], dict[str, Tensor]]
keeps = st.floats(0.05, 1)


def target(name: str, rows: int, columns: int, storage: Storage = "factors") -> Target:
    return Target(name=name, out_features=rows, in_features=columns, input_of=name, storage=storage)


@st.composite
def problems(draw: st.DrawFn, most: int = 5, smallest: int = 2, largest: int = 40) -> Problem:
    """Targets in one storage with descending spectra: steep or flat, some with nothing left after a few values."""
    targets, spectra, storage = [], {}, draw(st.sampled_from(["factors", "pivoted"]))
    for index in range(draw(st.integers(1, most))):
        size = st.integers(smallest, largest)
        some = target(f"map{index}", draw(size), draw(size), storage)
        count = min(some.out_features, some.in_features)
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**20)))).double()
        values = (drawn ** draw(st.sampled_from([0.1, 1, 4]))).sort(descending=True).values
        values[draw(st.integers(1, count)) :] *= draw(st.sampled_from([0.0, 1.0]))
        targets.append(some)
        spectra[some.name] = values * draw(st.sampled_from([0.1, 1.0, 10.0]))
    return targets, spectra


def possible(method: ByFormula, targets: Sequence[Target], keep: float) -> bool:
    """Whether keep pays for rank 1: everywhere on its own, or everywhere together."""
    if keep == 1:
        return True
    if method is UNIFORM:
        return all(allowance([some], keep) >= cost(some, 1) for some in targets)
    return allowance(targets, keep) >= sum(cost(some, choices(some)[0]) for some in targets)


def solve(method: ByFormula, problem: Problem, keep: float) -> Ranks:
    """The ranks, or no example where keep leaves none."""
    assume(possible(method, problem[0], keep))
    return method.ranks(*problem, keep)


def lost(problem: Problem, ranks: Mapping[str, Rank]) -> float:
    """Predicted loss: the tails of the spectra of what is not dense."""
    targets, spectra = problem
    return sum(
        float(spectra[t.name][ranks[t.name] :].double().square().sum()) for t in targets if ranks[t.name] is not None
    )


def choices(some: Target, multiple: int = 1) -> list[Rank]:
    return [*(rank for rank in range(1, largest_rank(some) + 1) if rank == 1 or rank % multiple == 0), None]


def waterfill(multiple: int) -> ByFormula:
    return BY_FOUR if multiple == 4 else WATERFILL


# --- laws of all -----------------------------------------------------------------------------------------------------


@METHODS
@given(problem=problems(), keep=st.floats(0.001, 0.1))
def test_there_is_an_error_wherever_keep_leaves_no_rank(method, problem, keep):
    assume(allowance(problem[0], keep) < sum(cost(some, choices(some)[0]) for some in problem[0]))
    with pytest.raises(NoRank):
        method.ranks(*problem, keep)


@METHODS
@given(problem=problems(), keep=keeps)
def test_parameters_stay_within_the_budget(method, problem, keep):
    targets, _ = problem
    ranks = solve(method, problem, keep)
    assert set(ranks) == {some.name for some in targets}
    assert total(targets, ranks) <= keep * sum(some.parameters for some in targets) + 1e-6


@METHODS
@given(problem=problems(), first=keeps, second=keeps)
def test_more_keep_never_predicts_more_loss(method, problem, first, second):
    less, more = (lost(problem, solve(method, problem, keep)) for keep in sorted((first, second)))
    assert more <= less * (1 + 1e-12) + 1e-12


# --- uniform ---------------------------------------------------------------------------------------------------------


@given(problems(), st.floats(0.05, 0.999))
def test_uniform_keeps_its_share_of_every_target_within_one_rank(problem, keep):
    ranks = solve(UNIFORM, problem, keep)
    for some in problem[0]:
        allowed = allowance([some], keep)
        rank = ranks[some.name]
        assert cost(some, rank) <= allowed
        if rank is not None and rank < largest_rank(some):
            assert cost(some, rank + 1) > allowed


@pytest.mark.parametrize(("keep", "rank"), [(0.34, 1), (0.66, 1), (0.67, 2), (0.99, 2), (1.0, None)])
def test_uniform_solved_by_hand(keep, rank):
    """6 × 6: a rank costs 12 of 36, and three are no smaller than the whole."""
    assert UNIFORM.ranks([target("a", 6, 6)], {}, keep) == {"a": rank}


@given(problems(), keeps)
def test_by_rank_every_target_has_the_largest_rank_that_the_budget_pays_for_or_is_smaller_dense(problem, keep):
    targets, _ = problem
    ranks = solve(ONE_RANK, problem, keep)
    shared = {rank for rank in ranks.values() if rank is not None}
    assert len(shared) <= 1
    for rank in shared:  # none where all are dense
        assert all(ranks[target.name] is not None or largest_rank(target) < rank for target in targets)
        more = sum(cost(target, rank_or_dense(target, rank + 1)) for target in targets)
        assert more > allowance(targets, keep)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (80, {"square": 1, "wide": 1}),
        (159, {"square": 1, "wide": 1}),
        (160, {"square": 2, "wide": 2}),
        # at rank 5 the square one would cost 100, as much as dense
        (6 * 60 + 100, {"square": None, "wide": 6}),
        (600, {"square": None, "wide": None}),
    ],
)
def test_by_rank_solved_by_hand(parameters, expected):
    """10 × 10 and 10 × 50: 20 and 60 a rank, 100 and 500 dense."""
    targets = [target("square", 10, 10), target("wide", 10, 50)]
    assert ONE_RANK.ranks(targets, {}, parameters / 600) == expected


BERT_LAYER = [*[target(f"attention{n}", 768, 768) for n in range(4)], target("in", 3072, 768), target("out", 768, 3072)]


@pytest.mark.parametrize(("keep", "rank"), [(0.33, 168), (0.495, 253), (0.508, 260), (0.254, 130), (0.098, 50)])
def test_by_rank_gives_the_ranks_of_the_papers(keep, rank):
    """33 and 22 % of 768 (ARS, table A2), and 260, 130 and 50 (LPAF), at the parameters that these keep of BERT."""
    assert set(ONE_RANK.ranks(BERT_LAYER, {}, keep).values()) == {rank}


def test_by_rank_what_a_rank_would_enlarge_stays_dense():
    """LPAF's 390 for three quarters of BERT: 390 · (768 + 768) is more than 768 · 768."""
    ranks = ONE_RANK.ranks(BERT_LAYER, {}, 0.757)
    assert {name: rank for name, rank in ranks.items() if rank is not None} == {"in": 390, "out": 390}


@pytest.mark.parametrize("keep", [0.1, 0.6, 0.97])
def test_uniform_leaves_what_no_rank_makes_smaller_dense_and_holds_the_budget(keep):
    """A gate of one row has none; of one of two rows the share would be less than the least rank takes."""
    targets = [target("large", 100, 100), target("gate", 1, 40), target("types", 2, 30), target("other", 60, 80)]
    ranks = UNIFORM.ranks(targets, {}, keep)
    assert ranks["gate"] is None
    assert ranks["types"] == 1
    assert total(targets, ranks) <= allowance(targets, keep)
    shares = [cost(one, ranks[one.name]) / one.parameters for one in (targets[0], targets[3])]
    assert all(0 < share <= keep for share in shares)
    assert abs(shares[0] - shares[1]) <= max(one.step / one.parameters for one in (targets[0], targets[3]))


# --- waterfill -------------------------------------------------------------------------------------------------------


@given(problems(), keeps)
def test_waterfill_leaves_nothing_that_a_single_move_could_use(problem, keep):
    """No target could take one rank more, or go dense, with what is left of the budget."""
    targets, _ = problem
    ranks = solve(WATERFILL, problem, keep)
    left = allowance(targets, keep) - total(targets, ranks)
    for target in targets:
        if (rank := ranks[target.name]) is not None:
            assert cost(target, rank_or_dense(target, rank + 1)) - cost(target, rank) > left


def hull_moves(some: Target, spectrum: Tensor, multiple: int = 1) -> list[tuple[float, int]]:
    """Steps of the upper hull of savings over cost from rank 1 up, as (saving, price)."""
    energies = spectrum.double().square()
    points = [(cost(some, rank), float(energies[:rank].sum())) for rank in choices(some, multiple)[:-1]]
    points.append((some.parameters, float(energies.sum())))
    moves, at = [], 0
    while at < len(points) - 1:
        slopes = [(points[k][1] - points[at][1]) / (points[k][0] - points[at][0]) for k in range(at + 1, len(points))]
        best = max(range(len(slopes)), key=lambda k: slopes[k]) + at + 1
        moves.append((points[best][1] - points[at][1], points[best][0] - points[at][0]))
        at = best
    return moves


@MULTIPLES
@given(problem=problems(most=3, smallest=3, largest=9), keep=st.floats(0.3, 1))
def test_waterfill_is_optimal_up_to_one_move(multiple, problem, keep):
    """Of all choices within the budget none loses less by more than one move of the hull could save."""
    targets, spectra = problem
    ranks = solve(waterfill(multiple), problem, keep)
    assert all(ranks[some.name] in choices(some, multiple) for some in targets)
    budget = allowance(targets, keep)
    names = [some.name for some in targets]
    candidates = (
        dict(zip(names, combination, strict=True))
        for combination in product(*(choices(some, multiple) for some in targets))
    )
    optimum = min(lost(problem, some) for some in candidates if total(targets, some) <= budget)
    one_move = max(
        (saving for some in targets for saving, _ in hull_moves(some, spectra[some.name], multiple)), default=0.0
    )
    assert optimum - 1e-9 <= lost(problem, ranks) <= optimum + one_move + 1e-9


@MULTIPLES
@given(problem=problems(most=3, smallest=3, largest=9))
def test_waterfill_is_optimal_where_the_budget_ends_with_a_move(multiple, problem):
    """The budget after each of the hull's moves, in order of what a parameter saves, is spent as well as can be."""
    targets, spectra = problem
    moves = sorted(
        (move for some in targets for move in hull_moves(some, spectra[some.name], multiple)),
        key=lambda m: -m[0] / m[1],
    )
    parameters = sum(some.parameters for some in targets)
    spent = sum(cost(some, choices(some)[0]) for some in targets)
    remaining = lost(problem, {some.name: choices(some)[0] for some in targets})
    for saving, price in moves:
        spent, remaining = spent + price, remaining - saving
        ranks = waterfill(multiple).ranks(targets, spectra, min(1.0, spent / parameters))
        assert lost(problem, ranks) == pytest.approx(remaining, rel=1e-9, abs=1e-9)


def six(*energies: float) -> Tensor:
    """Singular values of a 6 × 6 target with these energies: a rank costs 12, dense 36, rank 2 is the largest."""
    return torch.tensor([*energies, *[0.0] * (6 - len(energies))]).sqrt()


TWO = [target("a", 6, 6), target("b", 6, 6)]
TWO_PIVOTED = [target("a", 6, 6, "pivoted"), target("b", 6, 6, "pivoted")]


@pytest.mark.parametrize(
    ("a", "b", "parameters", "expected"),
    [
        # one rank more: where it saves more, not where the spectrum is larger
        (six(100, 2), six(9, 3), 36, {"a": 1, "b": 2}),
        # b's second rank saves 3/12; then 12 are left and do not pay for a's 24, so a takes a rank
        (six(1, 1, 1, 1, 1, 1), six(100, 3), 48, {"a": 2, "b": 2}),
        # going dense saves 5/24 a parameter, more than b's second rank at 2/12, and takes all there is
        (six(1, 1, 1, 1, 1, 1), six(100, 2), 48, {"a": None, "b": 1}),
        # a steep spectrum goes by single ranks first: 4/12 beats (4 + 1)/24
        (six(9, 4, 1), six(9), 48, {"a": None, "b": 1}),
        # everything
        (six(1), six(1), 72, {"a": None, "b": None}),
    ],
)
def test_waterfill_solved_by_hand(a, b, parameters, expected):
    assert WATERFILL.ranks(TWO, {"a": a, "b": b}, parameters / 72) == expected


@pytest.mark.parametrize(
    ("a", "b", "parameters", "expected"),
    [
        # b's second rank saves 2/9, which is more than the 5/25 of a's way to dense
        (six(1, 1, 1, 1, 1, 1), six(100, 2), 31, {"a": 1, "b": 2}),
        # 16 are left and do not pay for that way: two ranks are the most of it
        (six(1, 1, 1, 1, 1, 1), six(100, 2), 47, {"a": 3, "b": 2}),
        # one by one a's ranks save 1/9, then 1/7; all of them 5/25, more than b's second with 1.5/9
        (six(1, 1, 1, 1, 1, 1), six(100, 1.5), 47, {"a": None, "b": 1}),
        # everything
        (six(1), six(1), 72, {"a": None, "b": None}),
    ],
)
def test_waterfill_of_pivoted_targets_solved_by_hand(a, b, parameters, expected):
    """6 × 6: ranks cost 11, 20, 27, 32 and 35, dense 36."""
    assert WATERFILL.ranks(TWO_PIVOTED, {"a": a, "b": b}, parameters / 72) == expected


@pytest.mark.parametrize(("price", "expected"), [(1.0, {"a": 1, "b": 2}), (0.5, {"a": 2, "b": 1})])
def test_waterfill_weighs_savings_by_the_price_of_an_embedding(price, expected):
    """A rank more saves 2/12 in the embedding a and 3/12 in the map b; at half the price a's is 2/6."""
    targets = [TWO[0].model_copy(update={"looks_up": True}), TWO[1]]
    method = Waterfill(kind="waterfill", multiple=1, embedding_price=price)
    assert method.ranks(targets, {"a": six(100, 2), "b": six(9, 3)}, 36 / 72) == expected
