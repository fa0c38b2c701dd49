"""Prefect's records of old flow runs."""

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
_PAGE = 200  # that the server tells of at once


def kinds(days: float) -> list[Kind]:
    """Runs of Eckart's flows by whether they ended that long ago; none if the server is not on this machine.

    Raises:
        ServerError: Prefect was told of a server that does not answer, or none can be started.
    """
    address = prefect_server.require()
    if address and urlsplit(address).hostname not in (settings.LOOPBACK, "localhost"):
        return []  # it serves others, too
    prefect_server.use_temporary()
    before = datetime.now(UTC) - timedelta(days=days)
    old = FlowRunFilter.model_validate({"end_time": {"before_": before}})
    with get_client(sync_client=True) as client:
        all_of_them = client.count_flow_runs(flow_filter=_FLOWS)
        found = list(_ended(client, old))
    goes, stays = (Size(count, None) for count in (len(found), all_of_them - len(found)))
    return [Kind("flow runs in Prefect", stays, goes, lambda: _remove(found))]


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
