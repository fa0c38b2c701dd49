"""Locks: DVC's own, which this module waits for, and one on the machine, which a measurement has to itself.

DVC's locks fail instead of waiting. Its locks on paths belong to a process, so the threads of a process share them.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo, lock_repo
from dvc.rwlock import rwlock
from voluptuous import Invalid

from flows.engine import site_cache, stage_processes
from flows.engine.dvc_repo import WholeRepo
from flows.engine.stage_processes import CommandFailed
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

_books = threading.RLock()  # DVC polls its own lock twice a second: queue our threads here instead
_POLL = 0.2  # seconds between two looks at a lock that another process holds


class WorkspaceUnusable(EckartError):
    """Nothing can be run in the workspace; the message says why."""


@contextmanager
def repository() -> Iterator[Repo]:
    """Yield the workspace as DVC sees it. DVC logs warnings only, since the flow reports what happens to a stage."""
    logging.getLogger("dvc").setLevel(logging.WARNING)
    where = f"{Path.cwd()} (.dvc/config, .dvc/config.local, .dvcignore)"
    try:
        with WholeRepo(_wait_for_lock=True) as repo:
            where = str(Path.cwd())
            yield repo
    except LockError:
        raise
    except sqlite3.Error as error:
        folder = os.environ.get(site_cache.VARIABLE)
        raise WorkspaceUnusable(f"DVC's databases in {folder}: {error}; make room there, or remove them") from error
    except (DvcException, Invalid, UnicodeDecodeError) as error:
        raise WorkspaceUnusable(f"DVC cannot use {where}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Return DVC's message and that of its cause, which says where in a file the mistake is."""
    errors = (error, getattr(error, "exc", None) or error.__cause__)
    said = [" ".join(str(part).split()) for part in errors if part]
    return said[0] if said[-1] in said[0] else ": ".join(said)


@contextmanager
def bookkeeping(repo: Repo) -> Iterator[None]:
    """Hold DVC's lock on the repository, in one thread of one process at a time."""
    with _books, lock_repo(repo):
        yield


@contextmanager
def workspace(repo: Repo) -> Iterator[None]:
    """Hold the workspace so that no stage in it runs or begins.

    Raises:
        LockError: one runs.
    """
    with bookkeeping(repo), _rwlock(repo, write=[repo.root_dir]):
        yield


@contextmanager
def machine(alone: bool = False) -> Iterator[None]:
    """Share the machine with other stages, or have it alone, among all flows of this user."""
    with (Path(tempfile.gettempdir()) / f"eckart-{os.getuid()}.lock").open("w") as file:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        _wait_for(lambda: fcntl.flock(file, kind | fcntl.LOCK_NB))
        yield


@contextmanager
def of_paths(repo: Repo, reads: Sequence[str], writes: Sequence[str]) -> Iterator[None]:
    """Wait for and hold DVC's locks on what a stage reads and writes; `dvc repro` by hand respects them, too."""
    with ExitStack() as stack:
        for path in reads:
            _wait_for(partial(_read_locks.acquire, repo, path))
            stack.callback(_read_locks.release, repo, path)
        written = ExitStack()
        _wait_for(lambda: _enter(repo, written, _rwlock(repo, write=writes)))
        stack.callback(_close, repo, written)
        yield


class _ReadLocks:
    """Read locks that threads share: DVC's belong to a process, so the first thread to finish would end all of them."""

    def __init__(self) -> None:
        self._readers: Counter[str] = Counter()
        self._held: dict[str, ExitStack] = {}

    def acquire(self, repo: Repo, path: str) -> None:
        with bookkeeping(repo):
            if path not in self._held:
                held = ExitStack()
                held.enter_context(_rwlock(repo, read=[path]))
                self._held[path] = held
            self._readers[path] += 1

    def release(self, repo: Repo, path: str) -> None:
        with bookkeeping(repo):
            self._readers[path] -= 1
            if not self._readers[path]:
                self._held.pop(path).close()


_read_locks = _ReadLocks()


def _rwlock(repo: Repo, read: Sequence[str] = (), write: Sequence[str] = ()) -> AbstractContextManager[None]:
    return rwlock(repo.tmp_dir, repo.fs, " ".join(sys.argv), list(read), list(write), False)


def _wait_for(acquire: Callable[[], object]) -> None:
    """Call `acquire` until it gets its lock from other processes.

    Raises:
        CommandFailed: the flow has ended meanwhile.
    """
    said = False
    while True:
        try:
            acquire()
            return
        except (LockError, BlockingIOError) as error:
            if not said:
                log.warning("waiting: %s", error if isinstance(error, LockError) else "the machine is another flow's")
                said = True
        if stage_processes.flow_has_ended():
            raise CommandFailed("not begun, since the flow has ended")
        time.sleep(_POLL)


def _enter(repo: Repo, locks: ExitStack, lock: AbstractContextManager[None]) -> None:
    with bookkeeping(repo):  # all edits of DVC's file of locks are
        locks.enter_context(lock)


def _close(repo: Repo, locks: ExitStack) -> None:
    with bookkeeping(repo):
        locks.close()
