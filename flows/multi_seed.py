"""Run the tasks, seeds and trials of a multi-seed study one after the other, each in its own workspace."""

from __future__ import annotations

import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

import pandas as pd
from ruamel.yaml import YAML

from flows.engine import supervisor
from flows.engine.run_options import SEED_FOLDER, Options
from flows.engine.stage_processes import terminable
from flows.environment.git_variables import environment_without_git
from flows.environment.workspaces import WORKSPACES
from flows.tracking import database
from flows.workspace import worktrees
from flows.workspace.worktrees import Sources, WorkspaceError
from tasks.config.params_file import PARAMS
from tasks.multi_seed import seeds_table, trials
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


def run_tasks(
    studies: Sequence[StudyFile], options: Options, held: ExitStack
) -> tuple[list[StudyFile], dict[str | None, pd.DataFrame], dict[str | None, pd.DataFrame], dict[str, str]]:
    """Run the studies (one for each task), and print the results of each as soon as its seeds have run.

    Args:
        held: keeps the workspaces locked, so that no other study changes their results before they have been read.

    Raises:
        WorkspaceError: another process has locked one of the workspaces.

    Returns:
        Four values: the studies with the variants that their trials chose; task → results; task → differences between
        pairs of candidates; name of a failed run (task and seed) → cause.
    """
    start = worktrees.sources()  # once, since a commit hours later must not reach the later seeds
    ran: list[StudyFile] = []
    results: dict[str | None, pd.DataFrame] = {}
    pairs: dict[str | None, pd.DataFrame] = {}
    failed: dict[str, str] = {}
    locks = lock_all(studies, held)
    for study in studies:
        chosen, causes = run_all(study, options, start, locks)
        ran.append(chosen)
        place = f"task {study.task}, " if study.task else ""
        failed |= {f"{place}seed {seed}": cause for seed, cause in causes.items()}
        finished = {seed: folder_of(study, seed) for seed in study.seeds if seed not in causes}
        if finished:
            results[study.task], pairs[study.task] = seeds_table.collect(finished)
            print(seeds_table.to_text(seeds_table.cells(results[study.task])), flush=True)
    return ran, results, pairs, failed


def lock_all(studies: Sequence[StudyFile], held: ExitStack) -> dict[Path, IO[str]]:
    """Lock the workspaces of all seeds until `held` is closed, and return the lock of each."""
    folders = [folder_of(study, seed) for study in studies for seed in study.seeds]
    return {folder: held.enter_context(worktrees.locked(folder)) for folder in folders}


def run_all(
    study: StudyFile, options: Options, start: Sources, locks: Mapping[Path, IO[str]]
) -> tuple[StudyFile, dict[int, str]]:
    """Run the trials of a study, if it has any; then run its seeds, with the variant of each recipe that they chose.

    Returns:
        The study with the variants that the trials chose, and failed seed → cause.
    """
    try:
        study = _choose(study, study.trials, options, start) if study.trials else study
    except WorkspaceError as error:
        return study, dict.fromkeys(study.seeds, str(error))
    failed: dict[int, str] = {}
    for seed in study.seeds:
        print(f"seed {seed}: {folder_of(study, seed)}", flush=True)
        try:
            if not run(study, seed, options, start, locks[folder_of(study, seed)]):
                failed[seed] = "see its messages above"
        except WorkspaceError as error:
            failed[seed] = str(error)
    return study, failed


def _choose(study: StudyFile, trial: Trials, options: Options, start: Sources) -> StudyFile:
    """Run the trials of the study, and return the study with the best variant of each recipe."""
    first = study.of_trials(trial)
    folder = folder_of(first, trial.seed)
    print(f"trials: {folder}", flush=True)
    with worktrees.locked(folder) as lock:
        if not run(first, trial.seed, options, start, lock):
            raise WorkspaceError("the trials failed: see their messages above")
        return study.at_its_best(trials.results(trial, study.metric, folder))


def run(study: StudyFile, seed: int, options: Options, start: Sources, lock: IO[str]) -> bool:
    """Run `eckart run` in the workspace of a seed, which is locked, and return whether it succeeded."""
    folder = folder_of(study, seed)
    command = [sys.executable, "-m", "flows", "run", *options.words()]
    prepare(study, seed, start)
    # absolute, since MLflow takes a path in the environment for one in the seed's folder
    stores = {"MLFLOW_TRACKING_URI": database.address(), "MLFLOW_REGISTRY_URI": database.registry_address()}
    environment = environment_without_git() | stores | {SEED_FOLDER: str(folder)}
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


def prepare(study: StudyFile, seed: int, start: Sources) -> Path:
    """Make the workspace of a seed, or update it to the study's commit, and write its params.yaml. Its outputs stay."""
    folder = folder_of(study, seed)
    worktrees.follow(folder, start)
    of_task = f", task {study.task}," if study.task else ""
    comment = f"# Made from {PARAMS} and {study.path}{of_task} with seed {seed}; edits are overwritten.\n"
    yaml = YAML()
    yaml.default_flow_style = False
    with (folder / PARAMS).open("w") as file:
        file.write(comment)
        yaml.dump(dict(study.content(seed)), file)
    return folder


def draw(folder: Path, studies: Sequence[StudyFile], results: Mapping[str | None, pd.DataFrame]) -> None:
    """Draw the means over the seeds of each task, and scores over numbered tasks, into `folder`."""
    from tasks.figures import write  # slow imports, which only this needs
    from tasks.multi_seed import seeds_figures

    for study in studies:
        workspaces = [folder_of(study, seed) for seed in study.seeds]
        seeds_figures.write_means(workspaces, study.params["study"]["figures"], folder / (study.task or ""))
    for plot in seeds_figures.over_tasks(results):
        write(plot, folder)
    print(f"Figures are in {folder}.")


def same_command(file: Path, seeds: Sequence[int], tasks: Sequence[str], table: Path) -> str:
    """Return the command that anyone can run in the root of a clone to write the table again."""
    options = [*(("--task", task) for task in tasks), *(("--seed", str(seed)) for seed in seeds)]
    if table.resolve().is_relative_to(Path.cwd()):
        options.append(("--table", str(table.resolve().relative_to(Path.cwd()))))
    return shlex.join(["eckart", "study", str(file), *chain.from_iterable(options)])
