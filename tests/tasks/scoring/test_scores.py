"""Scores: metrics against values computed by hand, and what a score may not depend on."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertForSequenceClassification, PreTrainedModel

from tasks.artifacts.results_schema import Score
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import StageError
from tests.workspace import a_task, reviews, tiny_config, tiny_tokenizer

# pairs of positives and negatives, outputs of one row each: true positive, false negative, two false positives
LABELS, GUESSES = [1, 1, 0, 0], [1, 0, 1, 1]


def task(name: str, classes: int = 2) -> Task:
    kind = "regression" if name in ("pearson", "spearman") else "classification"
    labels = () if kind == "regression" else tuple(f"class {position}" for position in range(classes))
    return a_task(kind, labels, name)


def classified(name: str, labels: list[int], guesses: list[int], classes: int = 2) -> float:
    """The metric of outputs whose largest is `guesses`, by a margin that differs from row to row."""
    outputs = np.zeros((len(guesses), classes))
    outputs[range(len(guesses)), guesses] = 1 + np.arange(len(guesses))
    return kind_of(task(name, classes)).all_metrics(outputs - 5, np.array(labels))[name]


def regressed(name: str, labels: list[float], outputs: list[float]) -> float:
    return kind_of(task(name)).all_metrics(np.array(outputs)[:, None], np.array(labels))[name]


def test_accuracy_by_hand() -> None:
    assert classified("accuracy", LABELS, GUESSES) == 0.25
    assert classified("accuracy", [0, 1, 2, 2], [0, 1, 1, 2], classes=3) == 0.75


def test_f1_of_two_classes_is_that_of_the_second() -> None:
    """2 TP / (2 TP + FP + FN) = 2 / (2 + 2 + 1)."""
    assert classified("f1", LABELS, GUESSES) == pytest.approx(0.4)


def test_f1_of_more_classes_is_their_mean() -> None:
    """Class 0: 2/(2+0+1); class 1: 2/(2+2+0); class 2 is never guessed: 0."""
    assert classified("f1", [0, 0, 1, 2], [0, 1, 1, 1], classes=3) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)


def test_matthews_by_hand() -> None:
    """(TP TN - FP FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)) with TP 2, TN 1, FP 1, FN 0."""
    assert classified("matthews", [1, 1, 0, 0], [1, 1, 1, 0]) == pytest.approx(2 / math.sqrt(3 * 2 * 2 * 1))


def test_pearson_by_hand() -> None:
    """Deviations (-1, 0, 1) and (-1, 1, 0): 1 / 2."""
    assert regressed("pearson", [1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)


def test_spearman_by_hand() -> None:
    """1 - 6 Σ d² / (n (n² - 1)) with d = (0, 0, 1, 1): 1 - 12/60. It sees the order alone."""
    assert regressed("spearman", [1, 2, 3, 4], [1, 20, 400, 300]) == pytest.approx(0.8)
    assert regressed("spearman", [1, 2, 3], [1, 10, 1000]) == pytest.approx(1.0)
    assert regressed("pearson", [1, 2, 3], [1, 10, 1000]) < 0.99


@pytest.mark.parametrize(("name", "best"), [("accuracy", 1), ("f1", 1), ("matthews", 1)])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_truth_is_best(name: str, best: float, classes: int) -> None:
    labels = [0, 1, 2, 1, 0, 2] if classes == 3 else [0, 1, 1, 0]
    assert classified(name, labels, labels, classes) == pytest.approx(best)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_the_truth_and_its_opposite(name: str) -> None:
    labels = [0.5, -1.0, 4.0, 2.0]
    assert regressed(name, labels, labels) == pytest.approx(1)
    assert regressed(name, labels, [-2 * label for label in labels]) == pytest.approx(-1)


@pytest.mark.parametrize(("name", "value"), [("accuracy", 0.75), ("f1", 0.0), ("matthews", 0.0)])
def test_one_class_for_all(name: str, value: float) -> None:
    assert classified(name, [0, 0, 0, 1], [0, 0, 0, 0]) == value


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_a_correlation_with_a_constant_is_zero(name: str) -> None:
    assert regressed(name, [1, 2, 3], [7, 7, 7]) == 0
    assert regressed(name, [7, 7, 7], [1, 2, 3]) == 0
    assert regressed(name, [7], [1]) == 0


def bert(outputs: int = 2, **changes: object) -> PreTrainedModel:
    """Weights large enough for outputs that differ from text to text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(tiny_config(num_labels=outputs, initializer_range=0.3, **changes))


def rows(regression: bool = False) -> pd.DataFrame:
    """Reviews of differing lengths: padding has a say."""
    texts = [text + " and dull" * (position % 4) for position, text in enumerate(reviews()["text"])]
    labels = [float(position % 7) if regression else position % 2 for position in range(len(texts))]
    return pd.DataFrame({"text": texts, "label": labels})


def scored(model: PreTrainedModel, data: pd.DataFrame, batch_size: int = 8, name: str = "accuracy") -> Score:
    return kind_of(task(name)).score(model, tiny_tokenizer(), data, batch_size, "test").score


def row_by_row(model: PreTrainedModel, data: pd.DataFrame) -> torch.Tensor:
    """Outputs `(rows, outputs)`, with no padding at all."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(**tiny_tokenizer()(text, return_tensors="pt")).logits for text in data["text"]])


def test_a_score_is_that_of_all_rows_one_by_one() -> None:
    model, data = bert(), rows()
    outputs, labels = row_by_row(model, data), torch.tensor(data["label"])
    result = scored(model, data)
    assert result.rows == 60
    assert result.metric == (outputs.argmax(-1) == labels).double().mean()
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(outputs, labels).item(), rel=1e-5)


def test_a_score_of_a_regression_is_that_of_all_rows_one_by_one() -> None:
    model, data = bert(outputs=1, problem_type="regression"), rows(regression=True)
    outputs, labels = row_by_row(model, data)[:, 0], torch.tensor(data["label"])
    result = scored(model, data, name="pearson")
    assert result.metric == pytest.approx(torch.corrcoef(torch.stack([outputs, labels]))[0, 1].item(), abs=1e-5)
    assert result.loss == pytest.approx((outputs - labels).square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 60, 64])
def test_a_score_does_not_depend_on_the_batches(batch_size: int) -> None:
    model, data = bert(), rows()
    one, other = scored(model, data, 16), scored(model, data, batch_size)
    assert (one.metric, one.rows) == (other.metric, other.rows)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


def test_a_score_does_not_depend_on_the_order() -> None:
    model, data = bert(), rows()
    one, other = scored(model, data), scored(model, data.sample(frac=1, random_state=0))
    assert one.metric == other.metric
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


def test_a_score_is_without_dropout_whatever_the_mode() -> None:
    model, data = bert(), rows()
    assert scored(model.eval(), data) == scored(model.train(), data)


def test_scoring_leaves_the_weights() -> None:
    model = bert()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scored(model, rows())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_output_that_is_not_finite_is_an_error(value: float) -> None:
    """One class alone, so that the guess is a class like any other."""
    model = bert()
    with torch.no_grad():
        model.classifier.bias[0] = value
    with pytest.raises(StageError):
        scored(model, rows())


def test_one_row_that_is_not_finite_is_an_error() -> None:
    model = bert()
    word = tiny_tokenizer().convert_tokens_to_ids("clever")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[word] = math.nan
    with pytest.raises(StageError):
        scored(model, rows())
