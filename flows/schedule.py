"""Run the study on a schedule: a Prefect deployment that this process serves until it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from prefect._vendor.croniter import croniter  # as Prefect's server computes times; no public API of it is sync
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.events import DeploymentEventTrigger
from prefect.flows import EntrypointType
from prefect.schedules import Cron, Schedule
from prefect.settings import get_current_settings

from flows.display.progress import roughly
from flows.engine.run_options import Options
from flows.engine.stage_processes import terminable
from flows.environment.redaction import shown
from flows.environment.settings import answers
from flows.servers import notifications
from flows.servers.prefect_server import how_to_reach, is_ours, prefect_server
from flows.study import study
from flows.workspace import deployment_owner
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

CHANGED = "eckart.changed"
"""The event that reports new data, parameters or code."""
_POLL = 5.0  # seconds between two tries to reach a lost server
_ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)


class ScheduleError(EckartError):
    """The schedule cannot be parsed. The message says what to write."""


def serve(
    name: str, cron: str, timezone: str, options: Options, promote: bool = False, notify: Sequence[str] = ()
) -> None:
    """Run the study of the working directory on a schedule, one run at a time, until Ctrl-C or SIGTERM.

    An event `CHANGED` of the resource `eckart.NAME` starts a run, too. Folder and Dask's scheduler are those of this
    process; a run cannot choose them. If Prefect's server is lost, this waits for it, or restarts it if it is ours.

    Args:
        name: name of the deployment.
        cron: minute, hour, day of month, month and day of week.
        notify: Prefect's notification blocks that report the runs; see `notifications.set_up`.

    Raises:
        EckartError: `cron` or `timezone` is invalid, no server or block can be used, or another folder has the name.
    """
    schedule = _schedule(cron, timezone)
    parameters = {**options.parameters(), "promote": promote}
    logging.getLogger("prefect.runner").addFilter(_is_not_waiting)
    due = partial(next_run, cron, timezone)
    set_up = partial(notifications.set_up, name, notify, notifications.longest_gap(cron))
    with terminable():
        while True:
            with prefect_server() as address:
                if _serve_until_lost(name, schedule, parameters, set_up, due, address):
                    return
            log.warning("Prefect's server does not answer; the schedule continues when it does")
            while (url := get_current_settings().api.url) and not answers(f"{url.rstrip('/')}/health"):
                time.sleep(_POLL)


def _serve_until_lost(
    name: str,
    schedule: Schedule,
    parameters: Mapping[str, Any],
    set_up: Callable[[], None],
    due: Callable[[datetime], datetime],
    address: str,
) -> bool:
    """Serve the deployment. Return True when a signal ends that, False when Prefect's server is lost."""
    try:
        deployment_owner.check_name(name)
        set_up()
        print(_announcement(name, due, address), flush=True)
        study.serve(
            name=name,
            schedule=schedule,
            parameters=dict(parameters),
            description="Brings the study of params.yaml up to date.",
            global_limit=_ONE_AT_A_TIME,  # wherever it is served
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
    except Exception as error:  # Prefect raises many kinds, and groups of them
        if answers(f"{address.rstrip('/')}/health"):
            raise
        log.warning("the schedule was interrupted: %s", error)
        return False
    return True


def next_run(cron: str, timezone: str, now: datetime) -> datetime:
    """Return the time of the next run, in the schedule's time zone."""
    zone = ZoneInfo(timezone)
    local = now.astimezone(zone).replace(tzinfo=None)  # by the wall clock, as Prefect does
    return croniter(cron, local).get_next(datetime).replace(tzinfo=zone)


def _announcement(name: str, due: Callable[[datetime], datetime], address: str) -> str:
    """Say what runs when, where to watch it, and how to run it now, without showing the key of a server of ours."""
    now = datetime.now(UTC)
    following, place = due(now), shown(address)
    variables = how_to_reach(address) if is_ours(address) else f"PREFECT_API_URL={place}"
    return (
        f"study/{name} runs the study of {Path.cwd()}. The next run is due {following:%Y-%m-%d %H:%M %Z}, "
        f"in {roughly((following - now).total_seconds())}.\n"
        f"Prefect: {place.removesuffix('/api')}\n"
        f"To run it now: {variables} prefect deployment run study/{name}"
    )


def _is_not_waiting(record: logging.LogRecord) -> bool:
    """Drop what Prefect's runner logs at each poll while a run goes on and the next one waits."""
    return "skipped (at capacity)" not in record.getMessage()


def _schedule(cron: str, timezone: str) -> Schedule:
    if timezone not in available_timezones():
        raise ScheduleError(f"--timezone {timezone}: there is no such time zone; write one such as Europe/Berlin")
    try:
        return Cron(cron, timezone=timezone)
    except ValueError as error:
        raise ScheduleError(
            f"--cron {cron!r}: write minute, hour, day of month, month and day of week, such as '0 2 * * *'"
        ) from error
