"""Make the splits of a data set: take missing splits from train, and draw a sample of each split.

Both use a hash of each example's own content. So an example stays in its split when others are added, and examples
with equal texts are always in the same split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Split
from tasks.config.schema import Data
from tasks.data.hash_sampling import lowest, purpose_of, uniform_hashes
from tasks.nlp_tasks import task_class
from tasks.runtime.stage_runner import say

_PASSAGE = 5000
"""Characters per passage (choice). Each passage of running text goes into one split as a whole. A passage has about a
thousand tokens, so few blocks of tokens join two passages that were not neighbors."""


def split_and_convert(
    source: Mapping[Split, pd.DataFrame], params: Data
) -> tuple[dict[Split, pd.DataFrame], tuple[str, ...]]:
    """Split the data, and convert labels to the form that models read, such as class ids.

    Returns:
        The splits, and the names of the classes in the order of their ids.

    Raises:
        StageError: a split is empty, or the data do not fit the task.
    """
    splits = split_source(source, params)
    for name, frame in splits.items():
        if frame.empty:
            more = "text" if task_class(params.task).running_text else "examples"
            raise StageError(
                f"the {name} split of {params.source} is empty: give it more {more}, or a file of its own, or raise "
                "data.shares"
            )
    return splits, task_class(params.task).convert_labels(splits, params)


def split_source(source: Mapping[Split, pd.DataFrame], params: Data) -> dict[Split, pd.DataFrame]:
    """Return the splits train, validation, test and calibration.

    Each split is a random sample in random order, and calibration is a sample of train. Examples that occur in two
    splits are dropped from one of them.

    Running text keeps its order. A split that the source lacks gets whole passages of train, and calibration is train
    itself: blocks are sampled only after tokenization. No row is dropped, since lines such as headings repeat.
    """
    task = task_class(params.task)
    if task.running_text:
        parts = _carve(source, params, _passages)
        return {**parts, "calibration": parts["train"]}
    parts = _carve(_without_leaks(source), params, lambda rows: _in_one_order(_contents(rows, task.split_by)))
    drawn = {name: _sample(part, name, params) for name, part in parts.items()}
    return {**drawn, "calibration": _sample(drawn["train"], "calibration", params)}


def _carve(
    source: Mapping[Split, pd.DataFrame], params: Data, contents: Callable[[pd.DataFrame], list[Any]]
) -> dict[Split, pd.DataFrame]:
    """Return train, validation and test. A split that the source lacks gets its share of train, chosen by hash.

    Args:
        contents: function of the training rows that returns, for each row, the content to hash.
    """
    rows, parts, start = source["train"], dict(source), 0.0
    hashes = uniform_hashes(contents(rows), params.seed, "split")
    shares: dict[Split, float] = {"validation": params.shares.validation, "test": params.shares.test}
    for name, share in shares.items():
        if name not in source:
            parts[name] = rows[(start <= hashes) & (hashes < start + share)]
            start += share
    parts["train"] = rows[hashes >= start]
    return {name: parts[name] for name in ("train", "validation", "test")}


def _without_leaks(source: Mapping[Split, pd.DataFrame]) -> dict[Split, pd.DataFrame]:
    """Drop training examples that also occur in validation or test, and validation examples that also occur in test.

    Labels are not compared, and neither is the order of a pair's texts.
    """
    parts: dict[Split, pd.DataFrame] = {}
    seen: set[str] = set()
    for name in ("test", "validation", "train"):
        if name in source:
            keys = [repr(sorted(content, key=repr)) for content in _contents(source[name])]
            repeated = np.array([key in seen for key in keys], bool)
            if repeated.any():
                say(f"{name}: {repeated.sum()} examples left out, since they are also in validation or test")
            parts[name] = source[name][~repeated]
            seen.update(keys)
    return parts


def _contents(rows: pd.DataFrame, columns: Sequence[str] = ("text", "text_pair")) -> list[Any]:
    """Return for each row the tuple of its cells in `columns`, or the cell itself if `columns` has only one name."""
    cells = [rows[name] for name in columns if name in rows]
    return list(zip(*cells, strict=True)) if len(columns) > 1 else list(cells[0])


def _in_one_order(contents: list[Any]) -> list[Any]:
    """Swap the texts of some pairs, so that a pair that occurs in both orders has only one of them."""
    pairs = {content for content in contents if _is_pair(content)}

    def in_order(content: Any) -> Any:
        other = content[::-1] if _is_pair(content) else None
        return min(content, other, key=repr) if other in pairs else content

    return [in_order(content) for content in contents]


def _is_pair(content: Any) -> bool:
    return isinstance(content, tuple) and len(content) == 2


def _passages(rows: pd.DataFrame) -> list[Any]:
    """Return for each row a digest of its passage: of all rows that begin within the same `_PASSAGE` characters."""
    lengths = rows["text"].str.len()
    passage = (lengths.cumsum() - lengths) // _PASSAGE
    return list(
        rows["text"].groupby(passage).transform(lambda texts: hashlib.sha256(repr(list(texts)).encode()).hexdigest())
    )


def _sample(rows: pd.DataFrame, name: Split, params: Data) -> pd.DataFrame:
    size = getattr(params.sizes, name)
    if size is not None and size < len(rows) and name != "calibration":
        say(f"{name}: {size} of {len(rows)} examples are used (data.sizes.{name})")
    return rows.iloc[lowest(_contents(rows), size, params.seed, purpose_of(name))]
