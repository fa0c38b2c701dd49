"""Run the seeds and trials of a multi-seed study one after the other, each in its own workspace."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML

from flows.engine import supervisor
from flows.engine.run_options import SEED_FOLDER, Options
from flows.engine.stage_processes import terminable
from flows.workspace import worktrees
from flows.workspace.worktrees import WORKSPACES, WorkspaceError
from tasks.config.schema import PARAMS
from tasks.multi_seed import trials
from tasks.multi_seed.study_file import StudyFile
from tasks.multi_seed.trials import Trials

log = logging.getLogger(__name__)


def folder_of(study: StudyFile, seed: int) -> Path:
    """Return the path of a seed's workspace, relative to the main workspace."""
    return WORKSPACES / f"{study.name}-seed{seed}"


def check_committed(study: StudyFile) -> None:
    """Raise a WorkspaceError unless code and study file are committed, since workspaces are made from a commit."""
    file = str(study.path)
    edited = worktrees.edited(*worktrees.CODE, file)
    if not worktrees.git(Path(), "ls-files", "--", file):  # `edited` does not find a file that git ignores
        edited.add(file)
    worktrees.refuse(edited, "A study runs")


def run_all(study: StudyFile, options: Options) -> tuple[StudyFile, dict[int, str]]:
    """Run the trials of a study, if it has any; then run its seeds, with the variant of each recipe that they chose.

    Returns:
        The study with the variants that the trials chose, and failed seed → cause.
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
                failed[seed] = "see its messages above"
        except WorkspaceError as error:
            failed[seed] = str(error)
    return study, failed


def _choose(study: StudyFile, trial: Trials, options: Options) -> StudyFile:
    """Run the trials of the study, and return the study with the best variant of each recipe."""
    first = study.of_trials(trial)
    folder = folder_of(first, trial.seed)
    print(f"trials: {folder}", flush=True)
    if not run(first, trial.seed, options):
        raise WorkspaceError("the trials failed: see their messages above")
    return study.at_its_best(trials.results(trial, study.metric, folder))


def run(study: StudyFile, seed: int, options: Options) -> bool:
    """Run `eckart run` in the workspace of a seed, and return whether it succeeded."""
    folder = folder_of(study, seed)
    command = [sys.executable, "-m", "flows", "run", *options.words()]
    with worktrees.locked(folder) as lock:
        prepare(study, seed)
        tracking = _tracking(study.params["study"]["name"])
        environment = worktrees.environment() | {"MLFLOW_TRACKING_URI": tracking, SEED_FOLDER: str(folder)}
        # The new process inherits the lock, so the workspace stays locked even if this process is killed.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            pass_fds=[lock.fileno()],
            preexec_fn=partial(supervisor.die_with_parent, signal.SIGTERM),
        )
        with terminable(), process:
            try:
                return process.wait() == 0
            except SystemExit:
                process.terminate()
                raise
            except KeyboardInterrupt:  # Ctrl-C reaches that process, too
                process.wait()  # let it clean up
                raise


def prepare(study: StudyFile, seed: int) -> Path:
    """Make the workspace of a seed, or update it to the present commit, and write its params.yaml. Its outputs stay."""
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
    """Return the address of MLflow for a seed's run.

    If it is the main workspace's own database, first create the experiment there unless it exists.
    """
    from flows.tracking import database

    if not database.is_local():
        return database.address()
    from mlflow import MlflowClient  # slow imports

    from flows.tracking import mirror

    database.check()
    try:
        mirror.experiment(MlflowClient(database.address()), experiment)
    except Exception as error:  # whatever fails in MLflow must not stop the study
        log.warning("MLflow cannot be used: %s", error)
    return database.address()
