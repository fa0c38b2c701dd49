"""Ways to compress an MLP: ranks, a width, or both; and the choice of one for each MLP, or group of MLPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eckart.model.mlps import Mlp
from eckart.ranks.budget import Ranks
from eckart.ranks.hull import State, spend, vertices
from eckart.ranks.search_problem import Spectra

_BISECTIONS = 60


@dataclass(frozen=True)
class Way:
    """A way to compress an MLP, or a group of MLPs with one width.

    Attributes:
        states: target → its state; none if the layers stay dense.
        width: state of the MLPs, whose choices are numbers of neurons: all widths, or the one for which `states` are;
            None if the MLPs keep all their neurons.
        spectra: singular values of the smaller layers, for `states` of one width.
    """

    states: Mapping[str, State]
    width: State | None = None
    spectra: Spectra = field(default_factory=dict)

    @property
    def all_states(self) -> list[State]:
        return [*self.states.values(), *([] if self.width is None else [self.width])]

    def at(self, price: float) -> tuple[int, float]:
        """Return cost and loss at the choices of least loss + price · cost."""
        points = [state.at(price) for state in self.all_states]
        return sum(cost for cost, _ in points), sum(loss for _, loss in points)

    def copy(self) -> Way:
        states = {name: replace(state) for name, state in self.states.items()}
        return replace(self, states=states, width=self.width and replace(self.width))


def summed(widths: Sequence[State]) -> State:
    """Return the state of one width for several MLPs of the same size, from the states of each one's width."""
    costs = [sum(parts) for parts in zip(*(width.costs for width in widths), strict=True)]
    losses = [sum(parts) for parts in zip(*(width.losses for width in widths), strict=True)]
    return State(widths[0].choices, costs, losses, vertices(costs, losses))


Group = tuple[Mlp, ...]
"""MLPs that get the same width."""


@dataclass(frozen=True)
class Filled:
    """The states of all targets and groups of MLPs after the budget is spent."""

    states: Mapping[str, State]
    ways: Mapping[Group, Way]

    @property
    def all_states(self) -> list[State]:
        return [*self.states.values(), *(state for way in self.ways.values() for state in way.all_states)]

    @property
    def loss(self) -> float:
        return sum(state.loss for state in self.all_states)

    @property
    def ranks(self) -> Ranks:
        """Rank of each target; a target of an MLP that only gets a width has none here."""
        groups = (self.states, *(way.states for way in self.ways.values()))
        return {name: state.choice for states in groups for name, state in states.items()}

    @property
    def narrowed(self) -> dict[Group, int]:
        """Number of neurons of the MLPs of each group that lose neurons."""
        widths = {group: way.width for group, way in self.ways.items() if way.width is not None}
        return {group: width.choice for group, width in widths.items() if width.choice is not None}


def fill(states: Mapping[str, State], ways: Mapping[Group, Sequence[Way]], budget: int) -> Filled:
    """Choose one of the ways of each group of MLPs, then spend the budget."""
    chosen = _best_ways(states, ways, budget)
    filled = Filled(
        {name: replace(state) for name, state in states.items()}, {group: way.copy() for group, way in chosen.items()}
    )
    spend(filled.all_states, budget)
    return filled


def _best_ways(states: Mapping[str, State], ways: Mapping[Group, Sequence[Way]], budget: int) -> Mapping[Group, Way]:
    """Return the best way of each group of MLPs at the price that fits the budget.

    At a price of parameters, each target and each group takes the choice of least loss + price · parameters. The price
    is found by bisection, as the smallest at which all choices are within the budget.
    """

    def best(price: float) -> tuple[int, dict[Group, Way]]:
        spent, chosen = sum(state.at(price)[0] for state in states.values()), {}
        for group, offered in ways.items():
            points = [way.at(price) for way in offered]
            number = min(range(len(points)), key=lambda place: points[place][1] + price * points[place][0])
            spent += points[number][0]
            chosen[group] = offered[number]
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
