"""The data of a study between stages: `data/splits`, and how a split becomes model inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pandas as pd
from datasets import Dataset
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedTokenizerBase

SPLITS = Path("data/splits")

Split = Literal["train", "test", "calibration"]


class Task(BaseModel):
    """What is to be learned, as the extract stage found it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["classification", "regression"]
    labels: tuple[str, ...]
    """Names of the classes, in order of their ids; empty for a regression."""
    metric: Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
    max_length: int


def load_task() -> Task:
    return Task.model_validate_json((SPLITS / "task.json").read_text())


def load_split(name: Split) -> pd.DataFrame:
    """Columns text, text_pair (pairs of sentences only) and label."""
    return pd.read_parquet(SPLITS / f"{name}.parquet")


def tokenized(name: Split, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """A split as model inputs, in the order of the split; unpadded."""
    frame, task = load_split(name), load_task()
    pairs: list[Any] = [frame["text"].tolist()]
    if "text_pair" in frame:
        pairs.append(frame["text_pair"].tolist())
    columns = tokenizer(*pairs, truncation=True, max_length=task.max_length)
    return Dataset.from_dict({**columns, "labels": frame["label"].tolist()})
