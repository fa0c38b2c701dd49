"""Extractive question answering: the answer is a part of the context, as in SQuAD 1.1.

A context that is too long for `max_length` is cut into windows, of which neighbours share `stride` tokens. Each is a
row for the model: it points at the tokens where the answer starts and ends, or at the CLS token (at the first, where
there is none) if the answer is not wholly in the window. The answer to a question is the best over its windows.

Source: Rajpurkar et al., EMNLP 2016, and the evaluation script of SQuAD 1.1; windows as in Devlin et al., NAACL 2019.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from numpy.lib.stride_tricks import sliding_window_view
from torch.nn.functional import cross_entropy
from transformers import AutoModelForQuestionAnswering, PreTrainedModel, PreTrainedTokenizerBase
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from eckart.losses import span_logits, span_loss
from tasks.dataset import Split, Task
from tasks.kinds.kind import Collate, Kind, check_offsets, predict, scored
from tasks.metrics import MetricName
from tasks.records import Score
from tasks.stage import StageError

LONGEST = 30
"""Tokens of an answer at most, as in BERT's script for SQuAD."""

_CHUNK = 1000  # rows that are tokenized at once: the tokenizer's own lists take much memory
_NOT_CONTEXT = -1


@dataclass(frozen=True)
class Window:
    """A part of the context with its question before it."""

    row: int
    """Of the question."""
    inputs: Mapping[str, np.ndarray]
    """What the model reads, `(tokens,)` each."""
    offsets: np.ndarray
    """The characters of the context that each token covers, `(tokens, 2)`; -1 where it is not of the context."""


def encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
    """Windows, and between which tokens of each the first answer stands.

    Raises:
        StageError: the tokenizer does not say where its tokens stand, or a question leaves no room for its context.
    """
    return _encode(frame, list(windows(frame, task, tokenizer)), tokenizer)


def _encode(frame: pd.DataFrame, every: Sequence[Window], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    spans = [_span(cell["text"][0], cell["answer_start"][0]) for cell in frame["label"]]
    return Dataset.from_list([{**one.inputs, **_positions(one, *spans[one.row], tokenizer)} for one in every])


def _span(answer: str, start: int) -> tuple[int, int]:
    """The characters from the first to behind the last that is no white space, which tokens may not cover."""
    start += len(answer) - len(answer.lstrip())
    return start, start + len(answer.strip())


def windows(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> Iterator[Window]:
    """All windows of all questions, in their order."""
    check_offsets(tokenizer, task)
    stride = task.stride or 0
    for begin in range(0, len(frame), _CHUNK):
        some = frame.iloc[begin : begin + _CHUNK]
        questions = some["text"].str.strip().tolist()
        _check_room(questions, task, tokenizer, stride)
        batch = tokenizer(
            questions,
            some["text_pair"].tolist(),
            truncation="only_second",
            max_length=task.max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        rows, offsets = batch.pop("overflow_to_sample_mapping"), batch.pop("offset_mapping")
        for number, row in enumerate(rows):
            context = np.array([part == 1 for part in batch.sequence_ids(number)])
            yield Window(
                row=begin + row,
                inputs={name: np.array(values[number]) for name, values in batch.items()},
                offsets=np.where(context[:, None], np.array(offsets[number]), _NOT_CONTEXT),
            )


def _check_room(questions: list[str], task: Task, tokenizer: PreTrainedTokenizerBase, stride: int) -> None:
    longest = max(map(len, tokenizer(questions, add_special_tokens=False, verbose=False)["input_ids"]))
    room = task.max_length - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= stride:
        raise StageError(
            f"a question of {longest} tokens leaves {max(room, 0)} of data.max_length={task.max_length} to its "
            f"context, and windows of it share data.stride={stride}: raise data.max_length, or lower data.stride"
        )


def _positions(window: Window, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The first and the last token of the answer at the characters `start` to `end`."""
    begins, ends = window.offsets.T
    context = begins != _NOT_CONTEXT
    tokens = np.flatnonzero(context & (ends > start) & (begins < end))
    if len(tokens) and begins[context][0] <= start and end <= ends[context][-1]:
        return {"start_positions": int(tokens[0]), "end_positions": int(tokens[-1])}
    special = np.flatnonzero(window.inputs["input_ids"] == tokenizer.cls_token_id)
    nowhere = int(special[0]) if len(special) else 0
    return {"start_positions": nowhere, "end_positions": nowhere}


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> Score:
    """Metrics are means over questions, the loss is one over windows."""
    every = list(windows(frame, task, tokenizer))
    data = _encode(frame, every, tokenizer)
    predictions, positions = predict(model, data, _collate(tokenizer, model), batch_size)
    starts, ends = predictions[:2]
    guesses = answers(every, starts, ends, frame["text_pair"].tolist())
    golds = [list(cell["text"]) for cell in frame["label"]]
    return scored(task, metrics(guesses, golds), loss(every, (starts, ends), positions), len(frame))


def answers(every: Sequence[Window], starts: np.ndarray, ends: np.ndarray, contexts: Sequence[str]) -> list[str]:
    """The best answer to each question, of logits `(windows, tokens)`: of windows, the one with the larger sum."""
    best = [(-np.inf, "")] * len(contexts)
    for window, start, end in zip(every, starts, ends, strict=True):
        sum_of_logits, (first, last) = best_span(start, end, window.offsets)
        if sum_of_logits > best[window.row][0]:
            best[window.row] = sum_of_logits, contexts[window.row][first:last]
    return [text for _, text in best]


def best_span(start: np.ndarray, end: np.ndarray, offsets: np.ndarray) -> tuple[float, tuple[int, int]]:
    """The largest sum of a start's and an end's logit within the context, and the characters that it spans.

    All pairs of up to LONGEST tokens are looked at, where BERT's script takes those of the 20 best starts and ends.

    Args:
        start, end: `(tokens or more,)`; what is more is padding.
        offsets: `(tokens, 2)`, as in `Window`.
    """
    context = offsets[:, 0] != _NOT_CONTEXT
    start, end = (np.where(context, logits[: len(context)], -np.inf) for logits in (start, end))
    ahead = sliding_window_view(np.pad(end, (0, LONGEST - 1), constant_values=-np.inf), LONGEST)
    sums = start[:, None] + ahead
    first, further = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[first, further]), (int(offsets[first, 0]), int(offsets[first + further, 1]))


def loss(every: Sequence[Window], logits: tuple[np.ndarray, ...], positions: tuple[np.ndarray, ...]) -> float:
    """Mean over windows of the mean cross-entropy of start and end, as `eckart.losses.span_loss` has it."""
    lengths = torch.tensor([len(window.offsets) for window in every])
    total = 0.0
    for predicted, wanted in zip(logits, positions, strict=True):
        padding = torch.arange(predicted.shape[1]) >= lengths[:, None]
        values = torch.from_numpy(predicted).double().masked_fill(padding, -torch.inf)
        total += float(cross_entropy(values, torch.from_numpy(wanted)))
    return total / len(logits)


def metrics(guesses: Sequence[str], golds: Sequence[Sequence[str]]) -> dict[MetricName, float]:
    """Means over questions, of each the best over its gold answers: of equality, and of the F1 of words."""
    pairs = list(zip(guesses, golds, strict=True))
    return {
        "exact_match": float(np.mean([max(normal(guess) == normal(gold) for gold in some) for guess, some in pairs])),
        "f1": float(np.mean([max(_f1(normal(guess), normal(gold)) for gold in some) for guess, some in pairs])),
    }


def normal(answer: str) -> str:
    """Lower case, without punctuation and articles, words one space apart."""
    answer = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def _f1(guess: str, gold: str) -> float:
    guessed, wanted = guess.split(), gold.split()
    common = (Counter(guessed) & Counter(wanted)).total()
    return 2 * common / (len(guessed) + len(wanted)) if common else 0.0


def _head(task: Task) -> dict[str, Any]:
    return {"num_labels": 2}  # a start and an end, whatever head the base model had


def _collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Collate:
    """Padded on the right, whatever the tokenizer does: positions count from the left."""
    return partial(pad_without_fast_tokenizer_warning, tokenizer, padding_side="right", return_tensors="pt")


ANSWERS = Kind(
    auto=AutoModelForQuestionAnswering,
    head=_head,
    encode=encode,
    collate=_collate,
    loss=span_loss,
    logits=span_logits,
    score=score,
)
