"""Extractive question answering: contexts cut into windows, and the best answer over a question's windows.

A context that is too long is cut into windows that overlap by some tokens. Each window is one input of a model that
predicts where the answer starts and ends. The answer to a question is the best over its windows.

Source: windows as in Devlin et al., NAACL 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedTokenizerBase

LONGEST = 30
"""The most tokens of an answer, as in BERT's script for SQuAD."""
NOT_CONTEXT = -1

_CHUNK = 1000  # questions that are tokenized at once: the tokenizer's own lists take much memory


class NoRoom(ValueError):
    """A question is so long that its windows have too little room for the context; the message says how much."""


@dataclass(frozen=True)
class Window:
    """A question and a part of its context."""

    row: int
    """The number of the question."""
    inputs: Mapping[str, np.ndarray]
    """The model's inputs, `(tokens,)` each."""
    offsets: np.ndarray
    """The characters of the context that each token covers, `(tokens, 2)`; NOT_CONTEXT for other tokens."""


@dataclass(frozen=True)
class Answer:
    """The best answer to a question; empty if its context has no token."""

    text: str = ""
    sum_of_logits: float = -np.inf
    """The logit of its start plus that of its end."""
    probability: float = 0.0
    """The probability of its start times that of its end, among all tokens of their window."""


def windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
) -> Iterator[Window]:
    """Yield all windows of all questions, in order.

    Args:
        tokenizer: a fast one, which gives offsets of its tokens.
        max_length: the most tokens of a window.
        stride: tokens of the context that neighbouring windows share.

    Raises:
        NoRoom: a question is too long.
    """
    for begin in range(0, len(questions), _CHUNK):
        chunk = [question.strip() for question in questions[begin : begin + _CHUNK]]
        _check_room(chunk, tokenizer, max_length, stride)
        batch = tokenizer(
            chunk,
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
            f"a question of {longest} tokens leaves {max(room, 0)} of max_length={max_length} tokens for its context, "
            f"and its windows share stride={stride}: raise max_length, lower stride, or shorten the question"
        )


def best_answers(
    windows: Sequence[Window], starts: Iterable[np.ndarray], ends: Iterable[np.ndarray], contexts: Sequence[str]
) -> list[Answer]:
    """Return the best answer to each question: the span with the largest sum of logits over its windows.

    Args:
        starts, ends: the logits of each window, `(tokens or more,)`; the rest is padding.
    """
    best = [Answer()] * len(contexts)
    for window, start, end in zip(windows, starts, ends, strict=True):
        tokens = len(window.offsets)
        start, end = start[:tokens], end[:tokens]
        sum_of_logits, (first, last) = best_span(start, end, window.offsets)
        if sum_of_logits > best[window.row].sum_of_logits:
            probability = float(np.exp(sum_of_logits - np.logaddexp.reduce(start) - np.logaddexp.reduce(end)))
            best[window.row] = Answer(contexts[window.row][first:last], sum_of_logits, probability)
    return best


def best_span(start: np.ndarray, end: np.ndarray, offsets: np.ndarray) -> tuple[float, tuple[int, int]]:
    """Return the largest sum of a start's and an end's logit within the context, and the characters of that span.

    It compares all spans of up to LONGEST tokens, where BERT's script only takes the 20 best starts and ends.

    Args:
        start, end: `(tokens or more,)`; the rest is padding.
        offsets: `(tokens, 2)`, as in `Window`.
    """
    context = offsets[:, 0] != NOT_CONTEXT
    start, end = (np.where(context, logits[: len(context)], -np.inf) for logits in (start, end))
    ahead = sliding_window_view(np.pad(end, (0, LONGEST - 1), constant_values=-np.inf), LONGEST)
    sums = start[:, None] + ahead
    first, further = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[first, further]), (int(offsets[first, 0]), int(offsets[first + further, 1]))
