"""Versions: what a stage wrote at a git revision, got back bit for bit.

dvc.lock of a revision records the digest of everything that was read and written, so a revision and a stage name bytes.
They are taken from the cache or the remote, or made again in a workspace at that revision; either way the files
themselves are hashed here and compared with the record in git, which nothing that runs can change.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from flows import engine, workspaces
from flows.engine import cache, processes, remote
from flows.workspaces import CARRIED, LOCK, WORKSPACES, WorkspaceError
from tasks.errors import EckartError

log = logging.getLogger(__name__)

_REQUIREMENTS = "requirements.lock"


class VersionError(EckartError):
    """A version cannot be named or not be made; the message says what to do."""


@dataclass(frozen=True)
class Record:
    """A stage as dvc.lock of a revision has it."""

    commit: str
    stage: str
    stages: Mapping[str, Any]
    """All entries of dvc.lock, by name."""

    @property
    def folder(self) -> Path:
        """Of the workspace that it is got back in, relative to the main one."""
        return WORKSPACES / f"reproduce-{self.commit[:10]}"

    @property
    def outs(self) -> dict[str, str]:
        """Path → digest of what the stage wrote."""
        return _digests(self.stages[self.stage], "outs")

    @property
    def chain(self) -> list[str]:
        """The stage and all it follows from, upstream first."""
        found: dict[str, bool] = {}
        _visit(self.stages, self.stage, found)
        return list(found)


@dataclass(frozen=True)
class File:
    """A file of the version: digests as recorded in git and of the bytes there now; None where it is not."""

    path: str
    recorded: str | None
    now: str | None

    @property
    def same(self) -> bool:
        return self.recorded == self.now


@dataclass(frozen=True)
class Version:
    """What was got back, and how it compares."""

    folder: Path
    """Its workspace."""
    origin: str
    files: list[File]
    reasons: list[str]
    """What may explain a difference; empty without one."""

    @property
    def same(self) -> bool:
        return all(file.same for file in self.files)


def record(root: Path, name: str, revision: str = "HEAD") -> Record:
    """What git has of a candidate (`kfac-0.33`) or of any other stage (`teacher`) at a revision.

    Raises:
        VersionError: there is no such revision, no dvc.lock in it, or no such stage in that.
        WorkspaceError: `root` is not that of a git repository.
    """
    workspaces.check_root(root)
    try:
        commit = workspaces.git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").strip()
    except WorkspaceError as error:
        raise VersionError(f"{revision} is no revision of this repository: `git log --oneline` lists them") from error
    content = _shown(root, commit, str(LOCK))
    if content is None:
        raise VersionError(f"{revision} has no dvc.lock: commit dvc.lock to record a result")
    stages = _stages(content, f"dvc.lock of {revision}")
    for stage in (f"finetune@{name}", name):
        if stage in stages:
            return Record(commit, stage, stages)
    candidates = [stage.removeprefix("finetune@") for stage in stages if stage.startswith("finetune@")]
    raise VersionError(f"dvc.lock of {revision} has no candidate {name}; it has {', '.join(candidates) or 'none'}")


def reproduce(root: Path, wanted: Record, again: bool = False) -> Version:
    """Get a version back in a workspace of its own: from cache or remote, or else made again.

    Args:
        root: the main workspace and the working directory, which is left as it is.
        again: make it and all it follows from again, even where the bytes can be had.

    Raises:
        VersionError: it could not be made; what went wrong is above, or in the message.
        WorkspaceError: the workspace cannot be made, or is in use.
    """
    folder, objects = root / wanted.folder, engine.cache_dir()
    with workspaces.held(folder), workspaces.terminable():
        workspaces.check_out(root, folder, wanted.commit)
        had = not again and _had(objects, wanted.outs.values())
        if had:
            for out, digest in wanted.outs.items():
                cache.copy(objects, digest, folder / out)
        else:
            _make(root, folder, objects, wanted, again)
        files = compare(folder, objects, wanted.outs)
        same = all(file.same for file in files)
        if same and not had:
            _keep(folder, objects, wanted)
        reasons = [] if same else _reasons(root, folder, wanted)
    return Version(folder, "taken from the cache or the remote" if had else "made again", files, reasons)


def compare(folder: Path, objects: Path, outs: Mapping[str, str]) -> list[File]:
    """The files of `outs` (path → recorded digest) as they are in `folder`, all bytes read.

    Where no list of a folder's files can be had and the folder differs, it is compared as a whole.

    Args:
        objects: DVC's cache.
    """
    found: list[File] = []
    for out, digest in outs.items():
        now = cache.measured(folder / out)
        if cache.digest_of(now) == digest:
            found += [File(_join(out, name), each, each) for name, each in sorted(now.items())]
            continue
        try:
            then = cache.files(objects, digest)
        except cache.Unknown:
            found.append(File(out, digest, cache.digest_of(now) if now else None))
            continue
        found += [File(_join(out, name), then.get(name), now.get(name)) for name in sorted({*then, *now})]
    return found


def _had(objects: Path, digests: Collection[str]) -> bool:
    """Whether the cache has all bytes of these outputs, after the remote was asked for those that it lacks."""
    asked: set[str] = set()
    while True:  # a folder's list of files comes first, then the files
        _drop_corrupt(objects, digests)
        lacking = {each for digest in digests for each in cache.missing(objects, digest)}
        if not lacking or lacking == asked:
            return not lacking
        asked = lacking
        try:
            remote.fetch_objects(lacking)
        except remote.TransportFailed as error:
            log.warning("%s", error)
            return False


def _drop_corrupt(objects: Path, digests: Iterable[str]) -> None:
    """Remove objects that are not what their names say: nobody can use them, and DVC would."""
    for digest in digests:
        for path in cache.corrupted(objects, digest):
            log.warning("%s in DVC's cache is corrupt and was removed", path.parent.name + path.name)
            path.unlink()


def _make(root: Path, folder: Path, objects: Path, wanted: Record, again: bool) -> None:
    """Run the stage, and of what it follows from all (`again`) or what can be had nowhere."""
    _bring_inputs(root, folder, objects)
    if not again:
        for name in wanted.chain[:-1]:
            _had(objects, _digests(wanted.stages[name], "outs").values())
    for out in wanted.outs:
        cache.remove(folder / out)
    # Not committed to the cache, where a result that differs would be restored for the recorded one.
    flags = ["--quiet", "--no-commit", *(["--force"] if again else [])]
    unset = [word for name in workspaces.PLACES for word in ("-u", name)]
    command = ["env", *unset, sys.executable, "-m", "dvc", "repro", *flags, wanted.stage]
    try:
        with engine.beside_others():
            processes.run(shlex.join(command), folder, _say, {})
    except processes.CommandFailed as error:
        raise VersionError(f"{wanted.stage} could not be made again in {folder}: {error}") from error


def _bring_inputs(root: Path, folder: Path, objects: Path) -> None:
    """The user's own files as the revision has them in DVC, or else as they are in the main workspace."""
    for part in CARRIED:
        tracked = part.with_name(f"{part.name}.dvc")
        if not (folder / tracked).exists():
            workspaces.carry(root / part, folder / part)
            (folder / part).mkdir(parents=True, exist_ok=True)
            continue
        digest = YAML(typ="safe").load(folder / tracked)["outs"][0]["md5"]
        if not _had(objects, [digest]):
            raise VersionError(f"{part} as {tracked} of that revision names it is neither in the cache nor the remote")
        cache.copy(objects, digest, folder / part)


def _keep(folder: Path, objects: Path, wanted: Record) -> None:
    """Put into the cache what was made again to the same bytes and was not there."""
    made = _read_lock(folder)
    for name in wanted.chain:
        outs = _digests(wanted.stages[name], "outs")
        if any(cache.missing(objects, digest) for digest in outs.values()) and _digests(made[name], "outs") == outs:
            workspaces.dvc(folder, "commit", "--force", name)


def _reasons(root: Path, folder: Path, wanted: Record) -> list[str]:
    """What is not as it was: inputs first, since with others nothing else can be told."""
    made = _read_lock(folder)
    reasons = [reason for name in wanted.chain for reason in _changes(name, wanted.stages, made)]
    if packages := _packages(_shown(root, wanted.commit, _REQUIREMENTS) or ""):
        reasons.append(f"other packages than {_REQUIREMENTS} of that revision: {', '.join(packages)}")
    return [*reasons, "another kind of CPU, or another build of torch: float sums may end in other last bits"]


def _changes(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How a stage's run differs from the recorded one, but for what stages before it wrote."""
    if name not in now:
        return [f"{name} was not recorded anew"]
    written = {path for entry in then.values() for path in _digests(entry, "outs")}
    before, after = _digests(then[name], "deps"), _digests(now[name], "deps")
    read = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
    own = [path for path in read if not any(_overlap(path, out) for out in written)]
    own += [what for what in ("cmd", "params") if then[name].get(what) != now[name].get(what)]
    if own:
        return [f"{name} read another {', '.join(own)} than was recorded"]
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


def _visit(stages: Mapping[str, Any], name: str, found: dict[str, bool]) -> None:
    """Add a stage after all it follows from; False while those are looked at."""
    found[name] = False
    reads = _digests(stages[name], "deps")
    for other, entry in stages.items():
        writes = _digests(entry, "outs")
        if other not in found and any(_overlap(dep, out) for dep in reads for out in writes):
            _visit(stages, other, found)
    del found[name]
    found[name] = True


def _overlap(one: str, other: str) -> bool:
    """Whether one path is the other or inside it."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def _digests(entry: Mapping[str, Any], part: str) -> dict[str, str]:
    return {item["path"]: item.get("md5", "") for item in entry.get(part, [])}


def _stages(content: str, where: str) -> dict[str, Any]:
    try:
        return dict(YAML(typ="safe").load(content)["stages"])
    except (YAMLError, KeyError, TypeError) as error:
        raise VersionError(f"{where} cannot be read: {error}") from error


def _read_lock(folder: Path) -> dict[str, Any]:
    return _stages((folder / LOCK).read_text(), f"dvc.lock in {folder}")


def _shown(root: Path, commit: str, file: str) -> str | None:
    """The text of a file of the commit; None where it has none."""
    if not workspaces.git(root, "ls-tree", "--name-only", commit, file):
        return None
    return workspaces.git(root, "show", f"{commit}:{file}")


def _join(out: str, name: str) -> str:
    return f"{out}/{name}" if name else out


def _say(line: str) -> None:
    print(line, flush=True)
