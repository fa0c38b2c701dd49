"""Load a split as model inputs: as a data set for training, or as batches for other passes, such as calibration."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd
from datasets import Dataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from eckart.calibration.losses import Batch
from tasks.artifacts.paths import WRITTEN
from tasks.artifacts.task_spec import CALIBRATION_TEXTS, SPLITS, Split, Task, load_split, load_task
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks._prediction import Collate, by_length


def encoded(name: Split, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load a split, tokenized and with labels, but not yet padded.

    The calibration examples of a language model may come from several texts: the training text, the other
    `data.calibration_texts`, and what the model has written. They are mixed evenly, so that the first examples, which
    are all that some rank searches read, have each text in its share.
    """
    task = load_task()
    if name != "calibration":
        return kind_of(task).encode(with_originals(load_split(name), task), tokenizer, name)
    return mixed([*_calibration(task, tokenizer)])


def with_originals(frame: pd.DataFrame, task: Task) -> pd.DataFrame:
    """Return `frame`; if its labels are what the original model answers, with these (`NlpTask.from_original`)."""
    kind = kind_of(task)
    return kind.with_originals(*load(TEACHER, kind.auto), frame) if kind.from_original else frame


def mixed(parts: list[Dataset]) -> Dataset:
    """Concatenate data sets in an order in which each is spread evenly; a single one stays as it is."""
    if len(parts) == 1:
        return parts[0]
    places = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
    return concatenate_datasets(parts).select(np.argsort(places, kind="stable"))


def _calibration(task: Task, tokenizer: PreTrainedTokenizerBase) -> Iterator[Dataset]:
    """Yield the calibration examples from each text."""
    if task.sizes["calibration"]:
        yield kind_of(task).encode(with_originals(load_split("calibration"), task), tokenizer, "calibration")
    for text in json.loads((SPLITS / CALIBRATION_TEXTS).read_text()):
        sizes = {**task.sizes, "train": sys.maxsize, "calibration": text["examples"]}  # train limits data.source only
        own = task.model_copy(update={"sizes": sizes, "separator": text["separator"]})
        yield kind_of(own).encode(pd.DataFrame({"text": text["rows"]}), tokenizer, "calibration")
    if WRITTEN.exists() and len(blocks := pd.read_parquet(WRITTEN)):  # the stage `write` need not run where it is empty
        ids = np.stack(blocks["input_ids"].to_list())
        yield Dataset.from_dict({"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids})


def batches(data: Dataset, collate: Collate, size: int, device: str) -> Iterator[Batch]:
    """Yield padded batches with labels, on `device`. Examples are sorted by length, so batches have little padding."""
    for batch in DataLoader(data.select(by_length(data)), batch_size=size, collate_fn=collate):
        yield {name: values.to(device) for name, values in batch.items()}
