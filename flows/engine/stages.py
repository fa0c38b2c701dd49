"""The engine: runs one stage of dvc.yaml as `dvc repro -s` would, but side by side with others.

DVC decides what is stale. This room and reproduce.py alone touch DVC's internals (here Stage.changed/remove_outs/save/
commit, stage_cache.restore, to_single_stage_lockfile), some of which take paths relative to the working directory:
it must be the workspace's root. tests/flows/engine/test_stages.py compares the engine with the `dvc` command line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import networkx
from dvc.dependency import ParamsDependency
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
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import candidate_of, recipe_and_keep

log = logging.getLogger(__name__)

Status = Literal["Cached", "Restored", "Executed"]
_RESOLVE = "resolve"


class StageChanged(EckartError):
    """The stage, its code or an input changed during the run, so that its result belongs to no known inputs."""


@dataclass(frozen=True)
class Outcome:
    """The result of a stage that is up to date, as dvc.lock records it."""

    stage: str
    status: Status
    seconds: float | None
    """Time that its command took when this was computed; None if that was with another cache."""
    key: str
    """Digest of command, dependencies and parameters: two runs with one key are the same computation."""
    deps: dict[str, str] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    outs: dict[str, str] = field(default_factory=dict)
    place: str = ""
    """The workspace in which it ran, if it is another one."""


class Reads(NamedTuple):
    """The present inputs of a stage, whether it can run or not, and the paths of its outputs."""

    deps: dict[str, str]
    params: dict[str, Any]
    outs: dict[str, str]


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
    twin: str | None
    """A stage to wait for, since it computes the same under another recipe's name, as do all before it."""
    cached: Outcome | None
    """The result if the stage and all before it were up to date when the plan was made."""


def plan() -> list[Planned]:
    """Return the stages of dvc.yaml in an order in which they can run: all searches, which may be long, come first.

    The stage `resolve` has run then. All stages are compared with the workspace here, in one go: reading dvc.lock anew
    for each would take a minute.
    """
    check_workspace()
    resolve_parameters()
    planned: dict[str, Planned] = {}
    kinds: dict[str, int] = {}
    numbers: dict[Hashable, int] = {}
    with repository() as repo, bookkeeping(repo):
        graph = repo.index.graph
        _refuse_links(repo)
        for stage in chain.from_iterable(networkx.topological_generations(graph.reverse(copy=False))):
            if not stage.cmd:
                _note_input(stage)
                continue
            upstream = tuple(up.name for up in graph.successors(stage) if up.cmd)
            definition = _definition(stage)
            kind = (_nameless(stage.name, definition), *(kinds[name] for name in upstream))
            kinds[stage.name] = numbers.setdefault(kind, len(numbers))
            current = all(planned[name].cached for name in upstream) and _up_to_date(stage)
            cached = _outcome(stage, "Cached", definition) if current else None
            planned[stage.name] = replace(_planned(stage, upstream), cached=cached)
    first: dict[int, str] = {}  # kind → the stage whose result the others take
    for name in sorted(planned, key=lambda name: not planned[name].cached):
        first.setdefault(kinds[name], name)
    twins = {name: first[kinds[name]] for name in planned}
    return [replace(stage, twin=twins[name] if twins[name] != name else None) for name, stage in planned.items()]


def resolve_parameters() -> None:
    """Run the stage `resolve` unless it is up to date: what is stale depends on what it writes."""
    with repository() as repo, bookkeeping(repo):
        lock_file.heal(repo)
        try:
            (stage,) = repo.stage.collect(_RESOLVE)
        except StageNotFound:
            return
        if _up_to_date(stage):
            return
        planned = _planned(stage)
    said: list[str] = []
    try:
        with stage_processes.reaping():
            run(planned, partial(execute_here, planned, log=said.append, timeout=None))
    except CommandFailed as failure:
        raise WorkspaceUnusable("\n".join(said) or str(failure)) from failure


def _planned(stage: PipelineStage, upstream: tuple[str, ...] = ()) -> Planned:
    """Return the stage as it is to be run, without its result."""
    return Planned(
        name=stage.name,
        upstream=upstream,
        alone=bool((stage.meta or {}).get("alone")),
        reads=tuple(dep.fs_path for dep in stage.deps),
        writes=tuple(out.fs_path for out in stage.outs),
        definition=definition_of(stage),
        twin=None,
        cached=None,
    )


def _refuse_links(repo: Repo) -> None:
    """Refuse outputs behind a link that leads out of the workspace: DVC records none, and says so after the work."""
    root = Path(repo.root_dir)
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
    """Bring a stage up to date: find it cached, restore it from the run cache, or `execute` its command.

    Args:
        execute: runs the command and says how many seconds it took; or brings what it writes from another workspace,
            and gives the outcome there.

    Raises:
        StageChanged: the stage or a dependency changed since the plan was made; nothing is recorded.
    """
    if planned.cached:
        return planned.cached
    with repository() as repo, locks.of_paths(repo, planned.reads, planned.writes):
        orphaned_processes.refuse(Path(repo.root_dir), planned.name)
        with bookkeeping(repo):
            stage, definition = _unchanged(repo, planned)
            status = _prepare(repo, stage, definition)
            before = noted_digests(stage)
        done = _executed(stage, execute) if status == "Executed" else 0.0
        with bookkeeping(repo):
            if status != "Cached":
                stage.save_deps()
                if changed := [path for path, digest in noted_digests(stage).items() if before[path] != digest]:
                    raise StageChanged(f"{', '.join(changed)} changed while {planned.name} ran; run again")
                stage.save()
                _discard_corrupt(stage)
                stage.commit()
                stage.dump(update_pipeline=False)
            if status == "Executed":
                outs = [(out.hash_info.to_dict(), out.meta.to_dict()) for out in stage.outs]
                seconds = done.seconds if isinstance(done, Outcome) else done
                stage_results.keep(_cache(stage), _computation(stage, definition), Computed(seconds, outs))
            here = _outcome(stage, status, definition)
    if not isinstance(done, Outcome):
        return here
    # A workspace that had the result already has it from a run that was cut off.
    return replace(here, status="Executed" if done.status == "Executed" else "Restored", place=done.place)


def _executed(stage: PipelineStage, execute: Callable[[str], Outcome | float]) -> Outcome | float:
    # dvc.yaml may give a list, in which each command must succeed before the next.
    command = stage.cmd if isinstance(stage.cmd, str) else " && ".join(stage.cmd)
    try:
        return execute(command)
    except CommandFailed as failure:
        from tasks.runtime.code_digests import CodeChanged, check_stage  # a slow import

        try:
            check_stage(stage.name)
        except CodeChanged as changed:
            raise StageChanged(f"{stage.name}: {changed}") from failure
        raise


def execute_here(planned: Planned, command: str, log: Callable[[str], None], timeout: float | None) -> float:
    """Run a stage's command in the working directory once it has its turn, and return the seconds that it took.

    Raises:
        CommandFailed: with the last line printed, which says the cause.
    """
    root = Path.cwd()
    with machine(planned.alone):
        return stage_processes.run(command, root, log, {"DVC_ROOT": str(root), "DVC_STAGE": planned.name}, timeout)


def _up_to_date(stage: PipelineStage) -> bool:
    try:
        return not stage.changed()
    except LockError:  # another flow works on it: ask again when it is done
        return False


def _prepare(repo: Repo, stage: PipelineStage, definition: str) -> Status:
    """Return DVC's verdict; of a stale stage, remove the outputs and save the inputs of the new ones."""
    if not stage.changed():
        return "Cached"
    stage.remove_outs(ignore_remove=False)
    if restore(repo, stage):
        return "Restored"
    stage.save_deps()
    return "Restored" if _take(stage, definition) else "Executed"


def _take(stage: PipelineStage, definition: str) -> bool:
    """Take the result of the same computation under another recipe's name, if the cache still has it."""
    known = stage_results.known(_cache(stage), _computation(stage, definition))
    if not known or len(known.outs) != len(stage.outs):
        return False
    for out, (digest, meta) in zip(stage.outs, known.outs, strict=True):
        out.hash_info, out.meta, out.obj = HashInfo.from_dict(digest), Meta.from_dict(meta), None
    if any(out.changed_cache() for out in stage.outs):
        return False
    for out in stage.outs:
        out.checkout()
    return _is_whole(stage)


def _nameless(name: str, definition: str) -> str:
    """Return the definition of the stage `name` with `*` for the name of its recipe, if it is a candidate's."""
    if not (candidate := candidate_of(name)):
        return definition
    stage, (recipe, _) = name.partition("@")[0], recipe_and_keep(candidate)
    named = {
        f"/{candidate}": "/*",
        f"--recipe {recipe} ": "--recipe * ",
        f'"recipes": {{"{recipe}": ': '"recipes": {"*": ',
        f'"code": {{"{stage}": {{"{recipe}": ': f'"code": {{"{stage}": {{"*": ',
    }
    return reduce(lambda done, pair: done.replace(*pair), named.items(), definition)


def restore(repo: Repo, stage: PipelineStage, pull: bool = False) -> bool:
    """Check out the outputs that dvc.lock or the run cache has for the stage's present inputs, if they are whole.

    The stage must be as it was loaded, since its inputs are saved in it here: DVC takes the outputs of dvc.lock where
    the saved inputs are the same, so a second call would take them for any inputs.
    """
    try:
        repo.stage_cache.restore(stage, pull=pull)
    except RunCacheNotFoundError:
        return False
    return _is_whole(stage)


def _is_whole(stage: PipelineStage) -> bool:
    """Whether the outputs that were checked out have their digests; if not, they are removed again."""
    if not _discard_corrupt(stage):
        return True
    stage.remove_outs(ignore_remove=False)
    return False


def _discard_corrupt(stage: PipelineStage) -> bool:
    """Remove the corrupt objects of a stage's outputs, and return whether there were any."""
    return bool(cached_objects.discard_corrupt(_cache(stage), _digests(to_single_stage_lockfile(stage)).values()))


def _unchanged(repo: Repo, planned: Planned) -> tuple[PipelineStage, str]:
    """Return the stage and its definition, and refuse one that is not as planned: a run would mix two studies."""
    try:
        (stage,) = repo.stage.collect(planned.name)
    except StageNotFound:
        stage = None
    definition = _definition(stage) if stage else ""
    if _digest(definition) != planned.definition:
        raise StageChanged(f"params.yaml or dvc.yaml changed what {planned.name} is since the run began; run again")
    return stage, definition


def definition_of(stage: PipelineStage) -> str:
    """Return the digest of the stage's command, parameters and paths."""
    return _digest(_definition(stage))


def _digest(definition: str) -> str:
    return hashlib.sha256(definition.encode()).hexdigest()


def _definition(stage: PipelineStage) -> str:
    params = {
        dep.def_path: dict(dep.read_params(flatten=False)) for dep in stage.deps if isinstance(dep, ParamsDependency)
    }
    paths = [[str(dep) for dep in stage.deps], [str(out) for out in stage.outs]]
    return json.dumps([stage.cmd, params, paths], sort_keys=True)


def check_workspace() -> None:
    """Check that the working directory is a workspace in which stages can run."""
    if not Path(".dvc").is_dir() or not Path("dvc.yaml").is_file():
        raise WorkspaceUnusable(
            f"{Path.cwd()} has no .dvc and no dvc.yaml: run this in the root of a workspace; "
            "`eckart init FOLDER` makes one"
        )
    for folder in (Path.cwd(), Path(".dvc"), Path(".dvc/tmp")):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise WorkspaceUnusable(f"{folder.resolve()} cannot be written: a run needs a workspace of its own")


def read_now() -> list[Reads]:
    """Return the present inputs of each stage; what is missing is left out."""
    resolve_parameters()
    with repository() as repo, bookkeeping(repo):
        return [_reads(stage) for stage in repo.index.stages if stage.cmd]


def _reads(stage: PipelineStage) -> Reads:
    stage.save_deps(allow_missing=True)
    params = [dep for dep in stage.deps if isinstance(dep, ParamsDependency)]
    return Reads(
        deps={str(dep): str(dep.hash_info.value) for dep in stage.deps if dep not in params and dep.exists},
        params={key: value for dep in params for key, value in (dep.hash_info.value or {}).items()},
        outs={str(out): "" for out in stage.outs},
    )


def noted_digests(stage: PipelineStage) -> dict[str, str]:
    """Return path → digest of the stage's inputs as saved last; for a parameter file, the values as JSON."""
    values = {str(dep): dep.hash_info.value for dep in stage.deps}
    return {
        path: json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else str(value)
        for path, value in values.items()
    }


def _outcome(stage: PipelineStage, status: Status, definition: str) -> Outcome:
    # Taken from the stage, not by reading dvc.lock: DVC rewrites that file in place.
    entry = to_single_stage_lockfile(stage)
    deps = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
    params = {key: value for file in entry.get("params", {}).values() for key, value in file.items()}
    key = _digest(json.dumps([entry["cmd"], deps, params], sort_keys=True))[:32]
    known = stage_results.known(_cache(stage), _computation(stage, definition))
    return Outcome(stage.name, status, known.seconds if known else None, key, deps, params, _digests(entry))


def _digests(entry: Mapping[str, Any]) -> dict[str, str]:
    return {out["path"]: out.get("md5", "") for out in entry.get("outs", [])}


def _computation(stage: PipelineStage, definition: str) -> str:
    """Return the digest of the computation: like its key, but without its recipe's name."""
    read = [str(dep.hash_info.value) for dep in stage.deps if not isinstance(dep, ParamsDependency)]
    return _digest(json.dumps([_nameless(stage.name, definition), read]))


def _cache(stage: PipelineStage) -> Path:
    return Path(stage.repo.cache.local_cache_dir)


def _note_input(stage: Stage) -> None:
    """Write the present digest of a user's own file or folder into its .dvc file, as `dvc repro` does."""
    if stage.deps or stage.frozen:  # an import: DVC asks its source, and only when told to
        return
    if missing := [str(out) for out in stage.outs if not out.exists]:
        raise WorkspaceUnusable(f"{', '.join(missing)} is in DVC and not here: run `eckart pull`")
    with suppress(LockError):  # another flow reads it: the next run notes it
        if stage.changed():
            stage.save()
            stage.commit()
            stage.dump()
            log.warning("%s is not what %s said; noted: commit that file", stage.outs[0], stage.relpath)


def cache_dir() -> Path:
    """Return the folder that `dvc cache dir` names."""
    with repository() as repo:
        return Path(repo.cache.local_cache_dir)
