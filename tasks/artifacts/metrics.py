"""The kinds of task, and by which metrics each is judged: the one place that lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

TaskKindName = Literal[
    "classification",
    "regression",
    "token_classification",
    "question_answering",
    "summarization",
    "language_modeling",
]
MetricName = Literal[
    "accuracy",
    "f1",
    "matthews",
    "pearson",
    "spearman",
    "exact_match",
    "rouge1",
    "rouge2",
    "rougeL",
    "perplexity",
]


@dataclass(frozen=True)
class Metric:
    """How a metric reads. A share lies between 0 and 1 and is printed in percent where there is room for few digits."""

    title: str
    """As it stands in a sentence."""
    share: bool = False
    lower_is_better: bool = False
    bounded: bool = True
    """Whether it lies between -1 and 1."""

    @property
    def with_direction(self) -> str:
        """The title, and which way is better where that is not the usual one."""
        return f"{self.title} (lower is better)" if self.lower_is_better else self.title

    def worse_by(self, value: float, reference: float) -> float:
        """How much worse `value` is than `reference`, in the metric's own units; below 0 where it is better."""
        return value - reference if self.lower_is_better else reference - value

    def goodness(self, value: float) -> float:
        """What is higher the better `value` is."""
        return -value if self.lower_is_better else value

    def retained(self, value: float, dense: float) -> float | None:
        """`value` ÷ `dense`, or the inverse where lower is better, so that 1 is as good as dense and less is worse.

        None where the quotient would mislead, as one of them is not above 0.
        """
        part, whole = (dense, value) if self.lower_is_better else (value, dense)
        return part / whole if whole > 0 else None


METRICS: Mapping[MetricName, Metric] = {
    "accuracy": Metric("accuracy", share=True),
    "f1": Metric("F1", share=True),
    "matthews": Metric("Matthews correlation"),
    "pearson": Metric("Pearson correlation"),
    "spearman": Metric("Spearman correlation"),
    "exact_match": Metric("exact match", share=True),
    "rouge1": Metric("ROUGE-1", share=True),
    "rouge2": Metric("ROUGE-2", share=True),
    "rougeL": Metric("ROUGE-L", share=True),
    "perplexity": Metric("perplexity", lower_is_better=True, bounded=False),
}
BY_KIND: Mapping[TaskKindName, tuple[MetricName, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
    "token_classification": ("accuracy", "f1"),
    "question_answering": ("exact_match", "f1"),
    "summarization": ("rouge1", "rouge2", "rougeL"),
    "language_modeling": ("perplexity",),
}
ENTITY_TAG = re.compile(r"O|[BIES]-.+")
"""Where all tags are such, F1 is that of entities, each right only as a whole."""
TASK_KINDS: tuple[TaskKindName, ...] = get_args(TaskKindName)
