"""Find files and MLflow records that are no longer used, and remove them to free disk space.

An object of DVC's cache is kept if it is named by
- a dvc.lock or .dvc file, in any workspace or in git's history,
- a registered version or a stage that led to it, or
- one of the last runs of each study.
All other objects, those of uncommitted runs, are removed. Remotes stay as they are. Saved logits are outside of DVC:
flows/gc/saved_logits.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo

from flows.engine import cached_objects, locks, orphaned_processes, stages
from flows.environment.workspaces import WORKSPACES
from flows.gc import dvc_cache, mlflow_records, referenced_digests
from flows.gc.kind import CannotCollect, Kind, kind
from flows.gc.saved_logits import kind_of_logits
from flows.workspace import reproduce, worktrees
from flows.workspace.worktrees import WorkspaceError


@contextmanager
def kinds(runs: int, commits: int | None) -> Iterator[list[Kind]]:
    """Yield the kinds of things that fill the disk, each sorted into what stays and what can be removed.

    While the block runs, no stage can run in a workspace that shares this cache.

    Args:
        runs: number of finished runs of each study to keep.
        commits: how many of the latest commits that changed dvc.lock or .dvc files to search for objects to keep; None:
            all commits.

    Raises:
        CannotCollect: the objects to keep cannot be determined, or a stage runs.
    """
    stages.check_workspace()
    if (root := worktrees.root_of(Path())) != Path.cwd():
        raise CannotCollect(
            f"this workspace is a folder of the git repository {root}, and gc needs one of its own: remove what no "
            "commit names with `dvc gc --workspace --all-commits`"
        )
    cache_dir = stages.cache_dir()
    if not cache_dir.resolve().is_relative_to(Path.cwd()):
        raise CannotCollect(
            f"the cache {cache_dir} is outside this workspace, and others may need what is in it: run `eckart gc` in "
            "the workspace that it belongs to, or `dvc gc` with all others as --projects"
        )
    with ExitStack() as stack:
        # Workspaces of `eckart reproduce`, which are made again when needed.
        reproduced = [folder.resolve() for folder in WORKSPACES.glob(reproduce.FOLDERS) if folder.is_dir()]
        scratch = [folder for folder in reproduced if _is_free(stack, folder)]
        known = _worktrees()
        present = [folder for folder in WORKSPACES.glob("*/") if (folder / ".git").exists()]
        if unknown := [folder for folder in present if folder.resolve() not in (*known, *reproduced)]:
            raise CannotCollect(worktrees.not_ours(unknown))
        others = [folder for folder in (*known, *_experiments(known)) if folder not in scratch]
        for folder in (Path.cwd(), *others):
            stack.enter_context(_no_stage_runs(folder))
        in_mlflow, tracked = stack.enter_context(mlflow_records.look(runs))
        # history last: an experiment that ends meanwhile has its commit before its workspace goes
        in_workspaces = set[str]().union(*map(referenced_digests.in_workspace, (Path.cwd(), *others)))
        digests = in_mlflow | in_workspaces | referenced_digests.in_history(commits)
        workspaces = [folder for folder in (*others, *scratch) if folder.parent == WORKSPACES.resolve()]
        yield [
            kind("other workspaces", workspaces, scratch, partial(_remove, scratch)),
            *dvc_cache.kinds(cache_dir, referenced_digests.with_files(cache_dir, digests)),
            *tracked,
            kind_of_logits(),
        ]


def _worktrees() -> list[Path]:
    """Return the worktrees of this repository other than the working directory."""
    entries = [entry.splitlines() for entry in worktrees.git(Path(), "worktree", "list", "--porcelain").split("\n\n")]
    folders = [Path(entry[0].removeprefix("worktree ")) for entry in entries if entry and "bare" not in entry]
    return [folder.resolve() for folder in folders if folder.exists() and folder.resolve() != Path.cwd().resolve()]


def _experiments(others: Iterable[Path]) -> list[Path]:
    """Return the workspaces of `dvc exp run --temp` and of DVC's queue, clones that share the cache."""
    parents = [folder / ".dvc/tmp/exps" for folder in (Path.cwd(), *others)]
    patterns = "*/.dvc", "standalone/*/.dvc"
    return [found.parent for parent in parents for pattern in patterns for found in parent.glob(pattern)]


def _is_free(stack: ExitStack, folder: Path) -> bool:
    """Try to lock a workspace until the stack is closed, and return whether this succeeded."""
    try:
        stack.enter_context(worktrees.locked(folder))
    except WorkspaceError:
        return False
    return True


@contextmanager
def _no_stage_runs(folder: Path) -> Iterator[None]:
    """Lock a workspace so that no stage can run in it while the block runs."""
    if not (folder / ".dvc").is_dir():  # a worktree at a commit before DVC
        yield
        return
    with ExitStack() as stack:
        try:
            repo = stack.enter_context(Repo(str(folder), _wait_for_lock=True))
            stack.enter_context(locks.if_free(repo, [repo.root_dir]))
            orphaned_processes.refuse(folder)
        except LockError as error:
            raise CannotCollect(f"a study runs in {folder}: wait until it ends ({error})") from error
        except DvcException as error:
            raise CannotCollect(f"DVC cannot use {folder}: repair or remove it ({error})") from error
        yield


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        cached_objects.remove(folder)
        # Not `prune`, which also forgets worktrees on a disk that is not mounted. Twice --force, since a worktree is
        # locked if making it was interrupted; or else git may not know it.
        with suppress(WorkspaceError):
            worktrees.git(Path(), "worktree", "remove", "--force", "--force", str(folder))
