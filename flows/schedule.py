"""Run the study on a schedule, with a Prefect deployment that exists while this process runs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo, available_timezones

import httpx
from prefect._vendor.croniter import croniter  # as in Prefect's server, whose public API for this is async only
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, StateType
from prefect.events import DeploymentEventTrigger
from prefect.exceptions import ObjectNotFound
from prefect.flows import EntrypointType
from prefect.schedules import Cron, Schedule
from prefect.settings import get_current_settings
from prefect.states import Cancelled, State

from flows.display.progress import roughly
from flows.engine.run_options import Options
from flows.engine.stage_processes import terminable
from flows.environment.redaction import redact
from flows.environment.settings import answers
from flows.servers import notifications
from flows.servers.prefect_server import how_to_reach, is_ours, prefect_server
from flows.study import study
from flows.workspace import deployment_owner
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

CHANGED = "eckart.changed"
"""Name of the Prefect event that says that data, parameters or code have changed."""
_FIELDS = 5  # of a cron schedule
_POLL = 5.0  # seconds between two attempts to reach a lost server
_MISSING, _NEVER_SEEN = 2, 12  # looks in a row that do not find the deployment; a slow server takes long to make it
_PATIENCE = 30.0  # seconds in which a run ends its stages
_ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)


class ScheduleError(EckartError):
    """An invalid schedule. The message says what to write instead."""


def serve(
    name: str, cron: str, timezone: str, options: Options, promote: bool = False, notify: Sequence[str] = ()
) -> None:
    """Run the study of the working directory on a schedule, one run at a time, until Ctrl-C or SIGTERM.

    The event `CHANGED` of the resource `eckart.NAME` also starts a run. All runs use the folder and the Dask scheduler
    of this process; a run cannot choose others. If Prefect's server stops answering, this function waits until it
    answers again, or, if it had started that server itself, starts a new one. If the server no longer has the
    deployment, since somebody deleted it or the server lost its database, it is made again, with its notifications.

    Args:
        name: name of the deployment.
        cron: minute, hour, day of month, month and day of week.
        promote: whether each run also promotes the best candidate.
        notify: names of Prefect's notification blocks, through which the results of runs are sent; see
            `notifications.set_up`.

    Raises:
        EckartError: `cron` or `timezone` is invalid, no server can be used, a block cannot be used, another process
            serves this deployment, or one of another folder has this name.
    """
    deployment = {"schedule": _schedule(cron, timezone), "parameters": {**options.parameters(), "promote": promote}}
    logging.getLogger("prefect.runner").addFilter(_is_not_waiting)
    due = partial(next_run, cron, timezone)
    set_up = partial(notifications.set_up, name, notify, notifications.longest_gap(cron))
    with terminable(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine 'Runner.astop'")  # of Prefect's own handler of SIGTERM
        while True:
            with prefect_server() as address:
                while (outcome := _serve_until_lost(name, deployment, set_up, due, address)) == "deleted":
                    log.warning("study/%s is no longer on Prefect's server; it is made again", name)
                if outcome == "ended":
                    return
            log.warning("Prefect's server does not answer; the schedule continues when it does")
            while (url := get_current_settings().api.url) and not answers(f"{url.rstrip('/')}/health"):
                time.sleep(_POLL)


def _serve_until_lost(
    name: str,
    deployment: Mapping[str, Any],
    set_up: Callable[[], None],
    due: Callable[[datetime], datetime],
    address: str,
) -> Literal["ended", "deleted", "lost"]:
    """Serve the deployment until a signal ends it, or until the deployment or Prefect's server is lost."""
    lost = False
    try:
        deployment_owner.check_name(name)
        with deployment_owner.held(name), _paused_afterwards(name, address), _watching(name):
            set_up()
            print(_announcement(name, due, address), flush=True)
            study.serve(
                name=name,
                **deployment,
                description="Brings the study of params.yaml up to date.",
                global_limit=_ONE_AT_A_TIME,  # counts runs on all machines
                limit=1,
                tags=[deployment_owner.tag()],
                triggers=[
                    DeploymentEventTrigger(
                        name=f"eckart {name}: new data, parameters or code",
                        expect={CHANGED},
                        match={"prefect.resource.id": f"eckart.{name}"},
                    )
                ],
                entrypoint_type=EntrypointType.MODULE_PATH,
                print_starting_message=False,
            )
    except _DeletedError:
        return "deleted"
    except Exception as error:  # Prefect raises many kinds of errors, and groups of errors
        if answers(f"{address.rstrip('/')}/health"):
            raise
        log.warning("the schedule was interrupted: %s", error)
        lost = True
    finally:
        if not lost:
            _end_runs()  # before Prefect's server, which they need
    return "lost" if lost else "ended"


class _DeletedError(SystemExit):
    """Ends Prefect's runner, as SIGTERM does: the server no longer has the deployment."""


@contextmanager
def _watching(name: str) -> Iterator[None]:
    """During the block, raise _DeletedError in it once the server no longer has our deployment of this name.

    Prefect's runner would wait for ever: to it, a deployment that is gone is one without due runs. A run that goes on
    is not interrupted.
    """
    over = threading.Event()

    def watch() -> None:
        seen, missing = None, 0
        while not over.wait(get_current_settings().runner.poll_frequency):
            with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
                found = deployment_owner.own(client, name)
                seen = seen or found
                there = found and found == seen
                missing = 0 if there or multiprocessing.active_children() else missing + 1
            if missing >= (_MISSING if seen else _NEVER_SEEN):
                break
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    def end(*_: object) -> None:
        if not over.is_set():
            raise _DeletedError

    signal.signal(signal.SIGUSR1, end)
    # A thread of its own would not see the address and the key of a server that this process has started.
    threading.Thread(target=copy_context().run, args=(watch,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def _paused_afterwards(name: str, address: str) -> Iterator[None]:
    """After the block, pause the deployment and cancel its runs that have not begun, unless the server was lost.

    Prefect's runner does so, too, but not if SIGTERM comes while it starts a run.
    """
    try:
        yield
    finally:
        if answers(f"{address.rstrip('/')}/health"):
            _pause(name)


def _pause(name: str) -> None:
    try:
        with get_client(sync_client=True) as client:
            if not (deployment := deployment_owner.own(client, name)):  # never made, deleted, or another folder's now
                return
            with suppress(ObjectNotFound):
                client.pause_deployment(deployment)
            canceled: State[Any] = Cancelled(message="`eckart serve` ended before this run began.")
            of_deployment = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
            waiting = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING])))
            for run in client.read_flow_runs(deployment_filter=of_deployment, flow_run_filter=waiting):
                with suppress(ObjectNotFound):  # somebody has deleted it
                    client.set_flow_run_state(run.id, canceled, force=True)
    except httpx.HTTPError as error:
        log.warning("study/%s cannot be paused, so its next runs will be late: %s", name, redact(str(error)))


def _end_runs() -> None:
    """End the processes of runs that still go on, as Ctrl-C does; Prefect's runner only ends itself at SIGTERM."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    end = time.monotonic() + _PATIENCE
    for child in children:
        child.join(max(0.0, end - time.monotonic()))
        child.kill()


def next_run(cron: str, timezone: str, now: datetime) -> datetime:
    """Return the time of the first run after `now`, in the schedule's time zone."""
    zone = ZoneInfo(timezone)
    local = now.astimezone(zone).replace(tzinfo=None)  # wall-clock time, as in Prefect
    return croniter(cron, local).get_next(datetime).replace(tzinfo=zone)


def _announcement(name: str, due: Callable[[datetime], datetime], address: str) -> str:
    """Return a text for the user: when the next run starts, where to watch it, and how to start a run at once.

    The text does not contain the key of a server of ours.
    """
    now = datetime.now(UTC)
    following, place = due(now), redact(address)
    variables = how_to_reach(address) if is_ours(address) else f"PREFECT_API_URL={place}"
    return (
        f"study/{name} runs the study of {Path.cwd()}. The next run is due {following:%Y-%m-%d %H:%M %Z}, "
        f"in {roughly((following - now).total_seconds())}.\n"
        f"Prefect: {place.removesuffix('/api')}\n"
        f"To run it now: {variables} prefect deployment run study/{name}"
    )


def _is_not_waiting(record: logging.LogRecord) -> bool:
    """Whether to keep a log record: drop the line that Prefect's runner repeats while one run waits for another one."""
    return "skipped (at capacity)" not in record.getMessage()


def _schedule(cron: str, timezone: str) -> Schedule:
    if timezone not in available_timezones():
        raise ScheduleError(f"--timezone {timezone}: there is no such time zone; write one such as Europe/Berlin")
    try:
        if not cron.startswith("@") and len(cron.split()) != _FIELDS:  # a sixth one would be seconds, at the end
            raise ValueError("wrong number of fields")
        next_run(cron, timezone, datetime.now(UTC))  # there is none on a 31 February
        return Cron(cron, timezone=timezone)
    except ValueError as error:
        raise ScheduleError(
            f"--cron {cron!r}: write minute, hour, day of month, month and day of week, such as '0 2 * * *'"
        ) from error
