"""Waterfill: a rank search that spends each parameter of the budget where it saves the most predicted loss.

Related: ZS-SVD (arXiv 2602.02848) and IO-SVD (arXiv 2605.15626) select singular components of the whole model by
first-order estimates of the loss, under a global budget. LEMS (ICML 2026) allocates ranks by an integer linear program
over a layer-wise error model. ARA has the dense layer as a choice, too. Ours is the second-order loss, half of S²,
with the lower hull over dense, factors and pivots.

A target at rank r costs as many parameters as its storage needs, and its predicted loss is ½ Σ_{k>r} S_k², with S its
weighted singular values. Dense, it costs out · in and loses nothing. A move takes a target to any higher rank, or makes
it dense. Among the moves of all targets, the search always makes the one that saves the most loss per parameter. Each
target thus follows the lower convex hull of its points (parameters, predicted loss). As factors, all ranks cost the
same and S_k descends, so a move is a single rank (or a single `multiple`) until going dense saves more per parameter.
Pivoted, each rank costs less than the one before, out + in − 2r − 1, so a move may be many ranks at once.

While every such move is affordable, the loss is the smallest that the budget allows. If the best move of a target is
not affordable, the target makes the best affordable one. The loss then exceeds the optimum by at most the saving of the
missed move. That saving is little for one rank, but it can be much for a target of flat spectrum that just misses going
dense.

A larger budget never gives a larger loss. It makes the same moves as a smaller budget, up to the first move that only
the larger budget can pay for. No later move saves more per parameter, and this move alone costs more than the smaller
budget has left. So it saves more than all moves that the smaller budget can still make.

The search is sound only if S² is comparable across targets, as under a weighting in units of loss, such as kfac.

With `narrow`, an MLP may lose neurons instead (eckart/factorization/neuron_selection.py): its layers become smaller,
but stay dense. Its points are then those of its widths. Whether an MLP is narrowed or its layers are factorized is
decided first, by the smaller loss + price · parameters, at the price of a parameter that fits the budget.

Every parameter takes memory, but only those of linear layers take time as well: embeddings are looked up. So an
embedding's parameters can have a lower price when moves are compared. The budget still counts all parameters alike, so
linear layers then get smaller ranks and embeddings larger ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from eckart.factorization.neuron_selection import NeuronOrder, order_neurons
from eckart.factorization.weightings import weigh
from eckart.model.mlps import Mlp, Width, find_mlps
from eckart.model.targets import Target, weight_of
from eckart.ranks.budget import Rank, Ranks, cost, largest_rank, ranked_allowance
from eckart.ranks.search_problem import ByFormula, SearchProblem, SearchResult, Spectra, losses_of_components
from eckart.recipe_parts import Contradiction, Method, RecipeParts

_STEPS = 48  # about as many widths are tried for an MLP
_BISECTIONS = 60


class Filling(Method):
    """Settings of rank searches that spend the budget where a parameter saves the most predicted loss."""

    multiple: PositiveInt = Field(
        8, description="ranks are multiples of this number, or 1; 8 is faster on many processors"
    )
    embedding_price: PositiveFloat = Field(
        1.0,
        description="price of an embedding's parameter in parameters of a linear layer; below 1 favors embeddings. A "
        "tied head counts as a linear layer",
    )

    def filled(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        """Return the ranks of all targets; each gets at least rank 1, or stays dense if no rank makes it smaller."""
        budget, states = ranked_allowance(targets, keep), self._states(targets, spectra)
        _spend(list(states.values()), budget)
        return {name: state.choice for name, state in states.items()}

    def _states(self, targets: Sequence[Target], spectra: Spectra) -> dict[str, _State]:
        states = {}
        for target in targets:
            price = self.embedding_price if target.looks_up else 1.0
            savings = losses_of_components(spectra[target.name].double()) / price
            states[target.name] = _State.of(target, savings, self.multiple)
        return states


class Waterfill(Filling, ByFormula):
    """Settings of a rank search that spends the budget where a parameter saves the most predicted loss."""

    kind: Literal["waterfill"] = Field(
        "waterfill", description="spends the budget where a parameter saves the most predicted loss"
    )

    narrow: bool = Field(
        False,
        description="whether an MLP may lose neurons instead of getting factors: its layers become smaller, but stay "
        "dense",
    )

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return self.filled(targets, spectra, keep)

    def search(self, problem: SearchProblem) -> SearchResult:
        if not self.narrow:
            return super().search(problem)
        mlps = find_mlps(problem.model, problem.targets, problem.calibration(1)[0])
        spectra = problem.spectra()
        budget, states = ranked_allowance(problem.targets, problem.keep), self._states(problem.targets, spectra)
        orders = {mlp: self._order(problem, mlp) for mlp in problem.progress(mlps, "Orders of neurons", "MLP")}
        narrowings = {mlp: _narrowing(problem, mlp, order) for mlp, order in orders.items()}
        chosen = _better_narrow(states, narrowings, budget)
        for mlp in chosen:
            for name in (*mlp.up, mlp.down):
                del states[name]
        _spend([*states.values(), *chosen.values()], budget)
        widths = {
            mlp.down: Width(up=mlp.up, kept=orders[mlp].kept(state.choice), loss=state.losses[state.position])
            for mlp, state in chosen.items()
            if state.choice is not None
        }
        ranks = {
            target.name: states[target.name].choice if target.name in states else None for target in problem.targets
        }
        remark = "" if mlps else "narrow: no MLP was found whose neurons can be left out"
        return SearchResult(ranks, spectra, remark=remark, widths=widths)

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if self.narrow:
            for part in ("shaping", "residual"):
                if getattr(recipe, part) is not None:
                    yield "ranks", f"narrow does not go with {part}; write narrow: false, or {part}: null"
            if recipe.recovery.kind == "mixed_rank":
                yield "ranks", "narrow does not go with mixed_rank, which needs the dense weights; write narrow: false"

    def _order(self, problem: SearchProblem, mlp: Mlp) -> NeuronOrder:
        """Return the order of the neurons of an MLP, in some 48 widths that are multiples of `multiple`."""
        down = next(target for target in problem.targets if target.name == mlp.down)
        weight = weight_of(problem.model.get_submodule(mlp.down))
        step = self.multiple * ceil(mlp.neurons / (_STEPS * self.multiple))
        return order_neurons(weight, weigh(problem.weighting, down, problem.statistics), step)


def _narrowing(problem: SearchProblem, mlp: Mlp, order: NeuronOrder) -> _State:
    """Return the state of an MLP that gets a width: its choices are numbers of neurons."""
    members = {target.name: target for target in problem.targets}
    price = sum(members[name].in_features for name in mlp.up) + members[mlp.down].out_features  # of a neuron
    widths, losses = order.widths[1:], order.losses[1:]
    costs = [price * width for width in widths]
    return _State([*widths[:-1], None], costs, losses, _vertices(costs, losses))


def _spend(states: Sequence[_State], budget: int) -> None:
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


def _better_narrow(states: Mapping[str, _State], narrowings: Mapping[Mlp, _State], budget: int) -> dict[Mlp, _State]:
    """Return the MLPs that are better narrowed than factorized, with their states, at the price that fits the budget.

    At a price of parameters, each target takes the choice of least loss + price · parameters. The price is found by
    bisection, as the smallest at which all choices are within the budget.
    """

    def better(price: float) -> tuple[int, dict[Mlp, _State]]:
        spent, chosen = sum(state.at(price)[0] for state in states.values()), {}
        for mlp, narrowing in narrowings.items():
            parts = [states[name].at(price) for name in (*mlp.up, mlp.down)]
            cost, loss = (sum(values) for values in zip(*parts, strict=True))
            other_cost, other_loss = narrowing.at(price)
            if other_loss + price * other_cost < loss + price * cost:
                spent += other_cost - cost
                chosen[mlp] = narrowing
        return spent, chosen

    slopes = [slope for state in (*states.values(), *narrowings.values()) if (slope := state.best(budget)[0]) > 0]
    low, high = 0.0, 2 * max(slopes, default=0.0)
    while better(high)[0] > budget:  # the smallest width may cost more than rank 1 of the layers, and save much loss
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if better(middle)[0] <= budget else (middle, high)
    return better(high)[1]


@dataclass
class _State:
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
    def of(cls, target: Target, savings: Tensor, multiple: int) -> _State:
        """Return the state of `target` at its smallest choice, with which the search begins.

        Args:
            savings: predicted loss that each component saves, `(components,)`.
        """
        largest = largest_rank(target)
        ranks = sorted({*range(1, min(largest, 1) + 1), *range(multiple, largest + 1, multiple)})
        tails = savings.flip(0).cumsum(0).flip(0).tolist()
        costs = [*(cost(target, rank) for rank in ranks), target.parameters]
        losses = [*(tails[rank] for rank in ranks), 0.0]
        return cls([*ranks, None], costs, losses, _vertices(costs, losses))

    @property
    def cost(self) -> int:
        return self.costs[self.position]

    @property
    def choice(self) -> Rank:
        return self.choices[self.position]

    def at(self, price: float) -> tuple[int, float]:
        """Return cost and loss of the choice with the least loss + price · cost on the hull above the first choice."""
        position = 0
        while position < len(self.choices) - 1:
            vertex = self.vertices[position]
            if _slope(self.costs, self.losses, position, vertex) <= price:
                break
            position = vertex
        return self.costs[position], self.losses[position]

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


def _vertices(costs: Sequence[int], losses: Sequence[float]) -> Sequence[int]:
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
