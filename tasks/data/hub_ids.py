"""Distinguish ids on the Hugging Face hub from local files and folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from tasks.artifacts.input_folders import BASE, RAW

COMMIT = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def hub_id(source: str | None, packaged: Iterable[str] = ()) -> str | None:
    """Return `source` if it is a hub id, `OWNER/NAME` or `NAME`. Return None if it is a local path or in `packaged`."""
    if source is None:
        return None
    path = Path(os.path.normpath(source))
    is_local = path.exists() or any(path.is_relative_to(folder) for folder in (RAW, BASE))
    return source if _ID.fullmatch(source) and source not in packaged and not is_local else None
