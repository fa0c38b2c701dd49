"""The data of a study between stages: `data/splits`, with the splits and the task."""

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
    """Tokens of a summary, at most."""
    prefix: str | None
    """Text before each document that is to be summarized."""
    stride: int | None
    """Tokens that neighbouring windows of a long context share."""
    sizes: dict[Split, int]
    """Examples of each split, at most; for running text, blocks of `max_length` tokens."""
    seed: int
    """For drawing those blocks."""


def load_task() -> Task:
    return Task.model_validate_json((SPLITS / "task.json").read_text())


def load_split(name: Split) -> pd.DataFrame:
    """Load a split, with the columns text, text_pair and label, as far as the task has them."""
    return pd.read_parquet(SPLITS / f"{name}.parquet")
