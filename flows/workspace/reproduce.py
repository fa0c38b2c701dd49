"""What a stage wrote at a git revision, got back bit for bit.

dvc.lock of a revision records the digest of everything that was read and written, so a revision and a stage name bytes.
They are taken from the cache or the remote, or made again in a workspace at that revision; either way the files
themselves are hashed here and compared with the record in git, which nothing that runs can change.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import networkx
from dvc.dvcfile import Lockfile
from dvc.exceptions import DvcException, NotDvcRepoError
from dvc.repo import Repo
from dvc.scm import RevError
from ruamel.yaml import YAML

from flows.engine import cached_objects, dvc_transport, locks, orphaned_processes, stage_processes, stages
from flows.workspace import worktrees
from flows.workspace.worktrees import CARRIED, LOCK, WORKSPACES
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import candidate_of, stage_name

log = logging.getLogger(__name__)

_REQUIREMENTS = "requirements.lock"


class CannotReproduce(EckartError):
    """What is wanted cannot be named or not be made; the message says what to do."""


@dataclass(frozen=True)
class LockedStage:
    """A stage as dvc.lock of a revision has it."""

    commit: str
    stage: str
    entries: Mapping[str, Any]
    """All of dvc.lock, by the names of stages."""
    requirements: str
    """The packages that the revision pins, a `NAME==VERSION` line each."""

    @property
    def folder(self) -> Path:
        """The workspace that it is got back in."""
        return WORKSPACES / f"reproduce-{self.commit[:10]}"

    @property
    def outs(self) -> dict[str, str]:
        """Path → digest of what the stage wrote."""
        return _digests(self.entries[self.stage], "outs")

    @property
    def chain(self) -> list[str]:
        """The stage and all it follows from, upstream first.

        dvc.lock decides and not dvc.yaml: it may record stages that the parameters of its revision do not name.
        """
        reads = {name: _digests(entry, "deps") for name, entry in self.entries.items()}
        writes = {name: _digests(entry, "outs") for name, entry in self.entries.items()}
        graph = networkx.DiGraph(
            (before, name)
            for name, deps in reads.items()
            for before, outs in writes.items()
            if any(_overlap(dep, out) for dep in deps for out in outs)
        )
        graph.add_node(self.stage)
        return list(networkx.topological_sort(graph.subgraph({self.stage, *networkx.ancestors(graph, self.stage)})))


@dataclass(frozen=True)
class ComparedFile:
    """A file that was got back: digests as recorded in git and of the bytes there now; None where it is not."""

    path: str
    recorded: str | None
    now: str | None

    @property
    def same(self) -> bool:
        return self.recorded == self.now


@dataclass(frozen=True)
class Reproduction:
    """What was got back, and how it compares."""

    folder: Path
    """Its workspace."""
    origin: str
    files: list[ComparedFile]
    reasons: list[str]
    """What may explain a difference; empty without one."""

    @property
    def same(self) -> bool:
        return all(file.same for file in self.files)


def record(name: str, revision: str = "HEAD") -> LockedStage:
    """What git has of a candidate (`kfac-0.33`) or of any other stage (`teacher`) at a revision.

    Raises:
        CannotReproduce: there is no such revision, no dvc.lock in it, or no such stage in that.
        WorkspaceError: the working directory is not the root of a git repository.
    """
    commit, entries, pinned = _at(revision)
    for stage in (stage_name("finetune", name), name):
        if stage in entries:
            return LockedStage(commit, stage, entries, pinned)
    candidates = [candidate_of(stage) for stage in entries if stage.startswith(stage_name("finetune", ""))]
    raise CannotReproduce(f"dvc.lock of {revision} has no candidate {name}; it has {', '.join(candidates) or 'none'}")


def _at(revision: str) -> tuple[str, dict[str, Any], str]:
    """The commit of a revision, what its dvc.lock has, and the packages that it pins."""
    worktrees.check_root()
    nothing = CannotReproduce(f"{revision} has no dvc.lock: commit dvc.lock to record a result")
    try:
        with Repo(rev=revision) as repo:
            commit, entries = str(repo.get_rev()), _entries(repo, f"dvc.lock of {revision}")
            pinned = repo.fs.read_text(f"/{_REQUIREMENTS}") if repo.fs.exists(f"/{_REQUIREMENTS}") else ""
    except RevError as error:
        raise CannotReproduce(
            f"{revision} is no revision of this repository: `git log --oneline` lists them"
        ) from error
    except NotDvcRepoError as error:
        raise nothing from error
    if not entries:
        raise nothing
    return commit, entries, pinned


def recorded(revision: str = "HEAD") -> list[str]:
    """The names of the stages that dvc.lock of a revision records.

    Raises:
        CannotReproduce: there is no such revision, or no dvc.lock in it.
    """
    return list(_at(revision)[1])


def reproduce(wanted: LockedStage, again: bool = False, alone: bool = False) -> Reproduction:
    """Get a stage's outputs back in a workspace of their own: from cache or remote, or else made again.

    Args:
        again: make it and all it follows from again, even if the recorded bytes are there.
        alone: make it again, but take what it follows from where that is there.

    Raises:
        CannotReproduce: it could not be made; what went wrong is above, or in the message.
        WorkspaceError: the workspace cannot be made, or is in use.
        StillRuns: processes of an earlier call still write there.
    """
    folder, objects = wanted.folder, stages.cache_dir()
    with worktrees.held(folder), stage_processes.terminable():
        orphaned_processes.refuse(folder)
        worktrees.check_out(folder, wanted.commit)
        had = not (again or alone) and _had(objects, wanted.outs.values())
        if had:
            for out, digest in wanted.outs.items():
                cached_objects.copy(objects, digest, folder / out)
        else:
            _make(objects, wanted, again, alone)
        files = compare(folder, objects, wanted.outs)
        same = all(file.same for file in files)
        if same and not had:
            _keep(objects, wanted)
        reasons = [] if same else _reasons(wanted)
    return Reproduction(folder, "taken from the cache or the remote" if had else "made again", files, reasons)


def compare(folder: Path, objects: Path, outs: Mapping[str, str]) -> list[ComparedFile]:
    """The files of `outs` (path → recorded digest) as they are in `folder`, all bytes read.

    A folder that differs and whose list of files is nowhere is compared as a whole.

    Args:
        objects: DVC's cache.
    """
    found: list[ComparedFile] = []
    for out, digest in outs.items():
        now = cached_objects.measured(folder / out)
        if cached_objects.digest_of(now) == digest:
            found += [ComparedFile(_join(out, name), each, each) for name, each in sorted(now.items())]
            continue
        then = cached_objects.files(objects, digest)
        if then is None:
            found.append(ComparedFile(out, digest, cached_objects.digest_of(now) if now else None))
        else:
            found += [ComparedFile(_join(out, name), then.get(name), now.get(name)) for name in sorted({*then, *now})]
    return found


def _had(objects: Path, digests: Collection[str]) -> bool:
    """Whether the cache has all bytes of these outputs, after the remote was asked for those that it lacks."""
    asked: set[str] = set()
    while True:  # a folder's list of files comes first, then the files
        cached_objects.discard_corrupt(objects, digests)
        lacking = {each for digest in digests for each in cached_objects.missing(objects, digest)}
        if not lacking or lacking == asked:
            return not lacking
        asked = lacking
        try:
            dvc_transport.fetch_objects(lacking)
        except dvc_transport.TransportFailed as error:
            log.warning("%s", error)
            return False


def _make(objects: Path, wanted: LockedStage, again: bool, alone: bool) -> None:
    """Run the stage, and before it all that it follows from (`again`), or only what is nowhere to be found."""
    _bring_inputs(wanted.folder, objects)
    if not again:
        for name in wanted.chain[:-1]:
            _had(objects, _digests(wanted.entries[name], "outs").values())
    for out in wanted.outs:
        cached_objects.remove(wanted.folder / out)
    if alone:  # what it reads comes first, and with it the stage's own outputs: they are made again
        _repro(wanted)
        _repro(wanted, "--force", "--single-item")
    else:
        _repro(wanted, *(["--force"] if again else []))


def _repro(wanted: LockedStage, *flags: str) -> None:
    # Not committed to the cache, where a result that differs would be restored for the recorded one.
    unset = [word for name in worktrees.PLACES for word in ("-u", name)]
    repro = [sys.executable, "-m", "dvc", "repro", "--quiet", "--no-commit", *flags, wanted.stage]
    try:
        with locks.machine():
            stage_processes.run(shlex.join(["env", *unset, *repro]), wanted.folder, partial(print, flush=True), {})
    except stage_processes.CommandFailed as error:
        raise CannotReproduce(f"{wanted.stage} could not be made again in {wanted.folder}: {error}") from error


def _bring_inputs(folder: Path, objects: Path) -> None:
    """The user's own files as the revision has them in DVC, or else as they are in the main workspace."""
    for part in CARRIED:
        tracked = part.with_name(f"{part.name}.dvc")
        if not (folder / tracked).exists():
            worktrees.carry(part, folder / part)
            (folder / part).mkdir(parents=True, exist_ok=True)
            continue
        digest = YAML(typ="safe").load(folder / tracked)["outs"][0]["md5"]
        if not _had(objects, [digest]):
            raise CannotReproduce(
                f"{part} as {tracked} of that revision names it is neither in the cache nor the remote"
            )
        cached_objects.copy(objects, digest, folder / part)


def _keep(objects: Path, wanted: LockedStage) -> None:
    """Put into the cache what was made again to the same bytes and was not there; objects alone, and no entry."""
    with locks.repository() as repo:
        for name in wanted.chain:
            for out, digest in _digests(wanted.entries[name], "outs").items():
                made = wanted.folder / out
                if cached_objects.missing(objects, digest) and made.exists():
                    cached_objects.add(repo, made, digest)


def _reasons(wanted: LockedStage) -> list[str]:
    """What differs from the record: inputs first, since other inputs explain everything else."""
    made = _made(wanted.folder)
    reasons = [reason for name in wanted.chain for reason in _changes(name, wanted.entries, made)]
    if packages := _packages(wanted.requirements):
        reasons.append(f"other packages than {_REQUIREMENTS} of that revision: {', '.join(packages)}")
    return [*reasons, "another kind of CPU, or another build of torch: float sums may end in other last bits"]


def _changes(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How a stage's run differs from the recorded one, apart from what the stages before it wrote."""
    if name not in now:
        return [f"{name} was not recorded anew"]
    written = {path for entry in then.values() for path in _digests(entry, "outs")}
    before, after = _digests(then[name], "deps"), _digests(now[name], "deps")
    read = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
    own = [path for path in read if not any(_overlap(path, out) for out in written)]
    own += [what for what in ("cmd", "params") if then[name].get(what) != now[name].get(what)]
    if own:
        return [f"{name} read what differs from the record: {', '.join(own)}"]
    if not read and _digests(then[name], "outs") != _digests(now[name], "outs"):
        return [f"{name} wrote other bytes from the same inputs"]
    return []


def _packages(pinned: str) -> list[str]:
    """Packages that are not installed as `NAME==VERSION` lines say."""
    pins = [line.split("==") for line in pinned.splitlines() if line.count("==") == 1]
    installed = [(name.strip(), wanted.strip(), _installed(name.strip())) for name, wanted in pins]
    return [f"{name} {there} for {wanted}" for name, wanted, there in installed if there != wanted]


def _installed(name: str) -> str:
    try:
        return version(name).partition("+")[0]  # the build, such as +cpu, is not pinned
    except PackageNotFoundError:
        return "none"


def _overlap(one: str, other: str) -> bool:
    """Whether one path is the other or inside it."""
    return Path(one).is_relative_to(other) or Path(other).is_relative_to(one)


def _digests(entry: Mapping[str, Any], part: str) -> dict[str, str]:
    return {item["path"]: item.get("md5", "") for item in entry.get(part, [])}


def _made(folder: Path) -> dict[str, Any]:
    """The entries of dvc.lock in another workspace."""
    with Repo(str(folder)) as repo:
        return _entries(repo, f"dvc.lock in {folder}")


def _entries(repo: Repo, where: str) -> dict[str, Any]:
    """Of dvc.lock: name of a stage → what it read and wrote; none where there is no dvc.lock."""
    try:
        return dict(Lockfile(repo, repo.fs.join(repo.root_dir, str(LOCK))).load().get("stages", {}))
    except DvcException as error:
        raise CannotReproduce(f"{where} cannot be read: {error}") from error


def _join(out: str, name: str) -> str:
    return f"{out}/{name}" if name else out
