"""Find the digests of objects in DVC's cache that dvc.lock and .dvc files name, in workspaces and in git's history.

The files are searched as text. Digests of code are found, too, which does no harm. Unlike `dvc gc`, this module does
not read dvc.yaml: dvc.lock may record stages that the parameters of its revision do not have, and today's DVC may not
be able to read an old dvc.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from flows.engine import cached_objects
from flows.engine.lock_file import LOCK
from flows.workspace import worktrees

_DIGEST = re.compile(r"\b[0-9a-f]{32}\b(?:\.dir\b)?")


def in_text(text: str) -> set[str]:
    """Return all parts of a text that look like a digest of DVC. A folder's digest ends with `.dir`."""
    return set(_DIGEST.findall(text))


def in_workspace(folder: Path) -> set[str]:
    """Return the digests in a workspace's dvc.lock, in damaged copies of it, and in .dvc files, committed or not.

    There are none if the folder has gone, as that of an experiment of DVC does at its end.
    """
    if not folder.exists():
        return set()
    names = worktrees.git(folder, "ls-files", "-z", "--cached", "--others", "--", f"{LOCK}*", "*.dvc")
    texts = [(folder / name).read_text(errors="replace") for name in names.split("\0") if (folder / name).is_file()]
    return set().union(*map(in_text, texts))


def in_history(commits: int | None) -> set[str]:
    """Return the digests in dvc.lock and .dvc files of the commits of all branches, tags, worktrees and stashes.

    Args:
        commits: how many of the latest commits that changed these files to search, besides all tags, all stashes and
            the last commit of each branch; None for all commits.
    """
    last = [] if commits is None else [f"--max-count={commits}"]
    changed = worktrees.git(Path(), "rev-list", "--all", "--full-history", *last, "--", str(LOCK), "*.dvc")
    tips = worktrees.git(Path(), "rev-list", "--no-walk", "--all")
    stashes = worktrees.git(Path(), "stash", "list", "--format=%H %P")  # no reference names those before the last
    blobs = set().union(*(_blobs(commit) for commit in {*changed.split(), *tips.split(), *stashes.split()}))
    return set().union(*(in_text(worktrees.git(Path(), "cat-file", "blob", blob)) for blob in blobs))


def _blobs(commit: str) -> set[str]:
    lines = worktrees.git(Path(), "ls-tree", "-r", "-z", commit).split("\0")
    entries = [line.split("\t", 1) for line in lines if line]
    return {about.split()[2] for about, name in entries if name == str(LOCK) or name.endswith(".dvc")}


def with_files(cache_dir: Path, digests: Iterable[str]) -> set[str]:
    """Return these digests of files and folders, and the digests of all files in the folders.

    The lists of files are searched as text, so that even a corrupt list gives most of its files.
    """
    lists = [cached_objects.object_path(cache_dir, digest) for digest in digests if digest.endswith(".dir")]
    return set(digests).union(*(in_text(path.read_text(errors="replace")) for path in lists if path.exists()))
