"""A kind of what fills the disk: what of it stays and what goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts.errors import EckartError


class CannotCollect(EckartError):
    """It cannot be told what must stay; the message says why. Nothing was removed."""


@dataclass(frozen=True)
class Size:
    """How many, and how many bytes; None where bytes are not known."""

    count: int
    bytes: int | None


@dataclass(frozen=True)
class Kind:
    """All of one kind; `remove` removes what goes, and may be killed at any moment and begun again."""

    name: str
    stays: Size
    goes: Size
    remove: Callable[[], None]


def size_of(paths: Iterable[Path]) -> Size:
    """The size of files and folders, without files that have other names: those keep their bytes on the disk."""
    sizes = [_bytes(path) for path in paths]
    return Size(len(sizes), sum(sizes))


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    states = [file.lstat() for file in files if file.is_symlink() or file.is_file()]
    return sum(state.st_size for state in states if state.st_nlink == 1)
