"""Lots: chance that depends on a content alone, so that what it decided stays as other rows come and go."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np


def lots(contents: Iterable[Any], seed: int, purpose: str) -> np.ndarray:
    """A number in [0, 1) for each content, uniform; equal contents have equal ones.

    Args:
        contents: what JSON can say: strings, numbers, lists and tuples of them.
        seed, purpose: another one of either gives lots that are independent of these.
    """
    digests = (hashlib.sha256(json.dumps([seed, purpose, content]).encode()).digest() for content in contents)
    return np.array([int.from_bytes(digest[:8]) >> 11 for digest in digests], np.uint64) / 2.0**53


def lowest(contents: Iterable[Any], size: int, seed: int, purpose: str) -> np.ndarray:
    """Where the `size` contents of lowest lot stand, at most all, in the order of their lots."""
    return np.argsort(lots(contents, seed, purpose), kind="stable")[:size]
