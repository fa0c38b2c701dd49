"""Other studies: each task and seed of a study's file runs in a workspace of its own, one after the other."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from flows.engine import supervisor
from flows.engine.run_options import Options
from flows.engine.stage_processes import terminable
from flows.workspace import worktrees
from flows.workspace.worktrees import WORKSPACES, WorkspaceError
from tasks.config.schema import PARAMS
from tasks.multi_seed import trials
from tasks.multi_seed.study_file import StudyFile
from tasks.multi_seed.trials import Trials

log = logging.getLogger(__name__)


def folder_of(study: StudyFile, seed: int) -> Path:
    """The workspace of `seed`, relative to the main one."""
    return WORKSPACES / f"{study.name}-seed{seed}"


def folders_of(study: StudyFile) -> dict[int, Path]:
    """Seed → its workspace, relative to the main one."""
    return {seed: folder_of(study, seed) for seed in study.seeds}


def check_committed(study: StudyFile) -> None:
    """Check that a workspace made from the commit runs what stands in the main workspace.

    Raises:
        WorkspaceError: files are edited or new, and not committed; it names them.
    """
    file = str(study.path)
    edited = worktrees.edited(*worktrees.CODE, file)
    if not worktrees.git(Path(), "ls-files", "--", file):  # git may ignore it
        edited.add(file)
    worktrees.refuse(edited, "A study runs")


def run_all(study: StudyFile, options: Options) -> tuple[StudyFile, dict[int, str]]:
    """Run the study's trials, if it has some, and then with one seed after the other.

    Returns:
        The study as it ran, and the seeds that failed, with the causes.
    """
    try:
        study = _choose(study, study.trials, options) if study.trials else study
    except WorkspaceError as error:
        return study, dict.fromkeys(study.seeds, str(error))
    failed: dict[int, str] = {}
    for seed in study.seeds:
        print(f"seed {seed}: {folder_of(study, seed)}", flush=True)
        try:
            if not run(study, seed, options):
                failed[seed] = "its own messages are above"
        except WorkspaceError as error:
            failed[seed] = str(error)
    return study, failed


def _choose(study: StudyFile, asked: Trials, options: Options) -> StudyFile:
    """Run what the study's file wants to be tried, and give the study with the best of each recipe.

    Raises:
        WorkspaceError: the trials cannot be run, or failed.
    """
    first = study.of_trials(asked)
    folder = folder_of(first, asked.seed)
    print(f"trials: {folder}", flush=True)
    if not run(first, asked.seed, options):
        raise WorkspaceError("the trials failed; their own messages are above")
    return study.at_its_best(trials.results(asked, study.metric, folder))


def run(study: StudyFile, seed: int, options: Options) -> bool:
    """Run the study with `seed` in its workspace, as `eckart run` does there; whether it succeeded.

    Raises:
        WorkspaceError: the workspace cannot be made, or another study runs in it.
    """
    folder = folder_of(study, seed)
    command = [sys.executable, "-m", "flows", "run", *options.words()]
    with worktrees.held(folder) as lock:
        prepare(study, seed)
        environment = worktrees.environment() | {"MLFLOW_TRACKING_URI": _tracking(study.params["study"]["name"])}
        # The study keeps the lock should this process be killed.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            pass_fds=[lock.fileno()],
            preexec_fn=partial(supervisor.end_with_parent, signal.SIGTERM),
        )
        with _ending(process):
            return process.wait() == 0


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


def prepare(study: StudyFile, seed: int) -> Path:
    """Make the workspace of `seed`, or bring it to the present commit; outputs that are there stay.

    Raises:
        WorkspaceError: git or DVC refuse, or the folder is something else.
    """
    folder = folder_of(study, seed)
    worktrees.follow(folder)
    of_task = f", task {study.task}," if study.task else ""
    comment = f"# Made from {PARAMS} and {study.path}{of_task} with seed {seed}; edits are overwritten.\n"
    _write(study.content(seed), folder / PARAMS, comment)
    return folder


def _write(content: Mapping[str, Any], path: Path, comment: str) -> None:
    yaml = YAML()
    yaml.default_flow_style = False
    with path.open("w") as file:
        file.write(comment)
        yaml.dump(dict(content), file)


def _tracking(experiment: str) -> str:
    """Where MLflow stores runs and artifacts: in the main workspace, unless the user says otherwise."""
    from flows.tracking import database

    if not database.is_local():
        return database.address()
    from mlflow import MlflowClient  # slow imports

    from flows.tracking import mirror

    database.set_aside_damaged()
    try:
        mirror.experiment(MlflowClient(database.address()), experiment)
    except Exception as error:  # a store may fail in any way; none of them is the study's
        log.warning("MLflow cannot be used: %s", error)
    return database.address()
