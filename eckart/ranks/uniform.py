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
from eckart.ranks.budget import Rank, Ranks, allowance, cost, largest_rank, rank_or_dense, ranked_allowance, total
from eckart.ranks.search_problem import ByFormula, Spectra


class Uniform(ByFormula):
    """The same keep, or the same rank, for every target; dense only where `keep` pays for it."""

    by_size = True

    kind: Literal["uniform"] = Field("uniform", description="no target is favored")
    by: Literal["share", "rank"] = Field(
        "share", description="share: every target keeps the same share; rank: every target has the same rank"
    )

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return _same_rank(targets, keep) if self.by == "rank" else _same_share(targets, keep)


def _same_share(targets: Sequence[Target], keep: float) -> Ranks:
    """Return ranks by the same keep for all targets but those with few rows, which it would leave no rank.

    These have rank 1, or stay dense where no rank makes them smaller, and the others share what is left (choice).
    """
    budget = ranked_allowance(targets, keep)
    least: dict[str, Rank] = {}
    while True:
        others = [target for target in targets if target.name not in least]
        if least:
            left = budget - sum(cost(target, least[target.name]) for target in targets if target.name in least)
            keep = max(left / max(sum(target.parameters for target in others), 1), 1e-9)
        ranks = {target.name: _rank(target, keep) for target in others}
        if 0 not in ranks.values():
            return {target.name: (least | ranks)[target.name] for target in targets}
        least |= {target.name: rank_or_dense(target, 1) for target in others if ranks[target.name] == 0}


def _rank(target: Target, keep: float) -> Rank:
    """Return the largest r that `keep` pays for: ⌊keep · out · in / (out + in)⌋ as factors; 0 if none."""
    allowed = allowance([target], keep)
    if allowed >= target.parameters:
        return None
    return bisect_right(range(1, largest_rank(target) + 1), allowed, key=lambda rank: cost(target, rank))


def _same_rank(targets: Sequence[Target], keep: float) -> Ranks:
    """Return ranks by the largest common rank that meets `keep`; others stay dense (choice)."""
    budget = ranked_allowance(targets, keep)
    highest = max(map(largest_rank, targets)) + 1  # at which all are dense

    def ranks_at(rank: int) -> Ranks:
        return {target.name: rank_or_dense(target, rank) for target in targets}

    return ranks_at(bisect_right(range(1, highest + 1), budget, key=lambda rank: total(targets, ranks_at(rank))))
