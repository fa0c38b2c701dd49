"""Mark runs of this workspace that were killed as crashed in Prefect.

Prefect's runner notices when the process of a run dies. But if the machine stopped with it, or no runner watched, the
page would stay at Running for ever. So each run leaves a locked file, and a later run looks for files without a lock.
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
"""A file for each run, locked while its process lives. No stage reads or writes it."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@contextmanager
def noted(run: str) -> Iterator[None]:
    """Mark killed runs as crashed, then note this run while the block runs.

    Args:
        run: its id in Prefect.
    """
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for file in _FOLDER.glob("[!.]*"):  # a name with a dot is not locked yet
        if _UUID.fullmatch(file.name) and not _is_held(file) and _end(UUID(file.name)):
            file.unlink(missing_ok=True)
    file = _FOLDER / run
    new = file.with_name(f".{run}")
    with new.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        new.rename(file)  # so that nobody sees it without its lock
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _is_held(file: Path) -> bool:
    try:
        with file.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # the run has ended meanwhile
        pass
    return False


def _end(run: UUID) -> bool:
    """Mark a run as crashed if Prefect thinks it runs; False if the server fails and a later run must try again."""
    crashed: State[Any] = Crashed(message="Its process was killed; a later run noticed.")
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
            if state and state.is_running():
                client.set_flow_run_state(run, crashed, force=True)
    except ObjectNotFound:  # it was a run of another server
        return True
    except httpx.HTTPError:
        return False
    return True
