"""Sort the files of DVC's cache (objects, run cache, results of stages) into those that stay and those that go."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from flows.gc.kind import Kind, kind
from flows.gc.referenced_digests import in_text

_OBJECT = re.compile(r"[0-9a-f]{32}(\.dir)?")


def kinds(cache_dir: Path, kept: set[str]) -> list[Kind]:
    """Return the kinds of files in the cache; `kept` has the digests of all objects to keep, those in folders too."""
    objects = [path for path in cache_dir.glob("files/md5/??/*") if _OBJECT.fullmatch(_digest(path))]
    copies = list(cache_dir.glob("files/md5/??/*.tmp"))  # which a full disk or a kill cut off
    runs = [path for path in cache_dir.glob("runs/*/*/*") if path.is_file()]
    results = list(cache_dir.glob("computed/*.json"))
    objects_go = [path for path in objects if _digest(path) not in kept]
    runs_go = [path for path in runs if not _outs(path) <= kept]
    results_go = [path for path in results if not in_text(path.read_text("utf-8", "replace")) <= kept]
    return [
        kind("objects of DVC's cache", objects, objects_go, partial(_remove, objects_go)),
        kind("copies that were cut off", copies, copies, partial(_remove, copies)),
        kind("entries of the run cache", runs, runs_go, partial(_remove, runs_go)),
        kind("results of stages", results, results_go, partial(_remove, results_go)),
    ]


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
