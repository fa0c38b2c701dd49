"""Locks: DVC's own locks, and a lock on the machine, so that a stage that measures time can run alone.

DVC's locks on paths fail if they are taken, so this module tries again until it gets them. They belong to a process,
so all threads of a process share them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo, lock_repo
from dvc.rwlock import rwlock
from dvc.scm import SCMError
from voluptuous import Invalid

from flows.engine import site_cache, stage_processes
from flows.engine.dvc_repo import RepairingRepo
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

_books = threading.RLock()  # our threads queue here, since DVC tries to get its own lock only twice a second
_POLL = 0.2  # seconds between two looks at a lock that another process holds


class WorkspaceUnusable(EckartError):
    """No stage can run in the workspace. The message says why."""


@contextmanager
def repository() -> Iterator[Repo]:
    """Yield DVC's repository of the working directory, and turn DVC's errors into WorkspaceUnusable.

    DVC then logs warnings and errors only, since the flow itself reports the progress of a stage.
    """
    logging.getLogger("dvc").setLevel(logging.WARNING)
    where = f"{Path.cwd()} (.dvc/config, .dvc/config.local, .dvcignore)"
    try:
        with _open() as repo:
            where = str(Path.cwd())
            yield repo
    except LockError:
        raise
    except sqlite3.Error as error:
        folder = os.environ.get(site_cache.VARIABLE)
        raise WorkspaceUnusable(f"DVC's databases in {folder}: {error}; make room there, or remove them") from error
    except (DvcException, Invalid, UnicodeDecodeError) as error:
        raise WorkspaceUnusable(f"DVC cannot use {where}: {_cause(error)}") from error


def _open() -> Repo:
    try:
        return RepairingRepo(_wait_for_lock=True)
    except SCMError as error:
        raise WorkspaceUnusable(f"{error}: clone the workspace with git, or run `git init` here") from error


def _cause(error: Exception) -> str:
    """Return the message of a DVC error and of its cause, which says at which place of a file the mistake is."""
    errors = (error, getattr(error, "exc", None) or error.__cause__)
    messages = [" ".join(str(part).split()) for part in errors if part]
    return messages[0] if messages[-1] in messages[0] else ": ".join(messages)


@contextmanager
def bookkeeping(repo: Repo) -> Iterator[None]:
    """Hold DVC's lock on the repository. Only one thread of one process can hold it at a time."""
    with _books, lock_repo(repo):
        yield


@contextmanager
def if_free(repo: Repo, writes: Sequence[str]) -> Iterator[None]:
    """Hold DVC's locks on these paths while the block runs; raise a LockError if a stage of another process has one."""
    with bookkeeping(repo), ExitStack() as locks:
        _enter(repo, locks, write=writes)
        yield


@contextmanager
def machine(alone: bool = False) -> Iterator[None]:
    """Wait for the lock on the machine, and hold it while the block runs. All flows of this user use this lock.

    Args:
        alone: whether to keep all other stages from running meanwhile.
    """
    path = Path(tempfile.gettempdir()) / f"eckart-{os.getuid()}.lock"
    # In a folder that all users can write: a link there may name any file of this user, which must stay as it is.
    with open(path, opener=lambda name, _: os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as file:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        _wait_for(lambda: fcntl.flock(file, kind | fcntl.LOCK_NB))
        yield


@contextmanager
def of_paths(repo: Repo, reads: Sequence[str], writes: Sequence[str]) -> Iterator[None]:
    """Wait for DVC's locks on the paths that a stage reads and writes, and hold them while the block runs.

    `dvc repro` respects these locks, too.
    """
    with ExitStack() as stack:
        for path in reads:
            _wait_for(partial(_read_locks.acquire, repo, path))
            stack.callback(_read_locks.release, repo, path)
        written = ExitStack()
        _wait_for(partial(_enter, repo, written, write=writes))
        stack.callback(_close, repo, written)
        yield


def _enter(repo: Repo, locks: ExitStack, read: Sequence[str] = (), write: Sequence[str] = ()) -> None:
    with bookkeeping(repo):  # DVC's file of locks is only edited under this lock
        locks.enter_context(rwlock(repo.tmp_dir, repo.fs, " ".join(sys.argv), list(read), list(write), False))


def _close(repo: Repo, locks: ExitStack) -> None:
    with bookkeeping(repo):
        locks.close()


class _ReadLocks:
    """Read locks that several threads of a process can hold together.

    A read lock of DVC belongs to the process, so the first thread to finish would end it for all. This class counts
    the threads that hold a lock.
    """

    def __init__(self) -> None:
        self._readers: Counter[str] = Counter()
        self._held: dict[str, ExitStack] = {}

    def acquire(self, repo: Repo, path: str) -> None:
        with bookkeeping(repo):
            if path not in self._held:
                held = ExitStack()
                _enter(repo, held, read=[path])
                self._held[path] = held
            self._readers[path] += 1

    def release(self, repo: Repo, path: str) -> None:
        with bookkeeping(repo):
            self._readers[path] -= 1
            if not self._readers[path]:
                self._held.pop(path).close()


_read_locks = _ReadLocks()


def _wait_for(acquire: Callable[[], object]) -> None:
    """Call `acquire` again and again until no other process holds the lock that it asks for."""
    warned = False
    while True:
        try:
            acquire()
            return
        except (LockError, BlockingIOError) as error:
            if not warned:
                cause = error if isinstance(error, LockError) else "other stages run on this machine"
                log.warning("waiting: %s", cause)
                warned = True
        stage_processes.check_goes_on()
        time.sleep(_POLL)
