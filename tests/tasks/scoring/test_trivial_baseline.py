"""The trivial baseline of every kind of task by hand, and which teachers have learned something."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import TASK_NAMES, TaskName, kind_of, task_class
from tasks.scoring.bootstrap import Interval, interval, metric_of_all, resampled
from tasks.scoring.trivial_baseline import share_learned, warning
from tests.tasks.nlp_tasks import test_language_modeling as test_language
from tests.tasks.nlp_tasks import test_summarization, test_token_classification
from tests.workspace import a_task, tiny_tokenizer

EVERY = [(kind, metric) for kind in TASK_NAMES for metric in task_class(kind).metrics]


def baseline(task: Task, train: pd.DataFrame, test: pd.DataFrame, tokenizer: object = None) -> float:
    rows = kind_of(task).trivial(train, test, tokenizer or tiny_tokenizer())
    return metric_of_all(task, rows)


def labeled(*labels: object) -> pd.DataFrame:
    return pd.DataFrame({"text": "the plot is dull", "label": list(labels)})


@pytest.mark.parametrize(("metric", "wanted"), [("accuracy", 0.75), ("f1", 6 / 7), ("matthews", 0)])
def test_the_majority_class_is_that_of_the_training_rows(metric: MetricName, wanted: float) -> None:
    """Three of four test rows are of class 1; the F1 of class 1 is 2 · 3 ÷ (4 + 3)."""
    task = a_task("classification", ("no", "yes"), metric)
    assert baseline(task, labeled(1, 0, 1), labeled(1, 1, 1, 0)) == pytest.approx(wanted)
    assert baseline(task, labeled(0, 0, 1), labeled(1, 1, 1, 0)) == pytest.approx(0.25 if metric == "accuracy" else 0)


@pytest.mark.parametrize("metric", task_class("regression").metrics)
def test_a_mean_correlates_with_nothing(metric: MetricName) -> None:
    task = a_task("regression", (), metric)
    rows = kind_of(task).trivial(labeled(1.0, 2.0, 6.0), labeled(0.0, 4.0), tiny_tokenizer())
    assert rows["value"].tolist() == [3.0, 3.0]
    assert metric_of_all(task, rows) == 0


def test_the_most_frequent_tag_is_that_of_the_training_words() -> None:
    """Of five training words three have tag 0, and so have three of four test words. None of it is an entity."""
    train = pd.DataFrame({"text": [["the"] * 4, ["plot"]], "label": [[0, 0, 0, 1], [1]]})
    test = pd.DataFrame({"text": [["the", "plot"], ["is", "dull"]], "label": [[0, 1], [0, 0]]})
    labels = ("O", "B-x")
    tokenizer = test_token_classification.pieces()
    assert baseline(a_task("token_classification", labels, "accuracy"), train, test, tokenizer) == 0.75
    assert baseline(a_task("token_classification", labels, "f1"), train, test, tokenizer) == 0


@pytest.mark.parametrize(("metric", "wanted"), [("exact_match", 0.5), ("f1", (1 + 2 / 3) / 2)])
def test_the_most_frequent_answer_is_given_to_every_question(metric: MetricName, wanted: float) -> None:
    """`a year` and `The year.` are one answer. Of `next year` it has one word of two."""

    def answered(*answers: str) -> pd.DataFrame:
        cells = [{"text": [answer], "answer_start": [0]} for answer in answers]
        return pd.DataFrame({"text": "when", "text_pair": "then", "label": cells})

    task = a_task("question_answering", (), metric)
    train = answered("Paris", "a year", "The year.", "1999")
    assert baseline(task, train, answered("year", "next year")) == pytest.approx(wanted)


def test_a_summary_is_compared_with_the_first_three_sentences() -> None:
    """However many tokens they have. Of three words one is right, of one reference word one."""
    frame = pd.DataFrame({"text": ["Plot. Dull. Cast. Warm."], "label": ["plot dull cast"]})
    assert baseline(test_summarization.task(target_length=2), frame.head(0), frame) == 1
    assert baseline(test_summarization.task(), frame.head(0), frame.assign(label="plot")) == pytest.approx(2 / 4)


def test_unigram_perplexity_by_hand() -> None:
    """A token a byte: of eight training tokens four are `a`, four `b`; each vocable counts once more."""
    task = test_language.task(8)
    vocabulary = test_language.END + 1
    train, test = test_language.rows("aaaabbbb"), test_language.rows("baaccccc")
    of_a, of_c = 5 / (8 + vocabulary), 1 / (8 + vocabulary)
    wanted = math.exp(-(2 * math.log(of_a) + 5 * math.log(of_c)) / 7)  # the first token is not predicted
    assert baseline(task, train, test, test_language.tokenizer()) == pytest.approx(wanted)


def right(share: float, rows: int = 400) -> pd.DataFrame:
    return pd.DataFrame({"label": 1, "guess": (np.arange(rows) * 0.618 % 1 < share).astype(int)})


ACCURACY = a_task("classification", ("no", "yes"), "accuracy")


def test_a_teacher_two_points_above_the_majority_has_learned_nothing() -> None:
    """0.671 and 0.651, as on MRPC: of 0.349 that are left to learn it has 0.02."""
    drawn = resampled(ACCURACY, {"dense": right(0.671), "trivial": right(0.651)})
    difference = interval(drawn["dense"] - drawn["trivial"])
    assert share_learned(ACCURACY, 0.671, 0.651) == pytest.approx(0.02 / 0.349)
    assert "teacher.epochs" in warned(ACCURACY, 0.671, 0.651, difference)
    assert "teacher.epochs" in warned(ACCURACY, 0.671, 0.651, Interval(0.01, 0.03))  # whatever the number of rows
    assert not warned(ACCURACY, 0.8, 0.651, Interval(0.1, 0.2))


def test_few_rows_that_cannot_tell_are_no_sign_of_a_teacher_that_has_learned_nothing() -> None:
    said = warned(ACCURACY, 0.92, 0.67, Interval(-0.01, 0.5))
    assert "data.sizes.test" in said
    assert "teacher.epochs" not in said
    assert "teacher.epochs" in warned(ACCURACY, 0.6, 0.67, Interval(-0.2, 0.1))


def test_of_a_perplexity_the_loss_is_what_is_learned() -> None:
    task = a_task("language_modeling", (), "perplexity")
    assert share_learned(task, 10.0, 1000.0) == pytest.approx(2 / 3)
    assert not warned(task, 10.0, 1000.0, Interval(-995, -985))
    assert "teacher.epochs" in warned(task, 900.0, 1000.0, Interval(-110, -90))
    assert "teacher.epochs" in warned(task, 1100.0, 1000.0, Interval(90, 110))


def test_summaries_come_near_no_perfect_score() -> None:
    """Those of the best models are a few points above the lead."""
    task = a_task("summarization", (), "rouge1")
    assert not warned(task, 0.442, 0.404, Interval(0.03, 0.05))
    assert warned(task, 0.405, 0.404, Interval(-0.01, 0.01))


@pytest.mark.parametrize(("kind", "metric"), EVERY)
def test_nothing_is_learned_of_a_baseline_that_is_perfect(kind: TaskName, metric: MetricName) -> None:
    assert warned(a_task(kind, (), metric), 1.0, 1.0, Interval(0.0, 0.0))


def warned(task: Task, dense: float, trivial: float, difference: Interval) -> str:
    return warning(task, dense, trivial, difference, 60) or ""


@pytest.mark.parametrize(
    ("kind", "labels", "metric", "rows", "answer"),
    [
        ("classification", ("no", "yes"), "accuracy", {"guess": [1, 1]}, "yes"),
        ("token_classification", ("O", "B-x"), "f1", {"guess": [[0, 0], [0]]}, "O"),
        ("regression", (), "pearson", {"value": [2.5, 2.5]}, "2.5"),
        ("regression", (), "pearson", {"value": [2.5, 2.6]}, None),
        ("question_answering", (), "f1", {"f1": [1.0]}, None),
    ],
)
def test_one_answer_to_all_rows_is_named(
    kind: TaskName, labels: tuple[str, ...], metric: MetricName, rows: dict[str, list[object]], answer: str | None
) -> None:
    assert kind_of(a_task(kind, labels, metric)).only_answer(pd.DataFrame(rows)) == answer
