"""Names of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

_OWNED = re.compile(r"[\w.-]+/[\w.-]+")


def hub_id(source: str) -> str | None:
    """Of a model or a data set; None for what is packaged, or a folder here."""
    return source if _OWNED.fullmatch(source) and not Path(source).exists() else None
