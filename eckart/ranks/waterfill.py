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

With `narrow`, an MLP may lose neurons (eckart/factorization/neuron_selection.py). There are three ways to compress it:
its layers are factorized; they become smaller, but stay dense, and then its points are those of its widths; or they
become smaller and are then factorized. The predicted loss is then that of the width and those of the smaller layers'
ranks, each under the part of its norm that belongs to the neurons that stay. Every MLP's way is decided first, by the
smallest loss + price · parameters, at the price of a parameter that fits the budget. The third way pays with pivots:
the smaller layers lose their last ranks, which hold little and save more parameters than neurons do. With plain factors
it does not (docs/notes/language-models.md), so it is not tried.

With `narrow`, a larger budget may give a somewhat larger loss, because the price may decide for other ways. The
predicted loss is never larger than without `narrow`.

The sum of both losses is an estimate. In a layer of SmolLM2 at 60 and 40 % of the parameters, the measured error of
the MLP's outputs is 1.15 and 1.12 × it; that of pivots without narrowing is 1.20 and 1.07 × theirs.

Every parameter takes memory, but only those of linear layers take time as well: embeddings are looked up. So an
embedding's parameters can have a lower price when moves are compared. The budget still counts all parameters alike, so
linear layers then get smaller ranks and embeddings larger ones.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from eckart.factorization.neuron_selection import NeuronOrder, fitted, of_neurons, order_neurons
from eckart.factorization.weighted_svd import spectrum
from eckart.factorization.weightings import ErrorNorm, weigh
from eckart.model.mlps import Mlp, Width, find_mlps, narrowed
from eckart.model.targets import Target, weight_of
from eckart.ranks.budget import Rank, Ranks, cost, largest_rank, ranked_allowance
from eckart.ranks.search_problem import ByFormula, SearchProblem, SearchResult, Spectra, losses_of_components
from eckart.recipe_parts import Contradiction, Method, RecipeParts

_STEPS = 48  # about as many widths are tried for an MLP
_PARTS = 8  # its layers get pivots, too, at widths of 2, 3, … of as many parts of its neurons
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
        description="whether an MLP may lose neurons: its layers become smaller, and stay dense or, with storage "
        "pivoted, get pivots, too",
    )

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return self.filled(targets, spectra, keep)

    def search(self, problem: SearchProblem) -> SearchResult:
        if not self.narrow:
            return super().search(problem)
        mlps = find_mlps(problem.model, problem.targets, problem.calibration(1)[0])
        spectra, budget = problem.spectra(), ranked_allowance(problem.targets, problem.keep)
        states, orders, ways = self._states(problem.targets, spectra), {}, {}
        for mlp in problem.progress(mlps, "Widths", "MLP"):
            order = orders[mlp] = self._order(problem, mlp)
            in_ranks = _Way({name: states.pop(name) for name in (*mlp.up, mlp.down)})
            ways[mlp] = [in_ranks, _narrowing(problem, mlp, order), *self._both(problem, mlp, order)]
        # the search is greedy, so fewer ways may turn out better
        fillings = [_filled(states, {mlp: ways[mlp][:number] for mlp in mlps}, budget) for number in (1, 2, None)]
        best = min(fillings, key=lambda filling: filling.loss)
        ranks: dict[str, Rank] = {target.name: None for target in problem.targets}
        ranks |= {name: state.choice for name, state in best.states.items()}
        widths = {}
        for mlp, way in best.ways.items():
            ranks |= {name: state.choice for name, state in way.states.items()}
            if way.width is not None and (neurons := way.width.choice) is not None:
                spectra = {**spectra, **way.spectra}
                widths[mlp.down] = Width(up=mlp.up, kept=orders[mlp].kept(neurons), loss=way.width.loss)
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

    def _both(self, problem: SearchProblem, mlp: Mlp, order: NeuronOrder) -> Iterator[_Way]:
        """Yield ways in which an MLP loses neurons and its layers get pivots, at some of the widths of `order`."""
        targets = [target for target in problem.targets if target.name in (*mlp.up, mlp.down)]
        if targets[0].storage != "pivoted":
            return
        weights = {target.name: weight_of(problem.model.get_submodule(target.name)) for target in targets}
        norms = {target.name: weigh(problem.weighting, target, problem.statistics) for target in targets}
        steps = len(order.widths) - 1
        for place in sorted({steps * part // _PARTS for part in range(2, _PARTS)} - {0}):
            width = Width(up=mlp.up, kept=order.kept(order.widths[place]), loss=order.losses[place])
            spectra = {}
            for name, weight in weights.items():
                neurons, norm = torch.tensor(width.kept, device=weight.device), norms[name]
                smaller = fitted(weight, norm.right, neurons) if name == mlp.down else weight[neurons]
                rows, columns = smaller.shape
                sides = of_neurons(norm.left, rows, neurons), of_neurons(norm.right, columns, neurons)
                spectra[name] = spectrum(smaller, ErrorNorm(*sides))
            states = self._states(narrowed(targets, {mlp.down: width}), spectra)
            yield _Way(states, _State([width.neurons], [0], [width.loss], [1]), spectra)


def _narrowing(problem: SearchProblem, mlp: Mlp, order: NeuronOrder) -> _Way:
    """Return the way in which an MLP only gets a width."""
    members = {target.name: target for target in problem.targets}
    price = sum(members[name].in_features for name in mlp.up) + members[mlp.down].out_features  # of a neuron
    widths, losses = order.widths[1:], order.losses[1:]
    costs = [price * width for width in widths]
    return _Way({}, _State([*widths[:-1], None], costs, losses, _vertices(costs, losses)))


def _filled(states: Mapping[str, _State], ways: Mapping[Mlp, Sequence[_Way]], budget: int) -> _Filling:
    """Choose one of the ways of each MLP, then spend the budget."""
    chosen = _best_ways(states, ways, budget)
    filling = _Filling(
        {name: replace(state) for name, state in states.items()}, {mlp: way.copy() for mlp, way in chosen.items()}
    )
    _spend(filling.all_states, budget)
    return filling


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


def _best_ways(states: Mapping[str, _State], ways: Mapping[Mlp, Sequence[_Way]], budget: int) -> Mapping[Mlp, _Way]:
    """Return the best way of each MLP at the price that fits the budget.

    At a price of parameters, each target and each MLP takes the choice of least loss + price · parameters. The price is
    found by bisection, as the smallest at which all choices are within the budget.
    """

    def best(price: float) -> tuple[int, dict[Mlp, _Way]]:
        spent, chosen = sum(state.at(price)[0] for state in states.values()), {}
        for mlp, offered in ways.items():
            points = [way.at(price) for way in offered]
            number = min(range(len(points)), key=lambda place: points[place][1] + price * points[place][0])
            spent += points[number][0]
            chosen[mlp] = offered[number]
        return spent, chosen

    everything = [
        *states.values(),
        *(state for offered in ways.values() for way in offered for state in way.all_states),
    ]
    low, high = 0.0, 2 * max((0.0, *(state.best(state.costs[-1])[0] for state in everything)))
    while best(high)[0] > budget:  # the smallest width may cost more than rank 1 of the layers, and save much loss
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if best(middle)[0] <= budget else (middle, high)
    return best(high)[1]


@dataclass(frozen=True)
class _Way:
    """A way to compress an MLP.

    Attributes:
        states: target → its state; none if the layers stay dense.
        width: state of the MLP, whose choices are numbers of neurons: all widths, or the one for which `states` are;
            None if the MLP keeps all its neurons.
        spectra: singular values of the smaller layers, for `states` of one width.
    """

    states: Mapping[str, _State]
    width: _State | None = None
    spectra: Spectra = field(default_factory=dict)

    @property
    def all_states(self) -> list[_State]:
        return [*self.states.values(), *([] if self.width is None else [self.width])]

    def at(self, price: float) -> tuple[int, float]:
        """Return cost and loss at the choices of least loss + price · cost."""
        points = [state.at(price) for state in self.all_states]
        return sum(cost for cost, _ in points), sum(loss for _, loss in points)

    def copy(self) -> _Way:
        states = {name: replace(state) for name, state in self.states.items()}
        return replace(self, states=states, width=self.width and replace(self.width))


@dataclass(frozen=True)
class _Filling:
    """The states of all targets and MLPs after the budget is spent."""

    states: Mapping[str, _State]
    ways: Mapping[Mlp, _Way]

    @property
    def all_states(self) -> list[_State]:
        return [*self.states.values(), *(state for way in self.ways.values() for state in way.all_states)]

    @property
    def loss(self) -> float:
        return sum(state.loss for state in self.all_states)


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
    def loss(self) -> float:
        return self.losses[self.position]

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
