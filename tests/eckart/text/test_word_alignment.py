"""Words and their first tokens, on texts that are cut at either end."""

from __future__ import annotations

import numpy as np
import pytest

from eckart.text.word_alignment import first_tokens

WORDS = ["the", "plot", "is", "warm"]
OFFSETS = [(0, 3), (4, 6), (6, 8), (9, 11), (12, 14), (14, 16)]  # two tokens for each word of four letters


@pytest.mark.parametrize(
    ("part", "first"),
    [
        (slice(None), [0, 1, 3, 4]),
        (slice(0, 2), [0, 1, -1, -1]),
        (slice(1, None), [-1, 0, 2, 3]),
        (slice(2, None), [-1, -1, 1, 2]),
        (slice(5, None), [-1, -1, -1, -1]),
        (slice(0, 0), [-1, -1, -1, -1]),
    ],
)
def test_only_words_whose_beginning_is_left_have_a_first_token(part: slice, first: list[int]) -> None:
    offsets = np.array(OFFSETS[part], dtype=int).reshape(-1, 2)
    assert first_tokens(WORDS, offsets, np.ones(len(offsets), bool)).tolist() == first


def test_special_tokens_and_padding_are_no_part_of_the_text() -> None:
    offsets = np.array([(0, 0), *OFFSETS, (0, 0), (0, 0)])
    real = np.array([False, *[True] * len(OFFSETS), False, False])
    assert first_tokens(WORDS, offsets, real).tolist() == [1, 2, 4, 5]


def test_a_first_character_that_a_tokenizer_removes_is_no_cut() -> None:
    """Such as a space without width."""
    assert first_tokens(["\u200bso", "it"], np.array([(1, 3), (4, 6)]), np.ones(2, bool)).tolist() == [0, 1]
