"""Labels as shares of classes, and how far two are apart."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of

_BINS = 10
"""Of numbers (choice): as many classes, which are equally frequent in the reference."""


def classes(rows: pd.DataFrame, task: Task) -> pd.Series:
    """Return class or tag → how many rows or words have it; 0 for those that none has."""
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
    some, others = (
        pd.Series(np.bincount(np.searchsorted(edges, rows["label"]), minlength=len(edges) + 1)) for rows in (now, then)
    )
    return some, others


def shift(now: pd.Series, then: pd.Series) -> tuple[float, float]:
    """Return the total variation of two counts by class, and how far chance alone reaches.

    Chance: the mean of what two samples of one distribution differ by, bounded class by class, and three standard
    deviations (choice), each at most half the root of 1/m + 1/n (McDiarmid's inequality).
    """
    spread = 1 / now.sum() + 1 / then.sum()
    pooled = (now + then) / (now.sum() + then.sum())
    value = (now / now.sum() - then / then.sum()).abs().sum() / 2
    mean = np.sqrt(pooled * (1 - pooled) * spread).sum() / 2
    return float(value), float(mean + 1.5 * np.sqrt(spread))
