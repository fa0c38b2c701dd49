"""The rows that the champion learned from, which `eckart run` puts into data/reference, and what changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from tasks.artifacts.task_spec import REFERENCE, REFERENCE_PARTS, Task
from tasks.config.schema import Check
from tasks.data_checks.class_shares import counts_of_both, shift
from tasks.data_checks.drift import FEWEST, drift
from tasks.data_checks.findings import Finding, at_most, unmeasured
from tasks.data_checks.text_normalization import texts
from tasks.nlp_tasks import kind_of

_BOTH = "train, and the champion's"
_MEASURES = ("lost rows", "label shift", "text drift")


@dataclass(frozen=True)
class Reference:
    rows: pd.DataFrame
    task: Task


def load_reference() -> Reference | None:
    """None where there is no champion of this study yet."""
    if not all((REFERENCE / part).exists() for part in REFERENCE_PARTS):
        return None
    task = Task.model_validate_json((REFERENCE / "task.json").read_text())
    return Reference(pd.read_parquet(REFERENCE / "train.parquet"), task)


def _why_not(reference: Reference | None, task: Task) -> str:
    """Why data cannot be compared with the champion's; empty where they can be."""
    if reference is None:
        return f"{REFERENCE} has no data of a champion"
    if reference.task.kind != task.kind:
        return f"the champion's task is {reference.task.kind}, and this one is {task.kind}"
    return ""


def changes(now: pd.DataFrame, task: Task, reference: Reference | None, limits: Check) -> Iterator[Finding]:
    """What differs from the data that the champion learned from."""
    why = _why_not(reference, task)
    if reference is None or why:
        yield from (unmeasured(measure, _BOTH, why) for measure in _MEASURES)
        return
    before, after = _amount(reference.rows, task), _amount(now, task)
    lost = max(0.0, 1 - after / before)
    note = f"there were {before}, now {after}: see what the source lost, or raise check.largest_lost"
    yield at_most("lost rows", _BOTH, lost, limits.largest_lost, note)
    yield _label_shift(now, task, reference, limits)
    yield _text_drift(now, task, reference, limits)


def _amount(rows: pd.DataFrame, task: Task) -> int:
    """Rows; of running text, whose rows may be lines or books, characters."""
    return int(rows["text"].str.len().sum()) if kind_of(task).running_text else len(rows)


def _label_shift(now: pd.DataFrame, task: Task, reference: Reference, limits: Check) -> Finding:
    both = counts_of_both(now, task, reference.rows, reference.task)
    if both is None:
        return unmeasured("label shift", _BOTH, "its labels are no classes and no numbers")
    value, chance = shift(*both)
    most = (both[0] / both[0].sum() - both[1] / both[1].sum()).abs().idxmax()
    what = f"of {most}" if task.labels else "of the numbers"
    note = f"most {what}: see why, or raise check.largest_shift until a champion knows these labels"
    return at_most("label shift", _BOTH, value, limits.largest_shift, note, chance)


def _text_drift(now: pd.DataFrame, task: Task, reference: Reference, limits: Check) -> Finding:
    some, others = ([text for text in texts(rows) if text.strip()] for rows in (now, reference.rows))
    if min(len(some), len(others)) < FEWEST:
        return unmeasured("text drift", _BOTH, f"it takes {FEWEST} rows of each")
    if limits.largest_drift is None:
        return unmeasured("text drift", _BOTH, "check.largest_drift is null")
    value, chance = drift(some, others, limits.drift_rows)
    note = "a classifier tells them apart: see why, or raise check.largest_drift until a champion knows these texts"
    return at_most("text drift", _BOTH, value, limits.largest_drift, note, chance)
