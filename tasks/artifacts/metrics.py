"""Metrics, with their titles and directions; tasks/nlp_tasks says which task has which metrics."""

from __future__ import annotations

from dataclasses import dataclass

MetricName = str


@dataclass(frozen=True)
class Metric:
    """Properties of a metric that reports and comparisons need."""

    title: str
    """Name of the metric in a sentence."""
    share: bool = False
    """Whether values lie between 0 and 1, and tell how many answers are right. Compact tables then print them in
    percent, and few equal answers do not show that nothing is lost (tasks/report/non_inferiority.py)."""
    lower_is_better: bool = False
    bounded: bool = True
    """Whether values lie between -1 and 1."""

    @property
    def with_direction(self) -> str:
        """The title, with "(lower is better)" after it if that is the case."""
        return f"{self.title} (lower is better)" if self.lower_is_better else self.title

    def worse_by(self, value: float, reference: float) -> float:
        """Return how much worse `value` is than `reference`, in the metric's units; negative if it is better."""
        return value - reference if self.lower_is_better else reference - value

    def goodness(self, value: float) -> float:
        """Return a number that is higher for better values."""
        return -value if self.lower_is_better else value

    def retained(self, value: float, dense: float) -> float | None:
        """Return the share of the original model's quality that is left: 1 is equally good, less is worse.

        This is `value` ÷ `dense`, or `dense` ÷ `value` if lower is better. None if the divisor is not positive, because
        the quotient would mislead.
        """
        part, whole = (dense, value) if self.lower_is_better else (value, dense)
        return part / whole if whole > 0 else None


class _Metrics(dict[MetricName, Metric]):
    def __missing__(self, name: MetricName) -> Metric:
        """Find a metric that a task defines itself, in `NlpTask.own_metrics`."""
        from tasks.nlp_tasks import TASK_NAMES, task_class  # only here, since task_class imports torch

        for task in TASK_NAMES:
            self |= {key: metric for key, metric in task_class(task).own_metrics.items() if key not in self}
        if name not in self:
            raise KeyError(name)
        return self[name]


METRICS = _Metrics(
    accuracy=Metric("accuracy", share=True),
    f1=Metric("F1", share=True),
    f1_micro=Metric("micro F1", share=True),
    f1_macro=Metric("macro F1", share=True),
    matthews=Metric("Matthews correlation"),
    pearson=Metric("Pearson correlation"),
    spearman=Metric("Spearman correlation"),
    exact_match=Metric("exact match", share=True),
    rouge1=Metric("ROUGE-1", share=True),
    rouge2=Metric("ROUGE-2", share=True),
    rougeL=Metric("ROUGE-L", share=True),
    perplexity=Metric("perplexity", lower_is_better=True, bounded=False),
)
"""Name of a metric → its properties. Metrics that a task defines itself (`NlpTask.own_metrics`) are found on demand."""
