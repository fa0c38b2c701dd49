"""Other studies: a file of studies/ on top of params.yaml, each task and seed in a workspace of its own.

Two flows with different parameters cannot share a workspace, so each is a git worktree at the committed revision whose
params.yaml is the merged one. All share one DVC cache, run cache included: what two of them have in common runs once.
"""

from __future__ import annotations

import copy
import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field
from ruamel.yaml import YAML

from flows import params as whole
from flows import published, transport
from flows.published import Published
from tasks import params
from tasks.metrics import METRICS, MetricName
from tasks.params import PARAMS, ParamsError, Seed

log = logging.getLogger(__name__)

WORKSPACES = Path("workspaces")
CARRIED = (Path("data/raw"), Path("models/base"))
"""What stages read and git does not carry."""
CODE = ("eckart", "tasks", "flows", "dvc.yaml", ".dvcignore", str(PARAMS))
"""What a workspace takes from the commit, so that edits of it would not be used."""

LOCK = Path("dvc.lock")
PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Set inside a git hook, where they would lead every git command to the main workspace."""
_NAME = re.compile(r"[\w-]+")  # of a study's file or task: part of the names of folders and experiments


class WorkspaceError(RuntimeError):
    """A workspace cannot be made or used; the message says what to do."""


@dataclass(frozen=True)
class StudyFile:
    """A study as it runs, of one task: all parameters, but for the seed."""

    path: Path
    """Of its file, relative to the main workspace."""
    params: dict[str, Any]
    seeds: tuple[int, ...]
    task: str | None = None
    """Its name among the tasks of the file; None in a file without tasks."""
    published: tuple[Published, ...] = ()
    """What the file cites, of all its tasks."""

    @property
    def name(self) -> str:
        return f"{self.path.stem}-{self.task}" if self.task else self.path.stem

    @property
    def metric(self) -> MetricName:
        metric: MetricName = self.params["data"]["metric"]
        return metric

    def folder(self, seed: int) -> Path:
        """The workspace of `seed`, relative to the main one."""
        return WORKSPACES / f"{self.name}-seed{seed}"

    def content(self, seed: int) -> dict[str, Any]:
        """params.yaml of the workspace."""
        return {**self.params, "seed": seed}


class _Own(params.Section):
    """What a study's file has beside sections of params.yaml."""

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    tasks: Annotated[dict[str, dict[str, Any]], Field(min_length=1)] | None = None
    published: tuple[Published, ...] = ()


def load(root: Path, file: Path, seeds: Sequence[int] = (), tasks: Sequence[str] = ()) -> tuple[StudyFile, ...]:
    """The study of `file`, checked as a whole, for each of its tasks.

    Args:
        root: the main workspace.
        seeds: run these instead of those that the file states.
        tasks: these of the file's tasks; all, if there are none.

    Raises:
        WorkspaceError: `file` is none of the repository's, or its name cannot name a workspace.
        ParamsError: it cannot be read, or has mistakes; each is named.
    """
    path = _path(root, file)
    stated = params.read(file)
    own = params.parse({key: stated.pop(key) for key in _Own.model_fields if key in stated}, _Own, file)
    if lines := [*_of_seeds(own, stated), *_of_tasks(own, tasks)]:
        raise ParamsError(params.report(file, lines))
    common = merge(params.read(root / PARAMS), stated)
    chosen = tuple(dict.fromkeys(seeds)) or own.seeds or ()
    if chosen:
        common["seed"] = chosen[0]
    parts: dict[str | None, dict[str, Any]] = dict(own.tasks.items()) if own.tasks else {None: {}}
    merged = {task: merge(common, part) for task, part in parts.items()}
    _check(common, merged, own, file)
    return tuple(
        StudyFile(path, _named(content, task, parts[task]), chosen or (content["seed"],), task, own.published)
        for task, content in merged.items()
        if not tasks or task in tasks
    )


def _path(root: Path, file: Path) -> Path:
    """Of a study's file, relative to the main workspace."""
    path = file.resolve()
    if not path.is_relative_to(root.resolve()):
        raise WorkspaceError(f"{file} is outside the repository: put it into studies/")
    if not path.is_file():
        raise WorkspaceError(f"{file} does not exist: name a file of studies/")
    if not _NAME.fullmatch(path.stem):
        raise WorkspaceError(f"{file}: its name becomes that of a folder: write letters, digits, _ and -")
    return path.relative_to(root.resolve())


def _of_seeds(own: _Own, stated: Mapping[str, Any]) -> Iterator[str]:
    if own.seeds and "seed" in stated:
        yield "seed: stands beside seeds; remove one of them"
    for seed, count in Counter(own.seeds or ()).items():
        if count > 1:
            yield f"seeds: has {seed} twice; remove one"
    for task, part in (own.tasks or {}).items():
        if "seed" in part:
            yield f"tasks.{task}.seed: all tasks have the same seeds; write it beside tasks"


def _of_tasks(own: _Own, wanted: Sequence[str]) -> Iterator[str]:
    names = own.tasks or {}
    for task in names:
        if not _NAME.fullmatch(task):
            yield f"tasks.{task}: becomes the name of a folder; write letters, digits, _ and -"
    for task in dict.fromkeys(wanted):
        if task not in names:
            choice = f"choose from {', '.join(names)}" if names else "leave out --task"
            yield f"tasks: there is no {task}; {choice}"


def _check(common: Mapping[str, Any], merged: Mapping[str | None, dict[str, Any]], own: _Own, file: Path) -> None:
    """Check the parameters of all tasks, naming the study's file in the message, and each mistake where it stands."""
    shared = _mistakes(common)
    lines = [
        line if task is None or line in shared else f"tasks.{task}.{line}"
        for task, content in merged.items()
        for line in (_mistakes(content) if task else shared)
    ]
    lines += published.mistakes(own.published, {task: _metric(content) for task, content in merged.items()})
    if lines:
        raise ParamsError(params.report(Path(f"{file} on top of {PARAMS}"), dict.fromkeys(lines)))


def _mistakes(content: Mapping[str, Any]) -> list[str]:
    """As of the parameters of any workspace."""
    with tempfile.TemporaryDirectory() as folder:
        _write(content, Path(folder) / PARAMS, "")
        try:
            whole.check(Path(folder))
        except ParamsError as error:
            return [line.strip() for line in str(error).splitlines()[1:]]
    return []


def _metric(content: Mapping[str, Any]) -> MetricName | None:
    data = content.get("data")
    name = data.get("metric") if isinstance(data, dict) else None
    return next((metric for metric in METRICS if metric == name), None)


def _named(content: dict[str, Any], task: str | None, part: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a task with an MLflow experiment of its own, where the task does not name one."""
    if task is None or "name" in part.get("study", {}):
        return content
    return merge(content, {"study": {"name": f"{content['study']['name']}-{task}"}})


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with what `new` states: mappings merge key by key, anything else replaces.

    A mapping of another `kind` replaces the old one as a whole, because keys of one kind mean nothing to another.
    """
    result = dict(copy.deepcopy(old))
    for key, value in new.items():
        before = result.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and value.get("kind") in (None, before.get("kind")):
            result[key] = merge(before, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def check_committed(root: Path, study: StudyFile) -> None:
    """See to it that a workspace made from the commit runs what stands in the main workspace.

    Raises:
        WorkspaceError: files are edited or new, and not committed; it names them.
    """
    file = str(study.path)
    edited = _edited(root, *CODE, file)
    if not git(root, "ls-files", "--", file):  # git may ignore it
        edited.add(file)
    _refuse(edited, "A study runs")


def check_code(root: Path) -> None:
    """See to it that a workspace made from the commit has the code of this one, whatever its parameters.

    Raises:
        WorkspaceError: files are edited or new, and not committed; it names them.
    """
    _refuse(_edited(root, *(path for path in CODE if path != str(PARAMS))), "Workers run")


def check_root(root: Path) -> None:
    """See to it that git takes `root` for the root of a repository; if it does not, raise a WorkspaceError."""
    if Path(git(root, "rev-parse", "--show-toplevel").rstrip("\n")).resolve() != root.resolve():
        raise WorkspaceError("this is not the root of a git repository: run this where params.yaml is")


def _edited(root: Path, *paths: str) -> set[str]:
    """What of `paths` is not as in the last commit."""
    check_root(root)
    status = git(root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", *paths)
    return {line[3:] for line in status.split("\0") if line}


def _refuse(edited: set[str], who: str) -> None:
    if edited:
        names = "\n".join(f"  {name}" for name in sorted(edited))
        raise WorkspaceError(f"{who} the code of the last commit. Commit these, or undo the edits:\n{names}")


def run_all(root: Path, study: StudyFile, workers: int | None = None, timeout: float | None = None) -> dict[int, str]:
    """Run the study with one seed after the other; those that failed, with the causes."""
    failed: dict[int, str] = {}
    for seed in study.seeds:
        print(f"seed {seed}: {study.folder(seed)}", flush=True)
        try:
            if not run(root, study, seed, workers, timeout):
                failed[seed] = "its own messages are above"
        except WorkspaceError as error:
            failed[seed] = str(error)
    return failed


def run(root: Path, study: StudyFile, seed: int, workers: int | None = None, timeout: float | None = None) -> bool:
    """Run the study with `seed` in its workspace, as `python -m flows run` does there; whether it succeeded.

    Raises:
        WorkspaceError: the workspace cannot be made, or another study runs in it.
    """
    folder = root / study.folder(seed)
    command = [sys.executable, "-m", "flows", "run"]
    command += ["--workers", str(workers)] if workers else []
    command += ["--timeout", str(timeout)] if timeout else []
    with held(folder) as lock:
        prepare(root, study, seed)
        environment = _environment() | {"MLFLOW_TRACKING_URI": _tracking(root, study.params["study"]["name"])}
        # The study keeps the lock should this process be killed.
        with _ending(subprocess.Popen(command, cwd=folder, env=environment, pass_fds=[lock.fileno()])) as process:
            return process.wait() == 0


@contextmanager
def held(folder: Path) -> Iterator[IO[str]]:
    """No two users of one workspace: the second would change the code under the first.

    Raises:
        WorkspaceError: it is in use.
    """
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WorkspaceError(f"something runs in {folder.name} already: wait for its end") from error
        yield file


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """What ends this process ends the study, too. Ctrl-C reaches both by itself."""
    with terminable(), process:
        try:
            yield process
        except SystemExit:
            process.terminate()
            raise
        except KeyboardInterrupt:
            process.wait()  # for its clean-up
            raise


@contextmanager
def terminable() -> Iterator[None]:
    """A SIGTERM ends this process as an exception does, so that what it started can be ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def prepare(root: Path, study: StudyFile, seed: int) -> Path:
    """Make the workspace of `seed`, or bring it to the present commit; outputs that are there stay.

    Raises:
        WorkspaceError: git or DVC refuse, or the folder is something else.
    """
    folder = root / study.folder(seed)
    follow(root, folder)
    of_task = f", task {study.task}," if study.task else ""
    comment = f"# Made from {PARAMS} and {study.path}{of_task} with seed {seed}; edits are overwritten.\n"
    _write(study.content(seed), folder / PARAMS, comment)
    return folder


def follow(root: Path, folder: Path) -> None:
    """Bring `folder` to the present commit and raw data of the workspace `root`; outputs that are there stay.

    Raises:
        WorkspaceError: git refuses, or the folder is something else.
    """
    recorded = (folder / LOCK).read_bytes() if (folder / LOCK).exists() else None
    check_out(root, folder, "HEAD")
    if recorded is not None:  # it belongs to the outputs there
        (folder / LOCK).write_bytes(recorded)
    for part in CARRIED:
        carry(root / part, folder / part)


def check_out(root: Path, folder: Path, revision: str) -> None:
    """Make `folder` a worktree at `revision` with the cache and the remotes of the workspace `root`.

    Raises:
        WorkspaceError: git refuses, or the folder is something else.
    """
    commit = git(root, "rev-parse", revision).strip()
    if folder.exists():
        _check_own(root, folder)
        git(folder, "checkout", "--force", "--detach", commit)
    else:
        git(root, "worktree", "add", "--force", "--detach", str(folder), commit)
    transport.share_settings(root, folder)


def _check_own(root: Path, folder: Path) -> None:
    # Else git would go up to the main workspace and change that one.
    where = ("rev-parse", "--path-format=absolute", "--git-common-dir")
    own = Path(git(folder, "rev-parse", "--show-toplevel").rstrip("\n")).resolve() == folder.resolve()
    if not own or git(folder, *where) != git(root, *where):
        name = folder.relative_to(root)
        raise WorkspaceError(
            f"{name} is no worktree of this repository: remove it, or try `git worktree repair {name}`"
        )


def carry(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source` and no others, as hard links where the file system allows."""
    if target.is_symlink():
        target.unlink()
    wanted = _files(source, follow=True)
    for name in _files(target, follow=False) - wanted:
        (target / name).unlink()
    for parent, _, _ in os.walk(target, topdown=False):
        if not os.listdir(parent):
            os.rmdir(parent)
    for name in wanted:
        _link((source / name).resolve(), target / name)


def _files(folder: Path, follow: bool) -> set[Path]:
    """All files under `folder`, relative to it; links to folders are entered, or else count as files."""
    found: set[Path] = set()
    for parent, folders, files in os.walk(folder, followlinks=follow):
        links = [] if follow else [name for name in folders if Path(parent, name).is_symlink()]
        found |= {Path(parent, name).relative_to(folder) for name in (*files, *links)}
    return found


def _link(source: Path, target: Path) -> None:
    if target.is_file() and not target.is_symlink() and _stamp(source) == _stamp(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _write(content: Mapping[str, Any], path: Path, comment: str) -> None:
    yaml = YAML()
    yaml.default_flow_style = False
    with path.open("w") as file:
        file.write(comment)
        yaml.dump(dict(content), file)


def _tracking(root: Path, experiment: str) -> str:
    """Where MLflow stores runs and artifacts: in the main workspace, unless the user says otherwise."""
    if "MLFLOW_TRACKING_URI" in os.environ:
        return os.environ["MLFLOW_TRACKING_URI"]
    from mlflow import MlflowClient  # a slow import

    store = f"sqlite:///{root / 'mlflow.db'}"
    try:
        client = MlflowClient(store)
        if not client.get_experiment_by_name(experiment):
            client.create_experiment(experiment, (root / "mlruns").as_uri())
    except Exception as error:  # a store may fail in any way; none of them is the study's
        log.warning("MLflow cannot be used: %s", error)
    return store


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in PLACES}


def git(root: Path, *words: str) -> str:
    # Hooks would run here for a switch that is not the user's: DVC's checks outputs out.
    return _called(root, ["git", "-c", f"core.hooksPath={os.devnull}", *words], f"git {words[0]}")


def dvc(root: Path, *words: str) -> str:
    return _called(root, [sys.executable, "-m", "dvc", *words], f"dvc {words[0]}")


def _called(root: Path, command: Sequence[str], name: str) -> str:
    done = subprocess.run(command, cwd=root, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise WorkspaceError(f"{name} in {root.name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
