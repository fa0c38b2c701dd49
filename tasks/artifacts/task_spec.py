"""The data of a study between stages: `data/splits`, and how a split becomes model inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict

from tasks.artifacts.metrics import MetricName
from tasks.nlp_tasks import TaskName

SPLITS = Path("data/splits")
REFERENCE = Path("data/reference")
"""The data that the champion learned from."""
REFERENCE_PARTS = ("train.parquet", "task.json")
"""Its files, as they are in data/splits."""

Split = Literal["train", "validation", "test", "calibration"]


class Task(BaseModel):
    """The task of a study, as the stage extract wrote it down."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: TaskName
    labels: tuple[str, ...]
    """Names of the classes, in order of their ids; empty where there are none."""
    metric: MetricName
    max_length: int
    target_length: int | None
    """Of a summary, in tokens."""
    prefix: str | None
    """Text that stands before each document that is to be summarized."""
    stride: int | None
    """Tokens that neighbouring windows of a long context share."""
    sizes: dict[Split, int]
    """Examples of a split at most; for running text, blocks, into which it is cut once it is tokenized."""
    seed: int
    """For drawing those blocks."""


def load_task() -> Task:
    return Task.model_validate_json((SPLITS / "task.json").read_text())


def load_split(name: Split) -> pd.DataFrame:
    """Return a split with those of the columns text, text_pair and label that the task has."""
    return pd.read_parquet(SPLITS / f"{name}.parquet")
