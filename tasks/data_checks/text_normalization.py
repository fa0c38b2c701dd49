"""Normalize texts to find repeated examples: two texts are equal if they differ only in case, spaces or punctuation."""

from __future__ import annotations

import re

import pandas as pd


def texts(rows: pd.DataFrame) -> list[str]:
    """Return for each row its text and text_pair, joined into one string."""
    columns = [
        [cell if isinstance(cell, str) else " ".join(cell) for cell in rows[name]]
        for name in ("text", "text_pair")
        if name in rows
    ]
    return ["\n".join(parts) for parts in zip(*columns, strict=True)]


def contents(rows: pd.DataFrame) -> pd.Series:
    """Return the words of each row in lower case, without punctuation. Rows without a word are returned unchanged."""
    return pd.Series([" ".join(re.findall(r"\w+", text.casefold())) or text for text in texts(rows)], dtype=str)
