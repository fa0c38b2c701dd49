"""Extractive question answering: cuts long contexts into windows, and finds a question's best answer in its windows.

A context that is too long for the model is cut into windows that overlap by some tokens. Each window is one input of
the model, which predicts where the answer starts and ends.

Source: windows as in Devlin et al., NAACL 2019.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from transformers import PreTrainedTokenizerBase

LONGEST = 30
"""Maximum number of tokens of an answer, as in BERT's script for SQuAD."""
NOT_CONTEXT = -1
"""Value in `Window.offsets` for tokens that do not belong to the context."""

_CHUNK = 1000  # number of questions that are tokenized at once; the tokenizer's output for all would take much memory


class NoRoom(ValueError):
    """Error: a question is so long that its windows have too little room for the context."""


@dataclass(frozen=True)
class Window:
    """Input of a model: a question and a part of its context."""

    row: int
    """Number of the question, from 0."""
    inputs: Mapping[str, np.ndarray]
    """The model's inputs, `(tokens,)` each."""
    offsets: np.ndarray
    """Where each token begins and ends in the context, in characters, `(tokens, 2)`; the end is exclusive. NOT_CONTEXT
    for tokens outside the context."""


@dataclass(frozen=True)
class Answer:
    """The best answer to a question; empty if the context has no token."""

    text: str = ""
    sum_of_logits: float = -np.inf
    """Logit of the answer's start + logit of its end."""
    probability: float = 0.0
    """Probability of the start · probability of the end, each among all tokens of the window."""


def windows(
    questions: Sequence[str],
    contexts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
) -> Iterator[Window]:
    """Yield all windows of all questions, in order.

    Args:
        questions, contexts: the questions, and the context of each question in the same order.
        tokenizer: a fast tokenizer, because only these return offsets of tokens.
        max_length: maximum number of tokens of a window.
        stride: number of context tokens that neighboring windows share.

    Raises:
        NoRoom: a question is so long that its windows have too little room for the context.
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
    """Return the best answer to each question: among all its windows, the span with the largest sum of logits.

    Args:
        windows: the windows of all questions.
        starts, ends: for each window, the logits that the answer starts or ends at a token, `(tokens or more,)`; those
            after the last token belong to padding and are ignored.
        contexts: the context of each question.
    """
    best = [Answer()] * len(contexts)
    for window, start, end in zip(windows, starts, ends, strict=True):
        tokens = len(window.offsets)
        start, end = start[:tokens], end[:tokens]
        sum_of_logits, (first, last) = best_span(start, end, window.offsets)
        if sum_of_logits > best[window.row].sum_of_logits:
            probability = float(np.exp(sum_of_logits - np.logaddexp.reduce(start) - np.logaddexp.reduce(end)))
            best[window.row] = Answer(_with_marks(contexts[window.row], first, last), sum_of_logits, probability)
    return best


def _with_marks(context: str, first: int, last: int) -> str:
    """Return a part of the context, with the combining marks of its last letter: BERT's tokens end before them.

    White space at its ends is left out: tokens of SentencePiece begin with the space before a word.
    """
    while unicodedata.category(context[last : last + 1] or " ").startswith("M"):
        last += 1
    return context[first:last].strip()


def best_span(start: np.ndarray, end: np.ndarray, offsets: np.ndarray) -> tuple[float, tuple[int, int]]:
    """Find the span of the context with the largest sum of logits (start + end) in one window.

    All spans of up to LONGEST tokens are compared; BERT's script only compares the 20 best starts and ends.

    Args:
        start, end: logits `(tokens,)`.
        offsets: `(tokens, 2)`, as in `Window`.

    Returns:
        The sum of logits, and where the span begins and ends in the context, in characters.
    """
    context = offsets[:, 0] != NOT_CONTEXT
    start, end = (np.where(context, logits, -np.inf) for logits in (start, end))
    ahead = sliding_window_view(np.pad(end, (0, LONGEST - 1), constant_values=-np.inf), LONGEST)
    sums = start[:, None] + ahead
    first, further = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[first, further]), (int(offsets[first, 0]), int(offsets[first + further, 1]))
