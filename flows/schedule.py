"""The study on a schedule: a Prefect deployment that this machine serves for as long as the process lives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from prefect._vendor.croniter import croniter
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
"""An event that says that there is something new."""
_POLL = 5.0  # seconds between two looks for a server that is gone
_ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)


class ScheduleError(EckartError):
    """The schedule cannot be read; the message says what to write."""


def serve(
    name: str, cron: str, timezone: str, options: Options, promote: bool = False, notify: Sequence[str] = ()
) -> None:
    """Run the study of the working directory by `cron`, one run at a time, until Ctrl-C or SIGTERM.

    An event `CHANGED` of the resource `eckart.NAME` starts a run, too. Folder and scheduler are those of this process
    and no parameters of a run.

    Where Prefect's server goes away this waits for it; one of its own it starts again.

    Args:
        notify: the blocks by which Prefect's server tells what came of the runs; see `notifications.set_up`.

    Raises:
        NotificationError: it has no such block.
        OtherWorkspace: the name is that of another folder's deployment.
        ScheduleError: `cron` is no schedule, or `timezone` no time zone.
        ServerError: there is no Prefect server to keep the schedule.
    """
    schedule = _schedule(cron, timezone)
    parameters = {**options.parameters(), "promote": promote}
    logging.getLogger("prefect.runner").addFilter(_is_no_wait)
    due = partial(next_run, cron, timezone)
    set_up = partial(notifications.set_up, name, notify, notifications.longest_gap(cron))
    with terminable():
        while True:
            with prefect_server() as address:
                if _serve_until_lost(name, schedule, parameters, set_up, due, address):
                    return
            log.warning("Prefect's server does not answer; the schedule goes on when it does")
            while (theirs := get_current_settings().api.url) and not answers(f"{theirs.rstrip('/')}/health"):
                time.sleep(_POLL)


def _serve_until_lost(
    name: str,
    schedule: Schedule,
    parameters: Mapping[str, Any],
    set_up: Callable[[], None],
    due: Callable[[datetime], datetime],
    address: str,
) -> bool:
    """Whether it was ended by a signal; else the server is lost."""
    try:
        deployment_owner.check_name(name)
        set_up()
        print(_words(name, due, address), flush=True)
        study.serve(
            name=name,
            schedule=schedule,
            parameters=dict(parameters),
            description="Brings the study of params.yaml up to date.",
            global_limit=_ONE_AT_A_TIME,  # whoever runs it
            limit=1,
            tags=[deployment_owner.tag()],
            triggers=[_something_new(name)],
            entrypoint_type=EntrypointType.MODULE_PATH,
            print_starting_message=False,
        )
    except Exception as error:  # Prefect raises groups of them, of many kinds
        if answers(f"{address.rstrip('/')}/health"):
            raise
        log.warning("the schedule was interrupted: %s", error)
        return False
    return True


def next_run(cron: str, timezone: str, now: datetime) -> datetime:
    """When a schedule is due next, in its own time zone."""
    zone = ZoneInfo(timezone)
    local = now.astimezone(zone).replace(tzinfo=None)  # as Prefect does: the clock on the wall counts
    return croniter(cron, local).get_next(datetime).replace(tzinfo=zone)


def _words(name: str, due: Callable[[datetime], datetime], address: str) -> str:
    """What is run when, where that is seen, and how it is run now; what leads to a server of ours has no key in it."""
    now = datetime.now(UTC)
    following, place = due(now), shown(address)
    variables = how_to_reach(address) if is_ours(address) else f"PREFECT_API_URL={place}"
    return (
        f"study/{name} is the study of {Path.cwd()}. Its next run is due {following:%Y-%m-%d %H:%M %Z}, "
        f"in {roughly((following - now).total_seconds())}.\n"
        f"Prefect: {place.removesuffix('/api')}\n"
        f"This runs it now: {variables} prefect deployment run study/{name}"
    )


def _is_no_wait(record: logging.LogRecord) -> bool:
    """While a run goes on Prefect's runner says at each of its polls that the next one waits."""
    return "skipped (at capacity)" not in record.getMessage()


def _something_new(name: str) -> DeploymentEventTrigger:
    return DeploymentEventTrigger(
        name=f"eckart {name}: something new", expect={CHANGED}, match={"prefect.resource.id": f"eckart.{name}"}
    )


def _schedule(cron: str, timezone: str) -> Schedule:
    if timezone not in available_timezones():
        raise ScheduleError(
            f"--timezone {timezone}: this machine knows none of that name; write one such as Europe/Berlin"
        )
    try:
        return Cron(cron, timezone=timezone)
    except ValueError as error:
        raise ScheduleError(
            f"--cron {cron!r}: write minute, hour, day of month, month and day of week, such as '0 2 * * *'"
        ) from error
