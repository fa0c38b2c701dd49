"""The words of examples, which are equal where two examples differ in case, spaces and punctuation alone."""

from __future__ import annotations

import re

import pandas as pd


def texts(rows: pd.DataFrame) -> list[str]:
    """Return all that a model reads of each row, as one text."""
    columns = [
        [cell if isinstance(cell, str) else " ".join(cell) for cell in rows[name]]
        for name in ("text", "text_pair")
        if name in rows
    ]
    return ["\n".join(parts) for parts in zip(*columns, strict=True)]


def contents(rows: pd.DataFrame) -> pd.Series:
    """Return the words of each row, without case; a row of punctuation alone is itself."""
    return pd.Series([" ".join(re.findall(r"\w+", text.casefold())) or text for text in texts(rows)], dtype=str)
