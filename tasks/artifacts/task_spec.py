"""The data of a study between stages: `data/splits`, and how a split becomes model inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict

from tasks.artifacts.metrics import MetricName, TaskKindName

SPLITS = Path("data/splits")
REFERENCE = Path("data/reference")
"""What the champion learned from."""
REFERENCE_PARTS = ("train.parquet", "task.json")
"""Its files, as they are in data/splits."""

Split = Literal["train", "validation", "test", "calibration"]


class Task(BaseModel):
    """What is to be learned, as the extract stage found it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: TaskKindName
    labels: tuple[str, ...]
    """Names of the classes, in order of their ids; empty where there are none."""
    metric: MetricName
    max_length: int
    target_length: int | None
    """Of a summary, in tokens."""
    prefix: str | None
    """What stands before each document that is to be summarized."""
    stride: int | None
    """Tokens that neighbouring windows of a long context share."""
    sizes: dict[Split, int]
    """Rows of a split at most; of language modelling, which is cut into rows only when it is tokenized, blocks."""
    seed: int
    """Of the lots of those blocks."""


def load_task() -> Task:
    return Task.model_validate_json((SPLITS / "task.json").read_text())


def load_split(name: Split) -> pd.DataFrame:
    """Columns text, text_pair and label, those of them that the kind of task has."""
    return pd.read_parquet(SPLITS / f"{name}.parquet")
