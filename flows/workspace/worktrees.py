"""Additional workspaces: git worktrees that share the cache, the remotes and the raw data of the main workspace.

The main workspace is the working directory; `folder` is always another one. Two flows with different parameters need
two workspaces. All workspaces share DVC's cache with the run cache, so that a computation that several need runs once.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flows.engine import cached_objects, dvc_transport
from flows.engine.lock_file import LOCK
from flows.environment.git_variables import environment_without_git
from tasks.artifacts.errors import EckartError
from tasks.artifacts.input_folders import BASE, RAW
from tasks.config.params_file import PARAMS

CARRIED = (RAW, BASE)
"""Folders that stages read, but that are not in git."""
CODE = ("eckart", "tasks", "flows", "dvc.yaml", "code.yaml", ".dvcignore", str(PARAMS))
"""Files and folders that other workspaces get from a commit, and thus without uncommitted edits."""


class WorkspaceError(EckartError):
    """A workspace cannot be made or used. The message says what to do."""


@dataclass(frozen=True)
class Sources:
    """The commit, and the files that are not in git, from which workspaces are made."""

    commit: str
    files: dict[str, tuple[int, int]]
    """Path → size, and time of the last change."""


def sources() -> Sources:
    """Return the present commit and files, from which all workspaces of a study are to be made."""
    return Sources(git(Path(), "rev-parse", "HEAD").strip(), _carried_files())


def _carried_files() -> dict[str, tuple[int, int]]:
    walks = (walk for part in CARRIED for walk in os.walk(part, followlinks=True))
    states = {path: os.stat(path) for top, _, names in walks for name in names for path in [os.path.join(top, name)]}
    return {path: (state.st_size, state.st_mtime_ns) for path, state in states.items()}


def check_root() -> None:
    """Raise a WorkspaceError unless the working directory is the root of a git repository."""
    if (root := root_of(Path())) == Path.cwd():
        return
    if not PARAMS.exists():
        raise WorkspaceError("this is not the root of a workspace: run this where params.yaml is")
    raise WorkspaceError(
        f"this workspace is a folder of the git repository {root}, but worktrees hold whole repositories: make it a "
        "repository of its own, `git init && git add . && git commit`, or move it to the root"
    )


def root_of(folder: Path) -> Path:
    """Return the root of the git repository that contains `folder`."""
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
    except WorkspaceError as error:
        if "not a git repository" not in str(error):
            raise
        raise WorkspaceError(f"{error}. Call this in the folder of a workspace, which eckart init makes") from error


def edited(*paths: str) -> set[str]:
    """Return the files in `paths` that differ from the last commit, new files included."""
    check_root()
    status = git(Path(), "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", *paths)
    return {line[3:] for line in status.split("\0") if line}


def refuse(edited: set[str], who: str) -> None:
    """Raise a WorkspaceError if there are edited files.

    Args:
        edited: paths of the files.
        who: beginning of the message, such as "A study runs"; it goes on with "the code of the last commit".
    """
    if edited:
        names = "\n".join(f"  {name}" for name in sorted(edited))
        raise WorkspaceError(f"{who} the code of the last commit. Commit these, or undo the edits:\n{names}")


@contextmanager
def locked(folder: Path) -> Iterator[IO[str]]:
    """Lock a workspace while the block runs, since a second process could check out other code in it.

    Raises:
        WorkspaceError: another process has locked the workspace.
    """
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WorkspaceError(f"{folder.name} is in use by another process: wait until it ends") from error
        yield file


def follow(folder: Path, start: Sources) -> None:
    """Make the workspace `folder`, or update it to a commit and the raw data. Its outputs and dvc.lock stay.

    Raises:
        WorkspaceError: a file of the raw data or base models is no longer as in `start`.
    """
    if changed := sorted({path for path, _ in start.files.items() ^ _carried_files().items()}):
        raise WorkspaceError(
            f"{changed[0]} changed since the study began: run the study again, so that all seeds read the same files"
        )
    recorded = (folder / LOCK).read_bytes() if (folder / LOCK).exists() else None
    check_out(folder, start.commit)
    if recorded is not None:  # dvc.lock belongs to the outputs there
        (folder / LOCK).write_bytes(recorded)
    for part in CARRIED:
        carry(part, folder / part)
        if (tracked := part.with_name(f"{part.name}.dvc")).exists():  # the commit may name other data
            shutil.copy(tracked, folder / tracked)


def check_out(folder: Path, revision: str) -> None:
    """Make `folder` a worktree at `revision`, or update it, and give it the main workspace's cache and remotes.

    Raises:
        WorkspaceError: the folder exists and is not a worktree of this repository.
    """
    commit = git(Path(), "rev-parse", revision).strip()
    if folder.exists():
        if not _is_ours(folder):
            raise WorkspaceError(not_ours([folder]))
        git(folder, "checkout", "--force", "--detach", commit)
    else:
        git(Path(), "worktree", "add", "--force", "--detach", str(folder), commit)
    dvc_transport.share_settings(folder)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a worktree of this repository; if not, git would find, and change, the one above it."""
    where = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    try:
        return root_of(folder) == folder.resolve() and git(folder, *where) == git(Path(), *where)
    except WorkspaceError as error:
        if "not a git repository" not in str(error):
            raise
        return False  # such as after a move


def not_ours(folders: Sequence[Path]) -> str:
    """Return what is wrong with folders that are not worktrees of this repository, and what to do."""
    names = shlex.join(map(str, folders))
    return (
        f"git does not know these workspaces as worktrees of this repository: {names}. If this workspace was moved, "
        f"run `git worktree repair {names}`; otherwise, such as in a copy of a workspace, remove them"
    )


def carry(source: Path, target: Path) -> None:
    """Replace `target` with a copy of the folder `source`, made of hard links if the file system allows them.

    If `source` does not exist, `target` is removed.
    """
    fresh = target.with_name(f".{target.name}.new")
    cached_objects.remove(fresh)  # a killed process may have left it
    if source.exists():
        fresh.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, fresh, copy_function=_link)
        make_writable(fresh)
    cached_objects.remove(target)
    if fresh.exists():
        fresh.rename(target)


def make_writable(folder: Path) -> None:
    """Let the owner write into a folder and all folders in it. Files keep their modes, since they may be hard links."""
    for path, _, _ in os.walk(folder):
        os.chmod(path, os.stat(path).st_mode | stat.S_IRWXU)


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # `target` is on another file system
        shutil.copy2(source, target)


def git(folder: Path, *words: str) -> str:
    """Run git in `folder` and return its output. Hooks are off, since DVC's hooks would check out outputs."""
    return _called(folder, ["git", "-c", f"core.hooksPath={os.devnull}", *words], f"git {words[0]}")


def dvc(folder: Path, *words: str) -> str:
    """Run DVC in `folder` and return its output."""
    return _called(folder, [sys.executable, "-m", "dvc", *words], f"dvc {words[0]}")


def _called(folder: Path, command: Sequence[str], name: str) -> str:
    result = subprocess.run(command, cwd=folder, env=environment_without_git(), capture_output=True, text=True)
    if result.returncode:
        raise WorkspaceError(f"{name} in {folder.resolve().name}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout
