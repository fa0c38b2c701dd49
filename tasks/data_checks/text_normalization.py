"""The words of rows: what tells whether two rows are the same but for case, spaces and punctuation."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pandas as pd

_WORD = re.compile(r"\w+")


def texts(rows: pd.DataFrame) -> list[str]:
    """All that a model reads of each row, as one text."""
    columns = [[_joined(cell) for cell in rows[name]] for name in ("text", "text_pair") if name in rows]
    return ["\n".join(parts) for parts in zip(*columns, strict=True)]


def _joined(cell: Iterable[str]) -> str:
    return cell if isinstance(cell, str) else " ".join(cell)


def contents(rows: pd.DataFrame) -> pd.Series:
    """Of each row its words, without case; one of punctuation alone is itself."""
    return pd.Series([" ".join(_WORD.findall(text.casefold())) or text for text in texts(rows)], dtype=str)
