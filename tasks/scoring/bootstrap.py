"""What of a difference between two models may be the choice of test rows: paired bootstrap intervals.

Rows are drawn with replacement, the same ones for every model; the interval of a difference is that of the differences
on the draws. What other seeds of training would change is not in it. scipy's bootstrap draws anew for each difference;
here each model is looked at once, and most metrics are functions of sums over rows, so that a draw is a product.

Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13; Koehn, EMNLP 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import pandas as pd
from seqeval.metrics.sequence_labeling import get_entities

from tasks.artifacts.metrics import ENTITY_TAG
from tasks.artifacts.task_spec import Task
from tasks.runtime.stage_runner import StageError

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0
_AT_ONCE = 4_000_000  # rows drawn, for the memory

Model = TypeVar("Model", bound=Hashable)


@dataclass(frozen=True)
class Draws:
    """Which rows each draw has, `(draws, rows)`."""

    rows: np.ndarray

    @cached_property
    def times(self) -> np.ndarray:
        """How often each draw has each row, `(draws, rows)`."""
        return np.stack([np.bincount(draw, minlength=self.rows.shape[1]) for draw in self.rows]).astype(float)


OnDraws = Callable[[Draws], np.ndarray]
"""The metric of each draw `(draws,)`."""


@dataclass(frozen=True)
class Interval:
    """Of a difference, in the metric's units."""

    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 where all of it lies on that side of 0, and 0 where the rows decide nothing."""
        return int(self.low > 0) - int(self.high < 0)


def interval(differences: np.ndarray) -> Interval:
    """Of the differences on all draws: their percentiles."""
    tail = (1 - LEVEL) / 2
    return Interval(*map(float, np.quantile(differences, [tail, 1 - tail])))


def standard_error(differences: np.ndarray) -> float:
    """The standard error of a difference: the standard deviation over all draws.

    0 where it is not finite: a perplexity near the largest number has a spread beyond it, which is to excuse nothing.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        error = float(np.std(differences, ddof=1))
    return error if np.isfinite(error) else 0.0


def metric_of_all(task: Task, rows: pd.DataFrame) -> float:
    """The metric of the rows as they are."""
    return float(metric_of(task, rows)(Draws(np.arange(len(rows))[None])).item())


def resampled(task: Task, models: Mapping[Model, pd.DataFrame]) -> dict[Model, np.ndarray]:
    """The metric of each model `(RESAMPLES,)` on draws that depend on the number of rows alone.

    Args:
        models: model → what each row contributed, as the stages wrote it; of all models the same rows.

    Raises:
        StageError: they have not as many.
    """
    count, *others = {len(rows) for rows in models.values()}
    if others:
        raise StageError("models that were scored on different test rows cannot be compared: run the study again")
    metrics = {name: metric_of(task, rows) for name, rows in models.items()}
    generator, some = np.random.default_rng(_SEED), max(1, _AT_ONCE // count)
    parts: dict[Model, list[np.ndarray]] = {name: [] for name in models}
    for start in range(0, RESAMPLES, some):
        draws = Draws(generator.integers(count, size=(min(some, RESAMPLES - start), count)))
        for name, metric in metrics.items():
            parts[name].append(metric(draws))
    return {name: np.concatenate(each) for name, each in parts.items()}


def metric_of(task: Task, rows: pd.DataFrame) -> OnDraws:
    """The task's metric, as its kind defines it, on draws of `rows`."""
    if task.metric == "spearman":
        return partial(_spearman, rows["label"].to_numpy(float), rows["value"].to_numpy(float))
    if task.metric == "pearson":
        return _of_sums(_moments(rows["label"].to_numpy(float), rows["value"].to_numpy(float)), _pearson)
    if task.metric == "perplexity":
        return _of_sums(_with_ones(rows["loss"]), lambda sums: np.exp(np.minimum(_ratio(sums), 700.0)))
    if task.kind not in ("classification", "token_classification"):
        return _of_sums(_with_ones(rows[task.metric]), _ratio)
    if task.kind == "token_classification" and task.metric == "f1" and all(map(ENTITY_TAG.fullmatch, task.labels)):
        return _of_sums(_entities(rows, np.array(task.labels)), lambda sums: _f1(*sums.T))
    binary = task.kind == "classification" and len(task.labels) == 2
    combine = {"accuracy": _accuracy, "matthews": _matthews, "f1": _second_f1 if binary else _macro_f1}[task.metric]
    counts = _class_counts(rows, len(task.labels))
    return _of_sums(counts, lambda sums: combine(*np.moveaxis(sums.reshape(len(sums), 3, -1), 1, 0)))


def _of_sums(parts: np.ndarray, combine: Callable[[np.ndarray], np.ndarray]) -> OnDraws:
    """A function of the sums of `parts` `(rows, parts)` over the rows of each draw, `(draws, parts)`."""
    return lambda draws: combine(draws.times @ parts)


def _with_ones(values: pd.Series[float]) -> np.ndarray:
    return np.stack([values.to_numpy(float), np.ones(len(values))], axis=1)


def _ratio(sums: np.ndarray) -> np.ndarray:
    return _quotient(sums[:, 0], sums[:, 1])


def _quotient(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """0 where `whole` is."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _class_counts(rows: pd.DataFrame, classes: int) -> np.ndarray:
    """Of each row how often each class is right, guessed and wanted, `(rows, 3 · classes)`; it has one or several."""
    label, guess = (list(map(np.atleast_1d, rows[name])) for name in ("label", "guess"))
    row = np.repeat(np.arange(len(rows)), list(map(len, label)))
    wanted, guessed = np.concatenate(label), np.concatenate(guess)
    right = wanted == guessed
    counts = [
        np.bincount(where * classes + tags, minlength=len(rows) * classes).reshape(len(rows), classes)
        for where, tags in ((row[right], wanted[right]), (row, guessed), (row, wanted))
    ]
    return np.concatenate(counts, axis=1)


def _entities(rows: pd.DataFrame, names: np.ndarray) -> np.ndarray:
    """Of each row how many entities are right, guessed and wanted, `(rows, 3)`."""
    pairs = [
        [set(get_entities(names[np.asarray(tags, int)].tolist())) for tags in pair]
        for pair in zip(rows["guess"], rows["label"], strict=True)
    ]
    return np.array([[len(found & wanted), len(found), len(wanted)] for found, wanted in pairs], float)


def _f1(right: np.ndarray, guessed: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return _quotient(2 * right, guessed + wanted)


def _second_f1(right: np.ndarray, guessed: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return _f1(right, guessed, wanted)[:, 1]


def _macro_f1(right: np.ndarray, guessed: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The mean over the classes that are there."""
    return _quotient(_f1(right, guessed, wanted).sum(1), (guessed + wanted > 0).sum(1).astype(float))


def _accuracy(right: np.ndarray, guessed: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return _quotient(right.sum(1), wanted.sum(1))


def _matthews(right: np.ndarray, guessed: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """R of Gorodkin, 2004, which of two classes is Matthews' φ."""
    rows = wanted.sum(1)
    spreads = [rows**2 - (counts**2).sum(1) for counts in (guessed, wanted)]
    return _quotient(right.sum(1) * rows - (guessed * wanted).sum(1), np.sqrt(spreads[0] * spreads[1]))


def _moments(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`(rows, 6)`, about the means of all rows, as differences of large sums would lose their digits."""
    x, y = x - x.mean(), y - y.mean()
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def _pearson(sums: np.ndarray) -> np.ndarray:
    """0 where one of the two is constant, but for rounding."""
    count, x, y, xx, yy, xy = sums.T
    spread_x, spread_y = (square - total**2 / count for square, total in ((xx, x), (yy, y)))
    varied = (spread_x > 1e-12 * xx) & (spread_y > 1e-12 * yy)
    return _quotient(xy - x * y / count, np.where(varied, np.sqrt(np.abs(spread_x * spread_y)), 0.0))


def _spearman(label: np.ndarray, value: np.ndarray, draws: Draws) -> np.ndarray:
    ranks = [_ranks(values, draws.times) - (len(label) + 1) / 2 for values in (label, value)]
    spreads = [(draws.times * rank**2).sum(1) for rank in ranks]
    return _quotient((draws.times * ranks[0] * ranks[1]).sum(1), np.sqrt(spreads[0] * spreads[1]))


def _ranks(values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The mean rank that each row's value has in each draw, `(draws, rows)`; scipy's rankdata takes six times as long.

    Args:
        times: how often each draw has each row, `(draws, rows)`.
    """
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    sorted_times = times[:, np.argsort(group, kind="stable")]
    alike = np.add.reduceat(sorted_times, np.cumsum(sizes) - sizes, axis=1)
    return (alike.cumsum(1) - alike + (alike + 1) / 2)[:, group]
