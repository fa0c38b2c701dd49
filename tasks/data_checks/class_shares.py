"""Count labels by class, and measure how far two data sets' shares are apart."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of

_BINS = 10
"""Classes into which numbers are sorted (choice), equally frequent in the reference."""


def classes(rows: pd.DataFrame, task: Task) -> pd.Series:
    """Count the rows or words of each class or tag."""
    ids = rows["label"].explode().dropna()  # of tags and of sets of labels, each counts
    counts = np.bincount(ids.to_numpy(np.int64), minlength=len(task.labels))
    return pd.Series(counts, index=list(task.labels))


def counts_of_both(
    now: pd.DataFrame, task: Task, then: pd.DataFrame, task_then: Task
) -> tuple[pd.Series, pd.Series] | None:
    """Count the labels of each class now and then; None where labels are texts."""
    if task.labels:
        both = pd.concat([classes(now, task), classes(then, task_then)], axis=1).fillna(0)
        return both.iloc[:, 0], both.iloc[:, 1]
    if kind_of(task).problem_type != "regression":
        return None
    edges = np.unique(np.quantile(then["label"], np.linspace(0, 1, _BINS + 1)[1:-1]))
    bins = (np.searchsorted(edges, rows["label"]) for rows in (now, then))
    first, second = (pd.Series(np.bincount(bin_of, minlength=len(edges) + 1)) for bin_of in bins)
    return first, second


def shift(now: pd.Series, then: pd.Series) -> tuple[float, float]:
    """Return the total variation of two counts by class, and how much of it chance alone gives.

    Chance: the mean difference of two samples of one distribution, bounded class by class, and three standard
    deviations (choice), each at most half the root of 1/m + 1/n (McDiarmid's inequality).
    """
    spread = 1 / now.sum() + 1 / then.sum()
    pooled = (now + then) / (now.sum() + then.sum())
    value = (now / now.sum() - then / then.sum()).abs().sum() / 2
    mean = np.sqrt(pooled * (1 - pooled) * spread).sum() / 2
    return float(value), float(mean + 1.5 * np.sqrt(spread))
