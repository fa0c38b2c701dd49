"""Distillation: what the teacher adds to the loss, by hand and by its laws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import PreTrainedModel

from eckart.recovery.distillation import Distillation, DistillationRule, hidden_error, logits_error
from tests import tiny

SAMPLES = tiny.samples(6)
BATCH = tiny.collate(SAMPLES)


def rule(teacher: PreTrainedModel, classes: bool = True, **changes: float) -> DistillationRule:
    return DistillationRule(teacher, Distillation(**{"layers": 15.0, **changes}), classes)


def student() -> PreTrainedModel:
    return tiny.factorize(tiny.bert(), BATCH, lambda _: 2).eval()


def extra(distiller: DistillationRule, model: PreTrainedModel, batch: dict[str, Tensor] = BATCH) -> Tensor:
    """The loss that the rule adds, as the loop asks for it."""
    loss = distiller.extra_loss(model, batch, model(**batch, **distiller.forward_options))
    assert loss is not None
    return loss


def added(distiller: DistillationRule, model: PreTrainedModel, batch: dict[str, Tensor] = BATCH) -> float:
    """The same as a number."""
    return extra(distiller, model, batch).item()


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_hidden_states_are_compared_by_the_sum_of_mean_squares():
    """Two states of 1 × 2 tokens × 2 features: squares 1, 4, 9, 16 are 7.5 in the mean, and 2, 2, 2, 2 are 2."""
    zeros = torch.zeros(1, 2, 2)
    states = [torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.full((1, 2, 2), math.sqrt(2))]
    assert float(hidden_error(states, [zeros, zeros], None)) == pytest.approx(9.5)
    assert float(hidden_error([zeros, zeros], states, torch.ones(1, 2))) == pytest.approx(9.5)


def test_only_real_tokens_count():
    """The first token alone: (1 + 4)/2. What stands at the other one need not even be finite."""
    state = torch.tensor([[[1.0, 2.0], [math.nan, math.inf]]], requires_grad=True)
    error = hidden_error([state], [torch.zeros(1, 2, 2)], torch.tensor([[1, 0]]))
    assert error.item() == pytest.approx(2.5)
    error.backward()
    assert state.grad.tolist() == [[[1.0, 2.0], [0.0, 0.0]]]


def test_classes_are_compared_by_the_divergence_from_the_teacher_at_the_temperature():
    """Logits of log 9 at temperature 2 are odds of 3 : 1; the student's are even."""
    teacher, model = torch.tensor([[math.log(9), 0.0]]), torch.zeros(1, 2)
    expected = 4 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    assert float(logits_error(model, teacher, 2.0)) == pytest.approx(expected, rel=1e-5)
    reverse = 4 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert float(logits_error(teacher, model, 2.0)) == pytest.approx(reverse, rel=1e-5)
    assert float(logits_error(model.repeat(3, 1), teacher.repeat(3, 1), 2.0)) == pytest.approx(expected, rel=1e-5)


def test_values_are_compared_by_their_mean_square():
    assert float(logits_error(torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0], [1.0]]), None)) == pytest.approx(5)


def test_certain_teachers_give_finite_numbers():
    """Probabilities of exactly 0."""
    error = logits_error(torch.tensor([[0.0, 200.0]]), torch.tensor([[200.0, 0.0]]), 1.0)
    assert float(error) == pytest.approx(200)


# --- the rule --------------------------------------------------------------------------------------------------------


def test_the_teacher_itself_has_nothing_to_learn():
    assert added(rule(tiny.bert()), tiny.bert().eval()) == pytest.approx(0, abs=1e-6)


def test_values_of_a_regression_are_compared_by_their_mean_square_in_the_rule():
    teacher, model = tiny.bert(), student()
    found = added(rule(teacher, classes=False, layers=0.0), model)
    with torch.no_grad():
        expected = mse_loss(model(**BATCH).logits, teacher.eval()(**BATCH).logits)
    assert found == pytest.approx(float(expected))


def test_the_loss_is_the_weighted_sum_of_the_terms():
    teacher, model = tiny.bert(), student()
    distiller = rule(teacher, layers=3.0, logits=0.5)
    loss = added(distiller, model)
    errors = distiller.measures()
    assert set(errors) == {"distill_layers", "distill_logits"}
    assert min(errors.values()) > 0
    assert loss == pytest.approx(3 * errors["distill_layers"] + 0.5 * errors["distill_logits"], rel=1e-5)
    with torch.no_grad():
        states = [model(**BATCH, output_hidden_states=True).hidden_states for model in (model, teacher)]
    mask = BATCH["attention_mask"].bool()
    expected = sum(float(((a - b)[mask] ** 2).mean()) for a, b in zip(*states, strict=True))
    assert errors["distill_layers"] == pytest.approx(expected, rel=1e-4)


def test_the_gradient_reaches_the_student_and_not_the_teacher():
    teacher, model = tiny.bert(), student()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    extra(rule(teacher), model).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert sum(bool(p.grad.any()) for p in model.parameters() if p.grad is not None) > 3


def test_padding_changes_nothing():
    distiller, model = rule(tiny.bert()), student()
    expected = added(distiller, model)
    assert added(distiller, model, tiny.collate(SAMPLES, 12)) == pytest.approx(expected, rel=1e-4)


def test_a_batch_is_as_good_as_its_samples():
    """The layers' error is a mean over tokens, the logits' over samples."""
    distiller, model = rule(tiny.bert()), student()
    extra(distiller, model)
    together, tokens = distiller.measures(), [len(ids) for ids, _ in SAMPLES]
    layers, logits = 0.0, 0.0
    for sample, length in zip(SAMPLES, tokens, strict=True):
        extra(distiller, model, tiny.collate([sample]))
        layers += distiller.measures()["distill_layers"] * length / sum(tokens)
        logits += distiller.measures()["distill_logits"] / len(SAMPLES)
    assert together == pytest.approx({"distill_layers": layers, "distill_logits": logits}, rel=1e-4)


def test_the_teacher_has_no_dropout():
    """Whatever mode it comes in, and whatever mode the student is in."""
    teacher, model = tiny.bert().train(), student()
    distiller = rule(teacher)
    assert not any(module.training for module in teacher.modules())
    assert added(distiller, model) == added(distiller, model)
    first, second = (added(distiller, model.train()) for _ in range(2))
    assert first != second


@pytest.mark.parametrize(("layers", "asked"), [(1.0, {"output_hidden_states"}), (0.0, set())])
def test_the_teacher_sees_the_batch_without_its_labels_and_is_asked_for_hidden_states_if_they_count(layers, asked):
    teacher, seen = tiny.bert(), []
    teacher.register_forward_pre_hook(lambda _, args, options: seen.append(dict(options)), with_kwargs=True)
    distiller = rule(teacher, layers=layers)
    assert set(distiller.forward_options) == asked
    extra(distiller, student())
    assert len(seen) == 1
    assert set(seen[0]) == set(BATCH) - {"labels"} | asked
    assert ("distill_layers" in distiller.measures()) == bool(asked)


# --- terms that are off ----------------------------------------------------------------------------------------------


def test_without_the_logits_term_no_logits_are_needed():
    """An encoder alone, whose hidden states are all there is."""
    tokens = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    teacher, model = tiny.t5(), tiny.t5().eval()
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.q.weight.mul_(0.5)
    distiller = rule(teacher, logits=0.0)
    assert added(distiller, model, tokens) > 0
    assert set(distiller.measures()) == {"distill_layers"}
    with pytest.raises(ValueError, match=r"distillation\.logits"):
        extra(rule(teacher), model, tokens)


def test_states_of_an_encoder_and_of_its_decoder_add_up_each_without_its_own_padding():
    """Of the real tokens alone: rows of 2 and 3 tokens that are read, 2 and 1 that are written."""
    model, teacher = (tiny.ARCHITECTURES["bart"].build().eval() for _ in range(2))
    with torch.no_grad():
        model.model.shared.weight.mul_(0.5)
    batch = {
        "input_ids": torch.tensor([[5, 2, 0], [6, 7, 2]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "decoder_input_ids": torch.tensor([[2, 9], [2, 0]]),
        "decoder_attention_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    expected = 0.0
    states, others = (network(**batch, output_hidden_states=True) for network in (model, teacher))
    for part, mask in (("encoder", "attention_mask"), ("decoder", "decoder_attention_mask")):
        pairs = zip(states[f"{part}_hidden_states"], others[f"{part}_hidden_states"], strict=True)
        expected += sum(float((a - b)[batch[mask] == 1].detach().square().mean()) for a, b in pairs)
    assert expected > 0
    assert added(rule(teacher, layers=1.0, logits=0.0), model, batch) == pytest.approx(expected, rel=1e-5)
    assert added(rule(model), model, batch) == pytest.approx(0, abs=1e-5)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_model_without_hidden_states_is_an_error():
    model = tiny.bert().eval()
    outputs = model(**BATCH)
    with pytest.raises(ValueError, match=r"distillation\.layers"):
        rule(model).extra_loss(model, BATCH, outputs)


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_a_batch_without_predictions_changes_nothing(temperature: float | None) -> None:
    """Such as one of texts whose tokens have no labels."""
    student = torch.zeros(0, 3, requires_grad=True)
    error = logits_error(student, torch.zeros(0, 3), temperature)
    error.backward()
    assert float(error.detach()) == 0
