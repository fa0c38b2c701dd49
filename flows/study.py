"""The study flow of Prefect: it runs each stage of dvc.yaml as a task, and logs the results to MLflow."""

# No `from __future__ import annotations`: Prefect evaluates the annotations of a scheduled flow without this module's
# names.

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import httpx
from prefect import allow_failure, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.cluster import dask_runner
from flows.display import prefect_artifacts, terminal
from flows.display.progress import Progress, roughly
from flows.engine import hang_detection, nothing_to_do, stage_processes, stage_results, stages, torch_questions
from flows.engine.run_options import Options
from flows.engine.stages import Outcome, Planned, StageChanged
from flows.environment import canceled_runs, crashed_runs, settings
from flows.environment.redaction import keep_out, redact
from flows.tracking import database
from flows.workspace import deployment_owner, installation
from tasks.artifacts.errors import EckartError
from tasks.report.numbers import counted

if TYPE_CHECKING:
    from flows.tracking.mirror import Mirror

if canceled_runs.has_runner():
    keep_out()  # before it calls the flow, Prefect logs the address of its server, which may contain a password


# Each stage gets a thread, which waits for upstream stages and for a free slot. The slots limit how many stages run.
_THREADS = 256
_RECORD_POLLS = 25
_RECORDS = 200  # the server returns at most this many task runs
_CHANGED = "Changed"
"""Name of the state of a run or stage if its data, parameters or code changed while it ran.

This is not a success, and no notification is sent.
"""
_NAMED = 3  # number of changed files, parameters or stages that a message names

Execute = Callable[[Planned, str, Callable[[str], None]], Outcome | float]
"""A function (stage, command, log) that runs a stage's command, on this machine or on a worker of a cluster.

It passes each line of output to `log`. It returns the seconds that the command took here, or the worker's `Outcome`.
"""


Submit = Callable[..., PrefectFuture[Any]]
"""A function that submits a stage to Prefect and returns the stage's future."""


class StudyFailed(EckartError):
    """Some stages failed. The message names each of them and its cause. Results of finished stages are in DVC."""


class StudyChanged(StudyFailed):
    """Some stages failed, all because their data, parameters or code changed while the study ran."""


class StudyCanceled(EckartError):
    """Somebody canceled the run on Prefect's page before all stages were finished."""


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{planned.name}")
def stage(
    planned: Planned, execute: Execute, slots: threading.Semaphore, mirror: "Mirror", progress: Progress
) -> State[Outcome]:
    """Bring one stage up to date.

    The returned state is named Cached, Restored or Executed, as the status of the outcome, or else Failed, Changed or
    Cancelled.
    """
    log = get_run_logger()

    def warn(seconds: float) -> None:
        log.warning("no output for %s: if the stage hangs, end the run; --timeout ends such a stage", roughly(seconds))

    def execute_here(command: str) -> Outcome | float:
        with slots, mirror.following(planned), progress.running(planned.name), hang_detection.noticed(warn) as noted:

            def on_line(line: str) -> None:
                noted()
                log.info(line, extra=None if progress.show_line(planned.name, line) else terminal.QUIET)

            return execute(planned, command, on_line)

    try:
        outcome = stages.run(planned, execute_here)
    except (EckartError, OSError) as error:
        if stage_processes.flow_has_ended():
            return Cancelled(message="It ended with the run.")
        progress.failed(planned.name, str(error))
        name = _CHANGED if isinstance(error, StageChanged) else "Failed"
        return Failed(name=name, message=redact(str(error)))
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

    Anyone who may start a run can choose its parameters. So the folder and the Dask scheduler are not among them: the
    folder is the working directory, and the scheduler's address is in the environment variable ECKART_SCHEDULER.

    Args:
        workers: number of stages that run at a time; None: as many as the cores allow.
        timeout: seconds after which a stage is stopped; None: no limit.
        task_runner: `threads` runs stages in this workspace; `dask` runs them on Dask workers, each with a workspace of
            its own.
        promote: whether to make the best candidate the champion of the registry afterwards, if it passes the gates.

    Raises:
        StudyFailed: some stages failed. Their downstream stages did not run; all others finished.
        StudyChanged: the inputs of some stages changed while the study ran.
        StudyCanceled: somebody canceled the run on Prefect's page, and it has no runner of Prefect, which would end it.
        RegistryError: the study finished, but the registry failed.
        EckartError: any other cause, such as a mistake in params.yaml; nothing was run.
    """
    settings.apply()  # the run of a deployment starts here, not in the command line
    try:
        deployment_owner.check()
        installation.refresh()
        stages.check_workspace()  # before anything is written
        with crashed_runs.lock_run(str(flow_run.id)):
            damage = database.check()
            outcomes = _run(Options.of_flow(workers, timeout, task_runner))
            name, promotion = _promoted(outcomes) if promote else ("Completed", "")
    except StudyCanceled as canceled:
        return Cancelled(message=str(canceled), data=canceled)  # type: ignore[return-value]
    except Exception as error:  # returned as a state, which Prefect raises to the caller
        if not isinstance(error, EckartError | OSError):
            get_run_logger().exception("the study failed")
        name = _CHANGED if isinstance(error, StudyChanged) else "Failed"
        return Failed(name=name, message=redact(str(error) or repr(error)), data=error)  # type: ignore[return-value]
    message = " ".join(filter(None, [f"{nothing_to_do.summary(outcomes).removesuffix('.')}.", promotion, damage]))
    return Completed(name=name, message=message, data=outcomes)  # type: ignore[return-value]


def _promoted(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Promote the best candidate; return the name of the flow run's final state, and a sentence about the promotion.

    The name decides whether a notification is sent. It is sent for Promoted and for Refused, which is not a failure.
    It is not sent for Completed (the champion stays) and Changed (data, parameters or code changed while the study
    ran).
    """
    if changed := _changed_since(outcomes):
        return _CHANGED, _postponed(changed)
    from flows.promotion.flow import Refused, promotion  # a slow import

    try:
        result = promotion()
    except Refused as refusal:
        if not refusal.gates and (changed := _changed_since(outcomes)):  # the inputs changed just now
            return _CHANGED, _postponed(changed)
        return "Refused", redact(f"Not promoted: {refusal}")
    return "Promoted" if result.gates else "Completed", result.message


def _postponed(changed: str) -> str:
    return f"Not promoted: {changed} changed during the run; the next run uses the new state."


def _changed_since(outcomes: Sequence[Outcome]) -> str:
    """Return a text that names the data, parameters and code that changed after the stages had read them.

    It is empty if none changed.
    """
    from flows.display import run_diff  # a slow import

    before, now = (run_diff.current("", read, complete=False) for read in (outcomes, stages.read_now()))
    changed = {kind: [name for name, _, _ in rows] for kind, rows in run_diff.changes(before, now).items()}
    return " and ".join(
        f"{kind} ({', '.join(names[:_NAMED])}{', …' if names[_NAMED:] else ''})" for kind, names in changed.items()
    )


def _run(options: Options) -> list[Outcome]:
    # After settings.apply, because MLflow reads some settings when it is imported.
    from flows.registry import champion_data
    from flows.tracking.mirror import Mirror

    typed = torch_questions.checked_params()
    champion_data.refresh(typed["study"].name, typed["promotion"].model)
    planned = _in_order(nothing_to_do.plan(clear=True))
    names = {"prefect.flow_run": str(flow_run.id), "prefect.flow_run_name": str(flow_run.name)}
    mirror = Mirror(typed["study"].name, planned, names)
    mirror.start(typed)
    finished: dict[str, Outcome] = {}
    complete = False
    try:
        side_by_side = options.side_by_side(planned, typed["threads"].candidate)
        with (
            stage_processes.reaping(),
            canceled_runs.watch(UUID(flow_run.id), stage_processes.end_all) as canceled,
            terminal.show_progress(planned) as progress,
            _executor(planned, options, side_by_side) as (execute, slots),
        ):
            submit: Submit = partial(_submit, execute=execute, slots=slots, mirror=mirror, progress=progress)
            states = _run_all(planned, submit)
        finished = {name: state.result() for name, state in states.items() if state.is_completed()}
        complete = len(finished) == len(planned)
        stage_results.write_seconds(finished.values())
        if canceled.is_set() and not complete:
            raise StudyCanceled(
                f"canceled on Prefect's page: {len(finished)} of {len(planned)} stages are finished and kept. "
                "Run again to continue"
            )
        failures = {name: state for name, state in states.items() if state.is_failed() or state.is_crashed()}
        result = list(finished.values()) if complete else _causes(failures)
        _show_on_page(typed["study"].name, mirror, result, progress.lines, len(states))
    finally:
        mirror.finish(complete)
    if not complete:
        raise _failure(failures, len(finished), len(planned))
    return list(finished.values())


def _causes(failures: Mapping[str, State[Outcome]]) -> dict[str, str]:
    # messages of our own stages begin with the stage's name, and messages of shell commands do not
    return {name: (state.message or "").removeprefix(f"{name}: ") for name, state in failures.items()}


def _failure(failures: Mapping[str, State[Outcome]], finished: int, planned: int) -> StudyFailed:
    """Return the error that names the failed stages and their causes, and says what to do.

    Args:
        failures: stage → final state.
        finished, planned: number of stages that finished, and of all stages.
    """
    changed = all(state.name == _CHANGED for state in failures.values())
    advice = "The next run uses the new state" if changed else "Fix the cause and run again"
    waiting = planned - finished - len(failures)
    lines = "\n".join(f"  {name}: {cause}" for name, cause in _causes(failures).items())
    them = "it" if len(failures) == 1 else "them"
    return (StudyChanged if changed else StudyFailed)(
        f"{counted(len(failures), 'stage')} failed, {waiting} need {them} and did not run, "
        f"{finished} are finished and kept:\n{lines}\n{advice}: only unfinished stages will run."
    )


def _show_on_page(
    study: str,
    mirror: "Mirror",
    result: list[Outcome] | dict[str, str],
    lines: Mapping[str, Iterable[str]],
    tasks: int,
) -> None:
    """Show the comparison, or the causes of failures, on the run's page in Prefect; then wait for the tasks' records.

    Args:
        result: the outcomes of all stages if the study is complete; otherwise failed stage → cause.
        lines: stage → the last lines that it printed.
        tasks: number of tasks to wait for.
    """
    try:
        if isinstance(result, dict):
            prefect_artifacts.failure(study, result, lines)
            _show_changes(study)
        else:
            prefect_artifacts.comparison(study, mirror)
            prefect_artifacts.changes(study, str(flow_run.name), result)
        _await_records(str(flow_run.id), tasks)
    except httpx.HTTPError as error:  # go on: the results are in DVC, and MLflow may still work
        get_run_logger().warning("Prefect's server fails (%s): its page of this run is incomplete", error)


def _show_changes(study: str) -> None:
    """Show what changed since the last complete run. Errors are only logged: they must not hide the study's failure."""
    try:
        prefect_artifacts.changes(study, str(flow_run.name), None)
    except httpx.HTTPError:
        raise
    except Exception as error:  # DVC raises many kinds of errors if a file is missing or cannot be read
        get_run_logger().warning("Cannot list the changes since the last complete run: %s", redact(str(error)))


@contextmanager
def _executor(
    planned: Sequence[Planned], options: Options, side_by_side: int
) -> Iterator[tuple[Execute, threading.Semaphore]]:
    """Yield the function that runs a stage's command, and a semaphore that limits how many stages run at a time.

    On a Dask cluster the workers set this limit, and the semaphore is large enough for all stages.
    """
    if options.scheduler and any(not stage.cached for stage in planned):
        with dask_runner.workers(planned, options.scheduler, options.timeout) as workers:
            yield workers.execute, threading.Semaphore(_THREADS)
    else:
        yield partial(stages.execute_here, timeout=options.timeout), threading.Semaphore(side_by_side)


def _submit(planned: Planned, **options: Any) -> PrefectFuture[Any]:
    # The task gets the stage's name, too: until a task begins, Prefect shows it by the task's name, as `stage-13f`.
    return stage.with_options(name=planned.name).submit(planned, **options)


def _in_order(planned: Sequence[Planned]) -> list[Planned]:
    """Sort the stages: first those that can run side by side, then those that must run alone.

    Last come the other stages that depend on a stage that must run alone.
    """
    phases: dict[str, int] = {}
    for stage in planned:  # upstream first
        after = 2 if any(phases[name] for name in stage.upstream) else 0
        phases[stage.name] = 1 if stage.alone else after
    return sorted(planned, key=lambda stage: phases[stage.name])


def _run_all(planned: Sequence[Planned], submit: Submit) -> dict[str, State[Outcome]]:
    """Run all stages, and return name → final state.

    A stage waits for its upstream stages and its twin. A stage that must run alone waits for all stages before it.
    """
    futures: dict[str, PrefectFuture[Outcome]] = {}
    for position, stage in enumerate(planned):
        waits: list[object] = [futures[name] for name in stage.upstream]
        if stage.twin in futures:
            waits.append(allow_failure(futures[stage.twin]))
        if stage.alone:
            waits += [allow_failure(futures[before.name]) for before in planned[:position]]
        futures[stage.name] = submit(stage, wait_for=waits)
    for future in futures.values():
        future.wait()
    return {name: future.state for name, future in futures.items()}


def _await_records(flow_run_id: str, tasks: int) -> None:
    """Wait, for a few seconds at most, until Prefect's server has stored the final state of every task.

    The states reach the server as events, some time after the tasks ended. Without the wait a temporary server would
    stop, right after the flow, before they arrive.
    """
    ended = TaskRunFilter.model_validate({"state": {"type": {"any_": [kind.value for kind in TERMINAL_STATES]}}})
    this = FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})
    with get_client(sync_client=True) as client:
        for _ in range(_RECORD_POLLS):
            if len(client.read_task_runs(flow_run_filter=this, task_run_filter=ended)) >= min(tasks, _RECORDS):
                return
            time.sleep(0.2)
