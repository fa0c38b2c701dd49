"""Uniform: every target keeps the same share of its parameters, r = ⌊keep · out · in / (out + in)⌋."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from eckart.budget import NoRank, Rank, Ranks, allowance, step
from eckart.ranks.search_problem import ByFormula, Spectra
from eckart.targets import Target


class Uniform(ByFormula):
    """The same keep for every target; dense only where `keep` pays for it."""

    kind: Literal["uniform"]

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return {target.name: _rank(target, keep) for target in targets}


def _rank(target: Target, keep: float) -> Rank:
    allowed = allowance([target], keep)
    if allowed >= target.parameters:
        return None
    rank = allowed // step(target)
    if rank < 1:
        raise NoRank(f"keep={keep:g} leaves {target.name} no rank: raise keep or exclude it")
    return rank
