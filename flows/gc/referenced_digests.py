"""The digests that workspaces and the history of git name.

Read as text: dvc.lock decides and not dvc.yaml, since it may record stages that the parameters of its revision do not
name, which DVC's own `gc` would forget; and a revision whose dvc.yaml DVC cannot read any more names results, too. That
digests of code are among them does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from flows.engine import cached_objects
from flows.workspace import worktrees
from flows.workspace.worktrees import LOCK

_DIGEST = re.compile(r"\b[0-9a-f]{32}\b(?:\.dir\b)?")


def in_text(text: str) -> set[str]:
    """All that looks like a digest of DVC's; that of a folder ends with `.dir`."""
    return set(_DIGEST.findall(text))


def in_workspace(folder: Path) -> set[str]:
    """What dvc.lock, one that was cut off and set aside, and .dvc files name in a workspace, committed or not."""
    found = worktrees.git(folder, "ls-files", "-z", "--cached", "--others", "--", f"{LOCK}*", "*.dvc")
    texts = [(folder / name).read_text(errors="replace") for name in found.split("\0") if (folder / name).is_file()]
    return set().union(*map(in_text, texts))


def in_history(commits: int | None) -> set[str]:
    """What dvc.lock and .dvc files name in all commits, of all branches, tags and worktrees.

    Args:
        commits: how many of those that changed these files, the latest; besides the tips of branches, and all tags.
    """
    last = [] if commits is None else [f"--max-count={commits}"]
    changed = worktrees.git(Path(), "rev-list", "--all", "--full-history", *last, "--", str(LOCK), "*.dvc")
    tips = worktrees.git(Path(), "rev-list", "--no-walk", "--all")
    blobs = set().union(*(_blobs(commit) for commit in {*changed.split(), *tips.split()}))
    return set().union(*(in_text(worktrees.git(Path(), "cat-file", "blob", blob)) for blob in blobs))


def _blobs(commit: str) -> set[str]:
    lines = worktrees.git(Path(), "ls-tree", "-r", "-z", commit).split("\0")
    entries = [line.split("\t", 1) for line in lines if line]
    return {about.split()[2] for about, name in entries if name == str(LOCK) or name.endswith(".dvc")}


def with_files(cache_dir: Path, digests: Iterable[str]) -> set[str]:
    """The digests, and of each folder those of its files. A list that is corrupt still names most of them."""
    lists = [cached_objects.object_path(cache_dir, each) for each in digests if each.endswith(".dir")]
    return set(digests).union(*(in_text(path.read_text(errors="replace")) for path in lists if path.exists()))
