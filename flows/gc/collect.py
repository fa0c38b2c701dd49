"""What fills the disk night after night: what of it stays, how much would go, and an end of it.

Kept of DVC's cache is all that something names: dvc.lock and .dvc files, in every workspace and in the history of git;
the versions of the registry, with all that led to them; the last runs of each study. Runs that nobody committed are
what goes. Only the cache is touched and no remote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo

from flows.engine import cached_objects, locks, stages
from flows.gc import dvc_cache, mlflow_records, prefect_records, referenced_digests
from flows.gc.kind import CannotCollect, Kind, size_of
from flows.workspace import worktrees
from flows.workspace.worktrees import WORKSPACES, WorkspaceError

_SCRATCH = re.compile(r"reproduce-[0-9a-f]{10}|worker-\d+")
"""Workspaces that hold nothing of their own: they are made anew where they are needed."""


@contextmanager
def found(runs: int, commits: int | None, days: float) -> Iterator[list[Kind]]:
    """What fills the disk, by kind; meanwhile no stage runs in this workspace or one that shares its cache.

    Args:
        runs: how many finished runs of each study stay.
        commits: how many commits that changed dvc.lock keep what it names; None for all.
        days: after how many a flow run in Prefect goes.

    Raises:
        CannotCollect: a study runs, or what must stay cannot be told.
        WorkspaceUnusable, WorkspaceError: this is no workspace, or a part of git fails.
        RegistryError, ServerError: MLflow or Prefect fail.
    """
    stages.check_workspace()
    worktrees.check_root()
    cache_dir = stages.cache_dir()
    if not cache_dir.resolve().is_relative_to(Path.cwd()):
        raise CannotCollect(f"the cache is {cache_dir}, and what other workspaces need of it is not known here")
    with ExitStack() as stack:
        scratch = [folder for folder in _scratch() if _is_free(stack, folder)]
        others = [folder for folder in _worktrees() if folder not in scratch]
        for folder in (Path.cwd(), *others):
            stack.enter_context(_still(folder))
        known = stack.enter_context(mlflow_records.look(runs))
        digests = known.digests.union(
            referenced_digests.in_history(commits), *map(referenced_digests.in_workspace, (Path.cwd(), *others))
        )
        yield [
            _workspaces([folder for folder in others if folder.parent == WORKSPACES.resolve()], scratch),
            *dvc_cache.kinds(cache_dir, referenced_digests.with_files(cache_dir, digests)),
            *known.kinds,
            *prefect_records.kinds(days),
        ]


def _worktrees() -> list[Path]:
    """All that git knows of this repository but the working directory."""
    lines = worktrees.git(Path(), "worktree", "list", "--porcelain").splitlines()
    folders = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
    return [folder.resolve() for folder in folders if folder.exists() and folder.resolve() != Path.cwd().resolve()]


def _scratch() -> list[Path]:
    return [folder.resolve() for folder in WORKSPACES.glob("*") if folder.is_dir() and _SCRATCH.fullmatch(folder.name)]


def _is_free(stack: ExitStack, folder: Path) -> bool:
    """Whether nobody uses a workspace; nobody does before the stack ends."""
    try:
        stack.enter_context(worktrees.held(folder))
    except WorkspaceError:
        return False
    return True


@contextmanager
def _still(folder: Path) -> Iterator[None]:
    """No stage runs in a workspace."""
    if not (folder / ".dvc").is_dir():  # a worktree at a commit before DVC
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.workspace(stack.enter_context(Repo(str(folder), _wait_for_lock=True))))
        except DvcException as error:
            raise CannotCollect(f"a study runs in {folder}: wait for its end: {error}") from error
        yield


def _workspaces(stay: Iterable[Path], go: Iterable[Path]) -> Kind:
    return Kind("other workspaces", size_of(stay), size_of(go), partial(_remove, go))


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:  # not by git, which knows none that was killed half-way
        cached_objects.remove(folder)
    worktrees.git(Path(), "worktree", "prune")
