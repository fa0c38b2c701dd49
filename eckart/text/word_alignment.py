"""Alignment of labelled words with the tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def first_tokens(words: Sequence[str], offsets: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the position of each word's first token, `(words,)`, in the text of all words joined by single spaces.

    It is -1 for a word without a token: one that was cut off, or that the tokenizer drops.

    Args:
        offsets: `(tokens, 2)`, the characters that each token covers.
        real: `(tokens,)`, whether a token belongs to the text; special tokens and padding do not.
    """
    lengths = np.array([len(word) for word in words], dtype=int)
    word_ends = np.cumsum(lengths + 1) - 1
    tokens = np.flatnonzero(real)
    begins, ends = offsets[tokens].reshape(-1, 2).T
    first = np.searchsorted(ends, word_ends - lengths, side="right")  # the first token that reaches into the word
    has_token = first < len(tokens)
    has_token[has_token] = begins[first[has_token]] < word_ends[has_token]
    result = np.full(len(words), -1)
    result[has_token] = tokens[first[has_token]]
    return result
