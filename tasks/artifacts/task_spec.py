"""Files of `data/splits`: the splits of a study's data, and its task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pandas as pd
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from tasks.artifacts.generation import Generation
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.pooling import Pooling
from tasks.nlp_tasks import TaskName

SPLITS = Path("data/splits")
CALIBRATION_TEXTS = "calibration_texts.json"
"""Name of the file in SPLITS with the texts of data.calibration_texts. It is there without texts, too."""
TEXTS = "texts.json"
"""Name of the file in SPLITS with all texts of evaluate.texts: name → rows. It is there without texts, too."""
REFERENCE = Path("data/reference")
"""Folder of the data on which the champion was trained."""
REFERENCE_PARTS = ("train.parquet", "task.json")
"""Names of the files in REFERENCE, which are copied from data/splits."""

Split = Literal["train", "validation", "test", "calibration"]


class Task(BaseModel):
    """Task of a study, as the stage extract writes it to task.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: TaskName
    labels: tuple[str, ...]
    """Names of the classes in the order of their ids; empty if there are no classes."""
    metric: MetricName
    max_length: int
    target_length: int | None
    """Largest number of tokens of a summary."""
    generation: Generation | None = None
    """Beam search for summaries; None: they are greedy."""
    prefix: str | None
    """Text before each document that is to be summarized, or text that is to be embedded."""
    stride: int | None
    """Question answering: number of tokens that neighboring windows of a long context share. Language modeling:
    number of tokens by which the next window that is scored begins later."""
    sizes: dict[Split, int]
    """Largest number of examples in each split; for running text, of blocks of `max_length` tokens."""
    seed: int
    """Seed for drawing the blocks of running text."""
    separator: str | None = None
    """White space or a token between the rows of running text; None: an empty line."""
    pooling: Pooling | None = None
    """Way in which an embedding is made of the states of a text's tokens; None: their mean."""
    calibration_blocks: Literal["random"] | None = None
    """`random`: calibration blocks begin at random tokens of running text; None: they are a sample of its blocks."""
    first: Literal["bos"] | None = None
    """`bos`: the beginning-of-text token takes the place of the first token of each block of running text."""


def load_task() -> Task:
    return Task.model_validate_json((SPLITS / "task.json").read_text())


def load_texts() -> dict[str, pd.DataFrame]:
    """Load the texts of evaluate.texts: name → its rows, with the column text."""
    rows = json.loads((SPLITS / TEXTS).read_text())
    return {name: pd.DataFrame({"text": texts}) for name, texts in rows.items()}


def load_split(name: Split) -> pd.DataFrame:
    """Load a split. It has the columns text, text_pair and label, or those of them that the data have."""
    return pd.read_parquet(SPLITS / f"{name}.parquet")


def columns_of(name: Split) -> list[str]:
    """Return the names of the columns of a split, without its rows."""
    return list(pq.read_schema(SPLITS / f"{name}.parquet").names)
