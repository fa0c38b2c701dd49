"""Paired bootstrap: confidence intervals for the difference between two models' metrics on the same test examples.

Examples are drawn with replacement, and all models are scored on the same draws. The interval of a difference is taken
from the differences on the draws. It covers the choice of test examples, but not of the training seed. Unlike scipy's
bootstrap, each model is scored only once on all draws, not again for each difference. Most metrics are functions of
sums over examples, so all draws are scored with one matrix product.

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
_AT_ONCE = 4_000_000  # number of examples drawn at a time, which bounds memory

Model = TypeVar("Model", bound=Hashable)


@dataclass(frozen=True)
class Interval:
    """Confidence interval of a difference, in the metric's units."""

    low: float
    high: float

    @property
    def sign(self) -> int:
        """The sign (1 or -1) of a significant difference; 0 if the interval contains 0."""
        return int(self.low > 0) - int(self.high < 0)


def interval(differences: np.ndarray) -> Interval:
    """Return the percentile interval of a difference, given its values on all draws."""
    tail = (1 - LEVEL) / 2
    return Interval(*map(float, np.quantile(differences, [tail, 1 - tail])))


def standard_error(differences: np.ndarray) -> float:
    """Return the standard error of a difference, given its values on all draws: their standard deviation.

    It is 0 if it is not finite, as for huge perplexities: such an error must not widen a limit.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        error = float(np.std(differences, ddof=1))
    return error if np.isfinite(error) else 0.0


def metric_of_all(task: Task, rows: pd.DataFrame) -> float:
    """Return the study's metric on all examples. `rows` are the per-example results."""
    return float(kind_of(task).on_draws(rows)(Draws(np.arange(len(rows))[None])).item())


def resampled(task: Task, models: Mapping[Model, pd.DataFrame]) -> dict[Model, np.ndarray]:
    """Return the metric of each model on all draws, `(RESAMPLES,)`. The draws depend only on the number of examples.

    `models` has the per-example results (`Scored.predictions`) of each model on the same examples.
    """
    count, *others = {len(rows) for rows in models.values()}
    if others:
        raise StageError("models that were scored on different test examples cannot be compared: run the study again")
    metrics = {name: kind_of(task).on_draws(rows) for name, rows in models.items()}
    generator, at_once = np.random.default_rng(_SEED), max(1, _AT_ONCE // count)
    parts: dict[Model, list[np.ndarray]] = {name: [] for name in models}
    for start in range(0, RESAMPLES, at_once):
        draws = Draws(generator.integers(count, size=(min(at_once, RESAMPLES - start), count)))
        for name, metric in metrics.items():
            parts[name].append(metric(draws))
    return {name: np.concatenate(values) for name, values in parts.items()}
