"""The trivial baseline: what an answer scores that reads no input, and what it says about the teacher.

A study of a teacher that has learned nothing says nothing about compression, whatever its candidates keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from tasks.artifacts.metrics import METRICS, TaskKindName
from tasks.artifacts.task_spec import Task
from tasks.scoring.bootstrap import Interval

TRIVIAL = "trivial"
"""What its rows are called, beside those of the dense model."""

ANSWERS: Mapping[TaskKindName, str] = {
    "classification": "the most frequent class of the training rows",
    "regression": "the mean of the training labels",
    "token_classification": "the most frequent tag of the training rows",
    "question_answering": "the most frequent answer of the training rows",
    "summarization": "the first tokens of each document",
    "language_modeling": "the frequencies of tokens in the training text",
}
"""What it answers."""

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
    return task.kind != "summarization" and share_learned(task, dense, trivial) < _TINY


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
        f"its {title} is {dense:.4g}, where the trivial baseline, {ANSWERS[task.kind]}, has {trivial:.4g} (a "
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


def only_answer(task: Task, rows: pd.DataFrame) -> str | None:
    """The class, tag or number that a model answers to all `rows`; None where it has several, or writes texts."""
    if task.kind == "regression":
        return f"{rows['value'].iloc[0]:.3g}" if np.ptp(rows["value"]) == 0 else None
    if task.kind not in ("classification", "token_classification"):
        return None
    guesses = np.unique(np.concatenate(list(map(np.atleast_1d, rows["guess"]))))
    return task.labels[int(guesses[0])] if len(guesses) == 1 else None
