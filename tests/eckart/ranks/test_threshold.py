"""The soft threshold: its values by hand, the budget it must meet, and the dense model it must leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import factorized
from eckart.model.targets import Target, find_targets, weight_of
from eckart.ranks.budget import NoRank, allowance, largest_rank, total
from eckart.ranks.threshold import Threshold, ThresholdSearch, soft_threshold
from tests import tiny


def method(**changes: Any) -> Threshold:
    return Threshold(**{"pressure": 1.0, "threshold_learning_rate": 0.05, **changes})


def diagonal(*values: Sequence[float]) -> tiny.LinearLayers:
    """Square maps with these singular values."""
    model = tiny.LinearLayers(*((len(some), len(some)) for some in values))
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


def checkpointed(rule: ThresholdSearch, model: nn.Module) -> ThresholdSearch:
    """Another search, with the state of `rule`."""
    other = ThresholdSearch(model, model.targets(), rule.method, rule.keep)
    other.load_state(rule.state())
    return other


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


# --- eq. 6, 9 and 10 -------------------------------------------------------------------------------------------------


def test_soft_threshold_by_hand():
    sigma, alpha = torch.tensor([2.0, 1.0, 0.5, 1.5]), torch.tensor(1.0)
    expected = [2 * math.tanh(1), 0, 0, 1.5 * math.tanh(0.5)]
    assert soft_threshold(sigma, alpha, 1.0).tolist() == pytest.approx(expected)
    sharp = soft_threshold(sigma, alpha, 1e6)
    assert sharp.tolist() == [2.0, 0.0, 0.0, 1.5]


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


def test_a_sharp_threshold_at_zero_is_the_dense_model():
    model = tiny.gpt2()
    expected = tiny.logits(model, batch())
    rule = in_model(model, sharpness=1e6)
    assert set(factorized(model)) == {target.name for target in rule.targets}
    torch.testing.assert_close(tiny.logits(model, batch()), expected, rtol=1e-4, atol=1e-5)


def test_gradients_do_not_pile_up_over_steps():
    """A trainer clears those of its model, which the thresholds are not part of."""
    rule = searching(diagonal([3.0, 2.0]), keep=1.0, pressure=0.5)
    for number in range(3):
        rule.before_forward(number)
        rule.extra_loss(None, {}, None).backward()
        assert rule.values.alpha.grad.tolist() == pytest.approx([-0.5])


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
    model = tiny.LinearLayers(*some, seed=seed)
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
    model = tiny.LinearLayers(*some)
    assume(allowance(model.targets(), keep) < least(model.targets()))
    with pytest.raises(NoRank):
        searching(model, keep)
    assert not factorized(model)


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
    rule = in_model(model, threshold_learning_rate=0.2)
    until_done(rule, model)
    before = {name: value.clone() for name, value in rule.values.state_dict().items()}
    weight = rule.layers[0].left.weight.detach().clone()
    one_step(rule, model, optimizer_of(rule, model), number=0)
    assert all(torch.equal(value, before[name]) for name, value in rule.values.state_dict().items())
    assert not torch.equal(rule.layers[0].left.weight, weight)


def test_the_loss_holds_back_the_threshold_of_a_target_that_it_needs():
    """Outputs of a are to stay as they are; those of b are not looked at."""
    model = tiny.LinearLayers((12, 12), (12, 12))
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    wanted = 10 * model.a(x).detach()
    rule = searching(model, keep=0.6, threshold_learning_rate=0.01, pressure=0.1, sharpness=20.0)
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


# --- thresholds of blocks ---------------------------------------------------------------------------------------------


def test_the_layers_of_a_block_share_a_threshold():
    """Block 3 is cut at 1.5: of 2, 1 and 9, 1 the larger one is left; the block's α may rise to 9, the other's to 4."""
    model = diagonal([2.0, 1.0, 0.5, 0.1], [9.0, 1.0, 0.5, 0.1], [4.0, 3.0, 2.0, 1.0])
    names = ("h.3.query", "h.3.mlp.0", "pooler")
    targets = [target.model_copy(update={"name": name}) for target, name in zip(model.targets(), names, strict=True)]
    modules = [child for _, child in model.named_children()]
    named = nn.Module()
    named.h, named.pooler = nn.ModuleDict({"3": nn.Module()}), modules[2]
    named.h["3"].query, named.h["3"].mlp = modules[0], nn.ModuleList([modules[1]])
    rule = ThresholdSearch(named, targets, method(thresholds="block", pressure=0.5), 0.5)
    assert rule.extra_loss(None, {}, None).item() == pytest.approx(0.5 * 2)
    update(rule, [1.5, 0.5])
    assert [layer.gate.count_nonzero().item() for layer in rule.layers] == [4, 4, 4]  # before the step
    rule.before_forward(1)
    assert [layer.gate.count_nonzero().item() for layer in rule.layers] == [1, 1, 4]
    assert rule.measures() == pytest.approx({"kept": (8 + 8 + 16) / 48, "threshold": (1.5 + 1.5 + 0.5) / 3})
    update(rule, [100.0, 3.5])
    assert rule.ranks() == dict.fromkeys(names, 1)


# --- steps to each share, and after keep is met ----------------------------------------------------------------------


def test_the_steps_to_each_quarter_and_to_keep_are_recorded():
    """8 × 8: 16 parameters a rank, so 3, 2 and 1 ranks are 0.75, 0.5 and 0.25 of 64."""
    rule = searching(diagonal([8.0, 7.0, 6.0, 5.0, 0.4, 0.3, 0.2, 0.1]), keep=0.3)
    update(rule, 1.0, number=0)
    assert rule.reached == {}
    update(rule, 6.5, number=1)
    assert rule.reached == {0.75: 2, 0.5: 2}
    update(rule, 7.5, number=2)
    assert rule.reached == {0.75: 2, 0.5: 2, 0.3: 3}
    assert checkpointed(rule, diagonal([1.0] * 8)).reached == rule.reached


def test_u_sigma_and_v_train_on_while_the_thresholds_are_frozen():
    model = tiny.LinearLayers((12, 12), (12, 12))
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    wanted = (model.a(x) + model.b(x)).detach()
    rule = searching(model, keep=0.5, threshold_learning_rate=0.1, learning_rate=1e-2, frozen_steps=5, steps=200)
    optimizer, ranks, before = optimizer_of(rule, model), [], None
    for number in range(rule.method.optimization.steps):
        rule.before_forward(number)
        loss = (model.a(x) + model.b(x) - wanted).square().mean() + rule.extra_loss(None, {}, None)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        rule.after_update(number)
        if rule.met:
            ranks.append(rule.ranks())
            before = before or {
                name: value.clone() for name, value in [*rule.state().items(), *model.named_parameters()]
            }
            assert torch.equal(rule.values.alpha, before["alpha"])
        if rule.done:
            break
    assert len(ranks) == 6
    assert rule.steps == rule.reached[0.5] + 5
    for now, earlier in zip(ranks[1:], ranks, strict=False):
        assert all(now[name] <= earlier[name] for name in now)  # what is cut stays cut
    assert not torch.equal(rule.values.sigma[0], before["sigma.0"])
    for side in ("left", "right"):
        assert not torch.equal(model.get_parameter(f"a.{side}.weight"), before[f"a.{side}.weight"])


def test_momentum_does_not_bring_a_cut_component_back():
    rule = searching(diagonal([8.0, 7.0, 3.0, 2.0]), keep=0.5, frozen_steps=2)
    update(rule, 7.5)
    for number in (1, 2):
        rule.before_forward(number)
        with torch.no_grad():
            rule.values.sigma[0].copy_(torch.tensor([9.0, 8.0, 8.0, 1.0]))
        assert not rule.done
        rule.after_update(number)
    assert rule.done
    assert rule.values.sigma[0].tolist() == [9.0, 7.0, 3.0, 2.0]
    assert rule.ranks() == {"a": 1}


def test_a_budget_that_is_not_met_in_time_gets_no_frozen_steps():
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0]), keep=0.5, steps=1, frozen_steps=10)
    update(rule, 0.5)
    assert rule.done
    with pytest.raises(ValueError, match=r"ranks\.steps"):
        rule.ranks()


# --- what is left ----------------------------------------------------------------------------------------------------


def test_the_finished_model_is_dense_and_computes_what_the_gated_one_did():
    model = tiny.gpt2()
    kinds = {name: type(module) for name, module in model.named_modules()}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    rule = in_model(model.train(), threshold_learning_rate=0.2)
    biases = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("bias")}
    until_done(rule, model)
    rule.before_forward(rule.steps)
    trained = {name: value.clone() for name, value in model.state_dict().items() if name.endswith("bias")}
    expected = tiny.logits(model, batch())
    rule.finish()
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    torch.testing.assert_close(tiny.logits(model, batch()), expected, rtol=1e-5, atol=1e-5)
    merged = {name.replace(".left.bias", ".bias"): value for name, value in trained.items()}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in merged.items())
    assert all(not torch.equal(trained[name], biases[name]) for name in biases if "key" not in name)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert any(rank is not None for rank in rule.ranks().values())
    for name, rank in rule.ranks().items():  # truncating at the ranks loses nothing
        if rank is not None:
            parts = decompose(weight_of(model.get_submodule(name)).double(), ErrorNorm())
            assert parts.spectrum[rank:].max() <= 1e-6 * parts.spectrum[0]


def test_a_budget_that_is_not_met_is_an_error_that_says_what_to_raise():
    rule = searching(diagonal([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]), keep=0.5)
    update(rule, [3.5, 0.5], number=0)
    update(rule, [3.5, 0.6], number=1)
    rule.finish()
    assert not factorized(rule.model)
    with pytest.raises(ValueError, match=r"\b2\b.*\b0\.7500\b.*keep=0\.5.*ranks\.steps\b"):
        rule.ranks()


def test_a_weight_that_is_not_finite_is_named_and_nothing_is_changed():
    model = diagonal([4.0, 3.0, 2.0, 1.0], [4.0, math.inf, 2.0, 1.0])
    with pytest.raises(ValueError, match=r"\bb\b"):
        searching(model)
    assert not factorized(model)
