"""Check that the original model is better than a trivial baseline.

A trivial baseline has no model: for example, it answers every input with the most frequent class. If the original
model is not better, it has not learned the task, and a study of it says nothing about compression.
"""

from __future__ import annotations

import math

import pandas as pd

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.scoring.bootstrap import Interval, interval, metric_of_all, resampled

TRIVIAL = "trivial"
"""Name of the baseline in the file of per-example results of the original model."""

_TINY = 0.1  # (choice) smallest `share_learned` of a model that has learned its task


def share_learned(task: Task, dense: float, trivial: float) -> float:
    """Return (dense - trivial) / (perfect - trivial): 0 if the model equals the trivial baseline, 1 if it is perfect.

    A perplexity is replaced by its logarithm, the loss. The result is 0 if the baseline is perfect.
    """
    if METRICS[task.metric].bounded:
        return (dense - trivial) / (1 - trivial) if trivial < 1 else 0.0
    return 1 - math.log(dense) / math.log(trivial) if trivial > 1 else 0.0


def compare(
    task: Task, dense: float, dense_predictions: pd.DataFrame, trivial_predictions: pd.DataFrame
) -> tuple[float, str | None]:
    """Compare the original model, with the metric `dense`, with the baseline.

    The per-example results are those of the two on the same test examples.

    Returns:
        The metric of the baseline, and a warning or None (see `warning`).
    """
    trivial = metric_of_all(task, trivial_predictions)
    drawn = resampled(task, {"dense": dense_predictions, TRIVIAL: trivial_predictions})
    difference = interval(drawn["dense"] - drawn[TRIVIAL])
    return trivial, warning(task, dense, trivial, difference, len(trivial_predictions))


def warning(task: Task, dense: float, trivial: float, difference: Interval, rows: int) -> str | None:
    """Return a warning if the original model is not much or not significantly better than the baseline, else None.

    `difference` is the interval of dense - trivial on `rows` test examples.
    """
    metric, share = METRICS[task.metric], share_learned(task, dense, trivial)
    is_above = (-difference.sign if metric.lower_is_better else difference.sign) > 0
    is_close = not kind_of(task).perfect_is_far and share < _TINY
    if is_above and not is_close:
        return None
    numbers = (
        f"its {metric.title} is {dense:.4g}, where the trivial baseline, {kind_of(task).trivial_answer}, has "
        f"{trivial:.4g} (a difference of {difference.low:+.3g} to {difference.high:+.3g})"
    )
    if not is_close and share > 0:
        return (
            f"On {rows:,} test examples the original model is not significantly different from one that has learned "
            f"nothing: {numbers}. Raise data.sizes.test."
        )
    return (
        f"The original model has learned next to nothing: {numbers}. Scores of its candidates mean little: raise "
        "teacher.epochs, data.sizes.train or teacher.learning_rate."
    )
