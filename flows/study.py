"""The study flow: one Prefect task for each stage of dvc.yaml, and MLflow told of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from prefect import allow_failure, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import BaseModel

from flows import engine, params, processes
from flows.engine import Outcome, Planned
from flows.tracking import Mirror

# Threads only wait, for upstream stages and for a free slot: as many as stages. Slots bound what runs.
_THREADS = 256
_RECORD_POLLS = 25


class StudyFailed(RuntimeError):
    """Some stages failed; the message names each with its cause. What was finished is in DVC."""


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{planned.name}")
def stage(
    planned: Planned, root: Path, slots: threading.Semaphore, mirror: Mirror, timeout: float | None
) -> State[Outcome]:
    """Bring one stage up to date. The state's name is DVC's verdict: Cached, Restored or Executed."""
    log = get_run_logger()

    def execute(command: str) -> None:
        with slots, mirror.following(planned):
            processes.run(command, root, log.info, {"DVC_ROOT": str(root), "DVC_STAGE": planned.name}, timeout)

    try:
        outcome = engine.run(planned, execute)
    except (processes.CommandFailed, engine.StageChanged) as error:
        return Failed(message=str(error))
    mirror.record(outcome)
    return Completed(name=outcome.status, message=f"DVC: {outcome.status}", data=outcome)


@flow(name="study", task_runner=ThreadPoolTaskRunner(max_workers=_THREADS), persist_result=False)  # type: ignore[arg-type]
def study(root: str = ".", workers: int | None = None, timeout: float | None = None) -> list[Outcome]:
    """Run the study that params.yaml describes.

    Args:
        root: the workspace: a folder with params.yaml and dvc.yaml.
        workers: stages that run side by side; by default as many as the cores have room for.
        timeout: seconds that a stage may take.

    Raises:
        ParamsError: params.yaml has mistakes; nothing was run.
        StudyFailed: some stages failed; the others finished.
    """
    with chdir(root):  # DVC takes its paths from the working directory
        return _run(Path.cwd(), workers, timeout)  # type: ignore[return-value]  # Prefect raises a failed state


def _run(root: Path, workers: int | None, timeout: float | None) -> list[Outcome] | State[Any]:
    typed = params.check(root)
    planned = engine.plan()
    slots = threading.Semaphore(workers or max(1, _cores() // typed["threads"].candidate))
    mirror = Mirror(root, typed["study"].name, planned, {"prefect.flow_run": str(flow_run.id)})
    mirror.start({name: _plain(section) for name, section in typed.items() if name != "recipes"}, str(flow_run.name))
    finished: dict[str, Outcome] = {}
    complete = False
    try:
        with processes.reaping():
            futures = _submit(planned, root, slots, mirror, timeout)
            for future in futures.values():
                future.wait()
        finished = {name: future.result() for name, future in futures.items() if future.state.is_completed()}
        complete = len(finished) == len(planned)
        _await_records(str(flow_run.id), len(planned))
    finally:
        mirror.finish(complete)
    if not complete:
        failure = StudyFailed(_report(futures, finished))
        return Failed(message=str(failure), data=failure)  # raised to the caller, without a traceback in the log
    return list(finished.values())


def _submit(
    planned: Sequence[Planned], root: Path, slots: threading.Semaphore, mirror: Mirror, timeout: float | None
) -> dict[str, PrefectFuture[Outcome]]:
    """Submit every stage; those that need the machine alone come last and one after the other."""
    futures: dict[str, PrefectFuture[Outcome]] = {}
    phases = _phases(planned)
    order = sorted(planned, key=lambda one: phases[one.name])
    for position, one in enumerate(order):
        waits: list[object] = [futures[name] for name in one.upstream]
        if one.alone:
            waits += [allow_failure(futures[before.name]) for before in order[:position]]
        futures[one.name] = stage.submit(one, root, slots, mirror, timeout, wait_for=waits)  # type: ignore[call-overload]
    return futures


def _phases(planned: Sequence[Planned]) -> dict[str, int]:
    """0 for a stage that can come before all that must run alone, 1 for those, 2 for what they lead to."""
    phases: dict[str, int] = {}
    for one in planned:  # upstream first
        after = 2 if any(phases[name] for name in one.upstream) else 0
        phases[one.name] = 1 if one.alone else after
    return phases


def _plain(section: Any) -> Any:
    return section.model_dump() if isinstance(section, BaseModel) else section


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _await_records(flow_run_id: str, tasks: int) -> None:
    """Wait a little until Prefect's server has stored how every task ended.

    It learns of that by events, behind the tasks; a temporary server is stopped as soon as the flow is over.
    """
    ended = TaskRunFilter.model_validate({"state": {"type": {"any_": [kind.value for kind in TERMINAL_STATES]}}})
    this = FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})
    with get_client(sync_client=True) as client:
        for _ in range(_RECORD_POLLS):
            if len(client.read_task_runs(flow_run_filter=this, task_run_filter=ended)) >= tasks:
                return
            time.sleep(0.2)


def _report(futures: Mapping[str, PrefectFuture[Outcome]], finished: Mapping[str, Outcome]) -> str:
    states = {name: future.state for name, future in futures.items()}
    failures = {name: state for name, state in states.items() if state.is_failed() or state.is_crashed()}
    # a stage says its own name, a shell command does not
    messages = {name: (state.message or "").removeprefix(f"{name}: ") for name, state in failures.items()}
    causes = "\n".join(f"  {name}: {message}" for name, message in messages.items())
    waiting = len(futures) - len(finished) - len(failures)
    return (
        f"{len(failures)} stages failed, {waiting} waited for them, {len(finished)} are finished and stay finished:\n"
        f"{causes}\nMend the cause and run again: only what is not finished will run."
    )
