"""LoSparse's sparse rows: what is pruned and when, what is left at the end, and that it is stored and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.factorization.factorize import rest
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.hf_format import save
from eckart.model.layers import LowRankLinear, factorize_target, factorized, low_rank_layers, merge, residual_rows
from eckart.model.targets import Target, find_targets, weight_of
from eckart.residual.sparse_rows import RowPruning, SparseRows
from tasks.training.loop import train
from tests import architectures, tiny
from tests.workspace import collate

BATCH = tiny.collate(tiny.samples(8))
FAMILIES = pytest.mark.parametrize("family", tiny.FAMILIES)


def settings(**changes: Any) -> SparseRows:
    values = {"low_rank": 0.1, "smoothing": 0.5, "start": 0.0, "end": 0.0, "window": None, **changes}
    return SparseRows(**{"kind": "sparse_rows", **values})


def layer(residual: Tensor, rank: int = 0) -> LowRankLinear:
    """A layer with all its rows, whose factors are drawn."""
    count, columns = residual.shape
    result = LowRankLinear(columns, count, rank, bias=False, rows=count)
    with torch.no_grad():
        result.residual.copy_(residual)
        for factor in (result.left, result.right):
            factor.copy_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(0)))
    return result


def model_of(*layers: LowRankLinear) -> Any:
    return nn.ModuleDict({f"map{index}": some for index, some in enumerate(layers)})


def targets_of(model: PreTrainedModel) -> tuple[Target, ...]:
    """Also those that have no statistics."""
    return find_targets(model, BATCH, unsampled=True).targets


def compress(model: PreTrainedModel, rank: Callable[[int], int], residual: bool = True) -> PreTrainedModel:
    """Factorize every target as the factorize stage does; the rank may depend on its place."""
    for index, target in enumerate(targets_of(model)):
        weight = weight_of(model.get_submodule(target.name)).clone()
        left, right = decompose(weight, ErrorNorm()).truncate(rank(index))
        factorize_target(model, target.name, left, right, rest(weight, left, right) if residual else None)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(**{key: value for key, value in BATCH.items() if key != "labels"}).logits


def parameters(model: nn.Module, names: Iterable[str]) -> int:
    """Of the modules `names`, biases aside."""
    modules = dict(model.named_modules())
    return sum(p.numel() for name in names for part, p in modules[name].named_parameters() if part != "bias")


def step(model: nn.Module, rule: RowPruning, optimizer: torch.optim.Optimizer, number: int, loss: Tensor) -> None:
    """One step of the loop, with the gradient clipped."""
    optimizer.zero_grad()
    loss.backward()
    rule.after_backward(number)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rule.after_update(number)


def run(model: PreTrainedModel, rule: RowPruning, steps: Sequence[int], rate: float = 1e-3) -> None:
    """Train with AdamW, without dropout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for number in steps:
        step(model, rule, optimizer, number, model.eval()(**BATCH).loss)


def set_scores(rule: RowPruning, *scores: Sequence[float]) -> None:
    """As if the gradients had been such."""
    rule.load_state({name: torch.tensor(some) for name, some in zip(rule.targets, scores, strict=True)})


def kept(rule: RowPruning) -> list[list[int]]:
    """Of each target the rows that are not zero."""
    return [some.layer.residual.any(dim=1).nonzero().flatten().tolist() for some in rule.targets.values()]


# --- S at the beginning ----------------------------------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_before_training_the_model_is_the_dense_one(family, rank):
    """Law 11."""
    model = tiny.FAMILIES[family]()
    expected = logits(model)
    compress(model, lambda _: rank)
    assert len(residual_rows(model)) == len(factorized(model)) > 0
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_s_holds_what_rounding_the_factors_loses():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 9, generator=generator).bfloat16()
    left, right = decompose(weight, ErrorNorm()).truncate(8)
    stored = [part.bfloat16().double() for part in (left, right, rest(weight, left, right))]
    error = (stored[0] @ stored[1] + stored[2] - weight.double()).abs()
    assert (error <= 2**-8 * stored[2].abs() + 1e-12).all()


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_and_two_steps_solved_by_hand():
    """x = (1, 1), loss = y · (1, 1/2), so the rows of the gradient are (1, 1) and (1/2, 1/2); room for one row."""
    model = model_of(layer(torch.tensor([[1.0, 2.0], [3.0, -4.0]])))
    rule = RowPruning(model, settings(), budget=2, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss() -> Tensor:
        return model["map0"](torch.ones(2)) @ torch.tensor([1.0, 0.5])

    loss().backward()
    rule.after_backward(0)
    # (|1·1| + |2·1|)/2 and (|3/2| + |−4/2|)/2, half of which with β = 1/2
    torch.testing.assert_close(rule.state()["map0"], torch.tensor([0.75, 0.875]))
    optimizer.step()
    torch.testing.assert_close(model["map0"].residual.detach(), torch.tensor([[0.9, 1.9], [2.95, -4.05]]))
    rule.after_update(0)
    torch.testing.assert_close(model["map0"].residual.detach(), torch.tensor([[0.0, 0.0], [2.95, -4.05]]))

    optimizer.zero_grad()
    loss().backward()
    rule.after_backward(1)
    # a zero row has no sensitivity; the other one (1.475 + 2.025)/2
    torch.testing.assert_close(rule.state()["map0"], torch.tensor([0.375, 0.4375 + 0.875]))


def test_scores_are_of_the_weights_before_the_update():
    """The first row's update takes all of it, but the loss felt it more."""
    model = model_of(layer(torch.tensor([[1.0, 1.0], [0.5, 0.5]])))
    rule = RowPruning(model, settings(), budget=2, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model["map0"](torch.ones(2)).sum().backward()
    rule.after_backward(0)
    optimizer.step()
    rule.after_update(0)
    assert rule.targets["map0"].kept.tolist() == [True, False]
    assert not model["map0"].residual.any()


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.floats(0, 0.99), st.integers(0, 2**20))
def test_smoothed_rows_are_means_of_smoothed_entries(count, columns, steps, smoothing, seed):
    """Eq. 3 entry by entry, then eq. 4."""
    generator = torch.Generator().manual_seed(seed)
    some = layer(torch.randn(count, columns, generator=generator))
    rule = RowPruning(model_of(some), settings(smoothing=smoothing), budget=count * columns, steps=steps)
    smoothed = torch.zeros(count, columns)
    for number in range(steps):
        some.residual.grad = torch.randn(count, columns, generator=generator)
        rule.after_backward(number)
        smoothed = smoothing * smoothed + (1 - smoothing) * (some.residual.detach() * some.residual.grad).abs()
    torch.testing.assert_close(rule.state()["map0"], smoothed.mean(dim=1))


def test_a_window_solved_by_hand_and_a_row_that_comes_back():
    """Two rows of one entry, 1 and 2; the rate is 0.1, β is 1/2, windows are of two steps, and there is room for one.

    Gradients are 1 until the first row, pruned after the first window, is drawn far away from zero.
    """
    model = model_of(layer(torch.tensor([[1.0], [2.0]])))
    rule = RowPruning(model, settings(window=2, end=0.125), budget=1, steps=8)
    residual, left, scores = model["map0"].residual, [], []
    for number, gradient in enumerate([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [30.0, 0.0], [0.0, 0.0]]):
        residual.grad = torch.tensor(gradient).unsqueeze(1)
        rule.after_backward(number)
        with torch.no_grad():
            residual -= 0.1 * residual.grad
        residual.grad = None  # as the loop clears it before the rule is asked again
        rule.after_update(number)
        left.append(residual.flatten().tolist())
        scores.append(rule.state()["map0"])
    assert left[1] == pytest.approx([0.8, 1.8])
    assert left[2] == pytest.approx([0.0, 1.7])
    assert left[3] == pytest.approx([-3.0, 1.7])  # nothing is pruned within a window
    assert left[4] == pytest.approx([-3.0, 0.0])
    # scores: the mean of 0.9 and 0.8, of 1.9 and 1.8; then of 0.7 and 90, of 1.7 and 0
    first = torch.tensor([0.85, 1.85]) / 2
    assert not torch.stack(scores[:2]).any()
    torch.testing.assert_close(torch.stack(scores[2:4]), first.expand(2, 2))
    torch.testing.assert_close(scores[4], first / 2 + torch.tensor([45.35, 0.85]) / 2)


@given(st.integers(1, 4), st.integers(1, 12), st.floats(0, 0.99), st.integers(0, 2**20))
def test_scores_of_windows_are_smoothed_means_of_entries(window, steps, smoothing, seed):
    """Entry by entry: windows that are over count by their means: the last 1 − β, the one before β (1 − β) of it."""
    generator = torch.Generator().manual_seed(seed)
    some = layer(torch.randn(3, 4, generator=generator))
    rule = RowPruning(model_of(some), settings(smoothing=smoothing, window=window), budget=12, steps=99)
    entries = []
    for number in range(steps):
        gradient = torch.randn(3, 4, generator=generator)
        some.residual.grad = gradient
        rule.after_backward(number)
        with torch.no_grad():
            some.residual -= 0.1 * gradient
        entries.append((some.residual.detach() * gradient).abs())
        rule.after_update(number)
    means = [
        torch.stack(entries[at : at + window]).mean(0) for at in range(0, steps - 1 - (steps - 1) % window, window)
    ]
    weights = [(1 - smoothing) * smoothing**age for age in reversed(range(len(means)))]
    expected = sum((weight * mean for weight, mean in zip(weights, means, strict=True)), torch.zeros(3, 4))
    torch.testing.assert_close(rule.state()["map0"], expected.mean(dim=1), rtol=1e-4, atol=1e-6)


def test_a_target_that_the_loss_does_not_reach_goes_first():
    model = model_of(layer(torch.ones(2, 2)), layer(torch.ones(2, 2)))
    rule = RowPruning(model, settings(), budget=4, steps=1)
    model["map1"](torch.ones(2)).sum().backward()
    rule.after_backward(0)
    rule.after_update(0)
    assert kept(rule) == [[], [0, 1]]


def test_half_precision_is_scored_in_single():
    """Squares of small numbers would vanish in half precision."""
    some = layer(torch.full((2, 2), 1e-4)).half()
    rule = RowPruning(model_of(some), settings(smoothing=0.0), budget=4, steps=1)
    some.residual.grad = torch.full((2, 2), 1e-4).half()
    rule.after_backward(0)
    torch.testing.assert_close(rule.state()["map0"], torch.full((2,), 1e-8), rtol=1e-2, atol=0)


# --- which rows are kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, [[], []]),
        (2, [[], []]),  # the best row has 3 parameters
        (3, [[], [1]]),
        (5, [[2], [1]]),  # then one of 2
        (7, [[2], [1]]),  # then one of 3 again: what does not fit ends it, even if a smaller one would fit
        (8, [[2], [0, 1]]),
        (10, [[0, 2], [0, 1]]),
        (12, [[0, 1, 2], [0, 1]]),
    ],
)
def test_rows_of_all_targets_compete_and_cost_what_they_hold(budget, expected):
    """Rows of 2 parameters against rows of 3, in order 5 (3), 4 (2), 3 (3), 2 (2), 1 (2)."""
    model = model_of(layer(torch.ones(3, 2)), layer(torch.ones(2, 3)))
    rule = RowPruning(model, settings(), budget, steps=1)
    set_scores(rule, [2.0, 1.0, 4.0], [3.0, 5.0])
    rule.after_update(0)
    assert kept(rule) == expected


@pytest.mark.parametrize(
    ("budget", "expected", "left"),
    [
        (16, [[], []], 14),
        (17, [[0], []], 17),
        (19, [[0, 1, 2, 3], []], 19),  # its second row would pass the dense size, so it costs 2 and the others nothing
        (21, [[0, 1, 2, 3], []], 19),
        (22, [[0, 1, 2, 3], [0]], 22),
        (24, [[0, 1, 2, 3], [0, 1, 2, 3]], 24),
    ],
)
def test_a_target_never_costs_more_than_the_dense_one(budget, expected, left):
    """Two of 4 × 3 at rank 1: factors 7, a row 3, dense 12."""
    model = model_of(layer(torch.ones(4, 3), rank=1), layer(torch.ones(4, 3), rank=1))
    rule = RowPruning(model, settings(), budget, steps=1)
    set_scores(rule, [9.0, 8.0, 0.0, 0.0], [5.0, 4.0, 1.0, 1.0])
    rule.after_update(0)
    assert kept(rule) == expected
    rule.finish()
    assert parameters(model, rule.targets) == left


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, RowPruning, int]:
    """Some targets with drawn scores, some of them equal, and a budget between the factors and everything."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        count, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        most = (count * columns - 1) // (count + columns)
        layers.append(layer(torch.randn(count, columns, generator=generator), draw(st.integers(0, most))))
    model = model_of(*layers)
    factors = sum(some.left.numel() + some.right.numel() for some in layers)
    everything = sum(some.residual.numel() for some in layers)
    budget = draw(st.integers(factors, everything + 5))
    rule = RowPruning(model, settings(), budget, steps=1)
    set_scores(rule, *[(torch.rand(len(some.left), generator=generator) * 8).round().tolist() for some in layers])
    return model, rule, budget


@given(problems())
def test_what_is_left_meets_the_budget_to_within_one_row(problem):
    model, rule, budget = problem
    everything = sum(some.dense for some in rule.targets.values())
    longest = max(some.layer.right.shape[1] for some in rule.targets.values())
    rule.after_update(0)
    rule.finish()
    left = parameters(model, rule.targets)
    assert left <= budget
    assert left > budget - longest or left == everything


@given(problems())
def test_no_pruned_row_scores_more_than_a_kept_one(problem):
    """But for the rows that cost nothing, of targets that stay dense."""
    _, rule, _ = problem
    rule.after_update(0)
    factorized = [some for some in rule.targets.values() if not some.is_dense(some.kept)]
    pruned = [score for some in factorized for score in some.scores[~some.kept].tolist()]
    counted = [score for some in factorized for score in some.scores[some.kept].tolist()]
    assert max(pruned, default=0) <= min(counted, default=8)


@given(problems())
def test_no_target_that_is_left_factorized_is_larger_than_dense(problem):
    model, rule, _ = problem
    sizes = {name: some.dense for name, some in rule.targets.items()}
    rule.finish()
    for name in sizes:
        assert parameters(model, [name]) <= sizes[name]
        assert (parameters(model, [name]) == sizes[name]) == (not isinstance(model[name], LowRankLinear))


@given(problems())
def test_finish_changes_nothing_that_the_targets_compute(problem):
    model, rule, _ = problem
    rule.after_update(0)
    inputs = {name: torch.randn(3, some.layer.right.shape[1]) for name, some in rule.targets.items()}
    before = {name: model[name](x) for name, x in inputs.items()}
    rule.finish()
    for name, x in inputs.items():
        torch.testing.assert_close(model[name](x), before[name], rtol=1e-5, atol=1e-5)


def test_a_target_without_whole_residual_counts_and_stays_as_it_is():
    plain = LowRankLinear(3, 4, 1, bias=False)  # 7 parameters
    pruned = layer(torch.ones(4, 3))
    pruned.residual, pruned.rows = nn.Parameter(torch.ones(2, 3)), torch.tensor([1, 3])  # 6
    model = model_of(plain, pruned, layer(torch.ones(2, 5)))
    rule = RowPruning(model, settings(), budget=18, steps=1)
    assert list(rule.targets) == ["map2"]
    rule.finish()
    assert parameters(model, ["map0", "map1", "map2"]) == 18
    assert model["map1"].rows.tolist() == [1, 3]


# --- the schedule ----------------------------------------------------------------------------------------------------


def shares(steps: int, start: float, end: float, final: int = 0, count: int = 64) -> list[int]:
    """Rows left after each step, of `count` rows with one parameter each."""
    rule = RowPruning(model_of(layer(torch.ones(count, 1))), settings(start=start, end=end), final, steps)
    left = []
    for number in range(steps):
        rule.after_update(number)
        left.append(int(rule.targets["map0"].kept.sum()))
    return left


def test_the_schedule_is_cubic_between_start_and_end():
    """8 steps: 2 with all rows, 2 with the fewest, and 64 · (1, 3/4, 1/2, 1/4)³ between."""
    assert shares(8, 0.25, 0.25) == [64, 64, 64, 27, 8, 1, 0, 0]


def test_the_schedule_ends_where_the_budget_says():
    assert shares(8, 0.25, 0.25, final=10)[-3:] == [10, 10, 10]
    assert shares(8, 0.25, 0.25, final=64) == [64] * 8


@pytest.mark.parametrize(
    ("steps", "start", "end"), [(1, 0, 0), (1, 1, 0), (1, 0, 1), (5, 1, 0), (5, 0, 1), (5, 0, 0), (3, 0.5, 0.5)]
)
def test_the_last_step_meets_the_budget_whatever_the_schedule(steps, start, end):
    left = shares(steps, start, end, final=7)
    assert left[-1] == 7
    assert left == sorted(left, reverse=True)


def test_shares_of_steps_are_rounded_up_and_not_by_noise():
    rule = RowPruning(model_of(layer(torch.ones(2, 2))), settings(start=0.07, end=0.015), budget=2, steps=100)
    assert (rule.start, rule.end) == (7, 2)  # 0.07 · 100 is a little more than 7 in floating point


@given(problems(), st.integers(2, 8), st.integers(0, 2**20))
def test_a_pruned_row_stays_pruned(problem, steps, seed):
    """Its score fades as fast as any can."""
    model, _, budget = problem
    generator = torch.Generator().manual_seed(seed)
    rule = RowPruning(model, settings(smoothing=0.7, end=0.4), budget, steps)
    before = [some.kept for some in rule.targets.values()]
    for number in range(steps):
        for some in rule.targets.values():
            some.layer.residual.grad = torch.randn(some.layer.residual.shape, generator=generator)
        rule.after_backward(number)
        with torch.no_grad():
            for some in rule.targets.values():
                some.layer.residual -= some.layer.residual.grad
        rule.after_update(number)
        now = [some.kept for some in rule.targets.values()]
        dense = [some.is_dense(some.kept) for some in rule.targets.values()]
        assert all((~one | other | free).all() for one, other, free in zip(now, before, dense, strict=True))
        before = now


# --- training --------------------------------------------------------------------------------------------------------


def test_momentum_does_not_bring_a_pruned_row_back():
    model = compress(tiny.bert(), lambda _: 1)
    budget = parameters(model, factorized(model)) // 4
    rule = RowPruning(model, settings(end=0.7), budget, steps=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moved = 0
    for number in range(10):
        optimizer.zero_grad()
        model.eval()(**BATCH).loss.backward()
        rule.after_backward(number)
        pruned = [~some.kept for some in rule.targets.values()]
        optimizer.step()
        for some, gone in zip(rule.targets.values(), pruned, strict=True):
            moved += int(some.layer.residual[gone].any())
        rule.after_update(number)
        assert all(not some.layer.residual[~some.kept].any() for some in rule.targets.values())
    assert moved
    assert rule.measures()["rows"] < 0.5


def test_what_also_reads_relative_positions_is_scored_by_the_gradient_of_its_dense_weight():
    """Query and key of DeBERTa-v3: no sample has a gradient of its own there, but the batch has one."""
    dense = architectures.FAMILIES["deberta-v3"].build().eval()
    dense(**BATCH).loss.backward()
    model = compress(architectures.FAMILIES["deberta-v3"].build(), lambda _: 1).eval()
    rule = RowPruning(model, settings(), budget=parameters(model, factorized(model)), steps=1)
    model(**BATCH).loss.backward()
    rule.after_backward(0)
    unsampled = [target.name for target in targets_of(dense) if not target.sampled]
    assert {name.rpartition(".")[2] for name in unsampled} == {"query_proj", "key_proj"}
    for name in unsampled:
        some = rule.targets[name]
        gradient = dense.get_submodule(name).get_parameter("weight").grad
        assert gradient.any()
        expected = (some.layer.residual.detach() * gradient).abs().mean(dim=1) / 2
        torch.testing.assert_close(some.scores, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("window", [None, 2])
def test_what_also_reads_relative_positions_loses_rows_and_trains_as_others_do(window):
    model = compress(architectures.FAMILIES["deberta-v3"].build(), lambda _: 1)
    targets = targets_of(architectures.FAMILIES["deberta-v3"].build())
    unsampled = [target.name for target in targets if not target.sampled]
    before = {name: some.residual.detach().clone() for name, some in low_rank_layers(model).items()}
    budget = sum(target.parameters for target in targets) * 3 // 4
    rule = RowPruning(model, settings(end=0.5, window=window), budget, steps=8)
    run(model, rule, range(8))
    expected = logits(model)
    gone = {name: ~some.kept for name, some in rule.targets.items()}
    for names in (unsampled, [name for name in gone if name not in unsampled]):
        moved = {name: (rule.targets[name].layer.residual - before[name]).abs().amax(dim=1) for name in names}
        assert all((moved[name] > 1e-4)[~gone[name]].all() for name in names)  # decay alone takes a hundredth of that
        assert 0 < sum(int(gone[name].sum()) for name in names) < sum(len(gone[name]) for name in names)
    rule.finish()
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    longest = max(target.in_features for target in targets)
    assert budget - longest < parameters(model, [target.name for target in targets]) <= budget


@FAMILIES
@pytest.mark.parametrize("rank", [0, 1])
def test_after_training_the_model_meets_the_budget_and_computes_the_same(family, rank):
    """Rank 0 is iterative structured pruning."""
    model = compress(tiny.FAMILIES[family](), lambda _: rank)
    names = [target.name for target in targets_of(tiny.FAMILIES[family]())]
    longest = max(target.in_features for target in targets_of(tiny.FAMILIES[family]()))
    budget = sum(target.parameters for target in targets_of(tiny.FAMILIES[family]())) * 2 // 5
    rule = RowPruning(model, settings(end=0.5), budget, steps=6)
    run(model, rule, range(6))
    before = logits(model)
    rule.finish()
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    assert budget - longest < parameters(model, names) <= budget
    assert sum(residual_rows(model).values()) > 0


@FAMILIES
def test_without_room_for_rows_a_plain_low_rank_model_is_left(family):
    """The ablation Low-rank 2: it starts from W, and all of S is gone at the end."""
    model = compress(tiny.FAMILIES[family](), lambda index: 1 + index % 3)
    budget = sum(some.left.numel() + some.right.numel() for some in low_rank_layers(model).values())
    budget += 100  # what whole ranks could not use
    rule = RowPruning(model, settings(low_rank=1.0, end=0.2), budget, steps=5)
    run(model, rule, range(5))
    rule.finish()
    assert residual_rows(model) == {}
    assert all(some.residual is None and some.rows is None for some in low_rank_layers(model).values())
    plain = compress(tiny.FAMILIES[family](), lambda index: 1 + index % 3, residual=False)
    plain.load_state_dict(model.state_dict())
    assert_same(plain, model)


def test_finish_prunes_where_training_stopped_before_its_end():
    model = compress(tiny.bert(), lambda _: 1)
    names, budget = list(factorized(model)), parameters(model, factorized(model)) // 3
    rule = RowPruning(model, settings(), budget, steps=100)
    run(model, rule, range(2))
    rule.finish()
    assert parameters(model, names) <= budget


@pytest.mark.parametrize("window", [None, 2])
def test_a_resumed_rule_goes_on_as_if_it_had_not_stopped(window):
    states = []
    for stop in (False, True):
        model = compress(tiny.bert(), lambda _: 1)
        budget = parameters(model, factorized(model)) // 3
        rule = RowPruning(model, settings(end=0.2, window=window), budget, steps=6)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for number in range(6):
            if stop and number == 3:
                state = rule.state()
                rule = RowPruning(model, settings(end=0.2, window=window), budget, steps=6)
                rule.load_state(state)
            step(model, rule, optimizer, number, model.eval()(**BATCH).loss)
        rule.finish()
        states.append(model.state_dict())
    assert set(states[0]) == set(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_state_is_no_view_of_what_training_changes():
    rule = RowPruning(model_of(layer(torch.ones(2, 2))), settings(), budget=2, steps=2)
    state = rule.state()
    rule.targets["map0"].layer.residual.grad = torch.ones(2, 2)
    rule.after_backward(0)
    assert not state["map0"].any()
    rule.load_state(state)
    rule.after_backward(0)
    assert not state["map0"].any()


@pytest.mark.parametrize("window", [None, 2])
def test_the_training_loop_prunes_and_its_result_comes_back(window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    model = compress(tiny.bert(), lambda index: index % 2)
    names = list(factorized(model))
    budget = parameters(model, names) // 3
    rule = RowPruning(model, settings(end=0.3, window=window), budget, steps=6)
    some = tiny.samples(16)
    data = Dataset.from_dict({"input_ids": [ids.tolist() for ids, _ in some], "labels": [label for _, label in some]})
    options = {"steps": 6, "batch_size": 4, "learning_rate": 1e-3, "warmup": 0.1, "weight_decay": 0.01, "seed": 0}
    train(model, collate(), data, Path("curve.jsonl"), **options, rules=[rule])
    left = [json.loads(line)["rows"] for line in Path("curve.jsonl").read_text().splitlines()]
    assert left == sorted(left, reverse=True)
    assert left[0] == 1 > 0.5 > left[-1]
    assert all(rows.scores.any() for rows in rule.targets.values())
    assert parameters(model, names) <= budget
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert_same(loaded, model)
    assert parameters(loaded, names) == parameters(model, names)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_factors_beyond_the_budget_are_an_error():
    with pytest.raises(ValueError, match=r"\b7\b.*\b6\b.*residual\.low_rank"):
        RowPruning(model_of(layer(torch.ones(4, 3), rank=1)), settings(), budget=6, steps=1)


def test_a_model_without_residuals_is_an_error():
    with pytest.raises(ValueError, match="residual"):
        RowPruning(model_of(LowRankLinear(3, 4, 1, bias=False)), settings(), budget=99, steps=1)


def test_no_steps_are_an_error():
    with pytest.raises(ValueError, match=r"recovery\.steps"):
        RowPruning(model_of(layer(torch.ones(4, 3))), settings(), budget=99, steps=0)


@pytest.mark.parametrize("change", [{"low_rank": 1.1}, {"smoothing": 1.0}, {"start": -0.1}, {"end": 2.0}, {"other": 1}])
def test_settings_out_of_range_are_an_error(change):
    with pytest.raises(ValidationError):
        settings(**change)


# --- stored and loaded -----------------------------------------------------------------------------------------------


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder)


def assert_same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    tiny.assert_same(model, other, BATCH)


def thin(model: PreTrainedModel) -> PreTrainedModel:
    """Leave every third target no row, others every second row."""
    for index, some in enumerate(low_rank_layers(model).values()):
        rows = torch.arange(1, len(some.left), 2) if index % 3 else None
        some.residual = None if rows is None else nn.Parameter(some.residual.detach()[rows])
        some.rows = rows
    return model


@FAMILIES
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("rank", [lambda _: 0, lambda index: index % 4], ids=["pruning", "mixed"])
def test_a_model_with_residuals_comes_back_bit_for_bit(family, rank, pruned, tmp_path):
    """Rank 0 too, and targets that have no row left, and such as have neither."""
    model = compress(tiny.FAMILIES[family](), rank)
    if pruned:
        thin(model)
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert factorized(loaded) == factorized(model) != {}
    assert residual_rows(loaded) == residual_rows(model) != {}
    assert_same(loaded, model)


def test_half_precision_keeps_the_numbers_of_rows(tmp_path):
    """256 is the last whole number that bfloat16 counts up to."""
    model = thin(compress(tiny.llama(), lambda _: 2)).bfloat16()
    save(model, tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {some.rows.dtype for some in low_rank_layers(loaded).values() if some.rows is not None} == {torch.long}
    assert_same(loaded, model)


@FAMILIES
def test_a_merged_target_is_the_dense_module_of_the_architecture(family, tmp_path):
    """Conv1D in GPT-2, also where the model was loaded in between."""
    dense = tiny.FAMILIES[family]()
    types = {target.name: type(dense.get_submodule(target.name)) for target in targets_of(dense)}
    save(compress(tiny.FAMILIES[family](), lambda _: 2), tmp_path / "first")
    model = load(tmp_path / "first")
    before = logits(model)
    for index, name in enumerate(types):
        if index % 2:
            assert type(merge(model, name)) is types[name]
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(before, logits(dense), rtol=1e-5, atol=1e-5)
    save(model, tmp_path / "second")
    assert set(factorized(model)) == set(list(types)[::2])
    assert_same(load(tmp_path / "second"), model)


@FAMILIES
def test_a_budget_for_everything_leaves_a_dense_model(family, tmp_path):
    """Whose configuration forgets that it was loaded factorized."""
    dense = tiny.FAMILIES[family]()
    save(compress(tiny.FAMILIES[family](), lambda _: 1), tmp_path / "first")
    model = load(tmp_path / "first")
    budget = sum(target.parameters for target in targets_of(dense))
    rule = RowPruning(model, settings(), budget, steps=1)
    rule.after_update(0)
    rule.finish()
    assert factorized(model) == {}
    assert set(model.state_dict()) == set(dense.state_dict())
    assert isinstance(next(iter(model.modules())), type(dense))
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-5, atol=1e-5)
    save(model, tmp_path / "second")
    assert "quantization_config" not in json.loads((tmp_path / "second" / "config.json").read_text())
    assert_same(load(tmp_path / "second"), model)


def test_merging_keeps_precision_mode_and_bias():
    for module in (nn.Linear(5, 3), nn.Linear(5, 3, bias=False), Conv1D(3, 5)):
        model: Any = nn.ModuleDict({"map": module.double()})
        weight = weight_of(module).clone()
        left, right = decompose(weight, ErrorNorm()).truncate(2)
        factorize_target(model, "map", left, right, rest(weight, left, right))
        model["map"].eval()
        merged = merge(model, "map")
        assert not merged.training
        assert all(p.requires_grad and p.dtype == torch.float64 for p in merged.parameters())
        torch.testing.assert_close(weight_of(merged), weight)
        assert (merged.bias is None) == (module.bias is None)
        assert module.bias is None or torch.equal(merged.bias, module.bias)


def test_merging_what_is_dense_is_an_error():
    with pytest.raises(ValueError, match=r"bert\.pooler\.dense"):
        merge(tiny.bert(), "bert.pooler.dense")
