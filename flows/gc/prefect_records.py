"""Sort Prefect's records of flow runs into what stays and what goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from urllib.parse import urlsplit

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound

from flows.environment import settings
from flows.gc.kind import Kind, Size
from flows.servers import prefect_server

_FLOWS = FlowFilter.model_validate({"name": {"any_": ["study", "promotion"]}})
_PAGE = 200  # runs that the server lists at once


def kinds(days: float) -> list[Kind]:
    """Return the runs of Eckart's flows; those that ended so many days ago go. Empty for a server elsewhere.

    Raises:
        ServerError: the named server does not answer, or none can be started.
    """
    address = prefect_server.require()
    if address and urlsplit(address).hostname not in (settings.LOOPBACK, "localhost"):
        return []  # others may use it, too
    prefect_server.use_temporary()
    before = datetime.now(UTC) - timedelta(days=days)
    old = FlowRunFilter.model_validate({"end_time": {"before_": before}})
    with get_client(sync_client=True) as client:
        total = client.count_flow_runs(flow_filter=_FLOWS)
        ended = list(_ended(client, old))
    sizes = Size(total - len(ended), None), Size(len(ended), None)
    return [Kind("flow runs in Prefect", *sizes, lambda: _remove(ended))]


def _ended(client: SyncPrefectClient, old: FlowRunFilter) -> Iterator[FlowRun]:
    for offset in count(step=_PAGE):
        page = client.read_flow_runs(flow_filter=_FLOWS, flow_run_filter=old, limit=_PAGE, offset=offset)
        yield from page
        if len(page) < _PAGE:
            return


def _remove(runs: list[FlowRun]) -> None:
    with get_client(sync_client=True) as client:
        for run in runs:
            with suppress(ObjectNotFound):
                client.delete_flow_run(run.id)
