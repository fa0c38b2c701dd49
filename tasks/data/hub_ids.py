"""What of a study comes from the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_HERE = (Path("data/raw"), Path("models/base"))
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def hub_id(source: str, packaged: Iterable[str] = ()) -> str | None:
    """Of a model or a data set, `OWNER/NAME` or `NAME`; None for what is `packaged`, and for a file or folder here."""
    path = Path(os.path.normpath(source))
    here = path.exists() or any(path.is_relative_to(folder) for folder in _HERE)
    return source if _ID.fullmatch(source) and source not in packaged and not here else None
