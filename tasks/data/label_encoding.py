"""The labels of a data set: checked, and turned into what a loss takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tasks.artifacts.task_spec import Split
from tasks.config.schema import Data
from tasks.runtime.stage_runner import StageError


def convert_labels(splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
    """Turn labels into class ids or floats; give the names of the classes."""
    for name, frame in splits.items():
        if frame.empty:
            raise StageError(f"the {name} split of {params.source} is empty: give it more rows, or raise data.shares")
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
    if params.task == "question_answering":
        for name, frame in splits.items():
            frame["label"] = _answers(frame, name, params)
        return ()
    if params.task == "token_classification":
        return _tags(splits, params)
    ids = _ids({name: frame["label"] for name, frame in splits.items()}, params)
    for frame in splits.values():
        frame["label"] = frame["label"].map(ids).astype("int64")
    return tuple(map(str, ids))


def _ids(labels: Mapping[Split, pd.Series], params: Data, names: Sequence[Any] = ()) -> dict[Any, int]:
    """Class → id: of `names`, or where the source has none, of the labels of train."""
    classes = _classes(labels["train"], params)
    if len(classes) < 2:
        raise StageError(f"column {params.columns.label} has the single class {classes[0]!r}: nothing can be learned")
    ids = {label: position for position, label in enumerate(names or classes)}
    for name, some in labels.items():
        if unknown := [label for label in _classes(some, params) if label not in ids]:
            raise StageError(f"the {name} split has labels that train has not: {unknown}: check data.splits")
    return ids


def _tags(splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
    """Turn a tag for each word into its id; a tag that the source names is known even if train has none of it."""
    for name, frame in splits.items():
        pairs = zip(frame["text"], frame["label"], strict=True)
        if wrong := sum(not pd.api.types.is_list_like(tags) or len(tags) != len(words) for words, tags in pairs):
            raise StageError(
                f"the {name} split has {wrong} rows where column {params.columns.label} is not a list of as many tags "
                f"as {params.columns.text} has words: correct data.columns, or those rows"
            )
    some = splits["train"]["label"].iloc[0]
    names = some.categories.tolist() if isinstance(some, pd.Categorical) else ()
    ids = _ids({name: frame["label"].explode() for name, frame in splits.items()}, params, names)
    for frame in splits.values():
        frame["label"] = [[ids[tag] for tag in tags] for tags in frame["label"]]
    return tuple(map(str, ids))


def _answers(frame: pd.DataFrame, split: Split, params: Data) -> pd.Series:
    """Answers as SQuAD 1.1 has them: at least one a question, each a part of the context."""
    where = f"column {params.columns.label} of the {split} split"
    try:
        found = [_answer(cell) for cell in frame["label"]]
    except (KeyError, TypeError, ValueError) as error:
        raise StageError(
            f'{where} holds something other than answers; each must be {{"text": [...], "answer_start": [...]}} '
            "with a start for each text, or a list of such pairs"
        ) from error
    if without := sum(not answer["text"] for answer in found):
        raise StageError(f"{where} has {without} questions without an answer: remove them, as SQuAD 1.1 has none")
    if astray := sum(not _stands(*pair) for pair in zip(found, frame["text_pair"], strict=True)):
        raise StageError(
            f"{where} has {astray} rows where an answer does not stand at the character answer_start of column "
            f"{params.columns.text_pair}: correct or remove them"
        )
    return pd.Series(found, index=frame.index)


def _answer(cell: Any) -> dict[str, list[Any]]:
    """`{"text": [...], "answer_start": [...]}`, also of a list of single answers."""
    parts = [cell] if isinstance(cell, Mapping) else list(cell)
    texts, starts = (
        [value for part in parts for value in np.atleast_1d(part[key]).tolist()] for key in ("text", "answer_start")
    )
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise TypeError("an answer must be text")
    pairs = list(zip(texts, map(int, starts), strict=True))
    return {"text": [text for text, _ in pairs], "answer_start": [start for _, start in pairs]}


def _stands(answers: Mapping[str, list[Any]], context: str) -> bool:
    pairs = zip(answers["text"], answers["answer_start"], strict=True)
    return all(start >= 0 and context.startswith(text, start) for text, start in pairs)


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
