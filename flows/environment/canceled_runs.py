"""Notice that somebody canceled a run on Prefect's page.

A run of a deployment is the child of a process of Prefect, the runner, which ends it. `eckart run` has no runner. For
such a run, Prefect's server only writes down the state Cancelling, so the run itself must look for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

_POLL = 5.0  # seconds between two looks at the run's state


def has_runner() -> bool:
    """Whether Prefect started this process for a run of a deployment."""
    return "PREFECT__FLOW_RUN_ID" in os.environ


@contextmanager
def watch(run: UUID, end: Callable[[], None]) -> Iterator[threading.Event]:
    """While the block runs, look whether the run is canceled; if so, set the event that is yielded, and call `end`.

    Neither is done after the block. While the server fails, the block goes on, and so does the watch. A run that has a
    runner is not watched.
    """
    canceled, over, turn = threading.Event(), threading.Event(), threading.Lock()

    def look() -> None:
        with get_client(sync_client=True) as client, suppress(ObjectNotFound):  # the page can also delete a run
            while not over.wait(_POLL):
                with suppress(httpx.HTTPError):
                    state = client.read_flow_run(run).state
                    if state and (state.is_cancelling() or state.is_cancelled()):
                        with turn:
                            if not over.is_set():
                                canceled.set()
                                end()
                        return

    if not has_runner():
        # copied, since Prefect's settings are in the context; a daemon, since a request may take minutes
        threading.Thread(target=copy_context().run, args=(look,), daemon=True).start()
    try:
        yield canceled
    finally:
        with turn:
            over.set()
