"""Normalize texts to find repeated examples: two texts are equal if they differ only in case, spaces or punctuation."""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

import pandas as pd


def texts(rows: pd.DataFrame) -> list[str]:
    """Return for each row its text and text_pair, joined into one string."""
    return ["\n".join(parts) for parts in zip(*_columns(rows), strict=True)]


def contents(rows: pd.DataFrame) -> pd.Series:
    """Return for each row its text, and text_pair if there is one, as a tuple of their words.

    Words are in lower case and without punctuation. A text without a word is returned unchanged.
    """
    words = _word().findall
    columns = [[" ".join(words(text.casefold())) or text for text in column] for column in _columns(rows)]
    return pd.Series(list(zip(*columns, strict=True)), dtype=object)


def _columns(rows: pd.DataFrame) -> list[list[str]]:
    return [
        [cell if isinstance(cell, str) else " ".join(cell) for cell in rows[name]]
        for name in ("text", "text_pair")
        if name in rows
    ]


@cache
def _word() -> re.Pattern[str]:
    r"""Return the pattern of a word: letters, digits and combining marks, such as vowel signs, which \w leaves out."""
    marks = (chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)).startswith("M"))
    return re.compile(rf"\w[\w{''.join(marks)}]*")
