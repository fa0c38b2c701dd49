"""Waterfill (ours): spend the budget where a parameter saves most predicted loss.

One more rank for a target saves S_k² and costs out + in parameters; staying dense saves all the rest of its spectrum
and costs what is missing to out · in. The move that saves most per parameter comes first. While every such move is
affordable this follows the upper hull of savings over cost and is optimal: S_k descends, so single ranks save ever
less, and going dense is taken where it overtakes the next one. A move that the budget no longer pays for is skipped;
the loss then exceeds the optimum by at most that move's saving: little for a rank, but it can be much for a target of
flat spectrum that just misses going dense.

Sound only where S² is comparable across targets: under a weighting in units of loss, such as kfac.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eckart.budget import Rank, Ranks, cost, largest_rank, ranked_allowance, step
from eckart.ranks.search_problem import ByFormula, Spectra
from eckart.targets import Target


class Waterfill(ByFormula):
    """Ranks by predicted loss saved per parameter, over all targets at once."""

    kind: Literal["waterfill"]

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return _ranks(targets, spectra, keep)


@dataclass(frozen=True)
class _Move:
    rank: Rank
    price: int
    saving: float


def _ranks(targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
    """Ranks within `keep` of all targets together; every target gets rank 1 at least."""
    budget = ranked_allowance(targets, keep)
    if budget >= sum(target.parameters for target in targets):
        return {target.name: None for target in targets}
    ranks: dict[str, Rank] = {target.name: 1 if largest_rank(target) else None for target in targets}
    budget -= sum(cost(target, ranks[target.name]) for target in targets)

    spectra = {name: values.double().square() for name, values in spectra.items()}
    energies = {name: values.tolist() for name, values in spectra.items()}
    tails = {name: values.flip(0).cumsum(0).flip(0).tolist() for name, values in spectra.items()}
    by_name = {target.name: target for target in targets}
    queue: list[tuple[float, str]] = []

    def offer(target: Target) -> None:
        """Queue the best move of `target` that the budget still pays for."""
        moves = _moves(target, ranks[target.name], energies[target.name], tails[target.name])
        payable = [move for move in moves if move.price <= budget]
        if payable:
            heapq.heappush(queue, (-max(move.saving / move.price for move in payable), target.name))

    for target in targets:
        offer(target)
    while queue:
        promised, name = heapq.heappop(queue)
        target = by_name[name]
        moves = [m for m in _moves(target, ranks[name], energies[name], tails[name]) if m.price <= budget]
        best = max(moves, key=lambda move: move.saving / move.price, default=None)
        if best is not None and -best.saving / best.price <= promised:
            ranks[name] = best.rank
            budget -= best.price
        offer(target)
    return ranks


def _moves(target: Target, rank: Rank, energies: Sequence[float], tails: Sequence[float]) -> list[_Move]:
    """What `target` can do from `rank`: one rank more saves `energies[rank]`, dense all of `tails[rank]`."""
    if rank is None:
        return []
    moves = [_Move(None, target.parameters - cost(target, rank), tails[rank])]
    if rank < largest_rank(target):
        moves.append(_Move(rank + 1, step(target), energies[rank]))
    return moves
