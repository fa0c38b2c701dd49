"""The study flow: one Prefect task for each stage of dvc.yaml, and MLflow told of it."""

# Annotations are not postponed here: Prefect reads those of a scheduled flow without this module's names.

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import httpx
from prefect import allow_failure, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.cluster import dask_runner
from flows.display import prefect_artifacts, terminal
from flows.display.progress import Progress, roughly
from flows.engine import hang_detection, nothing_to_do, stage_processes, stage_results, stages, torch_questions
from flows.engine.run_options import Options
from flows.engine.stages import Outcome, Planned, StageChanged
from flows.environment import crashed_runs, settings
from flows.environment.redaction import keep_out, shown
from flows.tracking import database
from flows.workspace import deployment_owner, installation
from tasks.artifacts.errors import EckartError

if TYPE_CHECKING:
    from flows.tracking.mirror import Mirror

if "PREFECT__FLOW_RUN_ID" in os.environ:
    # Prefect began this process for a run of a deployment, and logs its server's address before it calls the flow.
    keep_out()

# Threads only wait, for upstream stages and for a free slot: as many as stages. Slots bound what runs.
_THREADS = 256
_RECORD_POLLS = 25
_RECORDS = 200  # that the server tells of at once
_CHANGED = "Changed"
"""State of a run, and of a stage, for which data, parameters or code changed meanwhile: no news, and no success."""
_NAMED = 3  # of what changed

Execute = Callable[[Planned, str, Callable[[str], None]], Outcome | float]
"""Runs a command of a stage and logs its lines, here or, then giving the outcome there, on a worker; see stages.run."""


class StudyFailed(EckartError):
    """Some stages failed; the message names each with its cause. What was finished is in DVC."""


class StudyChanged(StudyFailed):
    """Nothing failed but stages for which something changed while the study ran."""


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{planned.name}")
def stage(
    planned: Planned, execute: Execute, slots: threading.Semaphore, mirror: "Mirror", progress: Progress
) -> State[Outcome]:
    """Bring one stage up to date. The state's name is DVC's verdict: Cached, Restored or Executed."""
    log = get_run_logger()

    def tell(seconds: float) -> None:
        log.warning("no output for %s: if the stage hangs, end the run; --timeout ends such a stage", roughly(seconds))

    def followed(command: str) -> Outcome | float:
        with slots, mirror.following(planned), progress.running(planned.name), hang_detection.noticed(tell) as noted:

            def heard(line: str) -> None:
                noted()
                log.info(line, extra=None if progress.heard(planned.name, line) else terminal.QUIET)

            return execute(planned, command, heard)

    try:
        outcome = stages.run(planned, followed)
    except (EckartError, OSError) as error:
        progress.failed(planned.name, str(error))
        name = _CHANGED if isinstance(error, StageChanged) else "Failed"
        return Failed(name=name, message=shown(str(error)))
    progress.done(outcome)
    mirror.record(outcome)
    place = f", in {outcome.place}" if outcome.place else ""
    return Completed(name=outcome.status, message=f"DVC: {outcome.status}{place}", data=outcome)


@flow(name="study", task_runner=ThreadPoolTaskRunner(max_workers=_THREADS), persist_result=False)  # type: ignore[arg-type]
def study(
    workers: Annotated[int | None, Field(ge=1)] = None,
    timeout: Annotated[float | None, Field(ge=1)] = None,
    task_runner: Literal["threads", "dask"] = "threads",
    promote: bool = False,
) -> list[Outcome]:
    """Run the study that params.yaml of the working directory describes.

    Places are no parameters, which whoever starts a run may choose: the folder is that of the process, and the address
    of Dask's scheduler is in its environment, as ECKART_SCHEDULER.

    Args:
        workers: stages that run side by side; by default as many as the cores have room for.
        timeout: seconds that a stage may take.
        task_runner: whether stages run in this workspace, or on Dask's workers with a workspace each.
        promote: whether the best candidate is to become the champion of the registry, if it passes the gates.

    Raises:
        ParamsError: params.yaml has mistakes; nothing was run.
        OptionsError: the arguments contradict each other; nothing was run.
        OtherWorkspace: the run's deployment is of another folder; nothing was run.
        ClusterError, TransportFailed, WorkspaceError: workers cannot be used; nothing was run.
        StudyFailed: some stages failed; the others finished.
        StudyChanged: something changed for some stages while the study ran; the others finished.
        RegistryError: the study is finished, and the registry failed.
    """
    settings.apply()  # a deployment's run begins here
    try:
        deployment_owner.check()
        installation.refresh()
        stages.check_workspace()  # before anything is written
        with crashed_runs.noted(str(flow_run.id)):
            damage = database.set_aside_damaged()
            outcomes = _run(Options.told(workers, timeout, task_runner))
            name, said = _promoted(outcomes) if promote else ("Completed", "")
    except Exception as error:  # a state, which Prefect raises to the caller
        if not isinstance(error, EckartError | OSError):  # of those no traceback in the log
            get_run_logger().exception("the study failed")
        name = _CHANGED if isinstance(error, StudyChanged) else "Failed"
        return Failed(name=name, message=shown(str(error) or repr(error)), data=error)  # type: ignore[return-value]
    message = " ".join(filter(None, [f"{nothing_to_do.summary(outcomes).removesuffix('.')}.", said, damage]))
    return Completed(name=name, message=message, data=outcomes)  # type: ignore[return-value]


def _promoted(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """What came of promoting the best candidate: the name of the state, by which Prefect tells it, and in words.

    A refusal is no failure; the champion that stays one is no news, nor is what arrived while the study ran.
    """
    if changed := _changed_since(outcomes):
        return _CHANGED, _left(changed)
    from flows.promotion.flow import Refused, promotion  # a slow import

    try:
        conclusion = promotion()
    except Refused as refusal:
        if not refusal.gates and (changed := _changed_since(outcomes)):  # in the seconds since
            return _CHANGED, _left(changed)
        return "Refused", shown(f"Not promoted: {refusal}")
    return "Promoted" if conclusion.gates else "Completed", conclusion.message


def _left(changed: str) -> str:
    return f"Not promoted: {changed} changed while the run went on; the next run takes that."


def _changed_since(outcomes: Sequence[Outcome]) -> str:
    """Which data, parameters and code are not what the stages have read, in words."""
    from flows.display import run_diff  # a slow import

    before, now = (run_diff.of("", read, complete=False) for read in (outcomes, stages.read_now()))
    found = {kind: [name for name, _, _ in rows] for kind, rows in run_diff.changes(before, now).items()}
    return " and ".join(
        f"{kind} ({', '.join(names[:_NAMED])}{', …' if names[_NAMED:] else ''})" for kind, names in found.items()
    )


def _run(options: Options) -> list[Outcome]:
    from flows.registry import champion_data  # now that the settings hold: MLflow reads some as it is imported
    from flows.tracking.mirror import Mirror

    typed = torch_questions.checked_params()
    champion_data.refresh(typed["study"].name, typed["promotion"].model)
    planned = nothing_to_do.plan()
    names = {"prefect.flow_run": str(flow_run.id), "prefect.flow_run_name": str(flow_run.name)}
    mirror = Mirror(typed["study"].name, planned, names)
    mirror.start(typed)
    finished: dict[str, Outcome] = {}
    lines = prefect_artifacts.LastLines()
    complete = False
    try:
        side_by_side = options.side_by_side(planned, typed["threads"].candidate)
        with (
            stage_processes.reaping(),
            terminal.shown(_in_order(planned), side_by_side, stage_results.seconds_before()) as progress,
            _executor(planned, options, side_by_side) as (execute, slots),
        ):
            told = {"execute": lines.listening(execute), "slots": slots, "mirror": mirror, "progress": progress}
            submit: Callable[..., Any] = partial(stage.submit, **told)
            states = _run_all(planned, submit)
        finished = {name: state.result() for name, state in states.items() if state.is_completed()}
        complete = len(finished) == len(planned)
        stage_results.write_seconds(finished.values())
        causes = _causes(states)
        _tell_prefect(typed["study"].name, mirror, list(finished.values()) if complete else causes, lines, len(states))
    finally:
        mirror.finish(complete)
    if not complete:
        changed = all(states[name].name == _CHANGED for name in causes)
        advice = "The next run takes that" if changed else "Fix the cause and run again"
        raise (StudyChanged if changed else StudyFailed)(_report(causes, finished, len(planned), advice))
    return list(finished.values())


def _tell_prefect(
    study: str, mirror: "Mirror", found: list[Outcome] | dict[str, str], lines: prefect_artifacts.LastLines, tasks: int
) -> None:
    """Show on the run's page what a complete study found, or the causes why it is not; and let the records arrive."""
    try:
        if isinstance(found, dict):
            prefect_artifacts.failure(study, found, lines)
            _tell_changes(study)
        else:
            prefect_artifacts.comparison(study, mirror)
            prefect_artifacts.changes(study, str(flow_run.name), found)
        _await_records(str(flow_run.id), tasks)
    except httpx.HTTPError as error:  # what the stages did is in DVC, and MLflow may be there
        get_run_logger().warning("Prefect's server fails (%s): its page of this run is not complete", error)


def _tell_changes(study: str) -> None:
    """Since the last complete run, on the page of one that failed: whatever fails here does not hide why that did."""
    try:
        prefect_artifacts.changes(study, str(flow_run.name), None)
    except httpx.HTTPError:
        raise
    except Exception as error:  # a full disk, a file that is gone or cannot be read: DVC has an error for each
        get_run_logger().warning("What changed since the last complete run cannot be said: %s", shown(str(error)))


@contextmanager
def _executor(
    planned: Sequence[Planned], options: Options, side_by_side: int
) -> Iterator[tuple[Execute, threading.Semaphore]]:
    """What runs the stages, and how many at a time; on Dask as many as it has workers for."""
    if options.task_runner == "dask" and any(not one.cached for one in planned):
        with dask_runner.workers(planned, options.scheduler, side_by_side, options.timeout) as workers:
            yield workers.execute, threading.Semaphore(_THREADS)
    else:
        yield partial(stages.execute_here, timeout=options.timeout), threading.Semaphore(side_by_side)


def _in_order(planned: Sequence[Planned]) -> list[Planned]:
    """The stages as they are to begin: what needs a machine alone comes last."""
    phases = _phases(planned)
    return sorted(planned, key=lambda one: phases[one.name])


def _run_all(planned: Sequence[Planned], submit: Callable[..., PrefectFuture[Outcome]]) -> dict[str, State[Outcome]]:
    """Run every stage once those before it are done; those that need a machine alone one after the other."""
    futures: dict[str, PrefectFuture[Outcome]] = {}
    order = _in_order(planned)
    for position, one in enumerate(order):
        waits: list[object] = [futures[name] for name in one.upstream]
        if one.twin in futures:
            waits.append(allow_failure(futures[one.twin]))
        if one.alone:
            waits += [allow_failure(futures[before.name]) for before in order[:position]]
        futures[one.name] = submit(one, wait_for=waits)
    for future in futures.values():
        future.wait()
    return {name: future.state for name, future in futures.items()}


def _phases(planned: Sequence[Planned]) -> dict[str, int]:
    """0 for a stage that can come before all that must run alone, 1 for those, 2 for what they lead to."""
    phases: dict[str, int] = {}
    for one in planned:  # upstream first
        after = 2 if any(phases[name] for name in one.upstream) else 0
        phases[one.name] = 1 if one.alone else after
    return phases


def _await_records(flow_run_id: str, tasks: int) -> None:
    """Wait a little until Prefect's server has stored how every task ended.

    It learns of that by events, which come later; a temporary server is stopped as soon as the flow is over.
    """
    ended = TaskRunFilter.model_validate({"state": {"type": {"any_": [kind.value for kind in TERMINAL_STATES]}}})
    this = FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})
    with get_client(sync_client=True) as client:
        for _ in range(_RECORD_POLLS):
            if len(client.read_task_runs(flow_run_filter=this, task_run_filter=ended)) >= min(tasks, _RECORDS):
                return
            time.sleep(0.2)


def _causes(states: Mapping[str, State[Outcome]]) -> dict[str, str]:
    """Stage that failed → why."""
    failures = {name: state for name, state in states.items() if state.is_failed() or state.is_crashed()}
    # a stage says its own name, a shell command does not
    return {name: (state.message or "").removeprefix(f"{name}: ") for name, state in failures.items()}


def _report(causes: Mapping[str, str], finished: Mapping[str, Outcome], total: int, advice: str) -> str:
    lines = "\n".join(f"  {name}: {cause}" for name, cause in causes.items())
    waiting = total - len(finished) - len(causes)
    return (
        f"{len(causes)} stages failed, {waiting} waited for them, {len(finished)} are finished and stay finished:\n"
        f"{lines}\n{advice}: only what is not finished will run."
    )
