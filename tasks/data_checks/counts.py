"""Check each split: its number of rows, of rows with the rarest class, of repeated rows, and of labels out of range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd

from tasks.artifacts.task_spec import Split, Task
from tasks.config.schema import Check
from tasks.data_checks.class_shares import classes
from tasks.data_checks.findings import Finding, at_least, at_most, unmeasured
from tasks.data_checks.text_normalization import contents
from tasks.nlp_tasks import kind_of


def of_splits(splits: Mapping[Split, pd.DataFrame], task: Task, limits: Check) -> Iterator[Finding]:
    """Yield the findings on each split: each is a count or a share with its limit."""
    kind = kind_of(task)
    if kind.running_text:
        for measure in ("examples", "duplicates", "leaked examples"):
            yield unmeasured(measure, "all splits", "rows of running text are lines, which repeat")
        return
    for name, rows in splits.items():
        yield at_least(
            "examples",
            name,
            len(rows),
            limits.fewest_examples,
            "add examples to the source, or lower check.fewest_examples",
        )
        if task.labels:
            counts = classes(rows, task)
            rarest = str(counts.idxmin())
            note = f"of {rarest}: add examples with it to the source, remove it, or lower check.fewest_of_class"
            yield at_least("rarest class", name, int(counts[rarest]), limits.fewest_of_class, note)
        if kind.numeric_labels and limits.label_range and "label" in rows:
            outside = int((~rows["label"].between(*limits.label_range)).sum())
            yield at_most("labels out of range", name, outside, 0, "correct these labels, or check.label_range")
    yield from _repeated(splits, limits)


def _repeated(splits: Mapping[Split, pd.DataFrame], limits: Check) -> Iterator[Finding]:
    """Yield the shares of examples that a split has twice, and of those that another split has, too.

    A pair in the other order counts for the second share only.
    """
    words = {name: contents(rows) for name, rows in splits.items()}
    for name, texts in words.items():
        note = "remove repeated examples from the source, or raise check.largest_doubled"
        yield at_most("duplicates", name, float(texts.duplicated().mean()), limits.largest_doubled, note)
    words = {name: texts.map(lambda pair: tuple(sorted(pair))) for name, texts in words.items()}
    for name in ("validation", "test"):
        others = pd.concat([texts for other, texts in words.items() if other != name])
        share = float(words[name].isin(others).mean())
        note = (
            "apart from case, spaces and punctuation, these texts are also in another split: remove them from the "
            "source, or raise check.largest_leaked"
        )
        yield at_most("leaked examples", name, share, limits.largest_leaked, note)
