"""The soft threshold: its values by hand, the budget it must meet, and the dense model it must leave."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn
from transformers import BertForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import LowRankLinear, factorized
from eckart.model.targets import Target, find_targets, weight_of
from eckart.ranks.budget import NoRank, allowance, largest_rank, total
from eckart.ranks.threshold import Threshold, ThresholdSearch, soft_threshold
from eckart.training.rules import Rule
from tasks.training.checkpoints import SECONDS
from tasks.training.loop import train
from tests import tiny
from tests.workspace import collate, rows, tiny_config

VALUES: dict[str, Any] = {
    "kind": "threshold",
    "steps": 30,
    "batch_size": 8,
    "learning_rate": 1e-3,
    "warmup": 0.0,
    "weight_decay": 0.01,
    "sharpness": 10.0,
    "pressure": 1.0,
    "threshold_learning_rate": 0.05,
}
FAMILIES = pytest.mark.parametrize("family", tiny.FAMILIES.values(), ids=tiny.FAMILIES)
Shape = tuple[int, int]
PAIR: list[Shape] = [(12, 8), (8, 12)]


def method(**changes: Any) -> Threshold:
    return Threshold.model_validate({**VALUES, **changes})


class Maps(nn.Module):
    """Linear maps a, b, … of the given shapes `(out, in)`."""

    def __init__(self, shapes: Sequence[Shape], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, (rows, columns) in zip("abcdefgh", shapes, strict=False):
                self.add_module(name, nn.Linear(columns, rows))

    def targets(self) -> list[Target]:
        return [
            Target(name=name, out_features=map.out_features, in_features=map.in_features, input_of=name)
            for name, map in self.named_children()
        ]


def diagonal(*values: Sequence[float]) -> Maps:
    """Square maps with these singular values."""
    model = Maps([(len(some), len(some)) for some in values])
    with torch.no_grad():
        for map, some in zip(model.children(), values, strict=True):
            map.weight.copy_(torch.tensor(some).diag())
    return model


def searching(model: nn.Module, keep: float = 0.5, **changes: Any) -> ThresholdSearch:
    return ThresholdSearch(model, model.targets(), method(**changes), keep)


def update(rule: ThresholdSearch, alpha: Sequence[float] | float, number: int = 0) -> None:
    """A step whose optimizer leaves the thresholds at `alpha`."""
    rule.before_forward(number)
    with torch.no_grad():
        rule.values.alpha.copy_(torch.as_tensor(alpha))
    rule.after_update(number)


def batch() -> dict[str, Tensor]:
    return tiny.collate(tiny.samples(6))


def in_model(model: PreTrainedModel, keep: float = 0.5, **changes: Any) -> ThresholdSearch:
    return ThresholdSearch(model, find_targets(model, batch()).targets, method(**changes), keep)


def optimizer_of(rule: ThresholdSearch, model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters()), "lr": 1e-3}, *rule.parameter_groups()]
    return torch.optim.AdamW(groups)


def one_step(rule: ThresholdSearch, model: PreTrainedModel, optimizer: torch.optim.Optimizer, number: int) -> None:
    """As the training loop does it."""
    rule.before_forward(number)
    outputs = model(**batch())
    (outputs.loss + rule.extra_loss(model, batch(), outputs)).backward()
    optimizer.step()
    model.zero_grad()
    rule.after_update(number)


def until_done(rule: ThresholdSearch, model: PreTrainedModel, most: int = 300) -> None:
    optimizer = optimizer_of(rule, model)
    for number in range(most):
        one_step(rule, model, optimizer, number)
        if rule.done:
            return
    raise AssertionError("the budget was not met")


def logits(model: PreTrainedModel) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(**batch()).logits


# --- eq. 6, 9 and 10 -------------------------------------------------------------------------------------------------


def test_soft_threshold_by_hand():
    sigma, alpha = torch.tensor([2.0, 1.0, 0.5, 1.5]), torch.tensor(1.0)
    expected = [2 * math.tanh(1), 0, 0, 1.5 * math.tanh(0.5)]
    assert soft_threshold(sigma, alpha, 1.0).tolist() == pytest.approx(expected)
    sharp = soft_threshold(sigma, alpha, 1e6)
    assert sharp.tolist() == [2.0, 0.0, 0.0, 1.5]


def test_gradients_of_the_soft_threshold_by_hand():
    """d/dσ = tanh(z) + σ s sech²(z) and d/dα = −σ s sech²(z) with z = s (σ − α); nothing where σ < α."""
    sigma, alpha = torch.tensor([2.0, 0.5], requires_grad=True), torch.tensor(1.0, requires_grad=True)
    s = 0.7
    soft_threshold(sigma, alpha, s).sum().backward()
    steep = 2 * s / math.cosh(s) ** 2
    assert sigma.grad.tolist() == pytest.approx([math.tanh(s) + steep, 0])
    assert float(alpha.grad) == pytest.approx(-steep)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0.1, 100))
def test_the_soft_threshold_shrinks_and_never_turns_a_sign(sigma, alpha, sharpness):
    value = float(soft_threshold(torch.tensor([sigma]), torch.tensor(alpha), sharpness))
    assert 0 <= value <= sigma * (1 + 1e-6)


def test_pressure_by_hand():
    rule = searching(diagonal([3.0, 2.0], [3.0, 2.0]), keep=1.0, pressure=0.5)
    assert rule.extra_loss(None, {}, None).item() == pytest.approx(0.5 * 2)
    with torch.no_grad():
        rule.values.alpha.copy_(torch.tensor([0.0, math.log(4)]))
    loss = rule.extra_loss(None, {}, None)
    assert loss.item() == pytest.approx(0.5 * 1.25)
    loss.backward()
    assert rule.values.alpha.grad.tolist() == pytest.approx([-0.5, -0.125])


# --- before training -------------------------------------------------------------------------------------------------


@FAMILIES
def test_a_sharp_threshold_at_zero_is_the_dense_model(family):
    model = family()
    expected = logits(model)
    rule = in_model(model, sharpness=1e6)
    assert set(factorized(model)) == {target.name for target in rule.targets}
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_the_factors_are_singular_vectors_of_full_rank():
    model = Maps([(12, 8), (8, 12)])
    weights = [map.weight.detach().clone() for map in model.children()]
    rule = searching(model)
    for weight, layer, sigma in zip(weights, rule.layers, rule.values.sigma, strict=True):
        assert layer.rank == 8
        torch.testing.assert_close(layer.left.T @ layer.left, torch.eye(8), atol=1e-6, rtol=0)
        torch.testing.assert_close(layer.right @ layer.right.T, torch.eye(8), atol=1e-6, rtol=0)
        torch.testing.assert_close(layer.left * sigma @ layer.right, weight, atol=1e-6, rtol=0)
    assert rule.values.alpha.tolist() == [0, 0]


def test_what_trains_and_at_which_rates():
    model = diagonal([3.0, 2.0], [3.0, 2.0])
    rule = searching(model, keep=1.0, learning_rate=2e-5, threshold_learning_rate=0.25)
    values, thresholds = rule.parameter_groups()
    assert (values["lr"], values["weight_decay"]) == (2e-5, 0)
    assert (thresholds["lr"], thresholds["weight_decay"]) == (0.25, 0)
    assert [tuple(some.shape) for some in values["params"]] == [(2,), (2,)]
    assert [tuple(some.shape) for some in thresholds["params"]] == [(2,)]
    assert {name for name, _ in model.named_parameters()} == {
        f"{target}.{part}" for target in "ab" for part in ("left", "right", "bias")
    }


def test_all_that_a_model_computes_with_gets_a_gradient():
    model = tiny.bert().train()
    rule = in_model(model)
    rule.before_forward(0)
    model(**batch()).loss.backward()
    assert all(sigma.grad.abs().sum() > 0 for sigma in rule.values.sigma)
    assert rule.values.alpha.grad.abs().min() > 0
    assert all(layer.left.grad.abs().sum() > 0 and layer.right.grad.abs().sum() > 0 for layer in rule.layers)


def test_gradients_do_not_pile_up_over_steps():
    """A trainer clears those of its model, which the thresholds are not part of."""
    rule = searching(diagonal([3.0, 2.0]), keep=1.0, pressure=0.5)
    for number in range(3):
        rule.before_forward(number)
        rule.extra_loss(None, {}, None).backward()
        assert rule.values.alpha.grad.tolist() == pytest.approx([-0.5])


@pytest.mark.parametrize("family", [tiny.t5, lambda: tiny.bert().bfloat16()], ids=["t5", "bfloat16"])
def test_models_that_look_at_their_weights_or_are_of_another_type(family):
    model = family()
    inputs = {name: batch()[name] for name in ("input_ids", "attention_mask")}
    rule = ThresholdSearch(model, find_targets(model, inputs).targets, method(), 0.5)
    rule.before_forward(0)
    assert torch.isfinite(model(**inputs)[0]).all()
    dtype = next(model.parameters()).dtype
    rule.finish()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {sigma.dtype for sigma in rule.values.sigma} == {torch.float32}


# --- what survives ---------------------------------------------------------------------------------------------------


def test_survivors_and_measures_by_hand():
    """Two 4 × 4 targets of 16 parameters, 8 a rank: two components or more are no smaller than the dense weight."""
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0], [0.4, 0.3, 0.2, 0.1]), keep=0.5)
    update(rule, [0.5, 0.05])
    assert rule.measures() == {"kept": 1.0, "threshold": pytest.approx(0.275)}
    update(rule, [2.5, 0.05])
    assert rule.measures()["kept"] == 1.0
    assert not rule.done
    update(rule, [3.5, 0.05])
    assert rule.measures()["kept"] == 0.75
    assert not rule.done
    update(rule, [3.5, 0.35])
    assert rule.done
    assert rule.measures()["kept"] == 0.5
    assert rule.ranks() == {"a": 1, "b": 1}


def test_a_target_of_which_too_much_survives_stays_dense():
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]), keep=0.75)
    update(rule, [1.5, 3.5])
    assert rule.ranks() == {"a": None, "b": 1}


def test_the_last_step_is_taken_back_to_where_the_budget_is_met():
    """8 × 8: 16 parameters a rank, so keep 0.5 pays for 2. Half-way between 0 and 8 is α = 4, past σ = 3 alone."""
    rule = searching(diagonal([8.0, 7.0, 3.0, 0.4, 0.3, 0.2, 0.1, 0.05]), keep=0.5)
    update(rule, 7.5)
    assert rule.ranks() == {"a": 2}
    assert rule.values.alpha.item() == pytest.approx(3.0, abs=1e-5)
    assert rule.values.alpha.item() >= 3.0


def test_singular_values_are_taken_back_with_the_thresholds():
    rule = searching(diagonal([8.0, 7.0, 3.0, 2.0]), keep=0.5)
    rule.before_forward(0)
    with torch.no_grad():
        rule.values.alpha.fill_(4.0)
        rule.values.sigma[0].copy_(torch.tensor([8.0, 3.0, 3.0, 2.0]))
    rule.after_update(0)
    assert rule.ranks() == {"a": 1}
    assert rule.values.alpha.item() == pytest.approx(3.5, abs=1e-5)
    assert rule.values.sigma[0].tolist() == pytest.approx([8.0, 3.5, 3.0, 2.0], abs=1e-5)


shapes = st.lists(st.tuples(st.integers(4, 24), st.integers(4, 24)), min_size=1, max_size=5)


def least(targets: Sequence[Target]) -> int:
    """Parameters at rank 1 everywhere."""
    return sum(min(target.step, target.parameters) for target in targets)


@given(shapes, st.floats(0.2, 0.95), st.integers(0, 2**16))
def test_the_budget_is_met_within_one_rank(some, keep, seed):
    model = Maps(some, seed)
    targets = model.targets()
    assume(allowance(targets, keep) >= least(targets))
    rule = searching(model, keep)
    update(rule, [100.0 * (1 + number) for number in range(len(some))])
    assert rule.done
    ranks = rule.ranks()
    spent = total(targets, ranks)
    assert spent <= allowance(targets, keep) < spent + max(some.step for some in targets)
    assert all(ranks[t.name] is None or 1 <= ranks[t.name] <= largest_rank(t) for t in targets)


@given(shapes, st.floats(0.001, 0.3))
def test_there_is_an_error_wherever_keep_leaves_no_rank(some, keep):
    model = Maps(some)
    assume(allowance(model.targets(), keep) < least(model.targets()))
    with pytest.raises(NoRank):
        searching(model, keep)
    assert not factorized(model)


def test_keep_1_takes_nothing_away():
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0]), keep=1.0)
    update(rule, 3.5)
    assert rule.done
    assert rule.values.alpha.item() == 0
    assert rule.ranks() == {"a": None}


def test_no_threshold_falls_below_zero():
    """Where the loss wants all of a target."""
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]))
    update(rule, [-1.0, 0.5])
    assert rule.values.alpha.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("largest", [4.0, 1e-3, 0.0])
def test_no_target_is_left_without_a_rank(largest):
    rule = searching(diagonal([largest, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0]), keep=0.5)
    update(rule, [100.0, 0.5])
    assert not rule.done
    assert rule.values.alpha[0] <= largest
    update(rule, [100.0, 100.0])
    assert rule.ranks() == {"a": 1, "b": 1}
    rule.finish()
    assert torch.linalg.matrix_rank(rule.model.a.weight) == (largest > 0)


def test_a_threshold_that_passes_a_whole_target_leaves_its_largest_component_as_it_was():
    """As a small target beside large ones: with nothing left, no gradient would bring it back."""
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0], [0.5, 0.4, 0.4, 0.3]), keep=0.75, sharpness=20.0)
    rule.before_forward(0)
    before = rule.layers[1].gate.max().item()
    update(rule, 0.6)
    rule.before_forward(1)
    assert rule.layers[1].gate.max().item() == before == pytest.approx(0.5 * math.tanh(10))
    assert rule.layers[1].gate.count_nonzero() == 1
    assert rule.layers[0].gate.count_nonzero() == 4


def test_thresholds_and_singular_values_are_frozen_once_the_budget_is_met():
    model = tiny.bert().train()
    rule = in_model(model)
    until_done(rule, model)
    before = {name: value.clone() for name, value in rule.values.state_dict().items()}
    weight = rule.layers[0].left.detach().clone()
    optimizer = optimizer_of(rule, model)
    for number in range(3):
        one_step(rule, model, optimizer, number)
    assert all(torch.equal(value, before[name]) for name, value in rule.values.state_dict().items())
    assert not torch.equal(rule.layers[0].left, weight)


def test_the_loss_holds_back_the_threshold_of_a_target_that_it_needs():
    """Outputs of a are to stay as they are; those of b are not looked at."""
    model = Maps([(12, 12), (12, 12)])
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    wanted = 10 * model.a(x).detach()
    rule = searching(model, keep=0.6, threshold_learning_rate=0.005, pressure=0.1, sharpness=20.0)
    optimizer = optimizer_of(rule, model)
    for number in range(300):
        rule.before_forward(number)
        loss = (10 * model.a(x) - wanted).square().mean() + rule.extra_loss(None, {}, None)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        rule.after_update(number)
        if rule.done:
            break
    ranks = rule.ranks()
    assert rule.values.alpha[0] < rule.values.alpha[1]
    assert ranks["a"] is None or ranks["a"] > 2 * ranks["b"]


# --- what is left ----------------------------------------------------------------------------------------------------


@FAMILIES
def test_the_finished_model_is_dense_and_computes_what_the_gated_one_did(family):
    model = family()
    kinds = {name: type(module) for name, module in model.named_modules()}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    rule = in_model(model.train())
    biases = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("bias")}
    until_done(rule, model)
    rule.before_forward(rule.steps)
    trained = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("bias")}
    expected = logits(model)
    rule.finish()
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.items())
    assert all(not torch.equal(trained[name], biases[name]) for name in biases if "key" not in name)
    assert all(parameter.requires_grad for parameter in model.parameters())


@FAMILIES
def test_truncating_at_the_ranks_found_loses_nothing(family):
    model = family().train()
    rule = in_model(model)
    until_done(rule, model)
    rule.finish()
    assert any(rank is not None for rank in rule.ranks().values())
    for name, rank in rule.ranks().items():
        weight = weight_of(model.get_submodule(name)).double()
        parts = decompose(weight, ErrorNorm())
        if rank is not None:
            left, right = parts.truncate(rank)
            assert (weight - left @ right).norm() <= 1e-6 * weight.norm()
            assert parts.spectrum[rank:].max() <= 1e-6 * parts.spectrum[0]


def test_a_conv1d_is_searched_as_the_linear_of_its_transpose():
    linear = Maps([(12, 8)])
    conv = Maps([(12, 8)])
    conv.a = Conv1D(12, 8)
    with torch.no_grad():
        conv.a.weight.copy_(linear.a.weight.T)
        conv.a.bias.copy_(linear.a.bias)
    targets = linear.targets()
    rules = [ThresholdSearch(model, targets, method(), 0.5) for model in (linear, conv)]
    for rule in rules:
        update(rule, 1.0)
        rule.finish()
    assert rules[0].ranks() == rules[1].ranks()
    assert type(conv.a) is Conv1D
    assert torch.equal(conv.a.weight.T, linear.a.weight)
    assert torch.equal(conv.a.bias, linear.a.bias)


def test_a_budget_that_is_not_met_is_an_error_that_says_what_to_raise():
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]), keep=0.5)
    update(rule, [3.5, 0.5], number=0)
    update(rule, [3.5, 0.6], number=1)
    rule.finish()
    assert not factorized(rule.model)
    with pytest.raises(ValueError, match=r"\b2\b.*\b0\.7500\b.*keep=0\.5.*ranks\.steps\b"):
        rule.ranks()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_changed(bad):
    model = diagonal([4.0, 3.0, 2.0, 1.0], [4.0, bad, 2.0, 1.0])
    with pytest.raises(ValueError, match=r"\bb\b"):
        searching(model)
    assert not factorized(model)


# --- the training loop -----------------------------------------------------------------------------------------------

OPTIONS = {
    "steps": 200,
    "batch_size": 8,
    "learning_rate": 1e-3,
    "warmup": 0.0,
    "weight_decay": 0.01,
    "seed": 0,
    "schedule": "constant",
}


class Killed(Exception):
    pass


class Kill(Rule):
    """Dies after a step, if it is given one."""

    def __init__(self, step: int | None = None) -> None:
        self.step = step

    def after_update(self, step: int) -> None:
        if step == self.step:
            raise Killed


@pytest.fixture
def curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a checkpoint at every logged point."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECONDS, "0")
    return Path("curve.jsonl")


def loop(curve: Path, kill: int | None = None, **changes: Any) -> tuple[ThresholdSearch, PreTrainedModel, int]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, data = BertForSequenceClassification(tiny_config()).eval(), rows()
    inputs = {name: torch.tensor([data[0][name]]) for name in ("input_ids", "attention_mask")}
    targets = find_targets(model, inputs).targets
    rule = ThresholdSearch(model, targets, method(threshold_learning_rate=5e-3), 0.5)
    taken = train(model, collate(), data, curve, rules=[rule, Kill(kill)], **{**OPTIONS, **changes})
    return rule, model, taken


def test_the_training_loop_stops_where_the_budget_is_met(curve):
    rule, model, taken = loop(curve)
    points = [json.loads(line) for line in curve.read_text().splitlines()]
    assert 1 < taken < OPTIONS["steps"]
    assert points[-1]["step"] == taken
    assert points[-1]["kept"] == pytest.approx(
        total(rule.targets, rule.ranks()) / sum(t.parameters for t in rule.targets)
    )
    assert points[0]["kept"] > points[-1]["kept"]
    assert 0 < points[0]["threshold"] < points[-1]["threshold"]
    assert not any(isinstance(module, LowRankLinear) for module in model.modules())


def test_a_training_that_ends_too_soon_leaves_a_dense_model_and_no_ranks(curve):
    rule, model, taken = loop(curve, steps=3)
    assert taken == 3
    assert not factorized(model)
    with pytest.raises(ValueError, match=r"\b3\b.*ranks\.steps\b"):
        rule.ranks()


def test_a_killed_search_goes_on_to_the_same_bytes(curve, capsys):
    whole, model, taken = loop(curve)
    expected, written = save(dict(model.state_dict())), curve.read_text()
    with pytest.raises(Killed):
        loop(curve, kill=taken - 2)
    capsys.readouterr()
    resumed, model, again = loop(curve)
    assert "goes on from step" in capsys.readouterr().out
    assert again == taken
    assert save(dict(model.state_dict())) == expected
    assert curve.read_text() == written
    assert resumed.ranks() == whole.ranks()
    assert all(torch.equal(value, resumed.state()[name]) for name, value in whole.state().items())


def test_a_state_carries_over_whether_the_thresholds_are_frozen():
    for keep, alpha in ((0.5, 3.5), (0.5, 0.5)):
        first = searching(diagonal([4.0, 3.0, 2.0, 1.0]), keep)
        update(first, alpha)
        second = searching(diagonal([4.0, 3.0, 2.0, 1.0]), keep)
        second.load_state(first.state())
        assert second.done == first.done
        assert second.measures() == first.measures()
        assert second.values.alpha.requires_grad == (not first.done)


def test_another_keep_is_another_training():
    """Of which checkpoints must know."""
    first, second = (searching(diagonal([4.0, 3.0, 2.0, 1.0]), keep) for keep in (0.5, 0.75))
    assert repr(first.settings) != repr(second.settings)
