"""The signed first-order effect is autograd's, and zero sum cuts in the order that is solved by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import eckart
from eckart.calibration.losses import mean_loss_times_batch
from eckart.calibration.statistics import collect
from eckart.factorization.decomposition import decompose_target
from eckart.factorization.weightings import Inputs, Kfac, Weighting
from eckart.model.targets import Target, find_targets
from eckart.ranks.budget import NoRank, allowance, largest_rank, total
from eckart.ranks.zero_sum import first_order, zero_sum_ranks
from tests import tiny

BATCHES = tiny.batches(tiny.samples(6), 3)
TEXTS = [{"input_ids": ids} for ids in torch.stack([ids for ids, _ in tiny.samples(6, 5, 5)]).split(3)]


# --- effects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", [Inputs(), Kfac()], ids=["inputs", "kfac"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_an_effect_is_the_derivative_of_the_loss_as_the_component_is_cut(family: str, weighting: Weighting) -> None:
    """The first target is an embedding, the last a layer of the last block; gpt2's are Conv1D."""
    model = tiny.FAMILIES[family]().double().eval()
    targets = find_targets(model, BATCHES[0], embeddings=True).targets
    statistics = collect(model, BATCHES, targets, [*weighting.statistics, "gradients"])
    for batch in BATCHES:
        mean_loss_times_batch(model, batch).backward()
    for target in (targets[0], targets[-1]):
        parts = decompose_target(model, target, weighting, statistics)
        effects = first_order(target, parts, statistics)
        module = model.get_submodule(target.name)
        gradient = module.weight.grad / 6
        gradient = gradient.T if isinstance(module, Conv1D | nn.Embedding) else gradient
        for k in (0, 3):
            component = torch.outer(parts.left[:, k], parts.right[k])
            assert float(effects[k]) == pytest.approx(-float((gradient * component).sum()), rel=1e-4, abs=1e-9)


def test_without_gradients_the_error_says_what_to_add() -> None:
    target = square("a", 4)
    parts = decompose_target(tiny.LinearLayers((4, 4)), target, Kfac(), KFAC_OF_ONE)
    with pytest.raises(ValueError, match=r"^a: .*importance\.statistics"):
        first_order(target, parts, KFAC_OF_ONE)


KFAC_OF_ONE = {
    "inputs": {"a": torch.eye(4)},
    "tokens": {"a": torch.ones(())},
    "output_gradients": {"a": torch.eye(4)},
}


# --- the walk --------------------------------------------------------------------------------------------------------


def square(name: str, size: int = 8) -> Target:
    return Target(name=name, out_features=size, in_features=size, input_of=name)


def test_the_order_solved_by_hand() -> None:
    """8 × 8 has 64 parameters until rank 3, which has 48; the budget is 64 of 128.

    The sum is 0, so a's five 0s go first (rank 3). Then no target offers a positive one, because a offers −9: the
    smallest below 0 go, which are b's five −1s (rank 3: 96 parameters in all), its −2 (80), and its −3 (64).
    """
    effects = {"a": [0, 0, -9, 0, 0, 0, 0, 0], "b": [7, -3, -2, -1, -1, -1, -1, -1]}
    assert zero_sum_ranks([square("a"), square("b")], effects, 0.5) == {"a": 3, "b": 1}


def test_signs_balance() -> None:
    """Alone, each sign would go to one target; the sum near zero makes both lose in turn."""
    effects = {"a": [1.0] * 8, "b": [-1.0] * 8}
    ranks = zero_sum_ranks([square("a"), square("b")], effects, 0.5)
    assert ranks == {"a": 2, "b": 2}


def test_targets_that_end_above_break_even_are_dense() -> None:
    """The tail of b is dear: only a is cut, and b never saves a parameter."""
    effects = {"a": [0.0] * 8, "b": [0.0] * 7 + [1e9]}
    assert zero_sum_ranks([square("a"), square("b")], effects, 0.8) == {"a": 2, "b": None}


numbers = st.lists(st.floats(-1, 1), min_size=24, max_size=24)


@settings(max_examples=30)
@given(numbers, st.floats(0.05, 1), st.floats(0, 1), st.sampled_from(["factors", "pivoted"]))
def test_the_budget_is_met_and_the_floor_holds(values, keep, floor, storage) -> None:
    targets = [square(name).model_copy(update={"storage": storage}) for name in "ab"]
    targets.append(Target(name="c", out_features=1, in_features=8, input_of="c"))  # no rank makes it smaller
    effects = {"a": values[:8], "b": values[8:16], "c": values[16:17]}
    try:
        ranks = zero_sum_ranks(targets, effects, keep, floor)
    except NoRank:
        assume(False)
    assert total(targets, ranks) <= allowance(targets, keep)
    assert ranks["c"] is None
    assert all(rank is None or rank >= floor * largest_rank(targets[0]) for rank in ranks.values())
    if keep == 1:
        assert set(ranks.values()) == {None}


def test_the_floor_is_a_share_of_the_largest_rank_that_is_smaller_than_dense() -> None:
    """Of 8 × 8 that is 3; three eighths of 64 each."""
    effects = {name: [0.0] * 8 for name in "ab"}
    assert zero_sum_ranks([square("a"), square("b")], effects, 0.75, floor=1.0) == {"a": 3, "b": 3}


def test_a_floor_that_keep_does_not_pay_for_is_an_error() -> None:
    effects = {name: [0.0] * 8 for name in "ab"}
    with pytest.raises(NoRank, match=r"ranks\.floor"):
        zero_sum_ranks([square("a"), square("b")], effects, 0.3, floor=1.0)


# --- one call --------------------------------------------------------------------------------------------------------


def test_compress_gathers_the_gradients_that_it_reads() -> None:
    _, report = eckart.compress(tiny.bert(), BATCHES, 0.5, {"weighting": "inputs", "ranks": "zero_sum"}, check=False)
    assert report.keep <= 0.5
    assert len(set(report.ranks.values())) > 1
    with pytest.raises(ValueError, match="leave out tied"):
        eckart.compress(
            tiny.causal_llama(), TEXTS, 0.5, {"weighting": "inputs", "ranks": "zero_sum"}, tied=True, check=False
        )
