"""Random draws from hashes: a row's random number depends only on its content, so adding or removing other rows does
not change it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np


def uniform_hashes(contents: Iterable[Any], seed: int, purpose: str) -> np.ndarray:
    """Return a uniform pseudo-random number in [0, 1) for each content. Equal contents get equal numbers.

    Args:
        contents: values that JSON can write: strings, numbers, or lists and tuples of them.
        seed, purpose: changing either gives independent numbers.
    """
    digests = (hashlib.sha256(json.dumps([seed, purpose, content]).encode()).digest() for content in contents)
    return np.array([int.from_bytes(digest[:8]) >> 11 for digest in digests], np.uint64) / 2.0**53


def lowest(contents: Iterable[Any], size: int, seed: int, purpose: str) -> np.ndarray:
    """Return the positions of the `size` contents with the lowest hashes, lowest first; all if there are fewer."""
    return np.argsort(uniform_hashes(contents, seed, purpose), kind="stable")[:size]
