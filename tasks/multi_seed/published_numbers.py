"""Numbers cited from papers. They are printed in a table of their own, never mixed with measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import pandas as pd
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
    """Share of the target layers' parameters that is kept; None if the paper does not state it."""
    units: Literal["percent", "metric"]
    """Units of the scores: the metric itself, or percent (100 × the metric)."""
    note: Words | None
    """The difference between the paper's setting and ours, in one line."""
    score: float | None = None
    scores: Annotated[dict[Words, float], Field(min_length=1)] | None = None

    def points(self, name: str | None, metric: MetricName | None) -> float | None:
        """Return the row's score for a task, a benchmark or the study (`name` is None); None if the row has none.

        If the metric lies between -1 and 1, the score is returned in percent.
        """
        value = self.score if name is None else (self.scores or {}).get(name)
        scaled = self.units == "metric" and metric is not None and METRICS[metric].bounded
        return 100 * value if scaled and value is not None else value


def mistakes(rows: Sequence[Published], metrics: TaskMetrics) -> Iterator[str]:
    """Yield a message for each mistake in the published rows."""
    for position, row in enumerate(rows):
        path = f"published.{position}"
        if (row.score is None) == (row.scores is None):
            yield f"{path}: needs a score or scores, and not both; write one of them"
        if row.score is not None and None in metrics:
            yield from _unit_mistakes(f"{path}.score", row.score, row.units, metrics[None])
        elif row.score is not None:
            yield f"{path}.score: does not say of which task it is; write scores, by the names of tasks"
        for name, value in (row.scores or {}).items():
            if None in metrics or name in metrics:
                yield from _unit_mistakes(f"{path}.scores.{name}", value, row.units, metrics.get(name))
            else:
                yield f"{path}.scores.{name}: there is no task {name}; write one of {', '.join(map(str, metrics))}"


def _unit_mistakes(path: str, value: float, units: str, metric: MetricName | None) -> Iterator[str]:
    bounded = not metric or METRICS[metric].bounded
    if metric and not bounded and units == "percent":
        yield f"{path}: {METRICS[metric].title} is not a percentage; write units: metric"
    elif bounded and units == "percent" and abs(value) > 100:
        yield f"{path}: is {value:g}, more than 100 percent; correct it"
    elif bounded and units == "metric" and metric and abs(value) > 1:
        yield f"{path}: is {value:g}, and {METRICS[metric].title} lies between -1 and 1; write units: percent"


def beside(rows: Sequence[Published], metrics: TaskMetrics) -> list[Published]:
    """Return the published rows with a score for one of the tasks; all rows in a study without tasks."""
    return [row for row in rows if None in metrics or any(task in metrics for task in row.scores or {})]


def table(rows: Sequence[Published], metrics: TaskMetrics) -> pd.DataFrame:
    """Return the table of published numbers as text.

    The last column refers to the row's note by its position in `notes(rows)`, from 1. The columns of scores are the
    tasks or, in a study without tasks, the study's own metric and benchmarks of the paper.
    """
    columns: dict[str | None, str] = {name: str(name) for name in metrics if name}
    if None in metrics:
        own = METRICS[metrics[None]]
        if any(row.score is not None for row in rows):
            columns[None] = f"{own.title}, %" if own.bounded else own.title
        columns |= {name: name for row in rows for name in row.scores or {}}
    averaged = None not in metrics and len(metrics) > 1 and all(METRICS[metric].bounded for metric in metrics.values())
    lines, numbers = [], notes(rows)
    for row in rows:
        points = [row.points(name, metrics.get(name)) for name in columns]
        line = [row.method, "–" if row.keep is None else f"{row.keep:g}"]
        line += ["–" if value is None else f"{value:.10g}" for value in points]  # all digits that the paper gives
        line += [_mean(points)] if averaged else []
        lines.append([*line, row.source, str(numbers.index(row.note) + 1) if row.note else ""])
    heads = ["method", "keep", *columns.values(), *(["mean"] if averaged else []), "source", "note"]
    return pd.DataFrame(lines, columns=heads)


def notes(rows: Sequence[Published]) -> list[str]:
    """Return the distinct notes of the rows, in order of appearance."""
    return list(dict.fromkeys(row.note for row in rows if row.note))


def _mean(values: Sequence[float | None]) -> str:
    """Format the mean of the scores that exist; if some are missing (None), add the number of those that exist."""
    present = [value for value in values if value is not None]
    return f"{sum(present) / len(present):.2f}" + (f" of {len(present)}" if len(present) < len(values) else "")
