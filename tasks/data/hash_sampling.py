"""Random draws with hashes as random numbers.

An example's number depends only on its content, so it does not change when other examples are added or removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from tasks.artifacts.task_spec import Split


def uniform_hashes(contents: Iterable[Any], seed: int, purpose: str) -> np.ndarray:
    """Return a uniform pseudo-random number in [0, 1) for each item of `contents`. Equal items get equal numbers.

    Args:
        contents: contents of the examples, as JSON can write them: strings, numbers, or lists and tuples of them.
        seed, purpose: another seed or another purpose gives independent numbers.
    """
    digests = (hashlib.sha256(json.dumps([seed, purpose, content]).encode()).digest() for content in contents)
    return np.array([int.from_bytes(digest[:8]) >> 11 for digest in digests], np.uint64) / 2.0**53


def lowest(contents: Iterable[Any], size: int | None, seed: int, purpose: str) -> np.ndarray:
    """Draw a sample: return the positions of the `size` items with the lowest hashes, lowest first; None: all items."""
    return np.argsort(uniform_hashes(contents, seed, purpose), kind="stable")[:size]


def purpose_of(split: Split) -> str:
    """Return the purpose for `lowest` to draw a sample of this split: calibration is drawn from a sample of train."""
    return "calibration" if split == "calibration" else "sample"
