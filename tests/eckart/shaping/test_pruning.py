"""Pruning: scores against SGD by hand, exact shares, and row scores that make an invertible weighting."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.model.targets import Target, find_targets, weight_of
from eckart.shaping.pruning import Pruning, WeightPruning
from eckart.shaping.weight_measures import average_rank, numerical_rank
from tests import tiny
from tests.training import train
from tests.workspace import bert, collate, rows, tiny_tokenizer


def settings(**changes: Any) -> Pruning:
    values = {"steps": 4, "batch_size": 8, "learning_rate": 1e-2, "score": "first_order", "start": 0.0, "end": 0.0}
    if isinstance(remaining := changes.pop("remaining", 0.5), float):
        remaining = (remaining,)
    return Pruning(**{**values, "warmup": 0.0, "weight_decay": 0.0, **changes, "remaining": remaining})


def pruning(model: nn.Module, targets: Sequence[Target], some: Pruning) -> WeightPruning:
    return WeightPruning(model, targets, some, some.share_at(0.5))


def target(name: str, rows: int, columns: int) -> Target:
    return Target(name=name, out_features=rows, in_features=columns, input_of=name)


def single(weight: Tensor, conv1d: bool = False) -> tuple[nn.ModuleDict, list[Target]]:
    """A model of one target `map` with `weight` `(out, in)` and no bias to speak of."""
    rows, columns = weight.shape
    module = Conv1D(rows, columns) if conv1d else nn.Linear(columns, rows)
    with torch.no_grad():
        module.weight.copy_(weight.T if conv1d else weight)
        module.bias.zero_()
    return nn.ModuleDict({"map": module.requires_grad_(True)}), [target("map", rows, columns)]


def scored(rule: WeightPruning, scores: Tensor) -> WeightPruning:
    """`rule` as if training had given its one target these scores."""
    rule.load_state({"map": scores})
    return rule


def row_scores(weight: Tensor, scores: Tensor) -> Tensor:
    rule = scored(pruning(*single(weight), settings(remaining=1.0)), scores)
    return rule.statistics()["movement"]["map.output"]


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("conv1d", "score"), [(False, "first_order"), (True, "sensitivity")])
def test_first_order_scores_of_two_steps_by_hand(conv1d, score):
    """x = (1, 1), loss ½‖Wx‖², so the gradient of a row is its sum twice; learning rate 0.1.

    Row 0: (1, 2) has gradient 3, then (0.7, 1.7) has 2.4; row 1: (−1, 0.5) has −0.5, then (−0.95, 0.55) has −0.4.
    """
    model, targets = single(torch.tensor([[1.0, 2.0], [-1.0, 0.5]]), conv1d)
    rule = pruning(model, targets, settings(steps=2, start=1.0, score=score))
    optimizer = torch.optim.SGD([model["map"].weight], 0.1)
    for step in range(2):
        (model["map"](torch.ones(1, 2)).square().sum() / 2).backward()
        rule.after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        rule.after_update(step)
    expected = torch.tensor([[-3 - 1.68, -6 - 4.08], [-0.5 - 0.38, 0.25 + 0.22]])
    signed = score == "first_order"
    torch.testing.assert_close(rule.state()["map"], expected if signed else expected.abs())
    # signed, the two best scores are those of row 1; by magnitude those of row 0: one rank goes with the other row
    left = torch.tensor([[0, 0], [-0.91, 0.59]]) if signed else torch.tensor([[0.46, 1.46], [0, 0]])
    torch.testing.assert_close(weight_of(model["map"]), left)
    assert average_rank([model["map"]]) == 1


def test_scores_are_of_the_gradients_before_they_are_clipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny.without_dropout(bert())
    with torch.no_grad():
        model.classifier.weight.mul_(100)  # a norm that the loop clips
    data = rows().select(range(8))
    copied = copy.deepcopy(model).train()
    copied(**tiny_tokenizer().pad(data[:], return_tensors="pt")).loss.backward()
    assert torch.nn.utils.get_total_norm([p.grad for p in copied.parameters() if p.grad is not None]) > 2
    rule = pruning(model, bert_targets(model), settings(steps=1))
    train(model, collate(), data, Path("curve.jsonl"), **vars(rule.method.optimization), rules=[rule])
    for name, scores in rule.state().items():
        weight = copied.get_submodule(name).weight
        torch.testing.assert_close(scores, -weight.grad * weight.detach(), rtol=1e-3, atol=1e-6)


def test_zero_order_keeps_the_largest_magnitudes():
    weight = torch.tensor([[3.0, -5.0, 0.5], [-1.0, 2.0, -4.0]])
    model, targets = single(weight)
    rule = pruning(model, targets, settings(steps=1, score="zero_order"))
    rule.after_backward(0)
    rule.after_update(0)
    assert weight_of(model["map"]).tolist() == [[3, -5, 0], [0, 0, -4]]
    assert rule.state() == {}


def test_scores_of_half_precision_do_not_round_away():
    """After a first score of 1 each step adds 2⁻¹⁰, which 1 in bfloat16 does not feel."""
    model, targets = single(torch.full((1, 2), -1.0))
    rule = pruning(model.bfloat16(), targets, settings())
    for step, gradient in enumerate([1.0, *[2.0**-10] * 4]):
        model["map"].weight.grad = torch.full((1, 2), gradient, dtype=torch.bfloat16)
        rule.after_backward(step)
    assert rule.state()["map"].tolist() == [[1 + 4 * 2.0**-10] * 2]


# --- the projection --------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    distinct=st.integers(1, 9),
    remaining=st.floats(0.05, 1),
    seed=st.integers(0, 2**20),
)
def test_exactly_the_share_of_the_best_scores_stays(rows, columns, distinct, remaining, seed):
    """However many scores are equal, in either layout, and the same way every time."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(rows, columns, generator=generator) + 1
    scores = torch.randint(-distinct, distinct, (rows, columns), generator=generator).float()
    count = round(remaining * weight.numel())
    if not count:
        with pytest.raises(ValueError, match=r"shaping\.remaining"):
            pruning(*single(weight), settings(remaining=remaining))
        return
    left = []
    for conv1d in (False, True):
        model, targets = single(weight, conv1d)
        rule = scored(pruning(model, targets, settings(steps=1, remaining=remaining)), scores)
        rule.after_update(0)
        left.append(weight_of(model["map"]))
    assert torch.equal(left[0], left[1])
    alive = left[0] != 0
    assert int(alive.sum()) == count
    assert torch.equal(left[0][alive], weight[alive])
    assert alive.all() or scores[alive].min() >= scores[~alive].max()


def test_the_share_follows_the_cubic_schedule():
    """Ten steps, the first 3 of which leave all, the last 2 nothing but v_f; 100 weights, down to 20.

    After update t + 1 of those between: 20 + 80 ((8 − t − 1) / 5)³.
    """
    generator = torch.Generator().manual_seed(0)
    model, targets = single(torch.rand(10, 10, generator=generator) + 1)
    rule = pruning(model, targets, settings(steps=10, remaining=0.2, start=0.3, end=0.2, score="zero_order"))
    shares = []
    for step in range(10):
        rule.after_update(step)
        shares.append(rule.measures()["remaining"])
    assert shares == [1, 1, 1, 0.61, 0.37, 0.25, 0.21, 0.2, 0.2, 0.2]


def test_a_zeroed_weight_may_come_back():
    """The mask is discarded: an update revives it, and its score decides."""
    model, targets = single(torch.tensor([[1.0, 2.0]]))
    rule = pruning(model, targets, settings(steps=2, end=1.0, score="zero_order"))
    rule.after_update(0)
    assert weight_of(model["map"]).tolist() == [[0, 2]]
    weight_of(model["map"]).copy_(torch.tensor([[3.0, 2.0]]))
    rule.after_update(1)
    assert weight_of(model["map"]).tolist() == [[3, 0]]


def test_emptied_rows_lower_the_rank():
    """What the method rests on: scores that favour rows leave fewer of them; scattered ones leave all the rank."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 12, generator=generator)
    by_row = torch.arange(12.0).unsqueeze(1) + torch.rand(12, 12, generator=generator)
    ranks = []
    for scores in (by_row, torch.rand(12, 12, generator=generator)):
        model, targets = single(weight)
        assert average_rank([model["map"]]) == 12
        scored(pruning(model, targets, settings(steps=1)), scores).after_update(0)
        ranks.append(average_rank([model["map"]]))
    assert ranks == [6, 12]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_adds_no_rank(dtype):
    """A product of rank 50, computed and stored in a type, has 50 singular values; a drawn matrix has all of them."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for shape in ((384, 50), (50, 384)))
    assert numerical_rank(left @ right) == 50
    assert numerical_rank(torch.randn(48, 384, generator=generator).to(dtype)) == 48
    assert numerical_rank(torch.zeros(3, 4, dtype=dtype)) == 0


@given(st.integers(1, 12), st.integers(0, 2**20), st.floats(1e-30, 1e30))
def test_the_scale_of_a_weight_decides_no_rank(rank, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(12, rank, generator=generator), torch.randn(rank, 20, generator=generator)
    product = left.double() @ right.double() * scale  # in float64 the SVD itself would round as much as is allowed
    assert numerical_rank(product.float()) == rank


def test_each_keep_has_the_least_share_that_is_not_below_it():
    some = settings(remaining=(0.5, 0.25, 0.1))
    shares = {0.6: 0.5, 0.5: 0.5, 0.33: 0.5, 0.25: 0.25, 0.2: 0.25, 0.1: 0.1, 0.05: 0.1}
    assert {keep: some.share_at(keep) for keep in shares} == shares


# --- statistics ------------------------------------------------------------------------------------------------------


def test_row_scores_by_hand():
    """The 9 belongs to a weight that is zero, and the negative scores count for nothing."""
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    scores = torch.tensor([[1.0, 2.0, 9.0], [4.0, -5.0, 1.0]])
    torch.testing.assert_close(row_scores(weight, scores), torch.tensor([3 / 8, 5 / 8]))


def test_an_empty_row_and_a_negative_one_weigh_a_hundredth_of_the_mean():
    """The mean is 3: (9, 0, 0) becomes (9, 0.03, 0.03), and then a share of 9.06."""
    weight = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    scores = torch.tensor([[4.0, 5.0], [1.0, 2.0], [-3.0, -1.0]])
    expected = torch.tensor([9, 0.03, 0.03]) / 9.06
    torch.testing.assert_close(row_scores(weight, scores), expected)


@pytest.mark.parametrize("scores", [torch.zeros(2, 3), -torch.ones(2, 3)])
def test_rows_that_nothing_tells_apart_weigh_the_same(scores):
    assert row_scores(torch.ones(2, 3), scores).tolist() == [0.5, 0.5]


@given(st.integers(1, 7), st.integers(1, 7), st.sampled_from([1e-30, 1.0, 1e20]), st.integers(0, 2**20))
def test_row_scores_are_positive_and_sum_to_one(rows, columns, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).clamp(min=0)
    result = row_scores(weight, scale * torch.randn(rows, columns, generator=generator))
    assert result.shape == (rows,)
    assert (result > 0).all()
    assert float(result.sum()) == pytest.approx(1)
    assert (1 / result.square()).isfinite().all()


def test_zero_order_rows_score_by_their_magnitudes():
    rule = pruning(*single(torch.tensor([[3.0, -1.0], [0.0, 12.0]])), settings(score="zero_order"))
    torch.testing.assert_close(rule.statistics()["movement"]["map.output"], torch.tensor([0.25, 0.75]))


# --- the loop --------------------------------------------------------------------------------------------------------


def bert_targets(model: PreTrainedModel) -> tuple[Target, ...]:
    return find_targets(model, tiny_tokenizer()(["a plot"], return_tensors="pt")).targets


@pytest.mark.parametrize(("smallest", "rank"), [(5e-7, 99), (5e-6, 100)])
def test_singular_values_that_rounding_could_have_made_do_not_count(smallest: float, rank: int) -> None:
    """Below 1.2e-7 ‖W‖_F in float32: here ‖W‖_F is ten times the largest singular value."""
    assert numerical_rank(torch.tensor([*[1.0] * 99, smallest]).diag()) == rank
