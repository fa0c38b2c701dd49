"""The engine: runs one stage of dvc.yaml as `dvc repro -s` would, but side by side with others.

DVC decides what is stale; its path locks are waited for rather than failing; its bookkeeping goes one at a time. This
is the only module that touches DVC's internals (Repo, lock_repo, rwlock, Stage.changed/remove_outs/save/commit/dump,
stage_cache.restore, to_single_stage_lockfile), some of which take paths relative to the
working directory: it must be the workspace's root. tests/flows/test_engine.py compares it with the `dvc` command line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import networkx
from dvc.lock import LockError
from dvc.repo import Repo, lock_repo
from dvc.rwlock import rwlock
from dvc.stage import PipelineStage
from dvc.stage.cache import RunCacheNotFoundError
from dvc.stage.serialize import to_single_stage_lockfile

log = logging.getLogger(__name__)

Status = Literal["Cached", "Restored", "Executed"]

logging.getLogger("dvc").setLevel(logging.WARNING)  # the flow tells what happens to a stage

_books = threading.RLock()  # DVC polls its own lock twice a second: queue our threads here instead
_POLL = 0.2  # seconds between two looks at a lock that another process holds


class StageChanged(RuntimeError):
    """A dependency changed while the stage ran, so that its result belongs to no known input."""


@dataclass(frozen=True)
class Outcome:
    """What became of a stage, as it stands in dvc.lock."""

    stage: str
    status: Status
    seconds: float
    key: str
    """Digest of command, dependencies and parameters: two runs with one key are the same computation."""
    deps: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    outs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A stage of dvc.yaml: what it waits for, and whether it must have the machine to itself."""

    name: str
    upstream: tuple[str, ...]
    alone: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    cached: Outcome | None
    """Set if the stage and all before it were up to date when the plan was made."""


def plan() -> list[Planned]:
    """The stages of dvc.yaml in an order in which they can run.

    All are compared with the workspace here, in one go: reading dvc.lock anew for each would take a minute.
    """
    planned: dict[str, Planned] = {}
    with _repo() as repo, _bookkeeping(repo):
        graph = repo.index.graph
        for stage in reversed(list(networkx.topological_sort(graph))):
            if not stage.cmd:
                continue
            upstream = tuple(up.name for up in graph.successors(stage) if up.cmd)
            current = all(planned[name].cached for name in upstream) and _up_to_date(stage)
            planned[stage.name] = Planned(
                name=stage.name,
                upstream=upstream,
                alone=bool((stage.meta or {}).get("alone")),
                reads=tuple(dep.fs_path for dep in stage.deps),
                writes=tuple(out.fs_path for out in stage.outs),
                cached=_outcome(stage, "Cached", 0.0) if current else None,
            )
    return list(planned.values())


def run(planned: Planned, execute: Callable[[str], None]) -> Outcome:
    """Bring a stage up to date: find it cached, restore it from the run cache, or `execute` its commands.

    Raises:
        StageChanged: a dependency changed meanwhile; nothing is recorded.
    """
    if planned.cached:
        return planned.cached
    start = time.perf_counter()
    with _repo() as repo, _paths(repo, planned):
        with _bookkeeping(repo):
            (stage,) = repo.stage.collect(planned.name)
            status = _prepare(repo, stage)
            before = _digests(stage)
        if status == "Executed":
            with _machine(planned.alone):
                for command in stage.cmd if isinstance(stage.cmd, list) else [stage.cmd]:
                    execute(command)
        with _bookkeeping(repo):
            if status != "Cached":
                stage.save_deps()
                if changed := [path for path, digest in _digests(stage).items() if before[path] != digest]:
                    raise StageChanged(f"{', '.join(changed)} changed while {planned.name} ran; run again")
                stage.save()
                stage.commit()
                stage.dump(update_pipeline=False)
            return _outcome(stage, status, time.perf_counter() - start)


def _up_to_date(stage: PipelineStage) -> bool:
    try:
        return not stage.changed()
    except LockError:  # another flow is at it: ask again when it is done
        return False


def _prepare(repo: Repo, stage: PipelineStage) -> Status:
    """DVC's verdict. A stale stage's outputs are removed, and what it is about to read is noted in it."""
    if not stage.changed():
        return "Cached"
    stage.remove_outs(ignore_remove=False)
    try:
        repo.stage_cache.restore(stage)
        return "Restored"
    except RunCacheNotFoundError:
        return "Executed"
    finally:
        stage.save_deps()


def _digests(stage: PipelineStage) -> dict[str, str]:
    """Path or parameter file → digest, as noted last."""
    return {str(dep): str(dep.hash_info.value) for dep in stage.deps}


def _outcome(stage: PipelineStage, status: Status, seconds: float) -> Outcome:
    # Taken from the stage, not by reading dvc.lock: DVC rewrites that file in place.
    entry = to_single_stage_lockfile(stage)
    deps = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
    params = {key: value for file in entry.get("params", {}).values() for key, value in file.items()}
    key = hashlib.sha256(json.dumps([entry["cmd"], deps, params], sort_keys=True).encode()).hexdigest()[:32]
    outs = {out["path"]: out.get("md5", "") for out in entry.get("outs", [])}
    return Outcome(stage.name, status, seconds, key, deps, params, outs)


@contextmanager
def _repo() -> Iterator[Repo]:
    with Repo(_wait_for_lock=True) as repo:
        yield repo


@contextmanager
def _bookkeeping(repo: Repo) -> Iterator[None]:
    """One at a time, in this process and among processes."""
    with _books, lock_repo(repo):
        yield


@contextmanager
def _machine(alone: bool) -> Iterator[None]:
    """Stages share the machine, but for one that must have it alone; among all flows of this user, of any workspace."""
    with (Path(tempfile.gettempdir()) / f"eckart-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def _paths(repo: Repo, planned: Planned) -> Iterator[None]:
    """DVC's locks on what a stage reads and writes, waited for: `dvc repro` by hand respects them, too."""
    with ExitStack() as stack:
        for path in planned.reads:
            _wait_for(repo, partial(_read_locks.acquire, repo, path))
            stack.callback(_read_locks.release, repo, path)
        writes = ExitStack()
        _wait_for(repo, lambda: writes.enter_context(_rwlock(repo, write=planned.writes)))
        stack.callback(_close, repo, writes)
        yield


class _ReadLocks:
    """Read locks counted per path: DVC's own belong to a process, so the first thread done would end them for all."""

    def __init__(self) -> None:
        self._readers: Counter[str] = Counter()
        self._held: dict[str, ExitStack] = {}

    def acquire(self, repo: Repo, path: str) -> None:
        if path not in self._held:
            held = ExitStack()
            held.enter_context(_rwlock(repo, read=[path]))
            self._held[path] = held
        self._readers[path] += 1

    def release(self, repo: Repo, path: str) -> None:
        with _bookkeeping(repo):
            self._readers[path] -= 1
            if not self._readers[path]:
                self._held.pop(path).close()


_read_locks = _ReadLocks()


def _rwlock(repo: Repo, read: Sequence[str] = (), write: Sequence[str] = ()) -> AbstractContextManager[None]:
    return rwlock(repo.tmp_dir, repo.fs, " ".join(sys.argv), list(read), list(write), False)


def _wait_for(repo: Repo, acquire: Callable[[], object]) -> None:
    """Take a DVC lock as soon as no other process has it. All edits of its lock file are bookkeeping."""
    said = False
    while True:
        try:
            with _bookkeeping(repo):
                acquire()
                return
        except LockError as error:
            if not said:
                log.warning("waiting: %s", error)
                said = True
        time.sleep(_POLL)


def _close(repo: Repo, locks: ExitStack) -> None:
    with _bookkeeping(repo):
        locks.close()
