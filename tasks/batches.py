"""A split as batches, for passes that are no training."""

from __future__ import annotations

from collections.abc import Iterator

from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from eckart.batch import Batch


def batches(data: Dataset, tokenizer: PreTrainedTokenizerBase, size: int, device: str) -> Iterator[Batch]:
    """Padded model inputs with labels, on `device`."""
    for batch in DataLoader(data, batch_size=size, collate_fn=DataCollatorWithPadding(tokenizer)):
        yield {name: values.to(device) for name, values in batch.items()}
