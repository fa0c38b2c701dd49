"""Uniform: no target is favoured. By share, every target keeps the same part of its parameters; by rank, all have one.

One rank for all is what the tables of ARS (Gao et al. 2024, table A2) and LPAF (Ren and Zhu 2024) have as their
baseline: the largest that keeps the parameters of all targets within the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from eckart.budget import NoRank, Rank, Ranks, allowance, cost, largest_rank, rank_or_dense, ranked_allowance
from eckart.ranks.search_problem import ByFormula, Spectra
from eckart.targets import Target


class Uniform(ByFormula):
    """The same keep, or the same rank, for every target; dense only where `keep` pays for it.

    Attributes:
        by: share: the same keep; rank: the same rank.
    """

    by_size = True

    kind: Literal["uniform"]
    by: Literal["share", "rank"]

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        if self.by == "rank":
            return _one_rank(targets, keep)
        return {target.name: _rank(target, keep) for target in targets}


def _rank(target: Target, keep: float) -> Rank:
    """The largest r that `keep` pays for: as factors ⌊keep · out · in / (out + in)⌋."""
    allowed = allowance([target], keep)
    if allowed >= target.parameters:
        return None
    rank = bisect_right(range(1, largest_rank(target) + 1), allowed, key=lambda some: cost(target, some))
    if rank < 1:
        raise NoRank(f"keep={keep:g} leaves {target.name} no rank: raise keep or exclude it")
    return rank


def _one_rank(targets: Sequence[Target], keep: float) -> Ranks:
    """The largest rank for all that meets `keep`; a target that it would not make smaller stays dense (choice)."""
    budget = ranked_allowance(targets, keep)
    highest = max(map(largest_rank, targets)) + 1  # at which all are dense
    rank = bisect_right(range(1, highest + 1), budget, key=lambda some: _parameters(targets, some))
    return {target.name: rank_or_dense(target, rank) for target in targets}


def _parameters(targets: Sequence[Target], rank: int) -> int:
    """Of all `targets` at `rank`, or dense where that is smaller."""
    return sum(cost(target, rank_or_dense(target, rank)) for target in targets)
