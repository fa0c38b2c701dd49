"""Classes for the kinds of things that fill the disk, each sorted into what stays and what goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts.errors import EckartError


class CannotCollect(EckartError):
    """The objects to keep cannot be determined. The message says why. Nothing was removed."""


@dataclass(frozen=True)
class Size:
    """Number of things, and their bytes; None if unknown."""

    count: int
    bytes: int | None


@dataclass(frozen=True)
class Kind:
    """All things of one kind, such as the objects of DVC's cache.

    `remove` removes those that go. If it is interrupted, it can be called again.
    """

    name: str
    stays: Size
    goes: Size
    remove: Callable[[], None]


def kind(name: str, paths: Iterable[Path], go: Collection[Path], remove: Callable[[], None]) -> Kind:
    """Return the `Kind` of things that are files or folders: of all `paths`, `remove` removes those in `go`."""
    return Kind(name, size_of(set(paths).difference(go)), size_of(go), remove)


def size_of(paths: Iterable[Path]) -> Size:
    """Return the size of files and folders. Hard-linked files count as 0 bytes, since removing a link frees none."""
    paths = list(paths)
    files = (file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]))
    states = [file.lstat() for file in files if file.is_symlink() or file.is_file()]
    return Size(len(paths), sum(state.st_size for state in states if state.st_nlink == 1))
