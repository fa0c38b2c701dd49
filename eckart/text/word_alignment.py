"""Alignment of words with the tokens of a tokenizer, for tasks with a label for each word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def first_tokens(words: Sequence[str], offsets: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the position of each word's first token `(words,)`; -1 for words that were cut off or have no token.

    A token of just the space before a word (a lone `▁` or `Ġ`) is the word's first, as for transformers' `word_ids`.

    Args:
        words: the words of the tokenized text, in which they were joined by single spaces.
        offsets: where each token begins and ends in that text, in characters, `(tokens, 2)`.
        real: whether each token belongs to the text, `(tokens,)`; special tokens and padding do not.
    """
    lengths = np.array([len(word) for word in words], dtype=int)
    word_ends = np.cumsum(lengths + 1) - 1
    word_begins = word_ends - lengths
    result = np.full(len(words), -1)
    tokens = np.flatnonzero(real)
    if not len(tokens):
        return result
    begins, ends = offsets[tokens].reshape(-1, 2).T
    first = np.searchsorted(ends, word_begins, side="right")  # the first token that reaches into the word
    before = np.maximum(first - 1, 0)
    is_space = (begins[before] >= word_begins - 1) & (ends[before] == word_begins)
    first -= is_space & (first > 0) & (lengths > 0)
    has_token = first < len(tokens)
    has_token[has_token] = begins[first[has_token]] < word_ends[has_token]
    cut = np.searchsorted(word_ends, begins[0], side="right")  # a text that was cut on the left may begin within a word
    if 0 < cut < len(words) and begins[0] > word_begins[cut]:
        has_token[cut] = False
    result[has_token] = tokens[first[has_token]]
    return result
