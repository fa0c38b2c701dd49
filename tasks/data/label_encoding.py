"""Map the labels of a data set to class ids, and distinguish columns of classes from columns of numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Split

if TYPE_CHECKING:
    from tasks.config.schema import Data

_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_FEW = 20  # labels that are whole numbers with more distinct values than this are measurements, not classes


def class_ids(labels: Mapping[Split, pd.Series], params: Data, names: Sequence[Any] = ()) -> dict[Any, int]:
    """Return class → id: its position in `names` or, if `names` is empty, among the classes of the training split.

    Raises:
        StageError: train has a single class, or a split has a class without an id.
    """
    classes = _classes(labels["train"], params)
    if len(classes) < 2:
        found = f"only the class {classes[0]!r}" if classes else "no label"
        raise StageError(f"column {params.columns.label} has {found}: training needs at least two")
    ids = {label: position for position, label in enumerate(names or classes)}
    for name, column in labels.items():
        if unknown := [label for label in _classes(column, params) if label not in ids]:
            raise StageError(
                f"the {name} split has labels that train does not have, {unknown}: remove those examples, or get some "
                "into train, whose rows follow from data.splits, data.sizes.train and data.seed"
            )
    return ids


def alike(classes: Sequence[str]) -> list[list[str]]:
    """Return the classes that are equal but for case, spaces around them and `.0` at the end, equal ones together."""
    groups: dict[str, list[str]] = {}
    for label in classes:
        groups.setdefault(label.strip().casefold().removesuffix(".0"), []).append(label)
    return [labels for labels in groups.values() if len(labels) > 1]


def names_in_source(cells: pd.Series) -> list[Any]:
    """Return the class names that the source defines, in the order of their ids, or [].

    Args:
        cells: column of which each cell is a list of labels.
    """
    named = next((cell for cell in cells if isinstance(cell, pd.Categorical)), None)  # a cell may be empty
    return [] if named is None else list(named.categories)


def is_numeric(labels: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(labels) and not pd.api.types.is_bool_dtype(labels)


def has_mappings(labels: pd.Series) -> bool:
    """Whether any cell is a mapping or a list of mappings, such as the answers to a question."""
    firsts = (next(iter(cell), None) if pd.api.types.is_list_like(cell) else None for cell in labels)
    return any(isinstance(value, Mapping) for cells in (labels, firsts) for value in cells)


def has_structures(labels: pd.Series) -> bool:
    """Whether any cell is a mapping, or a list of mappings or of lists, such as spans."""
    cells = (cell for cell in labels if pd.api.types.is_list_like(cell) and not isinstance(cell, Mapping))
    return has_mappings(labels) or any(pd.api.types.is_list_like(part) for cell in cells for part in cell)


def few_values(labels: pd.Series) -> bool:
    """Whether the labels look like classes.

    Numbers look like classes if they are whole and have at most 20 distinct values. Other labels do if each distinct
    label occurs at least twice on average.
    """
    distinct = labels.astype(str).nunique()
    if is_numeric(labels):
        return bool(distinct <= _FEW and (labels == labels.round()).all())
    return bool(distinct <= len(labels) / 2)


def _classes(labels: pd.Series, params: Data) -> list[Any]:
    """Return the distinct labels, in the order of their ids if the source defines ids, else sorted: "2" before "10"."""
    if isinstance(labels.dtype, pd.CategoricalDtype):
        present = set(labels.unique())
        return [name for name in labels.cat.categories if name in present]
    try:
        distinct = labels.unique().tolist()
        numbers = all(isinstance(label, str) and _NUMBER.fullmatch(label) for label in distinct)
        return sorted(distinct, key=(lambda label: (float(label), label)) if numbers else None)
    except TypeError as error:  # the labels cannot be hashed or compared
        raise StageError(
            f"column {params.columns.label} has lists or a mix of types: classes must be all strings or all numbers"
        ) from error
