"""Paired bootstrap intervals: how much the choice of test rows alone may change a difference between two models.

Rows are drawn with replacement, the same for every model; the interval of a difference is that of the differences on
the draws. It does not include the effect of other seeds of training. scipy's bootstrap draws anew for each difference;
here each model is scored once on all draws, and most metrics are functions of sums over rows, so that a draw is a
product.

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
from tasks.scoring.metrics_on_draws import Draws

RESAMPLES = 2000
LEVEL = 0.95
_SEED = 0
_AT_ONCE = 4_000_000  # rows drawn at a time, to bound memory

Model = TypeVar("Model", bound=Hashable)


@dataclass(frozen=True)
class Interval:
    """The interval of a difference, in the metric's units."""

    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 if all of it is on that side of 0; 0 if the difference is not significant."""
        return int(self.low > 0) - int(self.high < 0)


def interval(differences: np.ndarray) -> Interval:
    """Return the percentiles of the differences on all draws."""
    tail = (1 - LEVEL) / 2
    return Interval(*map(float, np.quantile(differences, [tail, 1 - tail])))


def standard_error(differences: np.ndarray) -> float:
    """Return the standard error of a difference, its standard deviation over all draws.

    0 if it is not finite: the spread of a perplexity near the largest number must excuse nothing.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        error = float(np.std(differences, ddof=1))
    return error if np.isfinite(error) else 0.0


def metric_of_all(task: Task, rows: pd.DataFrame) -> float:
    """Return the study's metric on all rows, each once."""
    return float(kind_of(task).on_draws(rows)(Draws(np.arange(len(rows))[None])).item())


def resampled(task: Task, models: Mapping[Model, pd.DataFrame]) -> dict[Model, np.ndarray]:
    """Return the metric of each model `(RESAMPLES,)` on draws that depend on the number of rows alone.

    Args:
        models: model → the contributions of the same rows, as the stages wrote them.

    Raises:
        StageError: the numbers of rows differ.
    """
    count, *others = {len(rows) for rows in models.values()}
    if others:
        raise StageError("models that were scored on different test rows cannot be compared: run the study again")
    metrics = {name: kind_of(task).on_draws(rows) for name, rows in models.items()}
    generator, at_once = np.random.default_rng(_SEED), max(1, _AT_ONCE // count)
    parts: dict[Model, list[np.ndarray]] = {name: [] for name in models}
    for start in range(0, RESAMPLES, at_once):
        draws = Draws(generator.integers(count, size=(min(at_once, RESAMPLES - start), count)))
        for name, metric in metrics.items():
            parts[name].append(metric(draws))
    return {name: np.concatenate(values) for name, values in parts.items()}
