"""Merge the parameters that a study states into those of params.yaml."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `new` into a copy of `old`: mappings merge key by key, anything else replaces.

    A mapping of another `kind` replaces the old one as a whole, because keys of one kind mean nothing to another.
    """
    result = dict(copy.deepcopy(old))
    for key, value in new.items():
        before = result.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and value.get("kind") in (None, before.get("kind")):
            result[key] = merge(before, value)
        else:
            result[key] = copy.deepcopy(value)
    return result
