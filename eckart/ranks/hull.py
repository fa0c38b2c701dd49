"""Points (parameters, predicted loss) of targets, their lower hulls, and a search that spends a budget along them."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from eckart.model.targets import Target
from eckart.ranks.budget import Rank, cost, largest_rank


def spend(states: Sequence[State], budget: int) -> None:
    """Move `states` up by the moves that save the most loss per parameter, until no move is within the budget."""
    left = budget - sum(state.cost for state in states)
    queue = [(-state.best(left)[0], number) for number, state in enumerate(states)]
    heapq.heapify(queue)
    while queue:
        promised, number = heapq.heappop(queue)
        slope, position = states[number].best(left)
        if slope < 0:
            continue
        if slope >= -promised:  # otherwise another target may save more, so queue it again
            left += states[number].cost
            states[number].position = position
            left -= states[number].cost
        heapq.heappush(queue, (-states[number].best(left)[0], number))


@dataclass
class State:
    """State of one target in the search: the ranks that it may have, and the position of its current rank among them.

    Attributes:
        choices: rank 1 and the multiples, or numbers of neurons, ascending; then None for dense.
        costs: number of parameters of each choice, ascending.
        losses: predicted loss at each choice, descending.
        vertices: for each choice, the position of the next choice on the lower convex hull of the later choices.
    """

    choices: Sequence[Rank]
    costs: Sequence[int]
    losses: Sequence[float]
    vertices: Sequence[int]
    position: int = 0

    @classmethod
    def of(cls, target: Target, savings: Tensor, multiple: int) -> State:
        """Return the state of `target` at its smallest choice, with which the search begins.

        Args:
            savings: predicted loss that each component saves, `(components,)`.
        """
        largest = largest_rank(target)
        ranks = sorted({*range(1, min(largest, 1) + 1), *range(multiple, largest + 1, multiple)})
        tails = savings.flip(0).cumsum(0).flip(0).tolist()
        costs = [*(cost(target, rank) for rank in ranks), target.parameters]
        losses = [*(tails[rank] for rank in ranks), 0.0]
        return cls([*ranks, None], costs, losses, vertices(costs, losses))

    @property
    def cost(self) -> int:
        return self.costs[self.position]

    @property
    def loss(self) -> float:
        return self.losses[self.position]

    @property
    def choice(self) -> Rank:
        return self.choices[self.position]

    def at(self, price: float) -> tuple[int, float]:
        """Return cost and loss of the choice with the least loss + price · cost on the hull above the first choice."""
        corners, falls = self._hull
        position = corners[bisect_left(falls, -price)]
        return self.costs[position], self.losses[position]

    @cached_property
    def _hull(self) -> tuple[list[int], list[float]]:
        """Positions on the hull above the first choice, and the negative saving of each move between them."""
        corners = [0]
        while corners[-1] < len(self.choices) - 1:
            corners.append(self.vertices[corners[-1]])
        return corners, [-_slope(self.costs, self.losses, *move) for move in pairwise(corners)]

    def best(self, left: int) -> tuple[float, int]:
        """Return the largest loss saved per parameter by a move that costs at most `left`, and the position after it.

        The saving is negative if no move is possible.
        """
        if self.position == len(self.choices) - 1:
            return -1.0, self.position
        vertex = self.vertices[self.position]
        if self.costs[vertex] <= self.cost + left:
            return _slope(self.costs, self.losses, self.position, vertex), vertex
        payable = range(self.position + 1, bisect_right(self.costs, self.cost + left))
        slopes = ((_slope(self.costs, self.losses, self.position, there), there) for there in payable)
        return max(slopes, default=(-1.0, self.position))


def vertices(costs: Sequence[int], losses: Sequence[float]) -> Sequence[int]:
    """Return, for each choice, the later choice that saves the most loss per parameter; of several, the last one.

    Choices are given by their positions. The last choice has no later one; its entry is the position after the end.
    """
    hull, vertices = [len(costs) - 1], [len(costs)] * len(costs)
    for here in reversed(range(len(costs) - 1)):
        while len(hull) > 1 and _slope(costs, losses, here, hull[-2]) >= _slope(costs, losses, here, hull[-1]):
            hull.pop()
        vertices[here] = hull[-1]
        hull.append(here)
    return vertices


def _slope(costs: Sequence[int], losses: Sequence[float], here: int, there: int) -> float:
    """Return the loss saved per parameter by going from choice `here` to choice `there`."""
    return (losses[here] - losses[there]) / (costs[there] - costs[here])
