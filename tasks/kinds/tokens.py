"""Token classification: a tag for each word of a row, such as named entities or parts of speech.

A word is labelled at its first sub-token. (choice) The words are joined by spaces before they are tokenized, not handed
over one by one: tokenizers of bytes and of sentence pieces mark a word by the space before it, and would take words
without one for the middles of others. Words beyond `max_length` tokens are neither learned nor scored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from seqeval.metrics import f1_score as entity_f1_score
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eckart.losses import IGNORED, token_loss
from tasks.dataset import Split, Task
from tasks.kinds.kind import Collate, Kind, check_offsets, labelled, predict, scored
from tasks.kinds.sequence import head
from tasks.metrics import MetricName
from tasks.records import Score

_IOB = re.compile(r"O|[BIES]-.+")


def encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
    """Rows with the tag of each word at its first sub-token, and -100 elsewhere.

    Raises:
        StageError: the tokenizer does not say where its tokens stand.
    """
    check_offsets(tokenizer, task)
    texts = [" ".join(words) for words in frame["text"]]
    columns = tokenizer(texts, truncation=True, max_length=task.max_length, return_offsets_mapping=True)
    rows = zip(frame["text"], frame["label"], columns.pop("offset_mapping"), strict=True)
    labels = [
        _labels(words, tags, np.array(offsets), np.array([part is not None for part in columns.sequence_ids(row)]))
        for row, (words, tags, offsets) in enumerate(rows)
    ]
    return Dataset.from_dict({**columns, "labels": labels})


def _labels(words: Sequence[str], tags: Sequence[int], offsets: np.ndarray, real: np.ndarray) -> np.ndarray:
    """`(tokens,)` from the characters `(tokens, 2)` that each token covers; special tokens are not `real`."""
    lengths = np.array([len(word) for word in words])
    word_ends = np.cumsum(lengths + 1) - 1
    tokens = np.flatnonzero(real)
    begins, ends = offsets[tokens].reshape(-1, 2).T
    first = np.searchsorted(ends, word_ends - lengths, side="right")  # the first token that reaches into the word
    found = first < len(tokens)
    found[found] = begins[first[found]] < word_ends[found]  # a word may have no token at all
    labels = np.full(len(offsets), IGNORED)
    labels[tokens[first[found]]] = np.asarray(tags)[found]
    return labels


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> Score:
    data = encode(frame, task, tokenizer, "test")
    predictions, labels = predict(model, data, _collate(tokenizer, model), batch_size)
    outputs = predictions[0] if isinstance(predictions, tuple) else predictions
    return scored(task, metrics(task, outputs.argmax(-1), labels), loss(outputs, labels), len(data))


def loss(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean over rows of each row's mean cross-entropy, as `eckart.losses.token_loss` has it.

    Args:
        outputs: `(rows, tokens, classes)`.
        labels: `(rows, tokens)`.
    """
    predicted, wanted = torch.from_numpy(outputs).double(), torch.from_numpy(labels)
    losses = cross_entropy(predicted.mT, wanted, ignore_index=IGNORED, reduction="none")
    return float((losses.sum(1) / (wanted != IGNORED).sum(1).clamp(min=1)).mean())


def metrics(task: Task, guesses: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]:
    """All metrics of tags `(rows, tokens)`, of the tokens that are labelled.

    F1 is that of entities, each right only as a whole (seqeval's, which is conlleval's), where every tag is O or begins
    with B-, I-, E- or S-; of other tags it is the mean over tags.
    """
    where = labels != IGNORED
    accuracy = float(accuracy_score(labels[where], guesses[where]))
    if not all(_IOB.fullmatch(tag) for tag in task.labels):
        return {"accuracy": accuracy, "f1": float(f1_score(labels[where], guesses[where], average="macro"))}
    names = np.array(task.labels)
    wanted, found = (
        [names[row[here]].tolist() for row, here in zip(tags, where, strict=True)] for tags in (labels, guesses)
    )
    return {"accuracy": accuracy, "f1": float(entity_f1_score(wanted, found, zero_division=0))}


def _collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Collate:
    return DataCollatorForTokenClassification(tokenizer)


TOKENS = Kind(
    auto=AutoModelForTokenClassification,
    head=head,
    encode=encode,
    collate=_collate,
    loss=token_loss,
    logits=labelled,
    score=score,
)
