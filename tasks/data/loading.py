"""Load a split as model inputs: as a data set for training, or as batches for other passes, such as calibration."""

from __future__ import annotations

from collections.abc import Iterator

from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from eckart.calibration.losses import Batch
from tasks.artifacts.task_spec import Split, load_split, load_task
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks._prediction import Collate, by_length


def encoded(name: Split, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load a split, tokenized and with labels, but not yet padded."""
    return kind_of(load_task()).encode(load_split(name), tokenizer, name)


def batches(data: Dataset, collate: Collate, size: int, device: str) -> Iterator[Batch]:
    """Yield padded batches with labels, on `device`. Examples are sorted by length, so batches have little padding."""
    for batch in DataLoader(data.select(by_length(data)), batch_size=size, collate_fn=collate):
        yield {name: values.to(device) for name, values in batch.items()}
