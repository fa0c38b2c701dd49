"""Plan the stages of dvc.yaml, and run single stages as `dvc repro -s` does, but several at the same time.

DVC decides which stages are stale. Some of DVC's internals take paths relative to the working directory, so the working
directory must be the root of the workspace. tests/flows/engine/test_stages.py compares the engine with the `dvc`
command line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import networkx
from dvc.dependency import Dependency, ParamsDependency
from dvc.exceptions import ConfirmRemoveError
from dvc.lock import LockError
from dvc.repo import Repo
from dvc.stage import PipelineStage, Stage
from dvc.stage.cache import RunCacheNotFoundError
from dvc.stage.exceptions import StageNotFound
from dvc.stage.serialize import to_single_stage_lockfile
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.meta import Meta

from flows.engine import cached_objects, lock_file, locks, orphaned_processes, stage_processes, stage_results
from flows.engine.locks import WorkspaceUnusable, bookkeeping, machine, repository
from flows.engine.stage_processes import CommandFailed
from flows.engine.stage_results import Computed
from flows.environment.git_variables import environment_without_git
from tasks.artifacts.errors import EckartError
from tasks.artifacts.input_folders import BASE, RAW
from tasks.artifacts.names import candidate_of, recipe_and_keep

log = logging.getLogger(__name__)

Status = Literal["Cached", "Restored", "Executed"]
_RESOLVE = "resolve"
_KIND = re.compile(r"^  ([\w-]+):", re.MULTILINE)  # name of a stage in dvc.yaml, before any @


class StageChanged(EckartError):
    """A stage, its code or an input changed during the run. The result is not recorded, as it may mix old and new."""


@dataclass(frozen=True)
class Outcome:
    """Result of a stage that is up to date, as dvc.lock records it."""

    stage: str
    status: Status
    seconds: float | None
    """Time that the command took when the result was computed; None if unknown, as after `dvc repro`."""
    key: str
    """Digest of command, dependencies and parameters: two runs with the same key are the same computation."""
    deps: dict[str, str] = field(default_factory=dict)
    """Path → digest."""
    params: dict[str, Any] = field(default_factory=dict)
    outs: dict[str, str] = field(default_factory=dict)
    """Path → digest."""
    place: str = ""
    """Workspace in which the stage ran; empty if it is this one."""


class Reads(NamedTuple):
    """Present inputs of a stage, even if some are missing, and the paths of its outputs."""

    deps: dict[str, str]
    params: dict[str, Any]
    outs: dict[str, str]


@dataclass(frozen=True)
class Planned:
    """A stage of dvc.yaml, as it was when the run was planned."""

    name: str
    upstream: tuple[str, ...]
    """Names of the stages that it directly depends on."""
    alone: bool
    """Whether no other stage may run on the machine at the same time."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    definition: str
    """Digest of the command, parameters and paths at the time of the plan."""
    twin: str | None = None
    """Name of a stage that does the same work for another recipe; this stage waits for it and uses its result."""
    cached: Outcome | None = None
    """The result if the stage and all upstream stages were up to date at the time of the plan."""


def plan(clear: bool = False) -> list[Planned]:
    """Return the stages of dvc.yaml in an order in which they can run, and find those that are up to date.

    Args:
        clear: whether to remove first what recipes and keeps left that were taken out of params.yaml.

    Stages are sorted by their depth in the graph of dependencies. So all rank searches, which may be long, come before
    the stages that depend on a search. All stages are checked in one pass: reading dvc.lock anew for each would take a
    minute.
    """
    check_workspace()
    resolve_parameters()
    planned: dict[str, Planned] = {}
    kinds: dict[str, str] = {}  # stage → digest of its computation and of those that it depends on
    with repository() as repo, bookkeeping(repo):
        graph = repo.index.graph
        _refuse_missing(repo)
        _refuse_links(repo)
        if clear:
            _remove_leftovers(repo)
        for stage in chain.from_iterable(networkx.topological_generations(graph.reverse(copy=False))):
            if not stage.cmd:
                _note_input(stage)
                continue
            upstream = tuple(up.name for up in graph.successors(stage) if up.cmd)
            definition = _definition(stage)
            kind = [_without_recipe_name(stage.name, definition), *(kinds[name] for name in upstream)]
            kinds[stage.name] = _digest(json.dumps(kind))
            current = all(planned[name].cached for name in upstream) and _up_to_date(stage)
            cached = _outcome(stage, "Cached", definition) if current else None
            planned[stage.name] = _planned(stage, definition, upstream, cached)
    first: dict[str, str] = {}  # kind of computation → the stage that does it for all
    for name in sorted(planned, key=lambda name: not planned[name].cached):
        first.setdefault(kinds[name], name)
    twins = {name: first[kinds[name]] for name in planned}
    return [replace(stage, twin=twins[name] if twins[name] != name else None) for name, stage in planned.items()]


def _remove_leftovers(repo: Repo) -> None:
    """Remove what the stages of recipes and keeps left that were taken out of params.yaml.

    Stages that read whole folders, such as the benchmark, would record them as inputs, which no clone has. Only files
    that are as dvc.lock records them, and in the cache, are removed: they come back with their stage.
    """
    names = {stage.name for stage in repo.index.stages if stage.cmd}
    written = [os.path.relpath(out.fs_path) for out in repo.index.outs]
    kinds = {*_KIND.findall(Path("dvc.yaml").read_text("utf-8"))}  # a dvc.yaml that was cut off lacks some

    def is_gone(name: str) -> bool:
        kind, matrix, _ = name.partition("@")
        return bool(matrix) and kind in kinds and name not in names

    others = lock_file.outputs_of(is_gone)
    there = {path: digest for path, digest in others.items() if Path(path).exists() and not overlaps(path, written)}
    cache = Path(repo.cache.local_cache_dir)
    gone = [
        path
        for path, digest in there.items()
        if not cached_objects.missing(cache, digest)
        and not cached_objects.corrupted(cache, digest)
        and cached_objects.digest_of(cached_objects.measured(Path(path))) == digest
    ]
    if not gone:
        return
    with suppress(LockError), locks.if_free(repo, [str(Path(path).absolute()) for path in gone]):
        for path in map(Path, gone):
            aside = path.with_name(f"{path.name}.partial")  # which no stage reads, should a kill leave it
            cached_objects.remove(aside)
            path.rename(aside)
            cached_objects.remove(aside)
        log.warning(
            "removed what recipes or keeps that the study no longer has left here, such as %s; it is in the cache, and "
            "comes back with them",
            gone[0],
        )


def overlaps(path: str, outputs: Iterable[str]) -> bool:
    """Whether a path is one of the outputs, lies in one, or contains one: a stage may read a folder of outputs."""
    return any(Path(path).is_relative_to(out) or Path(out).is_relative_to(path) for out in outputs)


def resolve_parameters() -> None:
    """Run the stage `resolve`, whose parameters all other stages read, if it is stale."""
    with repository() as repo, bookkeeping(repo):
        lock_file.heal(repo)
        try:
            (stage,) = repo.stage.collect(_RESOLVE)
        except StageNotFound:
            return
        if _up_to_date(stage):
            return
        planned = _planned(stage, _definition(stage))
    lines: list[str] = []
    try:
        with stage_processes.reaping():
            run(planned, partial(execute_here, planned, log=lines.append, timeout=None))
    except CommandFailed as failure:
        raise WorkspaceUnusable("\n".join(lines) or str(failure)) from failure


def _planned(
    stage: PipelineStage, definition: str, upstream: tuple[str, ...] = (), cached: Outcome | None = None
) -> Planned:
    return Planned(
        name=stage.name,
        upstream=upstream,
        alone=bool((stage.meta or {}).get("alone")),
        reads=tuple(dep.fs_path for dep in stage.deps),
        writes=tuple(out.fs_path for out in stage.outs),
        definition=_digest(definition),
        cached=cached,
    )


def _refuse_missing(repo: Repo) -> None:
    """Raise WorkspaceUnusable if a folder of the user is missing that a stage reads and DVC does not track."""
    read = {dep.fs_path for stage in repo.index.stages for dep in stage.deps}
    made = {out.fs_path for out in repo.index.outs}  # of tracked ones, `_note_input` says that they are missing
    places = {path: str(Path(repo.root_dir) / path) for path in (RAW, BASE)}
    needed = [path for path, place in places.items() if place in read and place not in made]
    if missing := [str(path) for path in needed if not path.exists()]:
        raise WorkspaceUnusable(
            f"there is no {' and no '.join(missing)}: put your data or your base model there, or make an empty folder "
            "if params.yaml names none"
        )


def _refuse_links(repo: Repo) -> None:
    """Raise WorkspaceUnusable if DVC would not record what is behind a link.

    A link to a folder, among the files that a stage reads, is an empty folder to it, so it would see no change. Outputs
    behind a link out of the workspace it cannot record, and would say so only after a stage has run.
    """
    root = Path(repo.root_dir)
    stages = [stage for stage in repo.index.stages if stage.cmd]
    deps = (Path(dep.fs_path) for stage in stages for dep in stage.deps)
    outs = [Path(out.fs_path) for stage in stages for out in stage.outs]
    read = {path for path in deps if path.is_relative_to(root)}
    given = read - {path for out in outs for path in (out, *out.parents)}  # of the others, the message is below
    inside = chain(given, chain.from_iterable(path.rglob("*") for path in read))
    if linked := sorted(path for path in inside if path.is_symlink() and path.is_dir()):
        name, target = shlex.quote(str(linked[0].relative_to(root))), shlex.quote(str(linked[0].resolve()))
        raise WorkspaceUnusable(
            f"{name} is a link to a folder, in which DVC would see no change: put a copy there, `rm {name} && cp -rL "
            f"{target} {name}`, and copy again when the original changes"
        )
    folders = {folder for out in repo.index.outs for folder in Path(out.fs_path).parents if folder.is_relative_to(root)}
    links = sorted(folder for folder in folders if folder.is_symlink())
    if outside := [link for link in links if not link.resolve().is_relative_to(root.resolve())]:
        names, cache = ", ".join(str(link.relative_to(root)) for link in outside), outside[0].resolve() / "dvc-cache"
        raise WorkspaceUnusable(
            f"{names} is a link out of the workspace, and DVC records nothing there. Make it a folder, and have DVC "
            f"keep the files on that disk, with links to them here: `dvc cache dir --local {cache}` and "
            "`dvc config --local cache.type symlink`"
        )


def run(planned: Planned, execute: Callable[[str], Outcome | float]) -> Outcome:
    """Bring a stage up to date: unless it already is, restore its outputs from the cache, or else run its command.

    Args:
        execute: a function that runs the command and returns the seconds that it took. Or it has another workspace run
            the command, fetches the outputs, and returns the outcome there.

    Raises:
        StageChanged: the stage or a dependency changed since the plan was made. Nothing is recorded.
        CommandFailed: the command failed.
    """
    if planned.cached:
        return planned.cached
    with repository() as repo, locks.of_paths(repo, planned.reads, planned.writes):
        orphaned_processes.refuse(Path(repo.root_dir), planned.name)
        with bookkeeping(repo):
            stage, definition = _unchanged(repo, planned)
            status = _prepare(repo, stage, definition)
            before = noted_digests(stage)
        executed = _executed(stage, execute) if status == "Executed" else 0.0
        with bookkeeping(repo):
            if status != "Cached":
                stage.save_deps()
                if changed := [path for path, digest in noted_digests(stage).items() if before[path] != digest]:
                    raise StageChanged(f"{', '.join(changed)} changed while {planned.name} ran; run again")
                stage.save(run_cache=False)
                _discard_corrupt(stage)
                lock_file.write(stage)  # before the cache, whose disk may be full: the next run stores these outputs
                _store(stage)
            if status == "Executed":
                seconds = executed.seconds if isinstance(executed, Outcome) else executed
                stage_results.keep(_cache(stage), _computation(stage, definition), Computed(seconds, _results(stage)))
            here = _outcome(stage, status, definition)
    if not isinstance(executed, Outcome):
        return here
    # "Cached" in the other workspace: the stage ran there for an earlier run, which was cut off.
    return replace(here, status="Executed" if executed.status == "Executed" else "Restored", place=executed.place)


def _executed(stage: PipelineStage, execute: Callable[[str], Outcome | float]) -> Outcome | float:
    # dvc.yaml may have a list of commands: each runs only if the one before succeeded.
    command = stage.cmd if isinstance(stage.cmd, str) else " && ".join(stage.cmd)
    try:
        return execute(command)
    except BaseException as failure:  # such as Ctrl-C
        if "@" in stage.name:
            # A stage that reads the whole folder would record what was begun as an input, should the recipe be taken
            # out. Other stages stay, and what they wrote may say why they failed, such as the page of check.
            with bookkeeping(stage.repo):
                stage.remove_outs(ignore_remove=False)
        if not isinstance(failure, CommandFailed):
            raise
        from tasks.runtime.code_digests import CodeChanged, check_stage  # a slow import

        try:
            check_stage(stage.name)
        except CodeChanged as changed:
            raise StageChanged(f"{stage.name}: {changed}") from failure
        raise


def execute_here(planned: Planned, command: str, log: Callable[[str], None], timeout: float | None) -> float:
    """Wait for the machine's lock, run a stage's command in the working directory, and return the seconds it took."""
    root = Path.cwd()
    with machine(planned.alone):
        return stage_processes.run(command, root, log, {"DVC_ROOT": str(root), "DVC_STAGE": planned.name}, timeout)


def _up_to_date(stage: PipelineStage) -> bool:
    try:
        return not stage.changed()
    except LockError:  # another flow runs the stage: `run` waits for it and checks again
        return False


def _prepare(repo: Repo, stage: PipelineStage, definition: str) -> Status:
    """Replace the outputs of a stale stage by those in the cache, if the cache has outputs for the present inputs.

    If not, remove the outputs, and save the digests of the present inputs in `stage`.

    Returns:
        "Cached" if the stage is up to date, "Restored", or "Executed" if the caller must now run its command.
    """
    if not stage.changed() or _stored_again(stage):
        return "Cached"
    stage.remove_outs(ignore_remove=False)
    if restore(repo, stage):
        return "Restored"
    stage.save_deps()
    return "Restored" if _reuse(stage, definition) else "Executed"


def _stored_again(stage: PipelineStage) -> bool:
    """Store outputs that are as dvc.lock records them, but not in the cache, and return whether there were such.

    A full disk, or a folder of the cache that cannot be written, may have prevented that when the stage ran.
    """
    changed = stage.changed_stage() or stage.changed_deps()
    if changed or any(not out.exists or out.changed_checksum() for out in stage.outs):
        return False
    _store(stage)
    return not _discard_corrupt(stage)


def _store(stage: Stage) -> None:
    """Copy the outputs of a stage into DVC's cache, and note them in the run cache.

    Raises:
        WorkspaceUnusable: the cache did not take all files. DVC may only log that, or fail later, at links to them.
    """
    cause = ""
    try:
        stage.commit()
        stage.repo.stage_cache.save(stage)
    except (ConfirmRemoveError, OSError) as error:
        cause = f" ({error})" if isinstance(error, OSError) else ""
    cache = Path(stage.repo.cache.local_cache_dir)
    digests = [str(out.hash_info.value) for out in stage.outs if out.use_cache]
    if cause or any(cached_objects.missing(cache, digest) for digest in digests):
        raise WorkspaceUnusable(
            f"DVC's cache, {cache}, did not take {', '.join(str(out) for out in stage.outs)}{cause}: make room there, "
            "or make it writable, and run again; the files in this workspace are kept"
        )


def _reuse(stage: PipelineStage, definition: str) -> bool:
    """Check out the outputs of an earlier stage that did the same work, maybe for a recipe with another name.

    Returns:
        Whether the cache has such outputs.
    """
    computed = stage_results.load(_cache(stage), _computation(stage, definition))
    if not computed or len(computed.outs) != len(stage.outs):
        return False
    for out, (digest, meta) in zip(stage.outs, computed.outs, strict=True):
        out.hash_info, out.meta, out.obj = HashInfo.from_dict(digest), Meta.from_dict(meta), None
    if any(out.changed_cache() for out in stage.outs):
        return False
    for out in stage.outs:
        out.checkout()
    return _is_whole(stage)


def _without_recipe_name(name: str, definition: str) -> str:
    """Return the definition of the stage `name` with `*` in place of the recipe's name.

    If the stages of two recipes do the same work, they then have the same definition.
    """
    if not (candidate := candidate_of(name)):
        return definition
    stage, (recipe, _) = name.partition("@")[0], recipe_and_keep(candidate)
    named = {
        f"/{candidate}": "/*",
        f"--recipe {recipe} ": "--recipe * ",
        f'"recipes": {{"{recipe}": ': '"recipes": {"*": ',
        f'"code": {{"{stage}": {{"{recipe}": ': f'"code": {{"{stage}": {{"*": ',
    }
    return reduce(lambda text, pair: text.replace(*pair), named.items(), definition)


def restore(repo: Repo, stage: PipelineStage, pull: bool = False) -> bool:
    """Check out the outputs that dvc.lock or the run cache records for the stage's present inputs.

    Call it only once for the same object `stage`. DVC takes the outputs that dvc.lock records if the inputs saved in
    `stage` equal the present inputs, and this call saves the present inputs.

    Args:
        pull: whether to search the remote, too.

    Returns:
        Whether such outputs were found and are not corrupt.
    """
    try:
        repo.stage_cache.restore(stage, pull=pull)
    except RunCacheNotFoundError:
        return False
    return _is_whole(stage)


def _is_whole(stage: PipelineStage) -> bool:
    """Whether the outputs that were checked out have the right digests; if not, remove them again."""
    if not _discard_corrupt(stage):
        return True
    stage.remove_outs(ignore_remove=False)
    return False


def _discard_corrupt(stage: PipelineStage) -> bool:
    """Remove the corrupt objects of a stage's outputs, and return whether there were any."""
    return bool(
        cached_objects.discard_corrupt(
            _cache(stage), lock_file.digests(to_single_stage_lockfile(stage), "outs").values()
        )
    )


def _unchanged(repo: Repo, planned: Planned) -> tuple[PipelineStage, str]:
    """Load a stage, and return it with its definition.

    Raises:
        StageChanged: the definition is not the planned one, so the run would mix two studies.
    """
    try:
        (stage,) = repo.stage.collect(planned.name)
    except StageNotFound:
        stage = None
    definition = _definition(stage) if stage else ""
    if _digest(definition) != planned.definition:
        raise StageChanged(f"params.yaml or dvc.yaml changed or removed {planned.name} during the run; run again")
    return stage, definition


def definition_of(stage: PipelineStage) -> str:
    """Return the digest of the stage's command, parameters and paths."""
    return _digest(_definition(stage))


def _digest(definition: str) -> str:
    return hashlib.sha256(definition.encode()).hexdigest()


def _definition(stage: PipelineStage) -> str:
    params = {dep.def_path: dict(dep.read_params(flatten=False)) for dep in _params(stage)}
    paths = [[str(dep) for dep in stage.deps], [str(out) for out in stage.outs]]
    return json.dumps([stage.cmd, params, paths], sort_keys=True)


def check_workspace() -> None:
    """Raise WorkspaceUnusable unless the working directory is a workspace in which stages can run."""
    if not Path(".dvc").is_dir() or not Path("dvc.yaml").is_file():
        raise WorkspaceUnusable(
            f"{Path.cwd()} has no .dvc and no dvc.yaml: run this in the root of a workspace; "
            "`eckart init FOLDER` makes one"
        )
    for folder in (Path.cwd(), Path(".dvc"), Path(".dvc/tmp")):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise WorkspaceUnusable(f"{folder.resolve()} cannot be written: a run needs a workspace of its own")


def read_now() -> list[Reads]:
    """Return the present inputs of each stage. Missing dependencies are left out."""
    resolve_parameters()
    reads = []
    with repository() as repo, bookkeeping(repo):
        for stage in (stage for stage in repo.index.stages if stage.cmd):
            stage.save_deps(allow_missing=True)
            files = {str(dep): str(dep.hash_info.value) for dep in _files(stage) if dep.exists}
            params = {key: value for dep in _params(stage) for key, value in (dep.hash_info.value or {}).items()}
            reads.append(Reads(files, params, {str(out): "" for out in stage.outs}))
    return reads


def _files(stage: PipelineStage) -> list[Dependency]:
    return [dep for dep in stage.deps if not isinstance(dep, ParamsDependency)]


def _params(stage: PipelineStage) -> list[ParamsDependency]:
    return [dep for dep in stage.deps if isinstance(dep, ParamsDependency)]


def noted_digests(stage: PipelineStage) -> dict[str, str]:
    """Return path → digest of the inputs that are saved in `stage`; for a parameter file, path → values as JSON."""
    values = {str(dep): dep.hash_info.value for dep in stage.deps}
    return {
        path: json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else str(value)
        for path, value in values.items()
    }


def _outcome(stage: PipelineStage, status: Status, definition: str) -> Outcome:
    # From the stage and not from dvc.lock: DVC may be rewriting that file at this moment.
    entry = to_single_stage_lockfile(stage)
    deps, outs = lock_file.digests(entry, "deps"), lock_file.digests(entry, "outs")
    params = {key: value for file in entry.get("params", {}).values() for key, value in file.items()}
    key = _digest(json.dumps([entry["cmd"], deps, params], sort_keys=True))[:32]
    cache, computation = _cache(stage), _computation(stage, definition)
    computed = stage_results.load(cache, computation)
    if not computed:  # `dvc repro` computed it
        stage_results.keep(cache, computation, Computed(None, _results(stage)))
    return Outcome(stage.name, status, computed.seconds if computed else None, key, deps, params, outs)


def _computation(stage: PipelineStage, definition: str) -> str:
    """Return a digest of the stage's command, parameters and inputs.

    If the stages of two recipes do the same work, they have the same digest.
    """
    read = [str(dep.hash_info.value) for dep in _files(stage)]
    return _digest(json.dumps([_without_recipe_name(stage.name, definition), read]))


def _results(stage: PipelineStage) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Return digest and metadata of each output, as `Computed.outs` has them."""
    return [(out.hash_info.to_dict(), out.meta.to_dict()) for out in stage.outs]


def _cache(stage: PipelineStage) -> Path:
    return Path(stage.repo.cache.local_cache_dir)


def _note_input(stage: Stage) -> None:
    """Write the present digest of a user's file or folder into its .dvc file, as `dvc repro` does.

    Raises:
        WorkspaceUnusable: it is missing, or git changed the .dvc file and left the data, as `git pull` does.
    """
    if stage.deps or stage.frozen:  # an import, which DVC updates only on request
        return
    if missing := [str(out) for out in stage.outs if not out.exists]:
        raise WorkspaceUnusable(f"{', '.join(missing)} is tracked by DVC and not here: run `eckart pull`")
    with suppress(LockError):  # another flow reads the file: the next run updates the .dvc file
        if stage.changed():
            named = [out.hash_info for out in stage.outs]
            stage.save()
            if named != [out.hash_info for out in stage.outs] and _is_of_another_commit(stage):
                raise WorkspaceUnusable(
                    f"{stage.outs[0]} is not the version that {stage.relpath} names, but that of another commit: bring "
                    f"the one that it names, `eckart pull`, or keep this one, `dvc add {stage.outs[0]}`"
                )
            _store(stage)
            stage.dump()
            log.warning("%s has changed, and %s was updated: commit that file", stage.outs[0], stage.relpath)


def _is_of_another_commit(stage: Stage) -> bool:
    """Whether git wrote a .dvc file after its data were last changed, and another commit names these data."""
    files = [Path(top, name) for out in stage.outs for top, _, names in os.walk(out.fs_path) for name in names]
    files += [Path(out.fs_path) for out in stage.outs if Path(out.fs_path).is_file()]
    written = Path(stage.path).stat().st_mtime
    # lstat: a link to DVC's cache is as new as its checkout, and one to nowhere is a file of the data, too
    if any(file.lstat().st_mtime > written for file in files) or _git("diff", "--name-only", "HEAD", stage.path) != "":
        return False
    log = ("log", "--all", "--full-history", "--max-count=1", "--format=%h")
    return any(_git(*log, f"-S{out.hash_info.value}", "--", stage.path) for out in stage.outs)


def _git(*words: str) -> str | None:
    """Run git in the workspace, and return its output; None if it fails or is not installed."""
    environment = environment_without_git()
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(["git", *words], env=environment, capture_output=True, text=True, check=True).stdout
    return None


def cache_dir() -> Path:
    """Return the folder of DVC's cache."""
    with repository() as repo:
        return Path(repo.cache.local_cache_dir)
