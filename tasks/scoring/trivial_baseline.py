"""The trivial baseline: what an answer scores that reads no input, and what it says about the teacher.

A study of a teacher that has learned nothing says nothing about compression, whatever its candidates keep.
"""

from __future__ import annotations

import math

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.scoring.bootstrap import Interval

TRIVIAL = "trivial"
"""What its rows are called, beside those of the dense model."""

_TINY = 0.1  # (choice) of the way from the baseline to a perfect score; below it one would not call a task learned


def share_learned(task: Task, dense: float, trivial: float) -> float:
    """How much of the way from the trivial baseline to a perfect score the dense model has gone.

    Of a perplexity the way is that of its logarithm, the loss. 0 where the baseline is perfect.
    """
    if METRICS[task.metric].bounded:
        return (dense - trivial) / (1 - trivial) if trivial < 1 else 0.0
    return 1 - math.log(dense) / math.log(trivial) if trivial > 1 else 0.0


def is_above(task: Task, difference: Interval) -> bool:
    """Whether the dense model is better than the baseline beyond chance, by the interval of dense less trivial."""
    return (-difference.sign if METRICS[task.metric].lower_is_better else difference.sign) > 0


def is_close(task: Task, dense: float, trivial: float) -> bool:
    """Whether it has learned less than a tenth of what there is; no summary comes near a perfect score."""
    return not kind_of(task).perfect_is_far and share_learned(task, dense, trivial) < _TINY


def warning(task: Task, dense: float, trivial: float, difference: Interval, rows: int) -> str | None:
    """What to do about a teacher that has learned next to nothing, or that rows cannot tell from the baseline.

    Args:
        difference: the interval of dense less trivial, in the metric's units.
        rows: of the test split.
    """
    above, close = is_above(task, difference), is_close(task, dense, trivial)
    if above and not close:
        return None
    title = METRICS[task.metric].title
    numbers = (
        f"its {title} is {dense:.4g}, where the trivial baseline, {kind_of(task).trivial_answer}, has {trivial:.4g} (a "
        f"difference of {difference.low:+.3g} to {difference.high:+.3g})"
    )
    if not close and share_learned(task, dense, trivial) > 0:
        return (
            f"{rows:,} test rows cannot tell the dense model from one that has learned nothing: {numbers}. Raise "
            "data.sizes.test."
        )
    return (
        f"The dense model has learned next to nothing: {numbers}. What candidates keep of it says little: raise "
        "teacher.epochs, data.sizes.train or teacher.learning_rate."
    )
