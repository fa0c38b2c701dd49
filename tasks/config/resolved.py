"""The parameters of a study with every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def resolve(content: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of params.yaml.

    Args:
        content: params.yaml as plain data, without mistakes.

    Returns:
        The whole tree as plain data, in the order of the types.
    """
    return dict(content)
