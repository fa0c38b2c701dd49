"""The choice among the ways to compress an MLP, solved by hand."""

from __future__ import annotations

import pytest
import torch

from eckart.model.mlps import Mlp
from eckart.ranks.hull import State, vertices
from eckart.ranks.mlp_ways import Way, fill


def state(choices: list[int | None], costs: list[int], losses: list[float]) -> State:
    return State(choices, costs, losses, vertices(costs, losses))


def test_the_choice_at_a_price_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 5, 20):
        costs = (1 + torch.randint(1, 9, (count,), generator=generator)).cumsum(0).tolist()
        losses = [
            *torch.rand(count - 1, generator=generator, dtype=torch.float64).sort(descending=True)[0].tolist(),
            0.0,
        ]
        moves = state([*range(1, count), None], costs, losses)
        for price in (0.0, 0.003, 0.02, 0.1, 1.0):
            cost, loss = moves.at(price)
            assert loss + price * cost == pytest.approx(min(b + price * a for a, b in zip(costs, losses, strict=True)))


def test_a_way_whose_smallest_choice_exceeds_the_budget_is_not_chosen() -> None:
    """The width saves far more per parameter than any move within a way, but costs 100 of the 50 parameters."""
    mlp = Mlp(up=("up",), down="down", neurons=16)
    ranks = Way({"up": state([1, None], [1, 200], [1000.0, 999.0])})
    width = Way({}, state([8, None], [100, 200], [2.0, 0.0]))
    tight = fill({}, {(mlp,): [ranks, width]}, 50)
    assert tight.ways[mlp,].width is None
    assert tight.ranks == {"up": 1}
    assert fill({}, {(mlp,): [ranks, width]}, 150).narrowed == {(mlp,): 8}
