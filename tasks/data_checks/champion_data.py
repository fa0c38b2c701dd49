"""Compare the training data with those of the champion, which `eckart run` copies to data/reference."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from tasks.artifacts.task_spec import REFERENCE, REFERENCE_PARTS, Task
from tasks.config.schema import Check
from tasks.data_checks.class_shares import counts_of_both, shift
from tasks.data_checks.drift import FEWEST, drift
from tasks.data_checks.findings import Finding, at_most, unmeasured
from tasks.data_checks.text_normalization import texts
from tasks.nlp_tasks import kind_of

_BOTH = "train, and the champion's"


def load_reference() -> tuple[pd.DataFrame, Task] | None:
    """Load the champion's training data and task, or return None if this study has no champion yet."""
    if not all((REFERENCE / part).exists() for part in REFERENCE_PARTS):
        return None
    task = Task.model_validate_json((REFERENCE / "task.json").read_text())
    return pd.read_parquet(REFERENCE / "train.parquet"), task


def changes(
    now: pd.DataFrame, task: Task, reference: tuple[pd.DataFrame, Task] | None, limits: Check
) -> Iterator[Finding]:
    """Yield findings on lost rows, shifted labels and changed texts, compared with the champion's training data.

    Args:
        now: the training data of this study.
        reference: the training data and task of the champion.
    """
    why = f"{REFERENCE} has no data of a champion"
    if reference and reference[1].kind != task.kind:
        why, reference = f"the champion's task is {reference[1].kind}, and this one is {task.kind}", None
    if reference is None:
        yield from (unmeasured(measure, _BOTH, why) for measure in ("lost examples", "label shift", "text drift"))
        return
    then, task_then = reference
    # A row of running text may be a line or a whole book, so characters are counted instead of rows.
    count = (lambda rows: int(rows["text"].str.len().sum())) if kind_of(task).running_text else len
    before, after = count(then), count(now)
    note = f"there were {before}, now {after}: restore the lost ones in the source, or raise check.largest_lost"
    yield at_most("lost examples", _BOTH, max(0.0, 1 - after / before), limits.largest_lost, note)
    yield _label_shift(now, task, then, task_then, limits)
    yield _text_drift(now, then, limits)


def _label_shift(now: pd.DataFrame, task: Task, then: pd.DataFrame, task_then: Task, limits: Check) -> Finding:
    both = counts_of_both(now, task, then, task_then)
    if both is None:
        return unmeasured("label shift", _BOTH, "its labels are neither classes nor numbers")
    value, chance = shift(*both)
    most = (both[0] / both[0].sum() - both[1] / both[1].sum()).abs().idxmax()
    changed = f"the share of {most} changed most" if task.labels else "the numbers changed"
    note = f"{changed}: find out why, or raise check.largest_shift until a champion is trained on these labels"
    return at_most("label shift", _BOTH, value, limits.largest_shift, note, chance)


def _text_drift(now: pd.DataFrame, then: pd.DataFrame, limits: Check) -> Finding:
    new, old = ([text for text in texts(rows) if text.strip()] for rows in (now, then))
    if min(len(new), len(old)) < FEWEST:
        return unmeasured("text drift", _BOTH, f"it needs at least {FEWEST} texts of each")
    if limits.largest_drift is None:
        return unmeasured("text drift", _BOTH, "check.largest_drift is null")
    value, chance = drift(new, old, limits.drift_examples)
    note = (
        "a classifier tells them apart: find out why, or raise check.largest_drift until a champion knows these texts"
    )
    return at_most("text drift", _BOTH, value, limits.largest_drift, note, chance)
