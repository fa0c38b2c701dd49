"""Sort the files of DVC's cache (objects, run cache, times of stages) into those that stay and those that go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from flows.gc import referenced_digests
from flows.gc.kind import Kind, size_of

_OBJECT = re.compile(r"[0-9a-f]{32}(\.dir)?")


def kinds(cache_dir: Path, kept: set[str]) -> list[Kind]:
    """Return the kinds of files in the cache, each sorted into what stays and what goes.

    Args:
        kept: digests of objects to keep: files, folders, and all files in these folders.
    """
    objects = [path for path in cache_dir.glob("files/md5/??/*") if _OBJECT.fullmatch(_digest(path))]
    runs = [path for path in cache_dir.glob("runs/*/*/*") if path.is_file()]
    return [
        _kind("objects of DVC's cache", objects, lambda path: _digest(path) in kept),
        _kind("entries of the run cache", runs, lambda path: _outs(path) <= kept),
        _kind(
            "times of stages",
            cache_dir.glob("computed/*.json"),
            lambda path: referenced_digests.in_text(path.read_text(errors="replace")) <= kept,
        ),
    ]


def _kind(name: str, paths: Iterable[Path], stays: Callable[[Path], bool]) -> Kind:
    stay: list[Path] = []
    go: list[Path] = []
    for path in paths:
        (stay if stays(path) else go).append(path)
    return Kind(name, size_of(stay), size_of(go), partial(_remove, go))


def _remove(paths: Sequence[Path]) -> None:
    # Lists of files first: if this is interrupted, a list without its files would look like lost data.
    for path in sorted(paths, key=lambda path: path.suffix != ".dir"):
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty. An empty folder must go, since DVC fails on one in the run cache
            path.parent.rmdir()


def _digest(path: Path) -> str:
    return f"{path.parent.name}{path.name}"


def _outs(entry: Path) -> set[str]:
    """Return the digests of the outputs in a run cache entry; if it is unreadable, {""}, so that the entry goes."""
    try:
        return {out["md5"] for out in YAML(typ="safe").load(entry)["outs"]}
    except (YAMLError, UnicodeDecodeError, TypeError, KeyError):
        return {""}
