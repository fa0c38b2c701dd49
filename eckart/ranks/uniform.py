"""Uniform: no target is favoured. By share, every target keeps the same part of its parameters; by rank, all have one.

One rank for all is what the tables of ARS (Gao et al. 2024, table A2) and LPAF (Ren and Zhu 2024) have as their
baseline: the largest that keeps the parameters of all targets within the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from eckart.model.targets import Target
from eckart.ranks.budget import Rank, Ranks, allowance, cost, largest_rank, rank_or_dense, ranked_allowance
from eckart.ranks.search_problem import ByFormula, Spectra


class Uniform(ByFormula):
    """The same keep, or the same rank, for every target; dense only where `keep` pays for it."""

    by_size = True

    kind: Literal["uniform"] = Field("uniform", description="no target is favored")
    by: Literal["share", "rank"] = Field(
        "share", description="share: every target keeps the same share; rank: every target has the same rank"
    )

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return _one_rank(targets, keep) if self.by == "rank" else _one_share(targets, keep)


def _one_share(targets: Sequence[Target], keep: float) -> Ranks:
    """The same keep for all but those of few rows, which it would leave no rank.

    These have rank 1, or stay dense where no rank makes them smaller, and the others share what is left (choice).
    """
    budget = ranked_allowance(targets, keep)
    least: dict[str, Rank] = {}
    while True:
        others = [target for target in targets if target.name not in least]
        share = _share(budget, targets, least) if least else keep
        ranks = {target.name: _rank(target, share) for target in others}
        if 0 not in ranks.values():
            return {target.name: (least | ranks)[target.name] for target in targets}
        least |= {target.name: rank_or_dense(target, 1) for target in others if ranks[target.name] == 0}


def _share(budget: int, targets: Sequence[Target], least: Ranks) -> float:
    """Of the parameters of the others, what of `budget` is left where some have their `least`; positive."""
    left = budget - sum(cost(target, least[target.name]) for target in targets if target.name in least)
    return max(left / max(sum(one.parameters for one in targets if one.name not in least), 1), 1e-9)


def _rank(target: Target, keep: float) -> Rank:
    """The largest r that `keep` pays for: as factors ⌊keep · out · in / (out + in)⌋; 0 if none."""
    allowed = allowance([target], keep)
    if allowed >= target.parameters:
        return None
    return bisect_right(range(1, largest_rank(target) + 1), allowed, key=lambda some: cost(target, some))


def _one_rank(targets: Sequence[Target], keep: float) -> Ranks:
    """The largest rank for all that meets `keep`; a target that it would not make smaller stays dense (choice)."""
    budget = ranked_allowance(targets, keep)
    highest = max(map(largest_rank, targets)) + 1  # at which all are dense
    rank = bisect_right(range(1, highest + 1), budget, key=lambda some: _parameters(targets, some))
    return {target.name: rank_or_dense(target, rank) for target in targets}


def _parameters(targets: Sequence[Target], rank: int) -> int:
    """Of all `targets` at `rank`, or dense where that is smaller."""
    return sum(cost(target, rank_or_dense(target, rank)) for target in targets)
