"""LoRA: it begins at the model, trains updates alone, and ends as the model that it was, with other numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, default_data_collator

from eckart.model import hf_format
from eckart.model.layers import LowRankLinear, low_rank_layers
from eckart.model.targets import weight_of
from eckart.recovery.lora import Lora, LoraRule
from eckart.training.rules import Rule
from tasks.training.checkpoints import SECONDS
from tests import tiny
from tests.killing import Kill, Killed
from tests.training import train

CLASSES = tiny.collate(tiny.samples(5))
TEXT = {**CLASSES, "labels": CLASSES["input_ids"]}
CURVE = Path("curve.jsonl")
OPTIONS = {"steps": 4, "batch_size": 4, "learning_rate": 1e-2, "warmup": 0.0, "weight_decay": 0.0, "seed": 0}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def student(family: Any = tiny.causal_llama, rank: int = 6) -> PreTrainedModel:
    batch = TEXT if family is tiny.causal_llama else CLASSES
    return tiny.factorize(family(), batch, lambda _: rank).eval()


def blocks() -> Dataset:
    ids = torch.randint(tiny.VOCABULARY, (12, 6), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 6] * 12, "labels": ids})


def trained(model: PreTrainedModel, *others: Rule, **changes: Any) -> PreTrainedModel:
    rules = [LoraRule(model, Lora(rank=1), seed=0), *others]
    train(model, default_data_collator, blocks(), CURVE, rules=rules, **{**OPTIONS, **changes})
    return model


@pytest.mark.parametrize("family", [*tiny.FAMILIES.values(), tiny.causal_llama])
def test_without_a_step_the_model_comes_back(family: Any) -> None:
    """The very parameters, also where a target is dense, a Conv1D or tied."""
    model, batch = student(family), TEXT if family is tiny.causal_llama else CLASSES
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    objects, logits = [*model.parameters()], tiny.logits(model, batch)
    rule = LoraRule(model, Lora(rank=2), seed=0)
    torch.testing.assert_close(tiny.logits(model, batch), logits)
    rule.finish()
    after = dict(model.named_parameters())
    assert {*after} == {*before}
    assert all(torch.equal(after[name], values) and after[name].requires_grad for name, values in before.items())
    assert {*map(id, after.values())} == {*map(id, objects)}


def test_only_updates_of_matrices_train_and_change_them_by_their_rank() -> None:
    """Norms and the tied embedding stay. An update of rank 1 changes a factor by a matrix of rank 1."""
    before = dict(student().named_parameters())
    model = trained(student())
    layers = low_rank_layers(model)
    assert layers
    for name, values in model.named_parameters():
        change = (values - before[name]).detach()
        if name.removesuffix(".left.weight").removesuffix(".right.weight") in layers:
            assert torch.linalg.matrix_rank(change, rtol=1e-3) == 1, name
        else:
            assert not change.any(), name


def test_states_of_the_optimizer_are_those_of_the_updates_alone() -> None:
    plain, model = student(), student()
    rule = LoraRule(model, Lora(rank=1), seed=0)
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    factors = [factor for layer in low_rank_layers(plain).values() for factor in layer.factors]
    assert sum(sizes) == sum(sum(factor.shape) for factor in factors) < sum(factor.numel() for factor in factors)
    rule.finish()


def test_updates_begin_at_random_maps_that_keep_the_size_of_their_inputs() -> None:
    model = tiny.factorize(tiny.bert(), tiny.collate(tiny.samples(5)), lambda _: 6)
    rule = LoraRule(model, Lora(rank=1), seed=0)
    downs = [module.parametrizations[name][0].down.detach() for module, name in rule.updated]  # type: ignore[index]
    drawn = torch.cat([(down * down.shape[1] ** 0.5).flatten() for down in downs])
    assert float(drawn.std()) == pytest.approx(1, rel=0.15)


def test_a_factor_no_larger_than_its_update_is_trained_itself() -> None:
    """A factor of rank 1 has as many numbers as the update of rank 1 has, and one less."""
    model = student(rank=1)
    rule = LoraRule(model, Lora(rank=1), seed=0)
    assert not rule.updated
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {f"{name}.{side}.weight" for name in low_rank_layers(model) for side in ("left", "right")}


def test_the_gradient_of_the_update_is_that_of_the_weight_seen_through_it() -> None:
    """∂L/∂B = (α/r) G Aᵀ with the gradient G of the weight, at B = 0."""
    plain, model = student(), student()
    name, layer = next(iter(low_rank_layers(model).items()))
    LoraRule(model, Lora(rank=2, alpha=6.0), seed=0)
    for each in (plain, model):
        each(**TEXT).loss.backward()
    update = layer.left.parametrizations.weight[0]
    gradient = plain.get_submodule(name).left.weight.grad
    torch.testing.assert_close(update.up.grad, 3.0 * gradient @ update.down.T, rtol=1e-4, atol=1e-6)


def test_what_is_saved_is_an_ordinary_compressed_model(tmp_path: Path) -> None:
    model = trained(student())
    hf_format.save(model, tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(type(layer) is LowRankLinear for layer in low_rank_layers(model).values())
    tiny.assert_same(loaded, model, TEXT)


def test_bfloat16_weights_are_trained_through_their_rounding() -> None:
    """Updates in float32; after the end the model gives what it gave with them."""
    model = student().bfloat16()
    rule = LoraRule(model, Lora(rank=1), seed=0)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    with torch.no_grad():
        for module, name in rule.updated:
            module.parametrizations[name][0].up.normal_()
    before = tiny.logits(model, TEXT)
    rule.finish()
    assert torch.equal(tiny.logits(model, TEXT), before)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_killed_training_goes_on_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(*others: Rule) -> dict[str, Tensor]:
        return dict(trained(student(), *others).state_dict())

    monkeypatch.setenv(SECONDS, "0")
    whole = weights(Rule())
    with pytest.raises(Killed):
        weights(Kill(1))
    monkeypatch.setattr(Kill, "after_update", Rule.after_update)
    resumed = weights(Kill(1))
    assert "goes on from step" in capsys.readouterr().out
    assert all(torch.equal(resumed[name], values) for name, values in whole.items())


def test_a_dense_model_is_updated_too() -> None:
    """As the control of a recipe: its linear layers, not its tied head."""
    model = tiny.causal_llama().eval()
    before = weight_of(model.model.layers[0].mlp.up_proj).clone(), model.lm_head.weight.detach().clone()
    trained(model)
    assert not torch.equal(weight_of(model.model.layers[0].mlp.up_proj), before[0])
    assert torch.equal(model.lm_head.weight, before[1])
