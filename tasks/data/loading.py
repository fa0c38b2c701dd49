"""Load a split as model inputs: as a data set for training, or as batches for other passes, such as calibration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from datasets import Dataset
from pyarrow import parquet
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from eckart.model.batches import Batch
from tasks.artifacts.paths import CALIBRATION
from tasks.artifacts.task_spec import SPLITS, Split, Task, load_split, load_task
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks._prediction import Collate, by_length


def file_of(name: Split) -> Path:
    """Return the file from which `encoded` loads a split."""
    return CALIBRATION if name == "calibration" else SPLITS / f"{name}.parquet"


def encoded(name: Split, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load a split, tokenized and with labels, but not yet padded; the stage calibration has tokenized its own."""
    if name == "calibration":
        return Dataset(parquet.read_table(file_of(name)))
    task = load_task()
    return kind_of(task).encode(with_originals(load_split(name), task), tokenizer, name)


def with_originals(frame: pd.DataFrame, task: Task) -> pd.DataFrame:
    """Return `frame`; if its labels are what the original model answers, with these (`NlpTask.from_original`)."""
    kind = kind_of(task)
    return kind.with_originals(*load(TEACHER, kind.auto), frame) if kind.from_original else frame


def batches(data: Dataset, collate: Collate, size: int, device: str) -> Iterator[Batch]:
    """Yield padded batches with labels, on `device`. Examples are sorted by length, so batches have little padding."""
    for batch in DataLoader(data.select(by_length(data)), batch_size=size, collate_fn=collate):
        yield {name: values.to(device) for name, values in batch.items()}
