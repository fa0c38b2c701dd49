"""Distillation: what the teacher adds to the loss, by hand and by its laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import factorize_target
from eckart.model.targets import find_targets, weight_of
from eckart.recovery.distillation import Distillation, DistillationRule, hidden_error, logits_error
from tests import tiny

SAMPLES = tiny.samples(6)
BATCH = tiny.collate(SAMPLES)
TERMS = {"layers": 15.0, "logits": 1.0, "temperature": 2.0}


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {**tiny.FAMILIES, "albert": tiny.albert}


def rule(teacher: PreTrainedModel, classification: bool = True, **changes: float) -> DistillationRule:
    return DistillationRule(teacher, Distillation(**{**TERMS, **changes}), classification)


def student(family: str, rank: int = 2) -> PreTrainedModel:
    """Its targets factorized, where it has some."""
    model = FAMILIES[family]()
    for target in find_targets(model, BATCH).targets:
        left, right = decompose(weight_of(model.get_submodule(target.name)), ErrorNorm()).truncate(rank)
        factorize_target(model, target.name, left, right)
    return model.eval()


def extra(one: DistillationRule, model: PreTrainedModel, batch: dict[str, Tensor] = BATCH) -> Tensor:
    """The loss that the rule adds, as the loop asks for it."""
    loss = one.extra_loss(model, batch, model(**batch, **one.forward_options))
    assert loss is not None
    return loss


def added(one: DistillationRule, model: PreTrainedModel, batch: dict[str, Tensor] = BATCH) -> float:
    """The same as a number."""
    return extra(one, model, batch).item()


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


def test_tokens_count_alike_in_short_and_long_samples():
    """Three real tokens, of squares 9, 0 and 0: 3, not the mean of 9 and 0."""
    state = torch.zeros(2, 2, 1)
    state[0, 0] = 3
    assert float(hidden_error([state], [torch.zeros(2, 2, 1)], torch.tensor([[1, 0], [1, 1]]))) == pytest.approx(3)


def test_classes_are_compared_by_the_divergence_from_the_teacher_at_the_temperature():
    """Logits of log 9 at temperature 2 are odds of 3 : 1; the student's are even."""
    teacher, model = torch.tensor([[math.log(9), 0.0]]), torch.zeros(1, 2)
    expected = 4 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    assert float(logits_error(model, teacher, 2.0)) == pytest.approx(expected, rel=1e-5)
    reverse = 4 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert float(logits_error(teacher, model, 2.0)) == pytest.approx(reverse, rel=1e-5)
    assert float(logits_error(model.repeat(3, 1), teacher.repeat(3, 1), 2.0)) == pytest.approx(expected, rel=1e-5)


def test_the_size_of_the_logits_term_hardly_depends_on_a_high_temperature():
    """Which is what its square is for: in the limit it is half the variance of the difference over classes."""
    teacher, model = torch.tensor([[2.0, 0.0, -2.0]]).double(), torch.zeros(1, 3).double()
    for temperature in (50.0, 100.0):
        expected = float(teacher.var(unbiased=False)) / 2
        assert float(logits_error(model, teacher, temperature)) == pytest.approx(expected, rel=1e-2)


def test_values_are_compared_by_their_mean_square():
    assert float(logits_error(torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0], [1.0]]), None)) == pytest.approx(5)


def test_certain_teachers_give_finite_numbers():
    """Probabilities of exactly 0."""
    error = logits_error(torch.tensor([[0.0, 200.0]]), torch.tensor([[200.0, 0.0]]), 1.0)
    assert float(error) == pytest.approx(200)


# --- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("classification", [True, False])
def test_the_teacher_itself_has_nothing_to_learn(family, classification):
    teacher = FAMILIES[family]()
    one = rule(teacher, classification)
    assert added(one, FAMILIES[family]().eval()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_weighted_sum_of_the_terms(family):
    teacher, model = FAMILIES[family](), student(family)
    one = rule(teacher, layers=3.0, logits=0.5)
    loss = added(one, model)
    errors = one.measures()
    assert set(errors) == {"distill_layers", "distill_logits"}
    assert min(errors.values()) > 0 or family == "albert"  # which has no targets but its pooler
    assert loss == pytest.approx(3 * errors["distill_layers"] + 0.5 * errors["distill_logits"], rel=1e-5)
    with torch.no_grad():
        states = [model(**BATCH, output_hidden_states=True).hidden_states for model in (model, teacher)]
    mask = BATCH["attention_mask"].bool()
    expected = sum(float(((a - b)[mask] ** 2).mean()) for a, b in zip(*states, strict=True))
    assert errors["distill_layers"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("classification", "temperature"), [(True, 2.0), (False, None)])
def test_the_task_says_how_logits_are_compared(classification, temperature):
    teacher, model = tiny.bert().eval(), student("bert")
    one = rule(teacher, classification, layers=0.0)
    with torch.no_grad():
        expected = logits_error(model(**BATCH).logits, teacher(**BATCH).logits, temperature)
    assert added(one, model) == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_reaches_the_student_and_not_the_teacher(family):
    teacher, model = FAMILIES[family](), student(family)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    extra(rule(teacher), model).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in teacher.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert sum(bool(p.grad.any()) for p in model.parameters() if p.grad is not None) > 3


def test_a_few_steps_bring_the_student_nearer():
    teacher, model = tiny.bert(), student("bert")
    one = rule(teacher)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        loss = extra(one, model)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("classification", [True, False])
def test_padding_changes_nothing(family, classification):
    one, model = rule(FAMILIES[family](), classification), student(family)
    expected = added(one, model)
    assert added(one, model, tiny.collate(SAMPLES, 12)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_left_changes_no_error_of_hidden_states(family):
    """Logits are another matter: BERT's are of the first token, whatever that is."""
    one, model = rule(FAMILIES[family](), logits=0.0), student(family)
    expected = added(one, model)
    assert added(one, model, tiny.collate(SAMPLES, 12, "left")) == pytest.approx(expected, rel=1e-4)


def test_a_batch_is_as_good_as_its_samples():
    """The layers' error is a mean over tokens, the logits' over samples."""
    one, model = rule(tiny.bert()), student("bert")
    extra(one, model)
    together, tokens = one.measures(), [len(ids) for ids, _ in SAMPLES]
    layers, logits = 0.0, 0.0
    for sample, length in zip(SAMPLES, tokens, strict=True):
        extra(one, model, tiny.collate([sample]))
        layers += one.measures()["distill_layers"] * length / sum(tokens)
        logits += one.measures()["distill_logits"] / len(SAMPLES)
    assert together == pytest.approx({"distill_layers": layers, "distill_logits": logits}, rel=1e-4)


def test_the_teacher_has_no_dropout():
    """Whatever mode it comes in, and whatever mode the student is in."""
    teacher, model = tiny.bert().train(), student("bert")
    one = rule(teacher)
    assert not any(module.training for module in teacher.modules())
    assert added(one, model) == added(one, model)
    first, second = (added(one, model.train()) for _ in range(2))
    assert first != second


def test_the_teacher_sees_the_batch_without_its_labels():
    teacher, seen = tiny.bert(), []
    teacher.register_forward_pre_hook(lambda _, args, options: seen.append(dict(options)), with_kwargs=True)
    extra(rule(teacher), student("bert"))
    assert len(seen) == 1
    assert set(seen[0]) == set(BATCH) - {"labels"} | {"output_hidden_states"}
    assert all(seen[0][name] is BATCH[name] for name in set(BATCH) - {"labels"})


# --- terms that are off ----------------------------------------------------------------------------------------------


def test_without_the_layers_term_no_hidden_states_are_asked_for():
    teacher, seen = tiny.bert(), []
    teacher.register_forward_pre_hook(lambda _, args, options: seen.append(set(options)), with_kwargs=True)
    one = rule(teacher, layers=0.0)
    assert one.forward_options == {}
    extra(one, student("bert"))
    assert "output_hidden_states" not in seen[0]
    assert set(one.measures()) == {"distill_logits"}


def test_without_the_logits_term_no_logits_are_needed():
    """An encoder alone, whose hidden states are all there is."""
    tokens = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    teacher, model = tiny.t5(), tiny.t5().eval()
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.q.weight.mul_(0.5)
    one = rule(teacher, logits=0.0)
    assert added(one, model, tokens) > 0
    assert set(one.measures()) == {"distill_layers"}
    with pytest.raises(ValueError, match=r"distillation\.logits"):
        extra(rule(teacher), model, tokens)


def test_without_any_term_the_teacher_does_not_run():
    teacher = tiny.bert()
    teacher.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    one = rule(teacher, layers=0.0, logits=0.0)
    assert one.extra_loss(student("bert"), BATCH, ModelOutput()) is None
    assert one.measures() == {}
    assert one.forward_options == {}


def test_nothing_is_measured_before_the_first_step():
    assert rule(tiny.bert()).measures() == {}


def bart(seed: int) -> PreTrainedModel:
    """Two encoder layers, one decoder layer."""
    config = BartConfig(
        vocab_size=tiny.VOCABULARY,
        d_model=8,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        max_position_embeddings=16,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        decoder_start_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BartForConditionalGeneration(config).eval()


def test_states_of_an_encoder_and_of_its_decoder_add_up_each_without_its_own_padding():
    """Of the real tokens alone: rows of 2 and 3 tokens that are read, 2 and 1 that are written."""
    model, teacher = bart(0), bart(1)
    batch = {
        "input_ids": torch.tensor([[5, 2, 0], [6, 7, 2]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "decoder_input_ids": torch.tensor([[2, 9], [2, 0]]),
        "decoder_attention_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    expected = 0.0
    some, others = (one(**batch, output_hidden_states=True) for one in (model, teacher))
    for part, mask in (("encoder", "attention_mask"), ("decoder", "decoder_attention_mask")):
        pairs = zip(some[f"{part}_hidden_states"], others[f"{part}_hidden_states"], strict=True)
        expected += sum(float((one - other)[batch[mask] == 1].detach().square().mean()) for one, other in pairs)
    assert expected > 0
    assert added(rule(teacher, layers=1.0, logits=0.0), model, batch) == pytest.approx(expected, rel=1e-5)
    assert added(rule(model), model, batch) == pytest.approx(0, abs=1e-5)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_model_without_hidden_states_is_an_error():
    model = tiny.bert().eval()
    outputs = model(**BATCH)
    with pytest.raises(ValueError, match=r"distillation\.layers"):
        rule(model).extra_loss(model, BATCH, outputs)


@pytest.mark.parametrize("shapes", [[(1, 2, 3)], [(1, 2, 3), (1, 2, 4)]], ids=["fewer layers", "wider"])
def test_states_that_differ_in_number_or_shape_are_an_error(shapes):
    states = [torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)]
    with pytest.raises(ValueError, match=r"distillation\.layers"):
        hidden_error(states, [torch.zeros(shape) for shape in shapes], None)


def test_a_mask_that_does_not_fit_the_states_is_an_error():
    state = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"distillation\.layers"):
        hidden_error([state], [state], torch.ones(1, 4))


def test_logits_of_other_classes_are_an_error():
    """Which a plain mean square would broadcast."""
    for temperature in (None, 1.0):
        with pytest.raises(ValueError, match=r"distillation\.logits"):
            logits_error(torch.zeros(2, 1), torch.zeros(2, 3), temperature)


@pytest.mark.parametrize("change", [{"layers": -1.0}, {"logits": math.nan}, {"temperature": 0.0}, {"other": 1.0}])
def test_settings_out_of_range_are_an_error(change: dict[str, Any]):
    with pytest.raises(ValidationError):
        Distillation(**{**TERMS, **change})


def test_the_rule_has_settings_to_tell_it_from_others():
    assert rule(tiny.bert()).settings == Distillation(**TERMS)
