"""The labels of a data set: checked, and turned into what a loss takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tasks.dataset import Split
from tasks.params import Data
from tasks.stage import StageError


def check(splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
    """Turn labels into class ids or floats; give the names of the classes."""
    for name, frame in splits.items():
        if frame.empty:
            raise StageError(f"the {name} split of {params.source} is empty: give it more rows")
    if params.task == "language_modeling":
        return ()
    if params.task == "summarization":
        for name, frame in splits.items():
            if blank := (frame["label"].str.strip() == "").sum():
                raise StageError(f"the {name} split has {blank} rows with a blank {params.columns.label}: remove them")
        return ()
    if params.task == "regression":
        for frame in splits.values():
            frame["label"] = _floats(frame["label"], params)
        return ()
    classes = _classes(splits["train"]["label"], params)
    if len(classes) < 2:
        raise StageError(f"column {params.columns.label} has the single class {classes[0]!r}: nothing can be learned")
    ids = {label: position for position, label in enumerate(classes)}
    for name, frame in splits.items():
        if unknown := [label for label in _classes(frame["label"], params) if label not in ids]:
            raise StageError(f"the {name} split has labels that train has not: {unknown}: check data.splits")
        frame["label"] = frame["label"].map(ids).astype("int64")
    return tuple(map(str, classes))


def _classes(labels: pd.Series, params: Data) -> list[Any]:
    """The different labels: in the order of their ids where the source has ids, else sorted."""
    if isinstance(labels.dtype, pd.CategoricalDtype):
        present = set(labels.unique())
        return [name for name in labels.cat.categories if name in present]
    try:
        return sorted(labels.unique().tolist())
    except TypeError as error:  # what cannot be hashed or compared
        raise StageError(
            f"column {params.columns.label} has lists or a mix of types: a class must be a string or a number"
        ) from error


def _floats(labels: pd.Series, params: Data) -> pd.Series:
    try:
        numbers = labels.astype("float32")
    except (TypeError, ValueError) as error:
        raise StageError(
            f"column {params.columns.label} is no number: {error}; or is data.task classification?"
        ) from error
    if not np.isfinite(numbers).all():
        raise StageError(f"column {params.columns.label} has labels that are not finite: remove those rows")
    return numbers
