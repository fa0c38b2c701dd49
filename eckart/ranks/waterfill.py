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
still can, for from there on no move saves more per parameter and its cost alone is more than the smaller has left.

Sound only where S² is comparable across targets: under a weighting in units of loss, such as kfac.

Parameters are bytes, and those of linear layers are time besides. So moves may be compared by prices that ask less for
what an embedding looks up; within the budget, which counts parameters alone, linear layers then have smaller ranks and
embeddings larger ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from eckart.model.targets import Target
from eckart.ranks.budget import Rank, Ranks, cost, largest_rank, ranked_allowance
from eckart.ranks.search_problem import ByFormula, Spectra


class Waterfill(ByFormula):
    """Ranks by predicted loss saved per parameter, over all targets at once."""

    kind: Literal["waterfill"] = Field("waterfill", description="spend the budget where a parameter saves most loss")
    multiple: PositiveInt = Field(
        8, description="ranks are multiples of it, or 1: many processors are slower with other sizes"
    )
    embedding_price: PositiveFloat = Field(
        1.0,
        description="price of an embedding's parameter, which takes no time, in those of a linear layer; a tied head "
        "counts as a linear layer",
    )

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        """Every target gets rank 1 at least."""
        left = ranked_allowance(targets, keep)
        states = []
        for target in targets:
            price = self.embedding_price if target.looks_up else 1.0
            states.append(_State.of(target, spectra[target.name].double().square() / price, self.multiple))
        left -= sum(state.cost for state in states)
        queue = [(-state.best(left)[0], number) for number, state in enumerate(states)]
        heapq.heapify(queue)
        while queue:
            promised, number = heapq.heappop(queue)
            slope, position = states[number].best(left)
            if slope < 0:
                continue
            if slope >= -promised:  # else another target may save more: it comes again by what it saves now
                left += states[number].cost
                states[number].position = position
                left -= states[number].cost
            heapq.heappush(queue, (-states[number].best(left)[0], number))
        return {target.name: state.choices[state.position] for target, state in zip(targets, states, strict=True)}


@dataclass
class _State:
    """A target with the ranks that it may have, and the position of the one that it has.

    Attributes:
        choices: rank 1 and the multiples, ascending, then None.
        costs: their parameters, ascending.
        losses: the loss that each leaves, descending.
        vertices: from each choice the position of the next on the hull of those after it.
    """

    choices: Sequence[Rank]
    costs: Sequence[int]
    losses: Sequence[float]
    vertices: Sequence[int]
    position: int = 0

    @classmethod
    def of(cls, target: Target, savings: Tensor, multiple: int) -> _State:
        """Begin at the smallest choice, where each component saves `savings` `(components,)`."""
        largest = largest_rank(target)
        ranks = sorted({*range(1, min(largest, 1) + 1), *range(multiple, largest + 1, multiple)})
        tails = savings.flip(0).cumsum(0).flip(0).tolist()
        costs = [*(cost(target, rank) for rank in ranks), target.parameters]
        losses = [*(tails[rank] for rank in ranks), 0.0]
        return cls([*ranks, None], costs, losses, _vertices(costs, losses))

    @property
    def cost(self) -> int:
        return self.costs[self.position]

    def best(self, left: int) -> tuple[float, int]:
        """Return the most loss that one of `left` parameters can save, and the choice it leads to; below 0 if none."""
        if self.position == len(self.choices) - 1:
            return -1.0, self.position
        vertex = self.vertices[self.position]
        if self.costs[vertex] <= self.cost + left:
            return _slope(self.costs, self.losses, self.position, vertex), vertex
        payable = range(self.position + 1, bisect_right(self.costs, self.cost + left))
        slopes = ((_slope(self.costs, self.losses, self.position, there), there) for there in payable)
        return max(slopes, default=(-1.0, self.position))


def _vertices(costs: Sequence[int], losses: Sequence[float]) -> Sequence[int]:
    """Return for each point the one after it with the steepest way down, of equals the furthest; the last has none."""
    hull, vertices = [len(costs) - 1], [len(costs)] * len(costs)
    for here in reversed(range(len(costs) - 1)):
        while len(hull) > 1 and _slope(costs, losses, here, hull[-2]) >= _slope(costs, losses, here, hull[-1]):
            hull.pop()
        vertices[here] = hull[-1]
        hull.append(here)
    return vertices


def _slope(costs: Sequence[int], losses: Sequence[float], here: int, there: int) -> float:
    """Return the loss that each parameter saves between two choices."""
    return (losses[here] - losses[there]) / (costs[there] - costs[here])
