"""Numbers cited from papers, for a table of their own: they are never mixed with measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from tasks.artifacts.metrics import METRICS, MetricName
from tasks.config.schema import Section, Share

TaskMetrics = Mapping[str | None, MetricName]
"""Task → its metric. The key is None in a study without tasks."""
Words = Annotated[str, Field(min_length=1)]


class Published(Section):
    """Row of a table in a paper, cited in a study's file.

    In a study with tasks, `scores` are by task name. In a study without tasks, a row has either `score`, in the study's
    metric, or `scores`, by names of benchmarks in the paper.
    """

    source: Words
    """The paper, and the number of the table."""
    method: Words
    """The name of the method in the paper."""
    keep: Share | None
    """Parameter ratio of the target layers; None if the paper does not state it."""
    units: Literal["percent", "metric"]
    """Units of the scores: the metric itself, or percent (100 × the metric)."""
    note: Words | None
    """The difference between the paper's setting and ours, in one line."""
    score: float | None = None
    scores: Annotated[dict[Words, float], Field(min_length=1)] | None = None

    def points(self, value: float, metric: MetricName | None) -> float:
        """Return a score as printed: × 100 if its metric lies between -1 and 1 and it is not in percent already."""
        scaled = self.units == "metric" and metric is not None and METRICS[metric].bounded
        return 100 * value if scaled else value


def mistakes(rows: Sequence[Published], metrics: Mapping[str | None, MetricName | None]) -> Iterator[str]:
    """Yield messages on mistakes in published rows.

    Args:
        metrics: task → its metric, or None if the study names an unknown metric. The key is None in a study without
            tasks.
    """
    for position, row in enumerate(rows):
        path = f"published.{position}"
        if (row.score is None) == (row.scores is None):
            yield f"{path}: needs a score or scores, and not both; write one of them"
        if row.score is not None and None in metrics:
            yield from _of_value(f"{path}.score", row.score, row, metrics[None])
        elif row.score is not None:
            yield f"{path}.score: does not say of which task it is; write scores, by the names of tasks"
        for name, value in (row.scores or {}).items():
            if None in metrics or name in metrics:
                yield from _of_value(f"{path}.scores.{name}", value, row, metrics.get(name))
            else:
                yield f"{path}.scores.{name}: there is no task {name}; write one of {', '.join(map(str, metrics))}"


def _of_value(path: str, value: float, row: Published, metric: MetricName | None) -> Iterator[str]:
    if metric and not METRICS[metric].bounded:
        if row.units == "percent":
            yield f"{path}: {METRICS[metric].title} is no percentage; write units: metric"
    elif row.units == "percent" and abs(value) > 100:
        yield f"{path}: is {value:g}, more than 100 percent; correct it"
    elif row.units == "metric" and metric and abs(value) > 1:
        yield f"{path}: is {value:g}, and {METRICS[metric].title} lies between -1 and 1; write units: percent"


def beside(rows: Sequence[Published], metrics: TaskMetrics) -> list[Published]:
    """Return the published rows with a score for one of the tasks; all rows in a study without tasks."""
    return [row for row in rows if None in metrics or any(task in metrics for task in row.scores or {})]


def cells(rows: Sequence[Published], metrics: TaskMetrics) -> tuple[list[str], list[list[str]]]:
    """Return the header and the lines of the table. The last column has the number of a note in `notes`, from 1."""
    columns, numbers = _columns(rows, metrics), notes(rows)
    averaged = None not in metrics and len(metrics) > 1 and all(METRICS[metric].bounded for metric in metrics.values())
    lines = []
    for row in rows:
        points = [_points(row, name, metrics) for name, _ in columns]
        line = [row.method, "–" if row.keep is None else f"{row.keep:g}", *map(_digits, points)]
        line += [_mean(points)] if averaged else []
        lines.append([*line, row.source, str(numbers.index(row.note) + 1) if row.note else ""])
    return ["method", "keep", *(head for _, head in columns), *(["mean"] if averaged else []), "source", "note"], lines


def notes(rows: Sequence[Published]) -> list[str]:
    """Return the distinct notes."""
    return list(dict.fromkeys(row.note for row in rows if row.note))


def _columns(rows: Sequence[Published], metrics: TaskMetrics) -> list[tuple[str | None, str]]:
    """Return (name, title) of each column of scores.

    Columns are the tasks or, in a study without tasks, the study's own metric (its name is None) and benchmarks.
    """
    if None not in metrics:
        return [(name, str(name)) for name in metrics]
    metric = METRICS[metrics[None]]
    own = [(None, f"{metric.title}, %" if metric.bounded else metric.title)]
    others = dict.fromkeys(name for row in rows for name in row.scores or {})
    return [*(own if any(row.score is not None for row in rows) else []), *((name, name) for name in others)]


def _points(row: Published, name: str | None, metrics: TaskMetrics) -> float | None:
    value = row.score if name is None else (row.scores or {}).get(name)
    return None if value is None else row.points(value, metrics.get(name))


def _digits(value: float | None) -> str:
    """Format a score with all digits that the paper gives."""
    return "–" if value is None else f"{value:.10g}"


def _mean(values: Sequence[float | None]) -> str:
    """Format the mean over the tasks with a score, with their number if some are missing."""
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.2f}" + (f" of {len(known)}" if len(known) < len(values) else "")
