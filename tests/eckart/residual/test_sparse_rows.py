"""LoSparse's sparse rows: what is pruned and when, what is left at the end, and that it is stored and loaded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from eckart.model.hf_format import save
from eckart.model.layers import (
    LowRankEmbedding,
    LowRankLinear,
    factorized,
    low_rank_layers,
    matrix_of,
    merge,
    residual_rows,
)
from eckart.model.targets import Target, find_targets
from eckart.residual.sparse_rows import RowMasking, RowPruning, SparseRows
from tests import tiny

BATCH = tiny.collate(tiny.samples(8))


def settings(**changes: Any) -> SparseRows:
    return SparseRows(**{"smoothing": 0.5, "start": 0.0, "end": 0.0, **changes})


def layer(residual: Tensor, rank: int = 0, kind: type[LowRankLinear] = LowRankLinear) -> LowRankLinear:
    """A layer with all its rows, whose factors are drawn."""
    count, columns = residual.shape
    result = kind(columns, count, rank, bias=False, rows=count)
    with torch.no_grad():
        matrix_of(result.residual).copy_(residual)
        for factor in (result.left.weight, result.right.weight):
            factor.copy_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(0)))
    return result


def model_of(*layers: LowRankLinear) -> Any:
    return nn.ModuleDict({f"map{index}": some for index, some in enumerate(layers)})


def targets_of(model: PreTrainedModel) -> tuple[Target, ...]:
    """Also those that have no statistics."""
    return find_targets(model, BATCH, unsampled=True).targets


def compress(model: PreTrainedModel, rank: Callable[[int], int], residual: bool = True) -> PreTrainedModel:
    return tiny.factorize(model, BATCH, rank, residual, unsampled=True)


def parameters(model: nn.Module, names: Iterable[str]) -> int:
    """Of the modules `names`, biases aside."""
    modules = dict(model.named_modules())
    return sum(p.numel() for name in names for part, p in modules[name].named_parameters() if not part.endswith("bias"))


def run(model: PreTrainedModel, rule: RowPruning, steps: Sequence[int], rate: float = 1e-3) -> None:
    """Train with AdamW, without dropout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for number in steps:
        optimizer.zero_grad()
        model.eval()(**BATCH).loss.backward()
        rule.after_backward(number)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rule.after_update(number)


def set_scores(rule: RowPruning, *scores: Sequence[float]) -> None:
    """As if the gradients had been such."""
    rule.load_state({name: torch.tensor(some) for name, some in zip(rule.targets, scores, strict=True)})


def kept(rule: RowPruning) -> list[list[int]]:
    """Of each target the rows that are not zero."""
    return [some.layer.residual.weight.any(dim=1).nonzero().flatten().tolist() for some in rule.targets.values()]


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LowRankLinear, LowRankEmbedding])
def test_scores_and_two_steps_solved_by_hand(kind):
    """x = (1, 1), loss = y · (1, 1/2), so the rows of the gradient are (1, 1) and (1/2, 1/2); room for one row.

    An embedding reads each of two words once.
    """
    model = model_of(layer(torch.tensor([[1.0, 2.0], [3.0, -4.0]]), kind=kind))
    rule = RowPruning(model, settings(), budget=2, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss() -> Tensor:
        y = model["map0"](torch.arange(2)).sum(0) if kind is LowRankEmbedding else model["map0"](torch.ones(2))
        return y @ torch.tensor([1.0, 0.5])

    def residual() -> Tensor:
        return matrix_of(model["map0"].residual).detach()

    loss().backward()
    rule.after_backward(0)
    # (|1·1| + |2·1|)/2 and (|3/2| + |−4/2|)/2, half of which with β = 1/2
    torch.testing.assert_close(rule.state()["map0"], torch.tensor([0.75, 0.875]))
    optimizer.step()
    torch.testing.assert_close(residual(), torch.tensor([[0.9, 1.9], [2.95, -4.05]]))
    rule.after_update(0)
    torch.testing.assert_close(residual(), torch.tensor([[0.0, 0.0], [2.95, -4.05]]))

    optimizer.zero_grad()
    loss().backward()
    rule.after_backward(1)
    # a zero row has no sensitivity; the other one (1.475 + 2.025)/2
    torch.testing.assert_close(rule.state()["map0"], torch.tensor([0.375, 0.4375 + 0.875]))
    rule.finish()
    torch.testing.assert_close(residual(), torch.tensor([[2.95, -4.05]]))


def test_a_window_solved_by_hand_and_a_row_that_comes_back():
    """Two rows of one entry, 1 and 2; the rate is 0.1, β is 1/2, windows are of two steps, and there is room for one.

    Gradients are 1 until the first row, pruned after the first window, is drawn far away from zero.
    """
    model = model_of(layer(torch.tensor([[1.0], [2.0]])))
    rule = RowPruning(model, settings(window=2, end=0.125), budget=1, steps=8)
    residual, left, scores = model["map0"].residual.weight, [], []
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
        some.residual.weight.grad = gradient
        rule.after_backward(number)
        with torch.no_grad():
            some.residual.weight -= 0.1 * gradient
        entries.append((some.residual.weight.detach() * gradient).abs())
        rule.after_update(number)
    means = [
        torch.stack(entries[at : at + window]).mean(0) for at in range(0, steps - 1 - (steps - 1) % window, window)
    ]
    weights = [(1 - smoothing) * smoothing**age for age in reversed(range(len(means)))]
    expected = sum((weight * mean for weight, mean in zip(weights, means, strict=True)), torch.zeros(3, 4))
    torch.testing.assert_close(rule.state()["map0"], expected.mean(dim=1), rtol=1e-4, atol=1e-6)


# --- masks -----------------------------------------------------------------------------------------------------------


def step_of_masks(rule: RowMasking, step: int, gradient: Sequence[Sequence[float]], rate: float) -> list[list[float]]:
    """Return the rows in the forward pass of a step of SGD in which the residual gets this gradient."""
    (module,) = (rows.layer.residual for rows in rule.targets.values())
    rule.before_forward(step)
    inside = matrix_of(module).tolist()
    given = torch.tensor(gradient)
    module.weight.grad = given.T.clone() if isinstance(module, nn.Embedding) else given
    rule.after_backward(step)
    with torch.no_grad():
        module.weight -= rate * module.weight.grad
    rule.after_update(step)
    return inside


@pytest.mark.parametrize("kind", [LowRankLinear, LowRankEmbedding])
def test_movement_solved_by_hand_and_a_masked_row_that_comes_back(kind):
    """Two rows, room for one at the second step. Row 0 shrinks in the first step, and row 1 grows."""
    model = model_of(layer(torch.tensor([[2.0, 1.0], [1.0, -1.0]]), kind=kind))
    rule = RowMasking(model, settings(score="movement", start=0.25, end=0.75), budget=2, steps=4)
    residual = matrix_of(model["map0"].residual)

    assert step_of_masks(rule, 0, [[1.0, 1.0], [-1.0, 2.0]], 0.1) == [[2.0, 1.0], [1.0, -1.0]]
    torch.testing.assert_close(rule.state()["map0"], torch.tensor([-2.0 - 1.0, 1.0 + 2.0]))
    torch.testing.assert_close(residual.detach(), torch.tensor([[1.9, 0.9], [1.1, -1.2]]))

    # row 0 is masked; its weights stay as they are, and its score gets −(−5 · 1.9 + 0 · 0.9), row 1's −(10 · 1.1)
    inside = step_of_masks(rule, 1, [[-5.0, 0.0], [10.0, 0.0]], 0.1)
    torch.testing.assert_close(torch.tensor(inside), torch.tensor([[0.0, 0.0], [1.1, -1.2]]))
    torch.testing.assert_close(rule.state()["map0"], torch.tensor([-3.0 + 9.5, 3.0 - 11.0]))
    torch.testing.assert_close(residual.detach(), torch.tensor([[1.9, 0.9], [0.1, -1.2]]))

    inside = step_of_masks(rule, 2, [[0.0, 0.0], [0.0, 0.0]], 0.1)
    torch.testing.assert_close(torch.tensor(inside), torch.tensor([[1.9, 0.9], [0.0, 0.0]]))
    rule.finish()
    torch.testing.assert_close(matrix_of(model["map0"].residual).detach(), torch.tensor([[1.9, 0.9]]))
    assert model["map0"].rows.tolist() == [0]


def test_scores_of_movement_are_minus_the_sums_of_the_gradients_of_masks():
    """A dense model whose rows are multiplied by masks, with SGD on both, against the rule."""
    start = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    model = model_of(layer(start))
    rule = RowMasking(model, settings(score="movement", end=0.4), budget=6, steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    weight, scores, masks = start.clone(), torch.zeros(6), []
    for number in range(5):
        x, wanted = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1 + number)).unbind()
        x = x[:, :3]
        optimizer.zero_grad()
        rule.before_forward(number)
        masks.append(rule.targets["map0"].kept)
        mask = masks[-1].float().requires_grad_()
        dense = weight.clone().requires_grad_()
        (x @ (mask.unsqueeze(1) * dense).T - wanted).square().mean().backward()
        (model["map0"](x) - wanted).square().mean().backward()
        rule.after_backward(number)
        optimizer.step()
        rule.after_update(number)
        scores, weight = scores - mask.grad, weight - 0.3 * dense.grad
        torch.testing.assert_close(rule.state()["map0"], scores)
        torch.testing.assert_close(model["map0"].residual.weight.detach(), weight)
    assert any((later & ~earlier).any() for earlier, later in itertools.pairwise(masks))


# --- which rows are kept ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (2, [[], []]),  # the best row has 3 parameters
        (5, [[2], [1]]),  # then one of 2
        (7, [[2], [1]]),  # then one of 3 again: what does not fit ends it, even if a smaller one would fit
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
        (17, [[0], []], 17),
        (21, [[0, 1, 2, 3], []], 19),  # its second row would pass the dense size, so it costs 2 and the others nothing
        (22, [[0, 1, 2, 3], [0]], 22),
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
    factors = sum(some.left.weight.numel() + some.right.weight.numel() for some in layers)
    everything = sum(some.residual.weight.numel() for some in layers)
    budget = draw(st.integers(factors, everything + 5))
    rule = RowPruning(model, settings(), budget, steps=1)
    set_scores(rule, *[(torch.rand(some.out_features, generator=generator) * 8).round().tolist() for some in layers])
    return model, rule, budget


@given(problems())
def test_the_best_rows_that_the_budget_pays_for_are_left_and_finish_changes_no_output(problem):
    """To within one row. Rows that cost nothing, of targets that stay dense, are left whatever they score."""
    model, rule, budget = problem
    everything = sum(rows.dense for rows in rule.targets.values())
    longest = max(rows.layer.in_features for rows in rule.targets.values())
    rule.after_update(0)
    factorized = [rows for rows in rule.targets.values() if not rows.is_dense(rows.kept)]
    pruned = [score for rows in factorized for score in rows.scores[~rows.kept].tolist()]
    counted = [score for rows in factorized for score in rows.scores[rows.kept].tolist()]
    assert max(pruned, default=0) <= min(counted, default=8)
    inputs = {name: torch.randn(3, rows.layer.in_features) for name, rows in rule.targets.items()}
    before = {name: model[name](x) for name, x in inputs.items()}
    rule.finish()
    for name, x in inputs.items():
        torch.testing.assert_close(model[name](x), before[name], rtol=1e-5, atol=1e-5)
    left = parameters(model, rule.targets)
    assert left <= budget
    assert left > budget - longest or left == everything


# --- the schedule ----------------------------------------------------------------------------------------------------


def shares(steps: int, start: float, end: float, final: int = 0, rule_of: type[RowPruning] = RowPruning) -> list[int]:
    """Rows left in or after each step, of 64 rows with one parameter each."""
    rule = rule_of(model_of(layer(torch.ones(64, 1))), settings(start=start, end=end), final, steps)
    left = []
    for number in range(steps):
        rule.before_forward(number)
        rule.after_backward(number)
        rule.after_update(number)
        left.append(int(rule.targets["map0"].kept.sum()))
    return left


RULES = pytest.mark.parametrize("rule_of", [RowPruning, RowMasking])


@RULES
def test_the_schedule_is_cubic_between_start_and_end(rule_of):
    """8 steps: 2 with all rows, 2 with the fewest, and 64 · (1, 3/4, 1/2, 1/4)³ between."""
    assert shares(8, 0.25, 0.25, rule_of=rule_of) == [64, 64, 64, 27, 8, 1, 0, 0]


@RULES
@pytest.mark.parametrize(("steps", "start", "end"), [(1, 0, 0), (5, 1, 0), (5, 0, 1), (3, 0.5, 0.5)])
def test_the_last_step_meets_the_budget_whatever_the_schedule(steps, start, end, rule_of):
    left = shares(steps, start, end, final=7, rule_of=rule_of)
    assert left[-1] == 7
    assert left == sorted(left, reverse=True)


@given(problems(), st.integers(2, 8), st.integers(0, 2**20))
def test_a_pruned_row_stays_pruned(problem, steps, seed):
    """Its score fades as fast as any can."""
    model, _, budget = problem
    generator = torch.Generator().manual_seed(seed)
    rule = RowPruning(model, settings(smoothing=0.7, end=0.4), budget, steps)
    before = [some.kept for some in rule.targets.values()]
    for number in range(steps):
        for some in rule.targets.values():
            some.layer.residual.weight.grad = torch.randn(some.layer.residual.weight.shape, generator=generator)
        rule.after_backward(number)
        with torch.no_grad():
            for some in rule.targets.values():
                some.layer.residual.weight -= some.layer.residual.weight.grad
        rule.after_update(number)
        now = [some.kept for some in rule.targets.values()]
        dense = [some.is_dense(some.kept) for some in rule.targets.values()]
        assert all((~one | other | free).all() for one, other, free in zip(now, before, dense, strict=True))
        before = now


# --- training --------------------------------------------------------------------------------------------------------


def test_after_training_the_model_meets_the_budget_and_computes_the_same():
    """Rank 0 is iterative structured pruning."""
    targets = targets_of(tiny.gpt2())
    model, names = compress(tiny.gpt2(), lambda index: index % 2), [target.name for target in targets]
    longest = max(target.in_features for target in targets)
    budget = sum(target.parameters for target in targets) * 2 // 5
    rule = RowPruning(model, settings(end=0.5), budget, steps=4)
    run(model, rule, range(4))
    before = tiny.logits(model, BATCH)
    rule.finish()
    torch.testing.assert_close(tiny.logits(model, BATCH), before, rtol=1e-5, atol=1e-5)
    assert budget - longest < parameters(model, names) <= budget
    assert sum(residual_rows(model).values()) > 0


def test_without_room_for_rows_a_plain_low_rank_model_is_left():
    """The ablation Low-rank 2: it starts from W, and all of S is gone at the end."""
    model = compress(tiny.bert(), lambda index: 1 + index % 3)
    budget = sum(some.left.weight.numel() + some.right.weight.numel() for some in low_rank_layers(model).values())
    budget += 100  # what whole ranks could not use
    rule = RowPruning(model, settings(low_rank=1.0, end=0.2), budget, steps=3)
    run(model, rule, range(3))
    rule.finish()
    assert residual_rows(model) == {}
    assert all(some.residual is None and some.rows is None for some in low_rank_layers(model).values())
    plain = compress(tiny.bert(), lambda index: 1 + index % 3, residual=False)
    plain.load_state_dict(model.state_dict())
    tiny.assert_same(plain, model, BATCH)


def test_finish_prunes_where_training_stopped_before_its_end():
    model = model_of(layer(torch.ones(6, 3)))
    rule = RowPruning(model, settings(), budget=6, steps=100)
    rule.after_update(0)
    assert parameters(model, rule.targets) > 6
    rule.finish()
    assert parameters(model, rule.targets) == 6


# --- errors ----------------------------------------------------------------------------------------------------------


def test_factors_beyond_the_budget_are_an_error():
    with pytest.raises(ValueError, match=r"\b7\b.*\b6\b.*residual\.low_rank"):
        RowPruning(model_of(layer(torch.ones(4, 3), rank=1)), settings(), budget=6, steps=1)


# --- stored and loaded -----------------------------------------------------------------------------------------------


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder)


def thin(model: PreTrainedModel) -> PreTrainedModel:
    """Leave every third target no row, others every second row."""
    for index, some in enumerate(low_rank_layers(model).values()):
        some.keep_rows(slice(1, None, 2) if index % 3 else slice(0))
    return model


def test_a_model_with_residuals_comes_back_bit_for_bit(tmp_path):
    """Rank 0 too, targets that have no row left, and such as have neither; also once some of them are merged.

    A merged target is the dense module of the architecture, Conv1D in GPT-2.
    """
    dense = tiny.gpt2()
    types = {target.name: type(dense.get_submodule(target.name)) for target in targets_of(dense)}
    model = thin(compress(tiny.gpt2(), lambda index: index % 4))
    save(model, tmp_path / "first")
    loaded = load(tmp_path / "first")
    assert factorized(loaded) == factorized(model) != {}
    assert residual_rows(loaded) == residual_rows(model) != {}
    tiny.assert_same(loaded, model, BATCH)
    for name in list(types)[1::2]:
        assert type(merge(loaded, name)) is types[name]
    torch.testing.assert_close(tiny.logits(loaded, BATCH), tiny.logits(model, BATCH), rtol=1e-5, atol=1e-5)
    save(loaded, tmp_path / "second")
    assert set(factorized(loaded)) == set(list(types)[::2])
    tiny.assert_same(load(tmp_path / "second"), loaded, BATCH)


def test_half_precision_keeps_the_numbers_of_rows(tmp_path):
    """256 is the last whole number that bfloat16 counts up to."""
    model = thin(compress(tiny.llama(), lambda _: 2)).bfloat16()
    save(model, tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {some.rows.dtype for some in low_rank_layers(loaded).values() if some.rows is not None} == {torch.long}
    tiny.assert_same(loaded, model, BATCH)


def test_a_budget_for_everything_leaves_a_dense_model(tmp_path):
    """Whose configuration forgets that it was loaded factorized."""
    dense = tiny.gpt2()
    save(compress(tiny.gpt2(), lambda _: 1), tmp_path / "first")
    model = load(tmp_path / "first")
    budget = sum(target.parameters for target in targets_of(dense))
    rule = RowPruning(model, settings(), budget, steps=1)
    rule.after_update(0)
    rule.finish()
    assert factorized(model) == {}
    assert set(model.state_dict()) == set(dense.state_dict())
    assert isinstance(next(iter(model.modules())), type(dense))
    torch.testing.assert_close(tiny.logits(model, BATCH), tiny.logits(dense, BATCH), rtol=1e-5, atol=1e-5)
    save(model, tmp_path / "second")
    assert "quantization_config" not in json.loads((tmp_path / "second" / "config.json").read_text())
    tiny.assert_same(load(tmp_path / "second"), model, BATCH)
