"""Tell ids of the Hugging Face hub from files and folders of the workspace."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_LOCAL = (Path("data/raw"), Path("models/base"))
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def hub_id(source: str, packaged: Iterable[str] = ()) -> str | None:
    """Return the id `OWNER/NAME` or `NAME` of a model or data set; None if `source` is `packaged` or a path here."""
    path = Path(os.path.normpath(source))
    is_local = path.exists() or any(path.is_relative_to(folder) for folder in _LOCAL)
    return source if _ID.fullmatch(source) and source not in packaged and not is_local else None
