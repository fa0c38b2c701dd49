"""Counts within the data: rows, classes, rows that stand twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from tasks.artifacts.task_spec import Split, Task
from tasks.config.schema import Check
from tasks.data_checks.class_shares import classes
from tasks.data_checks.findings import Finding, at_least, at_most, unmeasured
from tasks.data_checks.schema import mistakes
from tasks.data_checks.text_normalization import contents
from tasks.nlp_tasks import kind_of

_RUNNING = "rows of running text are lines, which repeat"


def of_cells(splits: Mapping[Split, pd.DataFrame], task: Task, limits: Check) -> Iterator[Finding]:
    """Columns, types and ranges; what breaks them cannot be looked at any further."""
    for name, rows in splits.items():
        found = mistakes(rows, task, limits.label_range)
        note = f"such as {found[0]}; nothing else was looked at: correct these, or check.label_range" if found else ""
        yield at_most("invalid cells", name, len(found), 0, note)


def of_splits(splits: Mapping[Split, pd.DataFrame], task: Task, limits: Check) -> Iterator[Finding]:
    """What the rows say of themselves."""
    if kind_of(task).running_text:
        for measure in ("rows", "doubled rows", "leaked rows"):
            yield unmeasured(measure, "all splits", _RUNNING)
        return
    for name, rows in splits.items():
        yield at_least("rows", name, len(rows), limits.fewest_rows, "give the source more, or lower check.fewest_rows")
    if task.labels:
        yield from _of_classes(splits, task, limits)
    yield from _repeated(splits, limits)


def _of_classes(splits: Mapping[Split, pd.DataFrame], task: Task, limits: Check) -> Iterator[Finding]:
    for name, rows in splits.items():
        counts = classes(rows, task)
        rarest = str(counts.idxmin())
        note = f"of {rarest}: give the source more of it, remove it, or lower check.fewest_of_class"
        yield at_least("rarest class", name, int(counts[rarest]), limits.fewest_of_class, note)


def _repeated(splits: Mapping[Split, pd.DataFrame], limits: Check) -> Iterator[Finding]:
    found = {name: contents(rows) for name, rows in splits.items()}
    for name, some in found.items():
        note = "remove rows that stand twice from the source, or raise check.largest_doubled"
        yield at_most("doubled rows", name, float(some.duplicated().mean()), limits.largest_doubled, note)
    for name in ("validation", "test"):
        others = pd.concat([some for other, some in found.items() if other != name])
        share = float(found[name].isin(others).mean())
        note = (
            "but for case, spaces and punctuation they stand in another split, too: remove them from the source, "
            "or raise check.largest_leaked"
        )
        yield at_most("leaked rows", name, share, limits.largest_leaked, note)
