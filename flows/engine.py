"""The engine: runs one stage of dvc.yaml as `dvc repro -s` would, but side by side with others.

DVC decides what is stale; its path locks are waited for rather than failing; its bookkeeping goes one at a time. This
is the only module that touches DVC's internals (Repo, lock_repo, rwlock, Stage.changed/remove_outs/save/commit/dump,
stage_cache.restore, to_single_stage_lockfile; and for workers load_file, StageLoader.fill_from_lock, Output.checkout,
cloud.push/pull), some of which take paths relative to the working directory: it must be the workspace's root.
tests/flows/test_engine.py compares it with the `dvc` command line.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

import networkx
from dvc.config import Config, merge
from dvc.dependency import ParamsDependency
from dvc.dvcfile import load_file
from dvc.exceptions import CollectCacheError, ConfirmRemoveError, DvcException
from dvc.lock import LockError
from dvc.repo import Repo, lock_repo
from dvc.rwlock import RWLOCK_FILE, rwlock
from dvc.stage import PipelineStage, Stage
from dvc.stage.cache import RunCacheNotFoundError
from dvc.stage.exceptions import StageNotFound
from dvc.stage.loader import StageLoader
from dvc.stage.serialize import to_single_stage_lockfile
from dvc_data.hashfile.hash_info import HashInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from flows import cache
from flows.settings import shown

log = logging.getLogger(__name__)

Status = Literal["Cached", "Restored", "Executed"]

logging.getLogger("dvc").setLevel(logging.WARNING)  # the flow tells what happens to a stage

_books = threading.RLock()  # DVC polls its own lock twice a second: queue our threads here instead
_POLL = 0.2  # seconds between two looks at a lock that another process holds


class StageChanged(RuntimeError):
    """What a stage reads, or the stage itself, changed during the run, so that its result belongs to no known input."""


class WorkspaceUnusable(RuntimeError):
    """Nothing can be run in the workspace; the message says why."""


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
    definition: str
    """Digest of command, parameters and paths, as they were when the plan was made."""
    cached: Outcome | None
    """Set if the stage and all before it were up to date when the plan was made."""


def plan() -> list[Planned]:
    """The stages of dvc.yaml in an order in which they can run.

    All are compared with the workspace here, in one go: reading dvc.lock anew for each would take a minute.

    Raises:
        WorkspaceUnusable: it is no workspace, or cannot be written.
    """
    check_workspace()
    planned: dict[str, Planned] = {}
    with _repo() as repo, _bookkeeping(repo):
        _heal(repo)
        graph = repo.index.graph
        for stage in reversed(list(networkx.topological_sort(graph))):
            if not stage.cmd:
                _note_input(stage)
                continue
            upstream = tuple(up.name for up in graph.successors(stage) if up.cmd)
            current = all(planned[name].cached for name in upstream) and _up_to_date(stage)
            planned[stage.name] = Planned(
                name=stage.name,
                upstream=upstream,
                alone=bool((stage.meta or {}).get("alone")),
                reads=tuple(dep.fs_path for dep in stage.deps),
                writes=tuple(out.fs_path for out in stage.outs),
                definition=_definition(stage),
                cached=_outcome(stage, "Cached", 0.0) if current else None,
            )
    return list(planned.values())


def run(planned: Planned, execute: Callable[[str], None]) -> Outcome:
    """Bring a stage up to date: find it cached, restore it from the run cache, or `execute` its commands.

    Raises:
        StageChanged: the stage or a dependency changed since the plan was made; nothing is recorded.
    """
    if planned.cached:
        return planned.cached
    start = time.perf_counter()
    with _repo() as repo, _paths(repo, planned):
        with _bookkeeping(repo):
            stage = _unchanged(repo, planned)
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
                _discard_corrupt(repo, stage)
                stage.commit()
                stage.dump(update_pipeline=False)
            return _outcome(stage, status, time.perf_counter() - start)


Entry = dict[str, Any]
"""A stage as it stands in dvc.lock: digests and no bytes, so that any workspace can adopt it."""


class TransportFailed(RuntimeError):
    """The DVC remote cannot be used, or lacks what it should hold; the message says which."""


class NotTheSame(RuntimeError):
    """This workspace would run something else under the stage's name; the message says what differs."""


@dataclass(frozen=True)
class Order:
    """A stage for another workspace to run: all that it reads as digests, no bytes and no paths of this machine."""

    stage: str
    alone: bool
    definition: str
    reads: dict[str, str]
    """Dependency or parameter file → digest."""
    upstream: dict[str, Entry]


def order(planned: Planned) -> Order:
    """What another workspace needs to run a stage as it would run here, where all that it reads is."""
    with _repo() as repo, _bookkeeping(repo):
        stages = _stages(repo)
        stage = stages[planned.name]
        stage.save_deps()
        upstream = {name: dict(to_single_stage_lockfile(stages[name])) for name in planned.upstream}
        return Order(planned.name, planned.alone, planned.definition, _digests(stage), upstream)


def accept(order: Order) -> Planned:
    """Pull what the stage reads and is not in this workspace as it should be.

    Raises:
        TransportFailed: the remote does not give it.
        NotTheSame: code, parameters or data of this workspace are others.
    """
    with _repo() as repo, _bookkeeping(repo), _transport(f"pulling what {order.stage} reads"):
        stages = _stages(repo)
        if missing := [name for name in (order.stage, *order.upstream) if name not in stages]:
            raise NotTheSame(f"{_here()} has no stage {', '.join(missing)}: bring it up to date")
        stage = stages[order.stage]
        for name, entry in order.upstream.items():
            before = stages[name]
            StageLoader.fill_from_lock(before, entry)
            for out, dep in product(before.outs, stage.deps):
                if Path(dep.fs_path).is_relative_to(out.fs_path):
                    _pull(repo, out.get_used_objs(filter_info=dep.fs_path))
                    out.checkout(filter_info=dep.fs_path, force=True)
        stage.save_deps()
        if different := _differences(stage, order):
            raise NotTheSame(f"{_here()} has another {', '.join(different)} than the run: bring it up to date")
        reads, writes = (tuple(path.fs_path for path in paths) for paths in (stage.deps, stage.outs))
        return Planned(order.stage, (), order.alone, reads, writes, order.definition, cached=None)


def publish(names: Sequence[str]) -> dict[str, Entry]:
    """Push what stages wrote to the remote; their entries in dvc.lock.

    Raises:
        TransportFailed: it cannot be pushed.
    """
    what = f"pushing what {', '.join(names)} wrote"
    with _repo() as repo, _bookkeeping(repo), _transport(what):
        stages = _stages(repo)
        for name in names:
            for objects in stages[name].get_used_objs(push=True).values():
                if repo.cloud.push(objects).failed:
                    raise TransportFailed(f"{what}: the DVC remote does not take it")
        return {name: dict(to_single_stage_lockfile(stages[name])) for name in names}


def fetch(order: Order, entry: Entry) -> None:
    """Put here what another workspace wrote when it ran the order; `run` around this records it.

    Raises:
        TransportFailed: the remote does not give it.
        StageChanged: the stage, or what it reads here, is not what was ordered any more.
    """
    with _repo() as repo, _bookkeeping(repo), _transport(f"pulling what {order.stage} wrote"):
        stage = _stages(repo)[order.stage]
        stage.save_deps()
        if changed := _differences(stage, order):
            raise StageChanged(f"{', '.join(changed)} changed while {order.stage} ran; run again")
        StageLoader.fill_from_lock(stage, entry)
        _pull(repo, stage.get_used_objs())
        for out in stage.outs:
            out.checkout(force=True)


def check_remote() -> None:
    """See to it that there is a DVC remote, which carries bytes between workspaces.

    Raises:
        TransportFailed: there is none.
    """
    with _repo() as repo:
        if not repo.config["core"].get("remote"):
            raise TransportFailed("workers need a DVC remote that all reach: `dvc remote add --default NAME URL`")


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
        return "Restored" if _restore(repo, stage) else "Executed"
    finally:
        stage.save_deps()


def _restore(repo: Repo, stage: PipelineStage, pull: bool = False) -> bool:
    """Take the outputs from the run cache, if they are there and whole."""
    try:
        repo.stage_cache.restore(stage, pull=pull)
    except RunCacheNotFoundError:
        return False
    if whole := not _discard_corrupt(repo, stage):
        return whole
    stage.remove_outs(ignore_remove=False)
    return False


def _discard_corrupt(repo: Repo, stage: PipelineStage) -> bool:
    """Remove the objects of a stage's outputs that are corrupt; whether there were any.

    DVC takes a read-only object of its cache for whole: it would be checked out as it is, and never be written anew.
    """
    digests = _outcome(stage, "Cached", 0.0).outs.values()
    corrupt = [path for digest in digests for path in cache.corrupted(Path(repo.cache.local_cache_dir), digest)]
    for path in corrupt:
        log.warning("%s: object %s of DVC's cache is corrupt; it is made again", stage.name, path.name)
        path.unlink()
    return bool(corrupt)


def _unchanged(repo: Repo, planned: Planned) -> PipelineStage:
    """The stage as it was planned: a run whose parameters changed on the way would mix two studies."""
    try:
        (stage,) = repo.stage.collect(planned.name)
    except StageNotFound:
        stage = None
    if not stage or _definition(stage) != planned.definition:
        raise StageChanged(f"params.yaml or dvc.yaml changed what {planned.name} is since the run began; run again")
    return stage


def _definition(stage: PipelineStage) -> str:
    params = {
        dep.def_path: dict(dep.read_params(flatten=False)) for dep in stage.deps if isinstance(dep, ParamsDependency)
    }
    paths = [[str(dep) for dep in stage.deps], [str(out) for out in stage.outs]]
    return hashlib.sha256(json.dumps([stage.cmd, params, paths], sort_keys=True).encode()).hexdigest()


def check_workspace() -> None:
    """See to it that stages can be run in the working directory.

    Raises:
        WorkspaceUnusable: it is no workspace, or cannot be written.
    """
    if not Path(".dvc").is_dir() or not Path("dvc.yaml").is_file():
        raise WorkspaceUnusable(f"{Path.cwd()} has no .dvc and no dvc.yaml: run this in the root of a workspace")
    for folder in (Path.cwd(), Path(".dvc"), Path(".dvc/tmp")):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise WorkspaceUnusable(f"{folder.resolve()} cannot be written: a run needs a workspace of its own")


def _heal(repo: Repo) -> None:
    """Set aside records that a full disk or a kill left half-written: DVC rewrites them in place.

    dvc.lock names results that are in the cache, where the run cache finds them again; rwlock holds locks only.
    """
    for path, read in ((Path("dvc.lock"), YAML(typ="safe").load), (Path(repo.tmp_dir) / RWLOCK_FILE, json.load)):
        if not path.exists():
            continue
        try:
            with path.open() as file:
                whole = isinstance(read(file), dict)
        except (YAMLError, ValueError):
            whole = False
        if not whole:
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            log.warning("%s was cut off; it is now %s, and results are taken from the cache", path.name, aside.name)


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


def _stages(repo: Repo) -> Mapping[str, PipelineStage]:
    """All stages, made anew at every look; dvc.yaml and dvc.lock are read once."""
    return load_file(repo, "dvc.yaml").stages


def _pull(repo: Repo, used: Mapping[Any, set[Any]]) -> None:
    for objects in used.values():
        if repo.cloud.pull(objects).failed:
            raise TransportFailed("the DVC remote does not give it")


def _differences(stage: PipelineStage, order: Order) -> list[str]:
    """What the stage reads here, or is here, and was not when it was ordered."""
    reads = _digests(stage)
    paths = [path for path in {**reads, **order.reads} if reads.get(path) != order.reads.get(path)]
    return paths or ([] if _definition(stage) == order.definition else ["dvc.yaml"])


def _here() -> str:
    return f"{Path.cwd()} on {gethostname()}"


@contextmanager
def _transport(what: str) -> Iterator[None]:
    try:
        yield
    except DvcException as error:
        raise TransportFailed(f"{what}: {shown(str(error))}") from error


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


def push() -> None:
    """Copy to the remote what dvc.lock and .dvc files name, and the run cache with all that it names.

    `dvc push --run-cache` leaves behind what only the run cache names: results of parameters that were changed since.

    Raises:
        TransportFailed: the remote cannot be used.
    """
    with _repo() as repo, _bookkeeping(repo), _remote_used("pushing"):
        repo.push(run_cache=True)
        runs = [(path.parent.name, path.name) for path in Path(repo.stage_cache.cache_dir).glob("*/*/*")]
        for objects in repo.stage_cache.get_used_objs(runs).values():
            repo.cloud.push(objects)


def pull() -> list[str]:
    """Take from cache and remote what the workspace lacks, and run nothing; what could not be had, upstream first.

    With dvc.lock it is what that names; without, what the run cache has for these parameters, code and data.

    Raises:
        TransportFailed: the remote cannot be used.
    """
    with _repo() as repo, _bookkeeping(repo), _remote_used("pulling"):
        repo.stage_cache.pull(None)
        stages = reversed(list(networkx.topological_sort(repo.index.graph)))
        return [stage.addressing for stage in stages if not _pulled(repo, stage)]


def _pulled(repo: Repo, stage: Stage) -> bool:
    """Whether the stage is up to date, now or before; what a person edited stays as it is."""
    if not stage.changed():
        return True
    if not all(dep.exists for dep in stage.deps):  # the stage that writes it could not be had
        return False
    try:
        if not stage.cmd:
            return _pulled_input(repo, stage)
        # Where the cache's own bytes were corrupt and are gone, the remote's come at the second try.
        if not any(_restore(repo, stage, pull=True) for _ in range(2)):
            return False
    except (CollectCacheError, ConfirmRemoveError):
        return False
    stage.save()
    stage.commit()
    stage.dump(update_pipeline=False)
    return True


def _pulled_input(repo: Repo, stage: Stage) -> bool:
    for objects in stage.get_used_objs().values():
        repo.cloud.pull(objects)
    if stage.outs_cached():
        stage.checkout()
    return not stage.changed()


def _note_input(stage: Stage) -> None:
    """Write what the user's own file or folder is now into its .dvc file, as `dvc repro` does.

    Raises:
        WorkspaceUnusable: it is not here.
    """
    if stage.deps or stage.frozen:  # an import: DVC asks its source, and only when told to
        return
    if missing := [str(out) for out in stage.outs if not out.exists]:
        raise WorkspaceUnusable(f"{', '.join(missing)} is in DVC and not here: run `python -m flows pull`")
    with suppress(LockError):  # another flow reads it: the next run notes it
        if stage.changed():
            stage.save()
            stage.commit()
            stage.dump()
            log.warning("%s is not what %s said; noted: commit that file", stage.outs[0], stage.relpath)


def fetch_objects(digests: Iterable[str]) -> None:
    """Copy objects from the remote to the cache; those that the remote lacks are not copied.

    Raises:
        TransportFailed: the remote cannot be used.
    """
    with _repo() as repo, _bookkeeping(repo), _remote_used("pulling"):
        repo.cloud.pull({HashInfo("md5", digest) for digest in digests})


def cache_dir() -> Path:
    """As `dvc cache dir` names it."""
    with _repo() as repo:
        return Path(repo.cache.local_cache_dir)


@contextmanager
def _remote_used(what: str) -> Iterator[None]:
    try:
        yield
    except LockError as error:
        raise TransportFailed(f"{what}: a flow runs in this workspace; wait for its end: {error}") from error
    except Exception as error:  # each kind of remote fails in its own way
        cause = shown(str(error))
        raise TransportFailed(f"{what}: the DVC remote cannot be used: {cause}; `dvc remote list` names it") from error


def share_settings(root: Path, folder: Path) -> None:
    """Give the workspace `folder` what DVC is told in the workspace `root`: cache, remotes, all of them absolute."""
    main = Config(str(root / ".dvc"))
    settings = main.load_one("repo")
    merge(settings, main.load_one("local"))
    settings["cache"]["dir"] = main["cache"].get("dir") or str(root / ".dvc/cache")
    own = Config(str(folder / ".dvc"))
    Path(own.files["local"]).touch(mode=0o600)  # remotes may have secrets
    with own.edit("local") as local:
        local.clear()
        local.update(settings)


def own_cache(folder: Path) -> None:
    """Give the workspace `folder` a cache of its own."""
    with Config(str(folder / ".dvc")).edit("local") as local:
        local["cache"]["dir"] = str(folder / ".dvc/cache")


def beside_others() -> AbstractContextManager[None]:
    """Wait for, and then hold off, what must have the machine to itself, as any other stage does."""
    return _machine(alone=False)
