"""The study on a schedule: a Prefect deployment that this machine serves for as long as the process lives."""

from __future__ import annotations

from pathlib import Path
from zoneinfo import available_timezones

from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.flows import EntrypointType
from prefect.schedules import Cron, Schedule

from flows.server import prefect_server
from flows.settings import shown
from flows.study import study

_ONE_AT_A_TIME = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE)


class ScheduleError(ValueError):
    """The schedule cannot be read; the message says what to write."""


def serve(name: str, cron: str, timezone: str, workers: int | None, timeout: float | None, promote: bool) -> None:
    """Run the study of the working directory by `cron`, one run at a time, until Ctrl-C.

    Raises:
        ScheduleError: `cron` is no schedule, or `timezone` no time zone.
        ServerError: there is no Prefect server to keep the schedule.
    """
    schedule = _schedule(cron, timezone)
    with prefect_server() as address:
        print(f"Prefect: {shown(address).removesuffix('/api')}; `prefect deployment run study/{name}` runs it now")
        study.serve(
            name=name,
            schedule=schedule,
            parameters={"root": str(Path.cwd()), "workers": workers, "timeout": timeout, "promote": promote},
            description="Brings the study of params.yaml up to date.",
            global_limit=_ONE_AT_A_TIME,  # whoever runs it
            limit=1,
            entrypoint_type=EntrypointType.MODULE_PATH,
            print_starting_message=False,
        )


def _schedule(cron: str, timezone: str) -> Schedule:
    if timezone not in available_timezones():
        raise ScheduleError(f"--timezone {timezone}: is none that this machine knows; write one such as Europe/Berlin")
    try:
        return Cron(cron, timezone=timezone)
    except ValueError as error:
        raise ScheduleError(
            f"--cron {cron!r}: write minute, hour, day of month, month and day of week, such as '0 2 * * *'"
        ) from error
