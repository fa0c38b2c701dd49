"""Answers that are parts of a context: its windows, and the best span of tokens over them.

A context that is too long is cut into windows, of which neighbours share some tokens. Each is a row for a model that
points at the tokens where the answer starts and ends. The answer to a question is the best over its windows.

Source: windows as in Devlin et al., NAACL 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedTokenizerBase

LONGEST = 30
"""Tokens of an answer at most, as in BERT's script for SQuAD."""
NOT_CONTEXT = -1

_CHUNK = 1000  # rows that are tokenized at once: the tokenizer's own lists take much memory


class NoRoom(ValueError):
    """A question leaves too little of a window to its context; the message says how much."""


@dataclass(frozen=True)
class Window:
    """A part of the context with its question before it."""

    row: int
    """Of the question."""
    inputs: Mapping[str, np.ndarray]
    """What the model reads, `(tokens,)` each."""
    offsets: np.ndarray
    """The characters of the context that each token covers, `(tokens, 2)`; NOT_CONTEXT where it is not of it."""


@dataclass(frozen=True)
class Answer:
    """The best of a question; an empty one where its context has no token."""

    text: str = ""
    sum_of_logits: float = -np.inf
    """Of the start's and the end's."""
    probability: float = 0.0
    """Of that start times that of that end, among all tokens of their window."""


def windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
) -> Iterator[Window]:
    """All windows of all questions, in their order.

    Args:
        tokenizer: a fast one, which says where its tokens stand.
        max_length: tokens of a window.
        stride: tokens of the context that neighbouring windows share.

    Raises:
        NoRoom: a question is too long.
    """
    for begin in range(0, len(questions), _CHUNK):
        some = [question.strip() for question in questions[begin : begin + _CHUNK]]
        _check_room(some, tokenizer, max_length, stride)
        batch = tokenizer(
            some,
            list(contexts[begin : begin + _CHUNK]),
            truncation="only_second",
            max_length=max_length,
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
                offsets=np.where(context[:, None], np.array(offsets[number]), NOT_CONTEXT),
            )


def _check_room(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, stride: int) -> None:
    ids = tokenizer(list(questions), add_special_tokens=False, verbose=False)["input_ids"]
    longest = max(map(len, ids))
    room = max_length - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= stride:
        raise NoRoom(
            f"a question of {longest} tokens leaves {max(room, 0)} of max_length={max_length} to its context, and "
            f"windows of it share stride={stride}: raise max_length, lower stride, or shorten the question"
        )


def best_answers(
    every: Sequence[Window], starts: Iterable[np.ndarray], ends: Iterable[np.ndarray], contexts: Sequence[str]
) -> list[Answer]:
    """The best answer to each question: of windows, the one with the larger sum of logits.

    Args:
        starts, ends: of each window the logits `(tokens or more,)`; what is more is padding.
    """
    best = [Answer()] * len(contexts)
    for window, start, end in zip(every, starts, ends, strict=True):
        tokens = len(window.offsets)
        start, end = start[:tokens], end[:tokens]
        sum_of_logits, (first, last) = best_span(start, end, window.offsets)
        if sum_of_logits > best[window.row].sum_of_logits:
            probability = float(np.exp(sum_of_logits - np.logaddexp.reduce(start) - np.logaddexp.reduce(end)))
            best[window.row] = Answer(contexts[window.row][first:last], sum_of_logits, probability)
    return best


def best_span(start: np.ndarray, end: np.ndarray, offsets: np.ndarray) -> tuple[float, tuple[int, int]]:
    """The largest sum of a start's and an end's logit within the context, and the characters that it spans.

    All pairs of up to LONGEST tokens are looked at, where BERT's script takes those of the 20 best starts and ends.

    Args:
        start, end: `(tokens or more,)`; what is more is padding.
        offsets: `(tokens, 2)`, as in `Window`.
    """
    context = offsets[:, 0] != NOT_CONTEXT
    start, end = (np.where(context, logits[: len(context)], -np.inf) for logits in (start, end))
    ahead = sliding_window_view(np.pad(end, (0, LONGEST - 1), constant_values=-np.inf), LONGEST)
    sums = start[:, None] + ahead
    first, further = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[first, further]), (int(offsets[first, 0]), int(offsets[first + further, 1]))
