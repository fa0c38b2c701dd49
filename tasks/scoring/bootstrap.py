"""What of a difference between two models may be the choice of test rows: paired bootstrap intervals.

Rows are drawn with replacement, the same ones for every model; the interval of a difference is that of the differences
on the draws. What other seeds of training would change is not in it. scipy's bootstrap draws anew for each difference;
here each model is looked at once, and most metrics are functions of sums over rows, so that a draw is a product.

Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13; Koehn, EMNLP 2004.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pandas as pd

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.scoring.metrics_on_draws import Draws, OnDraws

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0
_AT_ONCE = 4_000_000  # rows drawn, for the memory

Model = TypeVar("Model", bound=Hashable)


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
    """Return the study's metric on draws of `rows`."""
    return kind_of(task).on_draws(rows)
