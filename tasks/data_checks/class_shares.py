"""Count labels by class, and measure how much the class shares of two data sets differ."""

from __future__ import annotations

import numpy as np
import pandas as pd

from eckart.model.batches import IGNORED
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of

_BINS = 10
"""Number of bins (choice) for numeric labels. The bins are equally frequent in the champion's data."""


def classes(rows: pd.DataFrame, task: Task) -> pd.Series:
    """Return the number of rows with each class or, in token classification, of words with each tag."""
    ids = rows["label"].explode().dropna()  # each tag of a row, or each of its labels, is counted
    counts = np.bincount(ids[ids != IGNORED].to_numpy(np.int64), minlength=len(task.labels))
    return pd.Series(counts, index=list(task.labels))


def counts_of_both(
    now: pd.DataFrame, task: Task, then: pd.DataFrame, task_then: Task
) -> tuple[pd.Series, pd.Series] | None:
    """Count the labels of each class in two data sets.

    Numeric labels are counted by bin. The result is None if labels are neither classes nor numbers.

    Args:
        now, task: the training data and task of this study.
        then, task_then: those of the champion.
    """
    if task.labels:
        both = pd.concat([classes(now, task), classes(then, task_then)], axis=1).fillna(0)
        return both.iloc[:, 0], both.iloc[:, 1]
    if not (kind_of(task).numeric_labels and "label" in now and "label" in then):
        return None
    edges = np.unique(np.quantile(then["label"], np.linspace(0, 1, _BINS + 1)[1:-1]))
    bins = (np.searchsorted(edges, rows["label"]) for rows in (now, then))
    first, second = (pd.Series(np.bincount(bin_of, minlength=len(edges) + 1)) for bin_of in bins)
    return first, second


def shift(now: pd.Series, then: pd.Series) -> tuple[float, float]:
    """Return the total variation distance between two class distributions, and a bound on the distance due to chance.

    The bound is for two samples, of m and n labels, from the same distribution. It is the expected distance, bounded
    class by class, plus three standard deviations (choice). The standard deviation is at most √(1/m + 1/n) / 2
    (McDiarmid's inequality).

    Args:
        now, then: number of labels of each class.
    """
    spread = 1 / now.sum() + 1 / then.sum()
    pooled = (now + then) / (now.sum() + then.sum())
    value = (now / now.sum() - then / then.sum()).abs().sum() / 2
    mean = np.sqrt(pooled * (1 - pooled) * spread).sum() / 2
    return float(value), float(mean + 1.5 * np.sqrt(spread))
