"""Uniform: a rank search that favors no target, either with one share of parameters or with one rank for all targets.

The tables of ARS (Gao et al. 2024, table A2) and LPAF (Ren and Zhu 2024) use one rank for all as their baseline: the
largest rank that keeps the parameters of all targets within the budget.
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
    """Settings of a rank search with the same share, or the same rank, for every target."""

    by_size = True

    kind: Literal["uniform"] = Field("uniform", description="the same share or rank for every target")
    by: Literal["share", "rank"] = Field(
        "share",
        description="share: every target keeps the same share of its parameters; rank: every target gets the same rank",
    )

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return _same_rank(targets, keep) if self.by == "rank" else _same_share(targets, keep)


def _same_share(targets: Sequence[Target], keep: float) -> Ranks:
    """Return ranks at which every target keeps the same share of its parameters.

    Targets with few outputs, whose share does not pay for rank 1, get rank 1, or stay dense if no rank makes them
    smaller. The other targets share the remaining budget (choice).
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
    """Return the largest rank of `target` that `keep` pays for; as factors, this is ⌊keep · out · in / (out + in)⌋.

    It is 0 if `keep` does not pay for rank 1, and None (dense) if it pays for the dense weight.
    """
    allowed = allowance([target], keep)
    if allowed >= target.parameters:
        return None
    return bisect_right(range(1, largest_rank(target) + 1), allowed, key=lambda rank: cost(target, rank))


def _same_rank(targets: Sequence[Target], keep: float) -> Ranks:
    """Return the same rank for every target: the largest one that meets `keep`.

    Targets that this rank does not make smaller stay dense (choice).
    """
    budget = ranked_allowance(targets, keep)
    highest = max(map(largest_rank, targets)) + 1  # at this rank all targets are dense

    def ranks_at(rank: int) -> Ranks:
        return {target.name: rank_or_dense(target, rank) for target in targets}

    return ranks_at(bisect_right(range(1, highest + 1), budget, key=lambda rank: total(targets, ranks_at(rank))))
