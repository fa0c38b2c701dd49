"""What a split must look like for its kind of task, by pandera: columns, types and ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pandera

from tasks.artifacts.task_spec import Task

_FILLED = pandera.Check.str_length(min_value=1)


def mistakes(frame: pd.DataFrame, task: Task, label_range: tuple[float, float] | None) -> list[str]:
    """What of a split is not as it should be, one mistake a cell or column, in pandera's words."""
    try:
        _schema(frame, task, label_range).validate(frame, lazy=True)
    except pandera.errors.SchemaErrors as error:
        return [
            f"{case['column'] or ''} {case['failure_case']} ({case['check']})".strip()
            for case in error.failure_cases.to_dict("records")
        ]
    return []


def _schema(frame: pd.DataFrame, task: Task, label_range: tuple[float, float] | None) -> Any:
    text = pandera.Column(str, [] if task.kind == "language_modeling" else [_FILLED])
    columns: dict[str, Any] = {"text": text}
    checks: list[pandera.Check] = []
    if "text_pair" in frame or task.kind == "question_answering":
        columns["text_pair"] = pandera.Column(str, [_FILLED])
    if task.kind == "classification":
        columns["label"] = pandera.Column("int64", [pandera.Check.in_range(0, len(task.labels) - 1)])
    elif task.kind == "regression":
        finite = pandera.Check(np.isfinite, name="finite")
        columns["label"] = pandera.Column(
            "float32", [finite, *([pandera.Check.in_range(*label_range)] if label_range else [])]
        )
    elif task.kind == "token_classification":
        columns["text"] = pandera.Column(object, [pandera.Check(_has_items, element_wise=True, name="has words")])
        known = pandera.Check(lambda tags: _within(tags, len(task.labels)), element_wise=True, name="known tags")
        columns["label"] = pandera.Column(object, [known])
        checks = [pandera.Check(_as_many, name="a tag for each word")]
    elif task.kind == "question_answering":
        answered = pandera.Check(lambda cell: _has_items(cell["text"]), element_wise=True, name="has an answer")
        columns["label"] = pandera.Column(object, [answered])
    elif task.kind == "summarization":
        columns["label"] = pandera.Column(str, [_FILLED])
    return pandera.DataFrameSchema(columns, checks=checks, strict=True)


def _has_items(cell: Any) -> bool:
    return len(cell) > 0


def _within(tags: Any, count: int) -> bool:
    return all(0 <= tag < count for tag in tags)


def _as_many(frame: pd.DataFrame) -> pd.Series:
    return frame["text"].map(len) == frame["label"].map(len)
