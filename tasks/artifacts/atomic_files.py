"""Replacement of files at once, so that a process that reads a file meanwhile finds it whole, old or new."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write `text` into a new file beside `path`, then rename it to `path`, which may be a link into DVC's cache."""
    new = path.with_name(f"{path.name}.new")  # in the same folder: a file cannot be renamed to another disk
    new.write_text(text, "utf-8")
    new.replace(path)
