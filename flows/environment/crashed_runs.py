"""The flow runs that go on in this workspace, so that a later one ends the pages of those that were killed.

Prefect's runner sees the process of a run die; where the machine stopped with it, or nothing watched, the page would
stay at Running for ever.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed, State

_FOLDER = Path(".eckart/runs")
"""A file for each, locked as long as its process lives; no stage reads or writes it."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # and no file of anyone else's


@contextmanager
def noted(run: str) -> Iterator[None]:
    """Note a run while it goes on, and end before that the pages of those that nobody holds any more.

    Args:
        run: its id in Prefect.
    """
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for file in _FOLDER.glob("[!.]*"):  # one with a dot is being made
        if _UUID.fullmatch(file.name) and not _is_held(file) and _end(UUID(file.name)):
            file.unlink(missing_ok=True)
    file = _FOLDER / run
    new = file.with_name(f".{run}")
    with new.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        new.rename(file)  # nobody sees it without its lock
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _is_held(file: Path) -> bool:
    try:
        with file.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # it has ended meanwhile
        pass
    return False


def _end(run: UUID) -> bool:
    """Whether its page says how it ended; it is still to be asked for where the server fails."""
    crashed: State[Any] = Crashed(message="Its process was killed, as a later run found.")
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
            if state and state.is_running():
                client.set_flow_run_state(run, crashed, force=True)
    except ObjectNotFound:  # another server had it
        return True
    except httpx.HTTPError:
        return False
    return True
