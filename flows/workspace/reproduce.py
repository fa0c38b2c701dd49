"""Restore the outputs of a stage at a git revision, bit for bit.

dvc.lock of a revision records the digests of all files that a stage read and wrote. The outputs come from the cache or
the remote, or `dvc repro` makes them again in a worktree at that revision, with the code of that revision. In both
cases the restored files are hashed, and the digests are compared with the record in git.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from dvc.repo.graph import collect_pipeline
from dvc.stage import PipelineStage
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from flows.engine import cached_objects, dvc_transport, locks, orphaned_processes, stage_processes, stages
from flows.engine.lock_file import LOCK, digests
from flows.environment.git_variables import GIT_VARIABLES
from flows.environment.workspaces import WORKSPACES
from flows.workspace import worktrees
from flows.workspace.worktrees import CARRIED, WorkspaceError
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import candidate_of, stage_name

FOLDERS = "reproduce-" + 10 * "[0-9a-f]"
"""Pattern of the names of the worktrees, which a study's workspace, reproduce-paper-seed0, does not match."""


class CannotReproduce(EckartError):
    """The stage or the revision does not exist, or the stage cannot be run again. The message says what to do."""


@dataclass(frozen=True)
class LockedStage:
    """A stage as recorded in dvc.lock of a revision."""

    commit: str
    stage: str
    entries: Mapping[str, Any]
    """Entries of all stages in this dvc.lock: stage → the digests of its inputs and outputs."""

    @property
    def folder(self) -> Path:
        """The worktree in which the stage is restored."""
        return WORKSPACES / f"reproduce-{self.commit[:10]}"

    @property
    def outs(self) -> dict[str, str]:
        """Path → digest of the stage's outputs."""
        return digests(self.entries[self.stage], "outs")


@dataclass(frozen=True)
class ComparedFile:
    """A restored file, its digest in the record and its digest now; None where it does not exist."""

    path: str
    recorded: str | None
    now: str | None

    @property
    def same(self) -> bool:
        return self.recorded == self.now


@dataclass(frozen=True)
class Reproduction:
    """Result of `reproduce`: the restored files of a stage, compared with the record."""

    folder: Path
    """The worktree with the files."""
    origin: str
    """Words that say whether the files were taken from the cache or made again."""
    files: list[ComparedFile]

    @property
    def same(self) -> bool:
        return all(file.same for file in self.files)


def record(name: str, revision: str = "HEAD") -> LockedStage:
    """Read the record of a candidate (`anchored-0.33`) or of any other stage (`teacher`) from dvc.lock of a revision.

    Raises:
        CannotReproduce: there is no such revision, dvc.lock or stage.
    """
    commit, entries = _locked(revision)
    for stage in (stage_name("finetune", name), name):
        if stage in entries:
            return LockedStage(commit, stage, entries)
    candidates = [candidate_of(stage) for stage in entries if stage.startswith(stage_name("finetune", ""))]
    raise CannotReproduce(f"dvc.lock of {revision} has no candidate {name}; it has {', '.join(candidates) or 'none'}")


def _locked(revision: str) -> tuple[str, dict[str, Any]]:
    """Return the commit of a revision and the entries of its dvc.lock."""
    worktrees.check_root()
    try:
        commit = worktrees.git(Path(), "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").strip()
    except WorkspaceError as error:
        raise CannotReproduce(
            f"{revision} is not a revision of this repository: `git log --oneline` lists them"
        ) from error
    try:
        text = worktrees.git(Path(), "show", f"{commit}:{LOCK}")
    except WorkspaceError as error:
        raise CannotReproduce(f"{revision} has no dvc.lock: commit dvc.lock to record a result") from error
    try:
        return commit, dict(YAML(typ="safe").load(text)["stages"])
    except (YAMLError, TypeError, KeyError, ValueError) as error:
        raise CannotReproduce(f"dvc.lock of {revision} cannot be read: {error}") from error


def reproduce(wanted: LockedStage, again: bool = False) -> Reproduction:
    """Restore a stage's outputs in a worktree: fetch them from the cache or the remote, or else run the stage again.

    Args:
        again: whether to run the stage and all stages that it depends on, even if the outputs can be fetched.

    Raises:
        CannotReproduce: the stage could not be run again.
    """
    folder, cache = wanted.folder, stages.cache_dir()
    with worktrees.locked(folder), stage_processes.terminable():
        orphaned_processes.refuse(folder)
        worktrees.check_out(folder, wanted.commit)
        from_cache = not again and dvc_transport.fetch_outputs(wanted.outs.values())
        if from_cache:
            for out, digest in wanted.outs.items():
                cached_objects.copy(cache, digest, folder / out)
        else:
            _run_again(cache, wanted, again)
        origin = "taken from the cache or the remote" if from_cache else "made again"
        reproduction = Reproduction(folder, origin, compare(folder, cache, wanted.outs))
        if reproduction.same and not from_cache:
            _add_to_cache(cache, wanted)
    return reproduction


def compare(folder: Path, cache: Path, outs: Mapping[str, str]) -> list[ComparedFile]:
    """Hash the outputs in `folder`, and compare each file with its recorded digest; `outs` is path → digest.

    If an output is a folder that differs, and the cache no longer has the recorded list of its files, only the digests
    of the whole folder are compared.
    """
    compared: list[ComparedFile] = []
    for out, digest in outs.items():
        now = cached_objects.measured(folder / out)
        then = now if cached_objects.digest_of(now) == digest else cached_objects.files(cache, digest)
        if then is None:
            compared.append(ComparedFile(out, digest, cached_objects.digest_of(now) if now else None))
        else:
            for name in sorted({*then, *now}):
                path = f"{out}/{name}" if name else out
                compared.append(ComparedFile(path, then.get(name), now.get(name)))
    return compared


def _run_again(cache: Path, wanted: LockedStage, again: bool) -> None:
    """Run the stage again in its worktree, after all stages that it depends on.

    Unless `again` is set, only those of them are run whose outputs cannot be fetched.
    """
    _bring_inputs(wanted.folder, cache)
    if not again:
        for name in _chain(wanted)[:-1]:
            dvc_transport.fetch_outputs(digests(wanted.entries[name], "outs").values())
    for out in wanted.outs:
        cached_objects.remove(wanted.folder / out)
    # --no-commit, since a differing result in the cache would later be restored instead of the recorded one.
    unset = [word for name in GIT_VARIABLES for word in ("-u", name)]
    repro = [sys.executable, "-m", "dvc", "repro", "--quiet", "--no-commit", *(["--force"] if again else [])]
    command = shlex.join(["env", *unset, *repro, wanted.stage])
    try:
        with locks.machine():
            stage_processes.run(command, wanted.folder, partial(print, flush=True), {})
    except stage_processes.CommandFailed as error:
        raise CannotReproduce(f"{wanted.stage} could not be made again in {wanted.folder}: {error}") from error


def _chain(wanted: LockedStage) -> list[str]:
    """Return the recorded stages that the stage depends on, in an order in which they can run, then the stage."""
    with Repo(str(wanted.folder)) as repo:
        graph = repo.index.graph
        named = {stage.name: stage for stage in graph if isinstance(stage, PipelineStage)}
        if wanted.stage not in named:
            raise CannotReproduce(f"dvc.yaml of {wanted.commit[:10]} has no stage {wanted.stage} to run again")
        stages_before = collect_pipeline(named[wanted.stage], graph)
        names = [stage.name for stage in stages_before if isinstance(stage, PipelineStage)]
    return [name for name in names if name in wanted.entries]


def _bring_inputs(folder: Path, cache: Path) -> None:
    """Put the user's own data and base models into the worktree.

    They are those that the revision tracks with DVC or git. Those that it does not track are of the main workspace.
    """
    for part in CARRIED:
        tracked = part.with_name(f"{part.name}.dvc")
        if not (folder / tracked).exists():
            worktrees.carry(part, folder / part)
            if worktrees.git(folder, "ls-files", "--", str(part)):
                worktrees.git(folder, "checkout", "--force", "HEAD", "--", str(part))
            (folder / part).mkdir(parents=True, exist_ok=True)
            continue
        digest = YAML(typ="safe").load(folder / tracked)["outs"][0]["md5"]
        if not dvc_transport.fetch_outputs([digest]):
            raise CannotReproduce(f"the {part} that {tracked} records is in neither the cache nor the remote")
        cached_objects.copy(cache, digest, folder / part)


def _add_to_cache(cache: Path, wanted: LockedStage) -> None:
    """Add to the cache the outputs that it had lost and that were made again with the recorded digests."""
    with locks.repository() as repo:
        for name in _chain(wanted):
            for out, digest in digests(wanted.entries[name], "outs").items():
                made = wanted.folder / out
                if cached_objects.missing(cache, digest) and made.exists():
                    cached_objects.add(repo, made, digest)
