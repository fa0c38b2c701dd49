"""Workspaces besides the main one: git worktrees at a revision, with its cache, remotes and raw data.

The main one is the working directory; every `folder` here is that of another. Two flows with different parameters
cannot share a workspace. All share one DVC cache, run cache included, unless they are told otherwise: what two of them
have in common runs once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from flows.engine import cached_objects, dvc_transport
from tasks.artifacts.errors import EckartError
from tasks.config.schema import PARAMS

WORKSPACES = Path("workspaces")
CARRIED = (Path("data/raw"), Path("models/base"))
"""What stages read and git does not carry."""
CODE = ("eckart", "tasks", "flows", "dvc.yaml", "code.yaml", ".dvcignore", str(PARAMS))
"""What a workspace takes from the commit, so that edits of it would not be used."""

LOCK = Path("dvc.lock")
PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Set inside a git hook, where they would lead every git command to the main workspace."""


class WorkspaceError(EckartError):
    """A workspace cannot be made or used; the message says what to do."""


def check_code() -> None:
    """Check that a workspace made from the commit has the code of this one, whatever its parameters.

    Raises:
        WorkspaceError: files are edited or new, and not committed; it names them.
    """
    refuse(edited(*(path for path in CODE if path != str(PARAMS))), "Workers run")


def check_root() -> None:
    """Raise a WorkspaceError unless this is the root of a git repository."""
    if (root := root_of(Path())) == Path.cwd():
        return
    if not PARAMS.exists():
        raise WorkspaceError("this is not the root of a workspace: run this where params.yaml is")
    raise WorkspaceError(
        f"this workspace is a folder of the git repository {root}, and worktrees are made of whole repositories: give "
        "it one of its own, `git init && git add . && git commit`, or move it to the root"
    )


def root_of(folder: Path) -> Path:
    """The root of the git repository that `folder` belongs to.

    Raises:
        WorkspaceError: there is none.
    """
    return Path(git(folder, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()


def edited(*paths: str) -> set[str]:
    """What of `paths` is not as in the last commit."""
    check_root()
    status = git(Path(), "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", *paths)
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


def follow(folder: Path) -> None:
    """Bring `folder` to the present commit and raw data; outputs that are there stay.

    Raises:
        WorkspaceError: git refuses, or the folder is something else.
    """
    recorded = (folder / LOCK).read_bytes() if (folder / LOCK).exists() else None
    check_out(folder, "HEAD")
    if recorded is not None:  # it belongs to the outputs there
        (folder / LOCK).write_bytes(recorded)
    for part in CARRIED:
        carry(part, folder / part)


def check_out(folder: Path, revision: str) -> None:
    """Make `folder` a worktree at `revision` with the cache and the remotes of the main workspace.

    Raises:
        WorkspaceError: git refuses, or the folder is something else.
    """
    commit = git(Path(), "rev-parse", revision).strip()
    if folder.exists():
        _check_own(folder)
        git(folder, "checkout", "--force", "--detach", commit)
    else:
        git(Path(), "worktree", "add", "--force", "--detach", str(folder), commit)
    dvc_transport.share_settings(folder)


def _check_own(folder: Path) -> None:
    # Otherwise git would go up to the main workspace and change that one.
    where = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    if root_of(folder) != folder.resolve() or git(folder, *where) != git(Path(), *where):
        raise WorkspaceError(
            f"{folder} is no worktree of this repository: remove it, or try `git worktree repair {folder}`"
        )


def carry(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source` and no others, as hard links where the file system allows."""
    fresh = target.with_name(f".{target.name}.new")
    cached_objects.remove(fresh)  # of one that was killed
    if source.exists():
        fresh.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, fresh, copy_function=partial(_link, fresh, target))
    cached_objects.remove(target)
    if fresh.exists():
        fresh.rename(target)


def _link(fresh: Path, old: Path, source: str, target: str) -> None:
    """Put a file into the folder `fresh`: a link, else what `old` has of it if that is the same, else a copy."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system
        before = old / Path(target).relative_to(fresh)
        if before.is_file() and not before.is_symlink() and _stamp(before) == _stamp(Path(source)):
            before.replace(target)
        else:
            shutil.copy2(source, target)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in PLACES}


def git(folder: Path, *words: str) -> str:
    # No hooks: the switch of revision is not the user's, and DVC's hook would check outputs out.
    return _called(folder, ["git", "-c", f"core.hooksPath={os.devnull}", *words], f"git {words[0]}")


def dvc(folder: Path, *words: str) -> str:
    return _called(folder, [sys.executable, "-m", "dvc", *words], f"dvc {words[0]}")


def _called(folder: Path, command: Sequence[str], name: str) -> str:
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise WorkspaceError(f"{name} in {folder.resolve().name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
