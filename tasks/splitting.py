"""Splitting: a test split where the source has none, and the calibration sample, drawn from train."""

from __future__ import annotations

import pandas as pd

from tasks.dataset import Split
from tasks.params import Data

_TEST_SHARE = 0.1  # of the characters of a running text


def split_rows(train: pd.DataFrame, test: pd.DataFrame | None, params: Data) -> dict[Split, pd.DataFrame]:
    """Samples of rows, which are independent of each other."""
    sizes, seed = params.sizes, params.seed
    if test is None:
        train, test = _carve(train, params)
    train, test = _sample(train, sizes.train, seed), _sample(test, sizes.test, seed)
    return {"train": train, "test": test, "calibration": _sample(train, sizes.calibration, seed)}


def split_text(train: pd.DataFrame, test: pd.DataFrame | None) -> dict[Split, pd.DataFrame]:
    """Running text: a test split is carved from its end, and blocks are drawn once it is tokenized."""
    if test is None:
        read = train["text"].str.len().cumsum()
        rest = read > (1 - _TEST_SHARE) * read.iloc[-1] if len(read) else read > 0
        train, test = train[~rest], train[rest]
    return {"train": train, "test": test, "calibration": train}


def _carve(frame: pd.DataFrame, params: Data) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Set rows aside for the test; a text that stands on both sides would be a leak."""
    frame = frame.drop_duplicates([name for name in ("text", "text_pair") if name in frame])
    test = _sample(frame, min(params.sizes.test, len(frame) // 2), params.seed)
    return frame.drop(test.index), test


def _sample(frame: pd.DataFrame, size: int, seed: int) -> pd.DataFrame:
    return frame.sample(min(size, len(frame)), random_state=seed)
