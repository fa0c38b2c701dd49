"""The choice among the ways to compress an MLP, solved by hand."""

from __future__ import annotations

from eckart.model.mlps import Mlp
from eckart.ranks.hull import State, vertices
from eckart.ranks.mlp_ways import Way, fill


def state(choices: list[int | None], costs: list[int], losses: list[float]) -> State:
    return State(choices, costs, losses, vertices(costs, losses))


def test_a_way_whose_smallest_choice_exceeds_the_budget_is_not_chosen() -> None:
    """The width saves far more per parameter than any move within a way, but costs 100 of the 50 parameters."""
    mlp = Mlp(up=("up",), down="down", neurons=16)
    ranks = Way({"up": state([1, None], [1, 200], [1000.0, 999.0])})
    width = Way({}, state([8, None], [100, 200], [2.0, 0.0]))
    tight = fill({}, {(mlp,): [ranks, width]}, 50)
    assert tight.ways[mlp,].width is None
    assert tight.ranks == {"up": 1}
    assert fill({}, {(mlp,): [ranks, width]}, 150).narrowed == {(mlp,): 8}
