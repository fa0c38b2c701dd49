"""Paired bootstrap intervals: by hand, against the libraries that score, and how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import TASK_NAMES, TaskName, kind_of, task_class
from tasks.scoring.bootstrap import RESAMPLES, Interval, interval, resampled, standard_error
from tasks.scoring.metrics_on_draws import Draws
from tests.workspace import a_task

EVERY = [(kind, metric) for kind in TASK_NAMES for metric in task_class(kind).metrics]


def task(kind: TaskName, metric: MetricName, labels: tuple[str, ...] = ("no", "yes")) -> Task:
    return a_task(kind, labels if "classification" in kind else (), metric)


def drawn(kind: TaskName, rows: int = 60, seed: int = 0, classes: int = 2) -> pd.DataFrame:
    """What rows might contribute."""
    generator = np.random.default_rng(seed)
    if kind in ("regression", "embedding"):
        label = generator.normal(size=rows).round(1)  # with ties
        found = pd.DataFrame({"label": label, "value": label + generator.normal(size=rows)})
        return found.assign(recall_at_10=generator.random(rows)) if kind == "embedding" else found
    if kind == "language_modeling":
        return pd.DataFrame({"loss": generator.gamma(3.0, size=rows)})
    if kind == "classification":
        return pd.DataFrame({name: generator.integers(classes, size=rows) for name in ("label", "guess")})
    if kind == "multi_label_classification":
        return pd.DataFrame({name: list(generator.integers(2, size=(rows, classes))) for name in ("label", "guess")})
    if kind == "token_classification":
        lengths = generator.integers(1, 8, size=rows)
        tags = {name: [generator.integers(classes, size=length) for length in lengths] for name in ("label", "guess")}
        return pd.DataFrame(tags)
    return pd.DataFrame({name: generator.random(rows) for name in task_class(kind).metrics})


def difference(one: Task, some: pd.DataFrame, others: pd.DataFrame) -> Interval:
    found = resampled(one, {"some": some, "others": others})
    return interval(found["some"] - found["others"])


def as_scored(one: Task, rows: pd.DataFrame) -> float:
    """The metric as the task itself computes it of these rows."""
    kind, labels = kind_of(one), rows.get("label")
    if one.kind == "classification":
        return kind.all_metrics(np.eye(len(one.labels))[rows["guess"]], labels.to_numpy())[one.metric]
    if one.kind == "multi_label_classification":
        wanted, guesses = (np.array(rows[name].tolist()) for name in ("label", "guess"))
        return kind.all_metrics(guesses - 0.5, wanted)[one.metric]
    if one.kind == "regression":
        return kind.all_metrics(rows[["value"]].to_numpy(), labels.to_numpy())[one.metric]
    if one.kind == "token_classification":
        return kind.all_metrics(*(padded(rows[name]) for name in ("guess", "label")))[one.metric]
    if one.metric == "spearman":
        return float(spearmanr(labels, rows["value"]).statistic)
    return math.exp(rows["loss"].mean()) if one.kind == "language_modeling" else rows[one.metric].mean()


def padded(rows: pd.Series) -> np.ndarray:
    return np.array([[*row, *[-100] * (8 - len(row))] for row in rows])


@pytest.mark.parametrize(
    ("kind", "metric", "labels"),
    [
        (kind, metric, labels)
        for kind, metric in EVERY
        for labels in [("no", "yes"), ("O", "B-a", "I-a")][: 1 + ("classification" in kind)]
    ],
)
def test_on_every_draw_a_metric_is_that_of_its_kind(
    kind: TaskName, metric: MetricName, labels: tuple[str, ...]
) -> None:
    """Classes that a draw has none of included."""
    spec, rows = task(kind, metric, labels), drawn(kind, 12, classes=len(labels))
    draws = np.stack([np.arange(12), *np.random.default_rng(1).integers(12, size=(20, 12))])
    expected = [as_scored(spec, rows.iloc[draw]) for draw in draws]
    assert kind_of(spec).on_draws(rows)(Draws(draws)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "metric"), [("regression", "pearson"), ("regression", "spearman"), ("classification", "matthews")]
)
def test_of_a_constant_a_correlation_is_0(kind: TaskName, metric: MetricName) -> None:
    rows = drawn(kind)
    rows[rows.columns[1]] = 1
    assert not resampled(task(kind, metric), {None: rows})[None].any()


def test_the_standard_error_of_a_mean_of_pairs_is_that_of_their_differences() -> None:
    models = {"first": drawn("summarization", 300), "second": drawn("summarization", 300, 1)}
    metrics = resampled(task("summarization", "rouge1"), models)
    expected = (models["first"]["rouge1"] - models["second"]["rouge1"]).std() / 300**0.5
    assert standard_error(metrics["first"] - metrics["second"]) == pytest.approx(expected, rel=0.1)
    assert standard_error(metrics["first"] - metrics["first"]) == 0


def test_a_perplexity_without_end_is_excused_by_no_chance() -> None:
    endless = pd.DataFrame({"loss": np.linspace(500, 900, 60)})
    models = {"endless": endless, "good": drawn("language_modeling")}
    metrics = resampled(task("language_modeling", "perplexity"), models)
    assert standard_error(metrics["endless"] - metrics["good"]) == 0


def test_two_rows_by_hand() -> None:
    """Differences 0 and 1 ÷ 2: a draw of two has 0, 1 or 2 of the second row, in shares of 1 ÷ 4, 1 ÷ 2 and 1 ÷ 4."""
    right, half = (pd.DataFrame({"label": [0, 1], "guess": guess}) for guess in ([0, 1], [0, 0]))
    metrics = resampled(task("classification", "accuracy"), {"right": right, "half": half})
    differences = metrics["right"] - metrics["half"]
    values, counts = np.unique(differences, return_counts=True)
    assert values.tolist() == [0, 0.5, 1]
    assert counts / RESAMPLES == pytest.approx([0.25, 0.5, 0.25], abs=0.05)
    assert interval(differences) == Interval(0, 1)


def test_the_interval_holds_the_true_difference_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models right on 80 and 75 % of all rows there are, and on the same ones mostly."""
    monkeypatch.setattr("tasks.scoring.bootstrap.RESAMPLES", 500)  # enough, and four times as fast
    one, generator, held, trials = task("classification", "accuracy"), np.random.default_rng(0), 0, 100
    for _ in range(trials):
        chance = generator.random(300)
        models = [np.where(chance < 0.7, True, generator.random(300) < rest) for rest in (1 / 3, 1 / 6)]
        found = difference(one, *(pd.DataFrame({"label": 1, "guess": right.astype(int)}) for right in models))
        held += found.low <= 0.05 <= found.high
    assert held / trials == pytest.approx(0.95, abs=0.05)


def test_large_splits_are_drawn_in_parts_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    one, rows = task("classification", "accuracy"), drawn("classification", 50)
    whole = resampled(one, {None: rows})
    monkeypatch.setattr("tasks.scoring.bootstrap._AT_ONCE", 1000)
    assert np.array_equal(resampled(one, {None: rows})[None], whole[None])
