"""Compare the original model with the trivial baseline, which answers without reading its input.

A study of a teacher that has learned nothing says nothing about compression, whatever its candidates keep.
"""

from __future__ import annotations

import math

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.scoring.bootstrap import Interval

TRIVIAL = "trivial"
"""The baseline's name beside the dense model's, in files of rows."""

_TINY = 0.1  # (choice) of the way from the baseline to a perfect score; below it one would not call a task learned


def share_learned(task: Task, dense: float, trivial: float) -> float:
    """Return the dense model's share of the way from the trivial baseline to a perfect score.

    For a perplexity the way is that of its logarithm, the loss. 0 if the baseline is perfect.
    """
    if METRICS[task.metric].bounded:
        return (dense - trivial) / (1 - trivial) if trivial < 1 else 0.0
    return 1 - math.log(dense) / math.log(trivial) if trivial > 1 else 0.0


def warning(task: Task, dense: float, trivial: float, difference: Interval, rows: int) -> str | None:
    """Return what to do about a model that has learned next to nothing, or is not significantly above the baseline.

    Args:
        difference: the interval of dense less trivial, in the metric's units.
        rows: of the test split.
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
            f"On {rows:,} test rows the dense model is not significantly different from one that has learned nothing: "
            f"{numbers}. Raise data.sizes.test."
        )
    return (
        f"The dense model has learned next to nothing: {numbers}. What candidates keep of it says little: raise "
        "teacher.epochs, data.sizes.train or teacher.learning_rate."
    )
