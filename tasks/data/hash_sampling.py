"""Draws by hash: chance that depends on a content alone, so draws stay as other contents come and go."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np


def uniform_hashes(contents: Iterable[Any], seed: int, purpose: str) -> np.ndarray:
    """Return a uniform number in [0, 1) for each content; equal contents have equal numbers.

    Args:
        contents: strings, numbers, lists and tuples of them, as JSON can write them.
        seed, purpose: another value of either gives independent numbers.
    """
    digests = (hashlib.sha256(json.dumps([seed, purpose, content]).encode()).digest() for content in contents)
    return np.array([int.from_bytes(digest[:8]) >> 11 for digest in digests], np.uint64) / 2.0**53


def lowest(contents: Iterable[Any], size: int, seed: int, purpose: str) -> np.ndarray:
    """Return the places of the `size` contents with the lowest hashes, at most all, in the order of their hashes."""
    return np.argsort(uniform_hashes(contents, seed, purpose), kind="stable")[:size]
