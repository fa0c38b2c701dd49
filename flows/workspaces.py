"""Workspaces besides the main one: git worktrees at a revision, with its cache, remotes and raw data.

Two flows with different parameters cannot share a workspace. All share one DVC cache, run cache included, unless they
are told otherwise: what two of them have in common runs once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flows.engine import remote
from tasks.errors import EckartError
from tasks.params import PARAMS

WORKSPACES = Path("workspaces")
CARRIED = (Path("data/raw"), Path("models/base"))
"""What stages read and git does not carry."""
CODE = ("eckart", "tasks", "flows", "dvc.yaml", ".dvcignore", str(PARAMS))
"""What a workspace takes from the commit, so that edits of it would not be used."""

LOCK = Path("dvc.lock")
PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Set inside a git hook, where they would lead every git command to the main workspace."""


class WorkspaceError(EckartError):
    """A workspace cannot be made or used; the message says what to do."""


def check_code(root: Path) -> None:
    """See to it that a workspace made from the commit has the code of this one, whatever its parameters.

    Raises:
        WorkspaceError: files are edited or new, and not committed; it names them.
    """
    refuse(edited(root, *(path for path in CODE if path != str(PARAMS))), "Workers run")


def check_root(root: Path) -> None:
    """See to it that git takes `root` for the root of a repository; if it does not, raise a WorkspaceError."""
    if Path(git(root, "rev-parse", "--show-toplevel").rstrip("\n")).resolve() != root.resolve():
        raise WorkspaceError("this is not the root of a git repository: run this where params.yaml is")


def edited(root: Path, *paths: str) -> set[str]:
    """What of `paths` is not as in the last commit."""
    check_root(root)
    status = git(root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", *paths)
    return {line[3:] for line in status.split("\0") if line}


def refuse(edited: set[str], who: str) -> None:
    if edited:
        names = "\n".join(f"  {name}" for name in sorted(edited))
        raise WorkspaceError(f"{who} the code of the last commit. Commit these, or undo the edits:\n{names}")


@contextmanager
def held(folder: Path) -> Iterator[IO[str]]:
    """No two users of one workspace: the second would change the code under the first.

    Raises:
        WorkspaceError: it is in use.
    """
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WorkspaceError(f"something runs in {folder.name} already: wait for its end") from error
        yield file


@contextmanager
def terminable() -> Iterator[None]:
    """A SIGTERM ends this process as an exception does, so that what it started can be ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def follow(root: Path, folder: Path) -> None:
    """Bring `folder` to the present commit and raw data of the workspace `root`; outputs that are there stay.

    Raises:
        WorkspaceError: git refuses, or the folder is something else.
    """
    recorded = (folder / LOCK).read_bytes() if (folder / LOCK).exists() else None
    check_out(root, folder, "HEAD")
    if recorded is not None:  # it belongs to the outputs there
        (folder / LOCK).write_bytes(recorded)
    for part in CARRIED:
        carry(root / part, folder / part)


def check_out(root: Path, folder: Path, revision: str) -> None:
    """Make `folder` a worktree at `revision` with the cache and the remotes of the workspace `root`.

    Raises:
        WorkspaceError: git refuses, or the folder is something else.
    """
    commit = git(root, "rev-parse", revision).strip()
    if folder.exists():
        _check_own(root, folder)
        git(folder, "checkout", "--force", "--detach", commit)
    else:
        git(root, "worktree", "add", "--force", "--detach", str(folder), commit)
    remote.share_settings(root, folder)


def _check_own(root: Path, folder: Path) -> None:
    # Else git would go up to the main workspace and change that one.
    where = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    own = Path(git(folder, "rev-parse", "--show-toplevel").rstrip("\n")).resolve() == folder.resolve()
    if not own or git(folder, *where) != git(root, *where):
        name = folder.relative_to(root)
        raise WorkspaceError(
            f"{name} is no worktree of this repository: remove it, or try `git worktree repair {name}`"
        )


def carry(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source` and no others, as hard links where the file system allows."""
    if target.is_symlink():
        target.unlink()
    wanted = _files(source, follow=True)
    for name in _files(target, follow=False) - wanted:
        (target / name).unlink()
    for parent, _, _ in os.walk(target, topdown=False):
        if not os.listdir(parent):
            os.rmdir(parent)
    for name in wanted:
        _link((source / name).resolve(), target / name)


def _files(folder: Path, follow: bool) -> set[Path]:
    """All files under `folder`, relative to it; links to folders are entered, or else count as files."""
    found: set[Path] = set()
    for parent, folders, files in os.walk(folder, followlinks=follow):
        links = [] if follow else [name for name in folders if Path(parent, name).is_symlink()]
        found |= {Path(parent, name).relative_to(folder) for name in (*files, *links)}
    return found


def _link(source: Path, target: Path) -> None:
    if target.is_file() and not target.is_symlink() and _stamp(source) == _stamp(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in PLACES}


def git(root: Path, *words: str) -> str:
    # Hooks would run here for a switch that is not the user's: DVC's checks outputs out.
    return _called(root, ["git", "-c", f"core.hooksPath={os.devnull}", *words], f"git {words[0]}")


def dvc(root: Path, *words: str) -> str:
    return _called(root, [sys.executable, "-m", "dvc", *words], f"dvc {words[0]}")


def _called(root: Path, command: Sequence[str], name: str) -> str:
    done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise WorkspaceError(f"{name} in {root.name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
