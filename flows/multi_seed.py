"""Run the tasks and seeds of a study's file, each in a workspace of its own, one after the other."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

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
    """Return the workspace of a seed, relative to the main one."""
    return WORKSPACES / f"{study.name}-seed{seed}"


def check_committed(study: StudyFile) -> None:
    """Raise unless a workspace made from the commit runs the same code and study as the main one.

    Raises:
        WorkspaceError: files are edited or new and not committed; the message names them.
    """
    file = str(study.path)
    edited = worktrees.edited(*worktrees.CODE, file)
    if not worktrees.git(Path(), "ls-files", "--", file):  # ignored by git
        edited.add(file)
    worktrees.refuse(edited, "A study runs")


def run_all(study: StudyFile, options: Options) -> tuple[StudyFile, dict[int, str]]:
    """Run a study's trials, if it has any, and its seeds; return it as it ran, and failed seed → cause."""
    try:
        study = _choose(study, study.trials, options) if study.trials else study
    except WorkspaceError as error:
        return study, dict.fromkeys(study.seeds, str(error))
    failed: dict[int, str] = {}
    for seed in study.seeds:
        print(f"seed {seed}: {folder_of(study, seed)}", flush=True)
        try:
            if not run(study, seed, options):
                failed[seed] = "see its messages above"
        except WorkspaceError as error:
            failed[seed] = str(error)
    return study, failed


def _choose(study: StudyFile, trial: Trials, options: Options) -> StudyFile:
    """Run the trials of the study's file, and return the study with the best variant of each recipe.

    Raises:
        WorkspaceError: the trials cannot be run, or failed.
    """
    first = study.of_trials(trial)
    folder = folder_of(first, trial.seed)
    print(f"trials: {folder}", flush=True)
    if not run(first, trial.seed, options):
        raise WorkspaceError("the trials failed: see their messages above")
    return study.at_its_best(trials.results(trial, study.metric, folder))


def run(study: StudyFile, seed: int, options: Options) -> bool:
    """Run `eckart run` with a seed in its workspace, and return whether it succeeded.

    Raises:
        WorkspaceError: the workspace cannot be made, or another study runs in it.
    """
    folder = folder_of(study, seed)
    command = [sys.executable, "-m", "flows", "run", *options.words()]
    with worktrees.held(folder) as lock:
        prepare(study, seed)
        environment = worktrees.environment() | {"MLFLOW_TRACKING_URI": _tracking(study.params["study"]["name"])}
        # The study inherits the lock, so that it holds even if this process is killed.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            pass_fds=[lock.fileno()],
            preexec_fn=partial(supervisor.die_with_parent, signal.SIGTERM),
        )
        with _ending(process):
            return process.wait() == 0


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End the study when this process is ended. Ctrl-C reaches both by itself."""
    with terminable(), process:
        try:
            yield process
        except SystemExit:
            process.terminate()
            raise
        except KeyboardInterrupt:
            process.wait()  # while it cleans up
            raise


def prepare(study: StudyFile, seed: int) -> Path:
    """Make the workspace of a seed, or update it to the present commit; its outputs stay."""
    folder = folder_of(study, seed)
    worktrees.follow(folder)
    of_task = f", task {study.task}," if study.task else ""
    comment = f"# Made from {PARAMS} and {study.path}{of_task} with seed {seed}; edits are overwritten.\n"
    yaml = YAML()
    yaml.default_flow_style = False
    with (folder / PARAMS).open("w") as file:
        file.write(comment)
        yaml.dump(dict(study.content(seed)), file)
    return folder


def _tracking(experiment: str) -> str:
    """Return MLflow's address: that of the main workspace, unless the environment names another."""
    from flows.tracking import database

    if not database.is_local():
        return database.address()
    from mlflow import MlflowClient  # slow imports

    from flows.tracking import mirror

    database.set_aside_damaged()
    try:
        mirror.experiment(MlflowClient(database.address()), experiment)
    except Exception as error:  # a store may fail in many ways, none of which may stop the study
        log.warning("MLflow cannot be used: %s", error)
    return database.address()
