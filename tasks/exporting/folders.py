"""The folders that an export reads and writes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.artifacts.errors import StageError
from tasks.artifacts.paths import FINETUNED


def folder_of(name: str) -> Path:
    """Return the folder of the candidate `name`; if there is none, the Hugging Face folder at the path `name`.

    Raises:
        StageError: neither exists.
    """
    candidate, path = FINETUNED / name, Path(name)
    if (candidate / "config.json").exists():
        return candidate
    if (path / "config.json").exists():
        return path
    candidates = sorted(folder.parent.name for folder in FINETUNED.glob("*/config.json"))
    advice = f"write one of {', '.join(candidates)}" if candidates else f"{FINETUNED} has none: run `eckart run` first"
    raise StageError(f"{name} is neither a candidate nor a Hugging Face folder: {advice}")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield the path of a folder to write; it becomes `folder` if the block ends without an error.

    Raises:
        StageError: `folder` cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as parent:
            yield (written := Path(parent) / folder.name)
            written.replace(folder)
    except OSError as error:
        raise StageError(f"{folder} cannot be written: {error}") from error
