"""Hold a split against the rules of its task, by pandera: columns, types and cells."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pandera.pandas as pandera

from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import FILLED_TEXT, CellRule


def mistakes(frame: pd.DataFrame, task: Task, label_range: tuple[float, float] | None) -> list[str]:
    """Return what is wrong with a split, one mistake a cell or column, in pandera's words."""
    try:
        _schema(frame, task, label_range).validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as error:
        return [
            f"{case['column'] or ''} {case['failure_case']} ({case['check']})".strip()
            for case in error.failure_cases.to_dict("records")
        ]
    return []


def _schema(frame: pd.DataFrame, task: Task, label_range: tuple[float, float] | None) -> Any:
    kind = kind_of(task)
    pair = {"text_pair": FILLED_TEXT} if "text_pair" in frame else {}
    columns = {name: _column(rule) for name, rule in (pair | kind.cell_rules(label_range)).items()}
    checks = [pandera.Check(check, name=name) for name, check in kind.row_checks().items()]
    return pandera.DataFrameSchema(columns, checks=checks, strict=True)


def _column(rule: CellRule) -> Any:
    return pandera.Column(
        rule.dtype, [pandera.Check(check, element_wise=True, name=name) for name, check in rule.checks.items()]
    )
