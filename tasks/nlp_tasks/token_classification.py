"""Token classification: a tag for each word of a row, such as named entities or parts of speech.

A word is labelled at its first sub-token. (choice) The words are joined by spaces before they are tokenized, not handed
over one by one: tokenizers of bytes and of sentence pieces mark a word by the space before it, and would take words
without one for the middles of others. Words beyond `max_length` tokens are neither learned nor scored.
"""

from __future__ import annotations

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

from eckart.calibration.losses import IGNORED, token_loss
from eckart.text.word_alignment import first_tokens
from tasks.artifacts.metrics import ENTITY_TAG, MetricName
from tasks.artifacts.task_spec import Split, Task
from tasks.nlp_tasks.nlp_task import Answers, Collate, Scored, TaskKind, check_offsets, labelled, outputs_of, scored
from tasks.nlp_tasks.sequence_classification import head


def encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
    """Rows with the tag of each word at its first sub-token, and -100 elsewhere.

    Raises:
        StageError: the tokenizer does not say where its tokens stand.
    """
    return _encode(frame, task, tokenizer)[0]


def _encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, list[np.ndarray]]:
    """The rows, and the first sub-token of each word `(words,)`, -1 where it has none."""
    check_offsets(tokenizer, task)
    texts = [" ".join(words) for words in frame["text"]]
    columns = tokenizer(texts, truncation=True, max_length=task.max_length, return_offsets_mapping=True)
    firsts = [
        first_tokens(words, np.array(offsets), np.array([part is not None for part in columns.sequence_ids(row)]))
        for row, (words, offsets) in enumerate(zip(frame["text"], columns.pop("offset_mapping"), strict=True))
    ]
    rows = zip(columns["input_ids"], frame["label"], firsts, strict=True)
    labels = [_labels(len(ids), np.asarray(tags), first) for ids, tags, first in rows]
    return Dataset.from_dict({**columns, "labels": labels}), firsts


def _labels(tokens: int, tags: np.ndarray, first: np.ndarray) -> np.ndarray:
    labels = np.full(tokens, IGNORED)
    labels[first[first >= 0]] = tags[first >= 0]
    return labels


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    frame: pd.DataFrame,
    task: Task,
    batch_size: int,
    split: Split,
) -> Scored:
    """A row contributes the tags of its labelled tokens."""
    data = encode(frame, task, tokenizer, split)
    outputs, labels = outputs_of(model, data, _collate(tokenizer, model), batch_size)
    guesses, where = outputs.argmax(-1), labels != IGNORED
    tags = {
        name: [row[here] for row, here in zip(values, where, strict=True)]
        for name, values in (("label", labels), ("guess", guesses))
    }
    return scored(task, metrics(task, guesses, labels), loss(outputs, labels), pd.DataFrame(tags))


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> list[Answers]:
    """A tag for each word, None for one without a token within `max_length`."""
    data, firsts = _encode(frame, task, tokenizer)
    outputs, labels = outputs_of(model, data, _collate(tokenizer, model), batch_size)
    rows = zip(outputs.argmax(-1), labels, firsts, strict=True)
    return [{"tags": _tags(guesses[wanted != IGNORED], first, task)} for guesses, wanted, first in rows]


def trivial(train: pd.DataFrame, frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """The most frequent tag of the training rows, for every word."""
    most = int(np.bincount(np.concatenate(train["label"].tolist())).argmax())
    labels = [np.array(row) for row in encode(frame, task, tokenizer, "test")["labels"]]
    wanted = [row[row != IGNORED] for row in labels]
    return pd.DataFrame({"label": wanted, "guess": [np.full_like(row, most) for row in wanted]})


def _tags(guesses: np.ndarray, first: np.ndarray, task: Task) -> list[str | None]:
    """`guesses` are those of the labelled tokens alone, `(labelled tokens,)`: padding may stand on either side."""
    order = iter(np.unique(first[first >= 0], return_inverse=True)[1])
    return [None if token < 0 else task.labels[guesses[next(order)]] for token in first]


def loss(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean over rows of each row's mean cross-entropy, as `eckart.calibration.losses.token_loss` has it.

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
    if not all(ENTITY_TAG.fullmatch(tag) for tag in task.labels):
        return {"accuracy": accuracy, "f1": float(f1_score(labels[where], guesses[where], average="macro"))}
    names = np.array(task.labels)
    wanted, found = (
        [names[row[here]].tolist() for row, here in zip(tags, where, strict=True)] for tags in (labels, guesses)
    )
    return {"accuracy": accuracy, "f1": float(entity_f1_score(wanted, found, zero_division=0))}


def _collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Collate:
    return DataCollatorForTokenClassification(tokenizer)


TOKENS = TaskKind(
    auto=AutoModelForTokenClassification,
    head=head,
    encode=encode,
    collate=_collate,
    loss=token_loss,
    own_loss=False,
    logits=labelled,
    score=score,
    answers=answers,
    trivial=trivial,
)
