"""Waterfill (ours): spend the budget where a parameter saves most predicted loss.

A target at rank r costs what its storage asks and loses Σ_{k>r} S_k²; dense it costs out · in and loses nothing. From
where it stands it may go to any rank above, or dense, and over all targets the move that saves most per parameter comes
first: this walks the lower convex hull of each target's (parameters, loss left). As factors all ranks cost the same and
S_k descends, so the hull has single ranks (or single multiples) and, where that overtakes them, going dense. Pivoted,
each rank costs less than the one before, out + in − 2r − 1, and a move may be many ranks at once.

While every such move is affordable the loss is the least that the budget allows. A target whose best move is not takes
the best that is; the loss then exceeds the optimum by at most the saving of the move that was missed: little for a
rank, but it can be much for a target of flat spectrum that just misses going dense. A larger budget never loses more:
it takes the same moves until it can pay for one that the smaller cannot, and that saves more than all that the smaller
still can, for from there on no move saves more per parameter and its price alone is more than the smaller has left.

Sound only where S² is comparable across targets: under a weighting in units of loss, such as kfac.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt
from torch import Tensor

from eckart.budget import Rank, Ranks, cost, largest_rank, ranked_allowance
from eckart.ranks.search_problem import ByFormula, Spectra
from eckart.targets import Target


class Waterfill(ByFormula):
    """Ranks by predicted loss saved per parameter, over all targets at once."""

    kind: Literal["waterfill"]
    multiple: PositiveInt
    """Of which each rank is one, but for rank 1: processors multiply some sizes faster than others."""

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        """Every target gets rank 1 at least."""
        left = ranked_allowance(targets, keep)
        states = [_State.of(target, spectra[target.name], self.multiple) for target in targets]
        left -= sum(state.price for state in states)
        queue = [(-state.best(left)[0], number) for number, state in enumerate(states)]
        heapq.heapify(queue)
        while queue:
            promised, number = heapq.heappop(queue)
            slope, position = states[number].best(left)
            if slope < 0:
                continue
            if slope >= -promised:
                left += states[number].price
                states[number].position = position
                left -= states[number].price
            heapq.heappush(queue, (-states[number].best(left)[0], number))
        return {target.name: state.rank for target, state in zip(targets, states, strict=True)}


@dataclass
class _State:
    """Where a target stands among what it may be.

    choices: rank 1 and the multiples, ascending, then None; prices: their parameters, ascending; losses: what each
    leaves, descending.
    vertices: from each choice the next on the hull of those behind it.
    """

    choices: Sequence[Rank]
    prices: Sequence[int]
    losses: Sequence[float]
    vertices: Sequence[int]
    position: int = 0

    @classmethod
    def of(cls, target: Target, spectrum: Tensor, multiple: int) -> _State:
        largest = largest_rank(target)
        ranks = sorted({*range(1, min(largest, 1) + 1), *range(multiple, largest + 1, multiple)})
        tails = spectrum.double().square().flip(0).cumsum(0).flip(0).tolist()
        prices = [*(cost(target, rank) for rank in ranks), target.parameters]
        losses = [*(tails[rank] for rank in ranks), 0.0]
        return cls([*ranks, None], prices, losses, _vertices(prices, losses))

    @property
    def rank(self) -> Rank:
        return self.choices[self.position]

    @property
    def price(self) -> int:
        return self.prices[self.position]

    def best(self, left: int) -> tuple[float, int]:
        """The most that a parameter can save of those that are `left`, and where that leads; below 0 if nowhere."""
        if self.position == len(self.choices) - 1:
            return -1.0, self.position
        vertex = self.vertices[self.position]
        if self.prices[vertex] <= self.price + left:
            return _slope(self.prices, self.losses, self.position, vertex), vertex
        payable = range(self.position + 1, bisect_right(self.prices, self.price + left))
        slopes = ((_slope(self.prices, self.losses, self.position, there), there) for there in payable)
        return max(slopes, default=(-1.0, self.position))


def _vertices(prices: Sequence[int], losses: Sequence[float]) -> Sequence[int]:
    """From each point the one behind it with the steepest way down, of equals the furthest; the last has none."""
    hull, vertices = [len(prices) - 1], [len(prices)] * len(prices)
    for here in reversed(range(len(prices) - 1)):
        while len(hull) > 1 and _slope(prices, losses, here, hull[-2]) >= _slope(prices, losses, here, hull[-1]):
            hull.pop()
        vertices[here] = hull[-1]
        hull.append(here)
    return vertices


def _slope(prices: Sequence[int], losses: Sequence[float], here: int, there: int) -> float:
    """What a parameter saves on the way from one choice to another."""
    return (losses[here] - losses[there]) / (prices[there] - prices[here])
