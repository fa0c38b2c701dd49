"""Mixed rank: what runs at each end of p, where gradients go, how two passes are joined, what is left at the end."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, mse_loss
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, PreTrainedModel

from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model import hf_format
from eckart.model.layers import LowRankLinear, factorize_target
from eckart.model.targets import find_targets, weight_of
from eckart.recovery.mixed_rank import MixedLinear, MixedRank, MixedRankRule
from tests import tiny
from tests.training import train
from tests.workspace import collate, rows, tiny_config, tiny_tokenizer

BATCH = tiny.collate(tiny.samples(5))
CURVE = Path("curve.jsonl")


def settings(**changes: Any) -> MixedRank:
    return MixedRank(**{"steps": 10, "batch_size": 8, "learning_rate": 1e-2, "warmup": 0.0, "until": 1.0, **changes})


def halves(rank: int = 3, dropout: bool = False, dense: int = 0) -> tuple[Any, Any, Any]:
    """A model whose targets are pruned at random, the same factorized but for `dense` targets, and W of the others."""
    sparse = tiny.bert() if dropout else tiny.without_dropout(tiny.bert())
    generator = torch.Generator().manual_seed(0)
    targets = find_targets(sparse, BATCH).targets
    for target in targets:
        weight_of(sparse.get_submodule(target.name)).mul_(
            torch.rand(target.out_features, target.in_features, generator=generator) < 0.5
        )
    low = copy.deepcopy(sparse)
    weights = {target.name: weight_of(sparse.get_submodule(target.name)) for target in targets[dense:]}
    for name, weight in weights.items():
        factorize_target(low, name, *decompose(weight, ErrorNorm()).truncate(rank))
    return sparse.train(), low.train(), weights


def rule_of(low: PreTrainedModel, weights: dict[str, Tensor], seed: int = 0, **changes: Any) -> MixedRankRule:
    return MixedRankRule(low, weights, settings(**changes), classes=True, seed=seed)


def drawn(rule: MixedRankRule) -> list[bool]:
    return [layer.dense for layer in rule.layers.values()]


def force(rule: MixedRankRule, dense: bool) -> None:
    for layer in rule.layers.values():
        layer.dense = dense


def snapshot(model: nn.Module) -> bytes:
    return save(dict(model.state_dict()))


# --- law 13 ----------------------------------------------------------------------------------------------------------


def test_the_ends_of_p_are_the_low_rank_model_and_the_sparse_one():
    sparse, low, weights = halves()
    plain = copy.deepcopy(low)
    rule = rule_of(low, weights, initial=1.0, until=0.5)
    rule.before_forward(0)
    assert rule.measures()["p"] == 1
    torch.testing.assert_close(low(**BATCH).logits, sparse(**BATCH).logits)
    rule.before_forward(5)
    assert rule.measures()["p"] == 0
    torch.testing.assert_close(low(**BATCH).logits, plain(**BATCH).logits)


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 2**20))
def test_the_layer_computes_one_term_of_the_sum(rows, columns, bias, dense, seed):
    """x_out = (1 − z) A B x + z W x + b."""
    generator = torch.Generator().manual_seed(seed)
    low = LowRankLinear(columns, rows, 2, bias).double()
    for parameter in low.parameters():
        nn.init.normal_(parameter, generator=generator)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    layer = MixedLinear(low, weight)
    layer.dense = dense
    x = torch.randn(2, 3, columns, generator=generator, dtype=torch.float64)
    expected = (1 - dense) * linear(x, low.left.weight @ low.right.weight) + dense * linear(x, weight)
    for training in (True, False):  # a training without dropout is in eval mode
        torch.testing.assert_close(layer.train(training)(x), expected if low.bias is None else expected + low.bias)


# --- gradients and W -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
def test_factors_have_a_gradient_only_where_they_run(dense):
    _, low, weights = halves()
    rule = rule_of(low, weights)
    force(rule, dense)
    low(**BATCH).loss.backward()
    for layer in rule.layers.values():
        for factor in (layer.low.left.weight, layer.low.right.weight):
            assert factor.grad is None if dense else factor.grad.any()
        assert layer.low.bias.grad is not None  # which both share


def test_the_weight_is_no_parameter_and_never_changes():
    _, low, weights = halves()
    parameters, sizes = [*low.parameters()], [value.numel() for value in low.state_dict().values()]
    before = {name: weight.clone() for name, weight in weights.items()}
    rule = rule_of(low, weights, initial=0.3)
    assert all(old is new for old, new in zip(parameters, low.parameters(), strict=True))
    assert [value.numel() for value in low.state_dict().values()] == sizes
    optimizer = torch.optim.AdamW(low.parameters(), 0.1, weight_decay=0.1)
    factors = {name: layer.low.left.weight.detach().clone() for name, layer in rule.layers.items()}
    for step in range(3):
        rule.before_forward(step)
        outputs = low(**BATCH)
        (outputs.loss + rule.extra_loss(low, BATCH, outputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, layer in rule.layers.items():
        assert not layer.weight.requires_grad
        assert torch.equal(layer.weight, before[name])
        assert torch.equal(weights[name], before[name])
        assert not torch.equal(layer.low.left.weight, factors[name])


# --- the draws -------------------------------------------------------------------------------------------------------


def test_p_falls_in_equal_steps_to_zero():
    """Ten steps, a share of 0.35 rounded up to 4, from 0.8."""
    _, low, weights = halves()
    rule = rule_of(low, weights, initial=0.8, until=0.35)
    values = []
    for step in range(10):
        rule.before_forward(step)
        values.append(rule.measures()["p"])
    assert values == pytest.approx([0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0, 0, 0])


def test_every_target_draws_on_its_own_at_rate_p():
    """400 steps of 14 draws, within five standard deviations; neighbors agree half of the time."""
    _, low, weights = halves()
    rule = rule_of(low, weights, initial=0.5, until=1.0, steps=10**6)
    draws = []
    for step in range(400):
        rule.before_forward(step)
        draws.append(drawn(rule))
    rates = torch.tensor(draws).double()
    assert ((rates.mean(0) - 0.5).abs() < 5 * 0.5 / 20).all()
    agree = (rates[:, 1:] == rates[:, :-1]).double().mean(0)
    assert ((agree - 0.5).abs() < 5 * 0.5 / 20).all()


def test_draws_depend_on_the_seed_alone():
    def draws(seed: int, noise: int) -> list[list[bool]]:
        _, low, weights = halves(dropout=True)
        rule = rule_of(low, weights, seed)
        torch.manual_seed(noise)
        result = []
        for step in range(2):
            rule.before_forward(step)
            result += [drawn(rule), rule.second]
        return result

    assert draws(3, 1) == draws(3, 2)
    assert draws(3, 1) != draws(4, 1)


# --- the loss --------------------------------------------------------------------------------------------------------


def passes(rule: MixedRankRule, low: PreTrainedModel, step: int = 0) -> tuple[Any, Any, Tensor]:
    """Both passes' outputs, each run again with the same z, and the extra loss."""
    rule.before_forward(step)
    extra = rule.extra_loss(low, BATCH, low(**BATCH))
    first = low(**BATCH)
    for layer, dense in zip(rule.layers.values(), rule.second, strict=True):
        layer.dense = dense
    return first, low(**BATCH), extra


def test_the_loss_is_the_mean_of_both_tasks_and_the_symmetric_divergence():
    _, low, weights = halves()
    rule = rule_of(low, weights, consistency=0.7)
    first, second, extra = passes(rule, low)
    p, q = log_softmax(first.logits, -1), log_softmax(second.logits, -1)
    options = {"log_target": True, "reduction": "batchmean"}
    divergence = (kl_div(p, q, **options) + kl_div(q, p, **options)) / 2
    tasks = [cross_entropy(outputs.logits, BATCH["labels"]) for outputs in (first, second)]
    assert divergence > 1e-3
    torch.testing.assert_close(first.loss + extra, sum(tasks) / 2 + 0.7 * divergence)
    assert rule.measures()["consistency"] == pytest.approx(divergence.item(), rel=1e-4)


def test_a_regression_agrees_by_squared_error():
    _, low, weights = halves()
    rule = MixedRankRule(low, weights, settings(consistency=0.7), classes=False, seed=0)
    first, second, extra = passes(rule, low)
    expected = (second.loss - first.loss) / 2 + 0.7 * mse_loss(first.logits, second.logits)
    torch.testing.assert_close(extra, expected)


@pytest.mark.parametrize("after", [False, True])
def test_once_p_is_zero_there_is_one_pass_or_two_that_differ_by_dropout(after):
    _, low, weights = halves(dropout=True)
    rule = rule_of(low, weights, until=0.5, consistency_after=after)
    calls = []
    low.register_forward_hook(lambda *_: calls.append(1))
    rule.before_forward(4)
    assert rule.extra_loss(low, BATCH, low(**BATCH)) is not None
    assert len(calls) == 2
    rule.before_forward(5)
    outputs = low(**BATCH)
    extra = rule.extra_loss(low, BATCH, outputs)
    assert len(calls) == (4 if after else 3)
    assert (extra is not None) == after
    assert (rule.measures()["consistency"] > 0) == after
    assert drawn(rule) == [False] * len(weights)


def test_extreme_logits_disagree_finitely():
    _, low, weights = halves()
    rule = rule_of(low, weights)
    rule.before_forward(0)
    second = {"logits": torch.tensor([[0.0, 1e3]]), "loss": torch.tensor(1.0)}
    first = {"logits": torch.tensor([[1e3, 0.0]], requires_grad=True), "loss": torch.tensor(0.0)}
    extra = rule.extra_loss(lambda **_: second, {}, first)
    extra.backward()
    assert float(extra.detach()) == pytest.approx(1e3 + 0.5)
    assert first["logits"].grad.isfinite().all()


def test_a_batch_without_a_label_adds_nothing():
    """The task's loss is 0 then, not nan as the mean over no prediction."""
    _, low, weights = halves()
    rule = rule_of(low, weights)
    rule.before_forward(0)
    first, second = ({"logits": torch.zeros(0, 2, requires_grad=True), "loss": torch.zeros(())} for _ in range(2))
    extra = rule.extra_loss(lambda **_: second, {}, first)
    extra.backward()
    assert float(extra.detach()) == 0


# --- wrapping --------------------------------------------------------------------------------------------------------


def test_finish_leaves_the_very_layers_that_were_there(tmp_path):
    _, low, weights = halves(dense=1)
    layers, before = {name: low.get_submodule(name) for name in weights}, snapshot(low)
    rule = rule_of(low, weights)
    assert all(isinstance(low.get_submodule(name), MixedLinear) for name in weights)
    assert snapshot(low) != before  # the names have changed
    rule.before_forward(0)
    rule.finish()
    assert {name: low.get_submodule(name) for name in weights} == layers
    assert snapshot(low) == before
    assert not any(isinstance(module, MixedLinear) for module in low.modules())
    hf_format.save(low, tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tiny.assert_same(loaded, low, BATCH)


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path, monkeypatch) -> SimpleNamespace:
    """A folder with a factorized model, as the loop loads one, and the weights that it came from."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(tiny_config())
    targets = find_targets(model, tiny_tokenizer()(["a plot"], return_tensors="pt")).targets
    weights = {target.name: weight_of(model.get_submodule(target.name)).clone() for target in targets}
    for name, weight in weights.items():
        factorize_target(model, name, *decompose(weight, ErrorNorm()).truncate(2))
    hf_format.save(model, tmp_path / "model")
    return SimpleNamespace(folder=tmp_path / "model", weights=weights)


def trained(sources: SimpleNamespace, again: bool = False) -> PreTrainedModel:
    """Train; with `again`, activations within layers are computed again on the way back."""
    model = AutoModelForSequenceClassification.from_pretrained(sources.folder)
    rule = MixedRankRule(model, sources.weights, settings(steps=3), classes=True, seed=0)
    options = {**vars(rule.settings.optimization), "checkpoint_activations": again}
    train(model, collate(), rows(), CURVE, **options, rules=[rule])
    return model


def test_what_is_computed_again_runs_at_the_rank_of_its_pass(sources):
    """Each pass has a z of its own, and both are there before the first is computed again."""
    whole = trained(sources).state_dict()
    torch.testing.assert_close(dict(trained(sources, again=True).state_dict()), dict(whole))


def test_a_small_disagreement_is_not_lost_to_rounding():
    """The logits of half precision may differ by little, in many classes."""
    _, low, weights = halves()
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(4, 30_000, generator=generator).bfloat16()
    second = (first.float() + 0.03 * torch.randn(first.shape, generator=generator)).bfloat16()
    rule = rule_of(low, weights)
    assert float(rule._disagreement(first, second)) == pytest.approx(
        float(rule._disagreement(first.double(), second.double())), rel=1e-3
    )
