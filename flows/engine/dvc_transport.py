"""Transport between workspaces over the DVC remote: stages to run, their results, and settings.

A stage goes to another workspace as an order and comes back as its entry in dvc.lock, both nothing but digests; the
bytes go through the remote. Of DVC's internals it touches load_file, StageLoader.fill_from_lock, Output.checkout,
cloud.push/pull, stage_cache and Config.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import networkx
from dvc.config import Config, merge
from dvc.dvcfile import load_file
from dvc.exceptions import CollectCacheError, ConfirmRemoveError
from dvc.lock import LockError
from dvc.output import Output
from dvc.repo import Repo
from dvc.stage import PipelineStage, Stage
from dvc.stage.loader import StageLoader
from dvc.stage.serialize import to_single_stage_lockfile
from dvc_data.hashfile.hash_info import HashInfo

from flows.engine import cached_objects, lock_file
from flows.engine.locks import bookkeeping, repository
from flows.engine.stages import (
    Planned,
    StageChanged,
    definition_of,
    noted_digests,
    resolve_parameters,
    restore,
)
from flows.environment.redaction import shown
from tasks.artifacts.errors import EckartError
from tasks.runtime.code_digests import CodeChanged, check_stage

log = logging.getLogger(__name__)


class TransportFailed(EckartError):
    """The DVC remote cannot be used, or lacks what it should hold; the message says which."""


class NotTheSame(EckartError):
    """This workspace would run something else under the stage's name; the message says what differs."""


Entry = dict[str, Any]
"""A stage as it stands in dvc.lock: digests and no bytes, so that any workspace can adopt it."""


@dataclass(frozen=True)
class Order:
    """A stage for another workspace to run: all that it reads as digests, no bytes and no paths of this machine."""

    stage: str
    definition: str
    reads: dict[str, str]
    """Dependency or parameter file → digest."""
    upstream: dict[str, Entry]


def order(planned: Planned) -> Order:
    """Return what another workspace needs to run a stage as it would run here; all that it reads must be here."""
    with repository() as repo, bookkeeping(repo):
        stages = _stages(repo)
        stage = stages[planned.name]
        stage.save_deps()
        upstream = {name: dict(to_single_stage_lockfile(stages[name])) for name in planned.upstream}
        return Order(planned.name, planned.definition, noted_digests(stage), upstream)


def accept(order: Order) -> Planned:
    """Pull the inputs of an ordered stage that this workspace lacks, and return the stage as it is to run here."""
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
        _pull_inputs(repo, stage)
        if absent := [str(dep) for dep in stage.deps if not dep.exists]:
            raise NotTheSame(f"{_here()} lacks {', '.join(absent)}: hand it to DVC (`dvc add`, `dvc push`) or copy it")
        stage.save_deps()
        if different := _differences(stage, order):
            raise NotTheSame(f"{_here()} has another {', '.join(different)} than the run: bring it up to date")
        try:
            check_stage(order.stage)
        except CodeChanged as error:
            raise NotTheSame(f"{_here()} has other code than the run: bring it up to date") from error
        reads, writes = (tuple(path.fs_path for path in paths) for paths in (stage.deps, stage.outs))
        return Planned(order.stage, (), False, reads, writes, order.definition, twin=None, cached=None)


def publish(names: Sequence[str]) -> dict[str, Entry]:
    """Push what stages wrote to the remote, and return their entries in dvc.lock."""
    with _transport(f"pushing what {', '.join(names)} wrote") as repo:
        stages = _stages(repo)
        for name in names:
            for objects in stages[name].get_used_objs(push=True).values():
                if repo.cloud.push(objects).failed:
                    raise TransportFailed("the DVC remote does not take it")
        return {name: dict(to_single_stage_lockfile(stages[name])) for name in names}


def fetch(order: Order, entry: Entry) -> None:
    """Pull what another workspace wrote when it ran the order; the caller's `stages.run` records it."""
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
    """Check that the workspace has a DVC remote, which carries bytes between workspaces."""
    with repository() as repo:
        if not repo.config["core"].get("remote"):
            raise TransportFailed("workers need a DVC remote that all reach: `dvc remote add --default NAME URL`")


def push() -> set[str]:
    """Copy to the remote what dvc.lock and .dvc files name, and the run cache with all that it names.

    Returns:
        Digests that the run cache names and that neither the cache nor the remote has.

    `dvc push --run-cache` leaves behind what only the run cache names: results of parameters that were changed since.
    """
    with _transport("pushing") as repo:
        _refuse_damaged()
        runs = [(path.parent.name, path.name) for path in Path(repo.stage_cache.cache_dir).glob("*/*/*")]
        used = list(repo.stage_cache.get_used_objs(runs).values())  # first: what is corrupt goes with it
        repo.push(run_cache=True)
        lacking: set[str] = set()
        for objects in used:
            repo.cloud.push(objects)
            state = repo.cloud.status(objects)
            lacking.update(str(info.value) for info in (*state.missing, *state.new))
        return lacking


@dataclass(frozen=True)
class Pulled:
    """The stages and .dvc files that `pull` could not bring up to date."""

    lacking: list[str]
    """Neither the cache nor the remote has it."""
    stale: list[str]
    """Not what dvc.lock or the .dvc file records: its parameters, code, inputs or outputs were edited."""


def pull() -> Pulled:
    """Bring from cache and remote the results that fit this workspace.

    It runs no stage but `resolve`, and leaves the other entries of dvc.lock as they are. Of each stage it brings what
    somebody made from its present parameters, code and data; where nobody did, what dvc.lock records. What a person
    edited stays.
    """
    _refuse_damaged()
    resolve_parameters()
    with _transport("pulling") as repo:
        repo.stage_cache.pull(None)
        lacking = [stage.addressing for stage in _upstream_first(repo) if not _pulled(repo, stage)]
        repo._reset()  # in the stages seen so far is noted what they read, in place of what dvc.lock records
        stale = [stage.addressing for stage in _upstream_first(repo) if stage.changed()]
        return Pulled(lacking, [name for name in stale if name not in lacking])


def run_entries() -> list[tuple[str, str]]:
    """Return place and text of each entry of the run cache, here and in the remote; an entry in both comes once."""
    with _transport("reading the run cache") as repo:
        here = Path(repo.stage_cache.cache_dir)
        texts = {
            file.relative_to(here).as_posix(): (str(file), file.read_text(errors="replace"))
            for file in here.glob("*/*/*")
        }
        if repo.config["core"].get("remote"):
            odb = repo.cloud.get_remote_odb(None, "verify", hash_name="md5-dos2unix")
            runs = odb.fs.join(odb.path, "runs")
            for path in odb.fs.find(runs) if odb.fs.exists(runs) else ():
                if (name := "/".join(odb.fs.parts(path)[-3:])) not in texts:
                    texts[name] = (path, odb.fs.read_bytes(path).decode(errors="replace"))
        return list(texts.values())


def fetch_outputs(digests: Collection[str]) -> bool:
    """Fetch what the cache lacks of these outputs from the remote, and return whether the cache then has all of it."""
    try:
        with _transport("pulling") as repo:
            return _fetch(repo, digests)
    except TransportFailed as error:
        log.warning("%s", error)
        return False


def _fetch(repo: Repo, digests: Collection[str]) -> bool:
    cache_dir = Path(repo.cache.local_cache_dir)
    asked: set[str] = set()
    while True:  # the list of a folder's files comes first, then the files
        cached_objects.discard_corrupt(cache_dir, digests)
        lacking = {missing for digest in digests for missing in cached_objects.missing(cache_dir, digest)}
        if not lacking or lacking == asked:
            return not lacking
        asked = lacking
        repo.cloud.pull({HashInfo("md5", digest) for digest in lacking})


def share_settings(folder: Path) -> None:
    """Give the workspace `folder` DVC's settings of the working directory: cache and remotes, with absolute paths."""
    root = Path.cwd()
    main = Config(str(root / ".dvc"))
    settings = main.load_one("repo")
    merge(settings, main.load_one("local"))
    settings["cache"]["dir"] = main["cache"].get("dir") or str(root / ".dvc/cache")
    own = Config(str(folder / ".dvc"))
    Path(own.files["local"]).touch(mode=0o600)  # remotes may have secrets
    with own.edit("local") as local:
        local.clear()
        local.update(settings)


def _upstream_first(repo: Repo) -> list[Stage]:
    """Every stage and .dvc file."""
    return list(reversed(list(networkx.topological_sort(repo.index.graph))))


def _pulled(repo: Repo, stage: Stage) -> bool:
    """Put what a stage wrote into the workspace, and return False if neither cache nor remote has it.

    It writes no entry into dvc.lock: only a run knows what was made from what.
    """
    if not stage.changed():
        return True
    try:
        if not stage.cmd:
            return _pulled_input(repo, stage)
        if all(dep.exists for dep in stage.deps) and restore(repo, stage, pull=True):
            return True
        if not all(out.hash_info for out in stage.outs):  # dvc.lock does not know it
            return False
        for out in stage.outs:
            with suppress(ConfirmRemoveError):  # somebody edited it
                _pull(repo, out, force=False)
    except ConfirmRemoveError:
        return True
    except (CollectCacheError, TransportFailed):
        return False
    return True


def _pull_inputs(repo: Repo, stage: Stage) -> None:
    """Bring the inputs of a stage up to date that have .dvc files: data and base models."""
    for file in (Path(f"{dep.fs_path}.dvc") for dep in stage.deps):
        if file.exists():
            _pulled(repo, load_file(repo, str(file)).stage)


def _pulled_input(repo: Repo, stage: Stage) -> bool:
    for objects in stage.get_used_objs().values():
        repo.cloud.pull(objects)
    if stage.outs_cached():
        stage.checkout()
    return not stage.changed()


def _pull(repo: Repo, out: Output, force: bool = True) -> None:
    """Put an output into the workspace, after a check of its digests.

    Args:
        force: whether to replace files that are in no cache.
    """
    if not _fetch(repo, [str(out.hash_info.value)]):
        raise TransportFailed(f"the DVC remote does not have {out}, or not whole")
    out.checkout(force=force)


def _refuse_damaged() -> None:
    if lock_file.is_damaged():
        raise TransportFailed(
            "dvc.lock was cut off: `git checkout dvc.lock` brings it back, or `eckart run`, from the cache"
        )


def _stages(repo: Repo) -> Mapping[str, PipelineStage]:
    """Return all stages by name; each access makes the stage anew, from one reading of dvc.yaml and dvc.lock."""
    return load_file(repo, "dvc.yaml").stages


def _differences(stage: PipelineStage, order: Order) -> list[str]:
    """Return the files that differ from when the stage was ordered, or dvc.yaml if the stage itself does."""
    reads = noted_digests(stage)
    paths = [path for path in {**reads, **order.reads} if reads.get(path) != order.reads.get(path)]
    return paths or ([] if definition_of(stage) == order.definition else ["dvc.yaml"])


def _here() -> str:
    return f"{Path.cwd()} on {gethostname()}"


@contextmanager
def _transport(what: str) -> Iterator[Repo]:
    """Yield the workspace as DVC sees it; errors of its remote become TransportFailed, which begins with `what`."""
    with repository() as repo, bookkeeping(repo):
        try:
            yield repo
        except (NotTheSame, StageChanged):
            raise
        except TransportFailed as error:
            raise TransportFailed(f"{what}: {error}") from error
        except LockError as error:
            raise TransportFailed(f"{what}: a flow runs in this workspace; wait for its end: {error}") from error
        except Exception as error:  # each kind of remote fails in its own way
            cause = f"the DVC remote cannot be used: {shown(str(error) or repr(error))}; `dvc remote list` names it"
            raise TransportFailed(f"{what}: {cause}") from error
