"""Exchange stages, their results and DVC's settings between workspaces.

A stage is sent to another workspace as an `Order`, and its result comes back as the stage's entry in dvc.lock. Both
hold digests only; the files themselves go through the DVC remote.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import networkx
from dvc.config import Config, merge
from dvc.config_schema import RelPath
from dvc.dvcfile import load_file
from dvc.exceptions import CollectCacheError, DownloadError
from dvc.lock import LockError
from dvc.output import Output
from dvc.repo import Repo
from dvc.stage import PipelineStage, Stage
from dvc.stage.loader import StageLoader
from dvc.stage.serialize import to_single_stage_lockfile
from dvc_data.hashfile.db import HashFileDB, get_index
from dvc_data.hashfile.hash_info import HashInfo

from flows.engine import cached_objects, lock_file
from flows.engine.locks import bookkeeping, repository
from flows.engine.stages import Planned, StageChanged, definition_of, noted_digests, resolve_parameters, restore
from flows.environment.redaction import redact
from tasks.artifacts.errors import EckartError
from tasks.runtime.code_digests import CodeChanged, check_stage

log = logging.getLogger(__name__)


class TransportFailed(EckartError):
    """The DVC remote cannot be used, or lacks an object that it should have. The message says which."""


class NotTheSame(EckartError):
    """A stage differs between two workspaces: its definition, code or inputs. The message says what differs."""


Entry = dict[str, Any]
"""The entry of a stage in dvc.lock. It holds digests and no bytes, so that any workspace can adopt it."""


@dataclass(frozen=True)
class Order:
    """Request to another workspace to run a stage. It has the digests of all inputs, but no paths of this machine."""

    stage: str
    definition: str
    """Digest of the stage's command, parameters and paths."""
    reads: dict[str, str]
    """Dependency → digest; parameter file → values as JSON."""
    upstream: dict[str, Entry]
    """Name → entry in dvc.lock of each stage that the stage directly depends on."""


def order(planned: Planned) -> Order:
    """Return the order to run a stage in another workspace with this workspace's inputs, all of which must exist."""
    with repository() as repo, bookkeeping(repo):
        stages = _stages(repo)
        stage = stages[planned.name]
        stage.save_deps()
        upstream = {name: dict(to_single_stage_lockfile(stages[name])) for name in planned.upstream}
        return Order(planned.name, planned.definition, noted_digests(stage), upstream)


def accept(order: Order) -> Planned:
    """Pull the inputs of an ordered stage that this workspace lacks, and return the stage, ready to run here.

    Raises:
        NotTheSame: the stage does not exist here, lacks an input, or has other inputs, parameters or code.
        TransportFailed: the remote cannot be used, or lacks an input.
    """
    with _transport(f"pulling what {order.stage} reads") as repo:
        stages = _stages(repo)
        if missing := [name for name in (order.stage, *order.upstream) if name not in stages]:
            raise NotTheSame(f"{_here()} has no stage {', '.join(missing)}: bring it up to date")
        stage = stages[order.stage]
        for name, entry in order.upstream.items():
            before = stages[name]
            StageLoader.fill_from_lock(before, entry)
            for out in before.outs:
                if any(Path(dep.fs_path).is_relative_to(out.fs_path) for dep in stage.deps):
                    _pull(repo, out)
        for file in (Path(f"{dep.fs_path}.dvc") for dep in stage.deps):  # data and base models
            if file.exists():
                _pulled(repo, load_file(repo, str(file)).stage)
        if absent := [str(dep) for dep in stage.deps if not dep.exists]:
            raise NotTheSame(f"{_here()} lacks {', '.join(absent)}: track it (`dvc add`, `dvc push`) or copy it")
        stage.save_deps()
        if different := _differences(stage, order):
            raise NotTheSame(f"{_here()} has another {', '.join(different)} than the run: bring it up to date")
        try:
            check_stage(order.stage)
        except CodeChanged as error:
            raise NotTheSame(f"{_here()} has other code than the run: bring it up to date") from error
        reads, writes = (tuple(path.fs_path for path in paths) for paths in (stage.deps, stage.outs))
        return Planned(order.stage, (), False, reads, writes, order.definition)


def publish(names: Sequence[str]) -> dict[str, Entry]:
    """Push the outputs of these stages to the remote, and return stage → its entry in dvc.lock."""
    with _transport(f"pushing what {', '.join(names)} wrote") as repo:
        stages = _stages(repo)
        for name in names:
            for out in stages[name].outs:
                if any(_push_all(repo, objects, odb) for odb, objects in out.get_used_objs(push=True).items()):
                    raise TransportFailed("the DVC remote did not accept all files")
        return {name: dict(to_single_stage_lockfile(stages[name])) for name in names}


def fetch(order: Order, entry: Entry) -> None:
    """Pull the outputs that another workspace made for the order. Afterwards `stages.run` records them here.

    Raises:
        StageChanged: the stage or an input changed here since it was ordered.
        NotTheSame: the other workspace used other inputs than the order says.
        TransportFailed: the remote cannot be used, or lacks an output.
    """
    with _transport(f"pulling what {order.stage} wrote") as repo:
        stage = _stages(repo)[order.stage]
        stage.save_deps()
        if changed := _differences(stage, order):
            raise StageChanged(f"{', '.join(changed)} changed while {order.stage} ran; run again")
        StageLoader.fill_from_lock(stage, entry)
        if other := _differences(stage, order):
            raise NotTheSame(f"the worker made {order.stage} from another {', '.join(other)} than was ordered")
        for out in stage.outs:
            _pull(repo, out)


def check_remote() -> None:
    """Raise a TransportFailed if the workspace has no default DVC remote, which workers need."""
    with repository() as repo:
        if not _has_remote(repo):
            raise TransportFailed("workers need a DVC remote that all reach: `dvc remote add --default NAME URL`")


def push() -> set[str]:
    """Copy all results to the remote: the objects that dvc.lock, .dvc files and the run cache name, and the run cache.

    `dvc push --run-cache` does not copy objects that only the run cache names, such as results of earlier parameters.

    Raises:
        TransportFailed: the remote lacks an object that dvc.lock or a .dvc file names, and so does the cache.

    Returns:
        Digests of objects that only the run cache names, and that the remote lacks after the push.
    """
    _refuse_damaged()
    with _transport("pushing") as repo:
        runs = [(path.parent.name, path.name) for path in Path(repo.stage_cache.cache_dir).glob("*/*/*")]
        # Before the push, since this call removes corrupt objects.
        of_runs = set[HashInfo]().union(*repo.stage_cache.get_used_objs(runs).values())
        repo.push(run_cache=True)
        # force: without a question about what is missing
        used = {out: out.get_used_objs(push=True, force=True) for out in repo.index.outs if _is_pushed(out)}
        default = None, None
        by_remote = {default: set(of_runs)}  # by name, too, since DVC takes two hosts with the same path for equal
        for out, objects in used.items():
            for odb, infos in objects.items():
                by_remote.setdefault((out.remote, odb), set()).update(infos)
        lacking = {(name, odb): _push_all(repo, infos, odb) for (name, odb), infos in by_remote.items()}
        if absent := [
            str(out)
            for out, objects in used.items()
            if not objects
            or any(info.value in lacking[out.remote, odb] for odb, infos in objects.items() for info in infos)
        ]:
            raise TransportFailed(
                f"neither the cache nor the remote has {', '.join(absent)}, which {lock_file.LOCK} or a .dvc file "
                "names: push from where it was made, or make it again with `eckart run`"
            )
        return lacking[default]


def _is_pushed(out: Output) -> bool:
    """Whether a remote should have all files of an output."""
    return bool(out.use_cache and out.can_push and out.hash_info) and not out.stage.is_repo_import


def _push_all(repo: Repo, objects: set[HashInfo], odb: HashFileDB | None) -> set[str]:
    """Push these outputs to a remote, the default one unless `odb` is another, and return the digests that it lacks.

    The remote is asked about each file. DVC does not ask about files that its index of the remote names, nor about
    those of a folder whose list the remote has. So a list is pushed only after all of its files.
    """
    get_index(odb or repo.cloud.get_remote_odb(None, "push")).clear()
    cache, lists = Path(repo.cache.local_cache_dir), {info for info in objects if info.isdir}
    lacking = _push_new(repo, objects - lists, odb)
    whole = {
        info for info in lists if lacking.isdisjoint((cached_objects.files(cache, info.value or "") or {}).values())
    }
    return lacking | {str(info.value) for info in lists - whole} | _push_new(repo, whole, odb)


def _push_new(repo: Repo, objects: set[HashInfo], odb: HashFileDB | None) -> set[str]:
    state = repo.cloud.status(objects, odb=odb)
    return {str(info.value) for info in (*state.missing, *repo.cloud.push(state.new, odb=odb).failed)}


@dataclass(frozen=True)
class Pulled:
    """Result of `pull`: the names of the stages and .dvc files that it could not bring up to date."""

    lacking: list[str]
    """Those whose outputs are neither in the cache nor in the remote."""
    stale: list[str]
    """Those whose parameters, code, inputs or outputs differ from the record in dvc.lock or in the .dvc file."""


def pull() -> Pulled:
    """Fetch the results that fit this workspace from the cache and the remote.

    For each stage, these are the outputs that somebody made from its present parameters, code and data. If there are
    none, they are the outputs that dvc.lock records. Files that a person has edited stay. Only the stage `resolve` is
    run, and only its entry in dvc.lock can change.
    """
    _refuse_damaged()
    resolve_parameters()
    with _transport("pulling") as repo:
        if _has_remote(repo):
            repo.stage_cache.pull(None)
        lacking = [stage.addressing for stage in _upstream_first(repo) if not _pulled(repo, stage)]
        repo._reset()  # load all stages anew: `_pulled` overwrote the recorded inputs of those in memory
        stale = [stage.addressing for stage in _upstream_first(repo) if stage.changed()]
        return Pulled(lacking, [name for name in stale if name not in lacking])


def run_entries() -> list[tuple[str, str]]:
    """Return (path, text) of each entry of the run cache, here and in the remote, without duplicates."""
    with _transport("reading the run cache") as repo:
        here = Path(repo.stage_cache.cache_dir)
        texts = {
            file.relative_to(here).as_posix(): (str(file), file.read_text(errors="replace"))
            for file in here.glob("*/*/*")
        }
        if _has_remote(repo):
            odb = repo.cloud.get_remote_odb(None, "verify", hash_name="md5-dos2unix")
            runs = odb.fs.join(odb.path, "runs")
            for path in odb.fs.find(runs) if odb.fs.exists(runs) else ():
                if (name := "/".join(odb.fs.parts(path)[-3:])) not in texts:
                    texts[name] = (path, odb.fs.read_bytes(path).decode(errors="replace"))
        return list(texts.values())


def fetch_outputs(digests: Collection[str]) -> bool:
    """Fetch the missing objects of these outputs from the remote, and return whether the cache then has all of them."""
    try:
        with _transport("pulling") as repo:
            return _fetch(repo, digests)
    except TransportFailed as error:
        log.warning("%s", error)
        return False


def _fetch(repo: Repo, digests: Collection[str]) -> bool:
    cache_dir = Path(repo.cache.local_cache_dir)
    asked: set[str] = set()
    while True:  # the first round fetches lists of folders' files, the second the files
        cached_objects.discard_corrupt(cache_dir, digests)
        lacking = {missing for digest in digests for missing in cached_objects.missing(cache_dir, digest)}
        if not lacking or lacking == asked or not _has_remote(repo):
            return not lacking
        asked = lacking
        repo.cloud.pull({HashInfo("md5", digest) for digest in lacking})


def share_settings(folder: Path) -> None:
    """Copy DVC's settings of the working directory (cache, remotes) to the workspace `folder`.

    Paths are written relative to the folder: DVC cannot write the absolute path of a workspace that is not ASCII.
    """
    root = Path.cwd()
    main = Config(str(root / ".dvc"))
    settings = main.load_one("repo")
    merge(settings, main.load_one("local"))
    settings["cache"]["dir"] = RelPath(main["cache"].get("dir") or root / ".dvc/cache")
    own = Config(str((folder / ".dvc").resolve()))
    Path(own.files["local"]).touch(mode=0o600)  # remotes may have secrets
    with own.edit("local") as local:
        local.clear()
        local.update(settings)


def _upstream_first(repo: Repo) -> list[Stage]:
    """Return all stages and .dvc files, each after those that it depends on."""
    return list(reversed(list(networkx.topological_sort(repo.index.graph))))


def _pulled(repo: Repo, stage: Stage) -> bool:
    """Put the outputs of a stage into the workspace, and return False if neither the cache nor the remote has them.

    If somebody edited a file of them, all stay: DVC would replace the others and then stop. dvc.lock stays as it is:
    only a run knows from which inputs the outputs were made.
    """
    if not stage.changed():
        return True
    try:
        if stage.is_import or any(out.remote for out in stage.outs):  # `_fetch` asks the default remote alone
            repo.fetch([stage.addressing])
        if any(_is_edited(repo, out) for out in stage.outs):
            return True
        if stage.cmd and all(dep.exists for dep in stage.deps) and restore(repo, stage, pull=_has_remote(repo)):
            return True
        if not all(out.hash_info for out in stage.outs):  # dvc.lock does not record the outputs
            return False
        for out in stage.outs:
            _pull(repo, out)
    except (CollectCacheError, DownloadError, TransportFailed):
        return False
    return True


def _is_edited(repo: Repo, out: Output) -> bool:
    """Whether neither the cache nor the remote has a file that is in the workspace."""
    path = Path(out.fs_path)
    if not cached_objects.has_all_of(repo, path) and out.hash_info:
        _fetch(repo, [str(out.hash_info.value)])
    return not cached_objects.has_all_of(repo, path)


def _has_remote(repo: Repo) -> bool:
    return bool(repo.config["core"].get("remote"))


def _pull(repo: Repo, out: Output) -> None:
    """Fetch an output and put it into the workspace, in place even of files of which the cache has no copy."""
    if not _fetch(repo, [str(out.hash_info.value)]):
        where = "the DVC remote does" if _has_remote(repo) else "no DVC remote is set, and the cache does"
        raise TransportFailed(f"{where} not have {out}, or not whole")
    out.checkout(force=True)


def _refuse_damaged() -> None:
    lock_file.refuse_conflict()
    if lock_file.is_damaged():
        raise TransportFailed(
            "dvc.lock was cut off: restore it with `git checkout dvc.lock`, or from the cache with `eckart run`"
        )


def _stages(repo: Repo) -> Mapping[str, PipelineStage]:
    """Return name → stage. dvc.yaml and dvc.lock are read once, but each access returns a new stage object."""
    return load_file(repo, "dvc.yaml").stages


def _differences(stage: PipelineStage, order: Order) -> list[str]:
    """Return the paths of the inputs that differ from the order; ["dvc.yaml"] if only the definition differs."""
    reads = noted_digests(stage)
    paths = [path for path in {**reads, **order.reads} if reads.get(path) != order.reads.get(path)]
    return paths or ([] if definition_of(stage) == order.definition else ["dvc.yaml"])


def _here() -> str:
    return f"{Path.cwd()} on {gethostname()}"


@contextmanager
def _transport(what: str) -> Iterator[Repo]:
    """Yield DVC's repository, and turn errors into TransportFailed.

    Args:
        what: the action, such as "pulling"; the message of the error begins with it.
    """
    with repository() as repo, bookkeeping(repo):
        try:
            yield repo
        except (NotTheSame, StageChanged):
            raise
        except TransportFailed as error:
            raise TransportFailed(f"{what}: {error}") from error
        except LockError as error:
            raise TransportFailed(f"{what}: a flow runs in this workspace; wait until it ends: {error}") from error
        except Exception as error:  # each kind of remote fails in its own way
            cause = f"the DVC remote cannot be used: {redact(str(error) or repr(error))}; `dvc remote list` names it"
            raise TransportFailed(f"{what}: {cause}") from error
