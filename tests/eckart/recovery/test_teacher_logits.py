"""The teacher's saved logits: the divergence over the largest classes and a rest, by hand and by its laws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eckart.recovery.distillation import logits_error
from eckart.recovery.teacher_logits import TeacherLogits, keys, largest, teach, top_error
from tests import tiny

seeds = st.integers(0, 2**20)
temperatures = st.sampled_from([0.5, 1.0, 2.0])


def pair(seed: int, classes: int = 12) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher for five predictions."""
    student, teacher = 3 * torch.randn(2, 5, classes, generator=torch.Generator().manual_seed(seed))
    return student, teacher


def error(student: Tensor, teacher: Tensor, count: int, temperature: float) -> float:
    return float(top_error(student, *largest(teacher, count, temperature), temperature))


def test_the_rest_is_a_class_at_the_temperature() -> None:
    """Logits of 2 log 6, 0 and 0 at temperature 2 are odds of 6 : 1 : 1, and the student's of 2 : 1 : 1."""
    teacher, student = torch.tensor([[2 * math.log(6), 0.0, 0.0]]), torch.tensor([[2 * math.log(2), 0.0, 0.0]])
    classes, logs, rest = largest(teacher, 1, 2.0)
    assert classes.tolist() == [[0]]
    assert logs.exp().tolist() == [[pytest.approx(0.75)]]
    assert rest.exp().tolist() == [pytest.approx(0.25)]
    expected = 4 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    assert error(student, teacher, 1, 2.0) == pytest.approx(expected, rel=1e-5)


@given(seeds, temperatures)
def test_all_classes_give_the_full_divergence(seed: int, temperature: float) -> None:
    student, teacher = pair(seed)
    full = float(logits_error(student, teacher, temperature))
    for count in (12, 100):
        assert error(student, teacher, count, temperature) == pytest.approx(full, rel=1e-4, abs=1e-5)


@given(seeds, temperatures)
def test_more_classes_never_have_less_divergence_and_the_teacher_has_none(seed: int, temperature: float) -> None:
    student, teacher = pair(seed)
    errors = [error(student, teacher, count, temperature) for count in range(1, 13)]
    assert all(before <= after + 1e-5 for before, after in itertools.pairwise(errors))
    assert error(teacher, teacher, 3, temperature) == pytest.approx(0, abs=1e-5)


def test_certain_teachers_give_finite_numbers_and_gradients() -> None:
    teacher = torch.tensor([[500.0, 0.0, 0.0, -500.0]])
    student = torch.tensor([[0.0, 0.0, 300.0, 0.0]], requires_grad=True)
    for count in (1, 2, 4):
        loss = top_error(student, *largest(teacher, count, 1.0), 1.0)
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.item() == pytest.approx(300)
        torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("number", [2, 300, 70_000])
def test_examples_are_found_by_their_tokens(number: int) -> None:
    """In any order and with any padding; numbers of classes are saved in few bytes, but whole."""
    teacher = tiny.of("BertForSequenceClassification", **tiny.LAYERS, num_labels=number)().eval()
    teacher.classifier.bias.data[-1] = 9.0  # the class with the largest number is among the most probable
    texts = tiny.samples(6)
    batch = tiny.collate(texts)
    arrays = teach(teacher, batch, lambda outputs, _: outputs.logits, 2, 1.0)
    saved = TeacherLogits({key: row for row, key in enumerate(keys(batch))}, *arrays)
    other = tiny.collate([texts[4], texts[1]], length=12)
    classes, logs, rest = saved.of(other)
    with torch.no_grad():
        expected = largest(teacher(**other).logits, 2, 1.0)
    assert torch.equal(classes, expected[0])
    torch.testing.assert_close(logs.float(), expected[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rest, expected[2], rtol=1e-4, atol=1e-4)
    with pytest.raises(KeyError):
        saved.of(tiny.collate(tiny.samples(1, seed=1)))
