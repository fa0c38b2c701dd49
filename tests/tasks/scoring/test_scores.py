"""Metrics of classification and regression by hand; laws of scores are in nlp_tasks/test_every_task.py."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import BertForSequenceClassification, PreTrainedModel

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.config.schema import Evaluate
from tasks.nlp_tasks import kind_of
from tasks.scoring.splits import Scorer
from tests.workspace import a_task, reviews, tiny_config, tiny_tokenizer


def task(name: str, classes: int = 2) -> Task:
    kind = "regression" if name in ("pearson", "spearman") else "classification"
    labels = () if kind == "regression" else tuple(f"class {position}" for position in range(classes))
    return a_task(kind, labels, name)


@pytest.mark.parametrize(
    ("name", "labels", "guesses", "expected"),
    [
        ("accuracy", [1, 1, 0, 0], [1, 0, 1, 1], 1 / 4),
        ("accuracy", [0, 1, 2, 2], [0, 1, 1, 2], 3 / 4),
        ("f1", [1, 1, 0, 0], [1, 0, 1, 1], 2 / 5),  # of the second of two: 2 TP ÷ (2 TP + FP + FN)
        ("f1", [0, 0, 1, 2], [0, 1, 1, 1], (2 / 3 + 1 / 2 + 0) / 3),  # of more classes the mean
        # (TP TN - FP FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)) with TP 2, TN 1, FP 1, FN 0
        ("matthews", [1, 1, 0, 0], [1, 1, 1, 0], 2 / math.sqrt(3 * 2 * 2 * 1)),
        *((name, labels, labels, 1) for name in ("accuracy", "f1", "matthews") for labels in ([0, 1, 1], [0, 1, 2, 1])),
        ("f1", [0, 0, 0, 1], [0, 0, 0, 0], 0),
        ("matthews", [0, 0, 0, 1], [0, 0, 0, 0], 0),
    ],
)
def test_metrics_of_classes_by_hand(name: str, labels: list[int], guesses: list[int], expected: float) -> None:
    """The largest outputs are `guesses`, by a margin that differs from row to row."""
    classes = max(2, *labels) + (max(labels) > 1)
    outputs = np.zeros((len(guesses), classes))
    outputs[range(len(guesses)), guesses] = 1 + np.arange(len(guesses))
    metrics = kind_of(task(name, classes)).all_metrics(outputs - 5, np.array(labels))
    assert metrics[name] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "labels", "outputs", "expected"),
    [
        ("pearson", [1, 2, 3], [1, 3, 2], 1 / 2),  # deviations (-1, 0, 1) and (-1, 1, 0)
        ("spearman", [1, 2, 3, 4], [1, 20, 400, 300], 0.8),  # 1 - 6 Σ d² / (n (n² - 1)) with d = (0, 0, 1, 1)
        ("spearman", [1, 2, 3], [1, 10, 1000], 1),
        *((name, [0.5, -1, 4, 2], [-1, 2, -8, -4], -1) for name in ("pearson", "spearman")),
        *((name, [1, 2, 3], [7, 7, 7], 0) for name in ("pearson", "spearman")),
        *((name, [7, 7, 7], [1, 2, 3], 0) for name in ("pearson", "spearman")),
        ("pearson", [7], [1], 0),
    ],
)
def test_correlations_by_hand(name: str, labels: list[float], outputs: list[float], expected: float) -> None:
    metrics = kind_of(task(name)).all_metrics(np.array(outputs)[:, None], np.array(labels))
    assert metrics[name] == pytest.approx(expected)


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_output_that_is_not_finite_is_an_error(value: float) -> None:
    """The logit of one class, or all logits of the rows with one word: a guess would be a class like any other."""
    model, words = bert(), bert()
    with torch.no_grad():
        model.classifier.bias[0] = value
        words.bert.embeddings.word_embeddings.weight[tiny_tokenizer().convert_tokens_to_ids("clever")] = math.nan
    for broken in (model, words):
        with pytest.raises(StageError):
            kind_of(task("accuracy")).score(broken, tiny_tokenizer(), rows(), 8, "test")


def test_a_model_is_scored_on_both_splits() -> None:
    frame = reviews().assign(label=lambda rows: (rows["label"] == "positive").astype(int))
    splits = {"validation": frame[:8], "test": frame[20:40]}
    scorer = Scorer(task("accuracy"), Evaluate(batch_size=4), splits)
    model = BertForSequenceClassification(tiny_config()).eval()
    scores, rows = scorer.all_scores(model, tiny_tokenizer(), "tiny")
    assert {split: len(results) for split, results in rows.items()} == {"test": 20, "validation": 8}
    assert (scores.score.examples, scores.validation.examples) == (20, 8)
    assert scorer.score_on("validation", model, tiny_tokenizer(), "another").score == scores.validation


def test_answers_that_differ_by_rounding_only_are_equal() -> None:
    """Those of a model that has collapsed: their correlation would be noise."""
    kind = kind_of(task("pearson"))
    noise = np.arange(6, dtype=np.float32) * np.spacing(np.float32(3.2))
    outputs, labels = (np.float32(3.2) + noise)[:, None], np.arange(6.0)
    rows = kind.prediction_table(outputs, labels)
    assert kind.all_metrics(outputs, labels) == {"pearson": 0.0, "spearman": 0.0}
    assert kind.only_answer(rows) == "3.2"
    assert kind.all_metrics(outputs * np.linspace(1, 1.01, 6)[:, None], labels)["pearson"] > 0.9
