"""Mark killed runs of this workspace as crashed in Prefect.

Prefect's runner notices if the process of a run dies. If the whole machine stopped, or if the run had no runner, the
run would be shown as Running for ever. So each run holds a lock on a file of its own. A later run finds those files
that are no longer locked.
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
"""Folder with a file for each run, which is locked while the run's process lives. No stage reads or writes it."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@contextmanager
def lock_run(run: str) -> Iterator[None]:
    """Mark earlier runs whose process was killed as crashed; then hold this run's file locked while the block runs."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for file in _FOLDER.glob("[!.]*"):  # a file with a leading dot is not locked yet
        if _UUID.fullmatch(file.name) and not _is_held(file) and _end(UUID(file.name)):
            file.unlink(missing_ok=True)
    file = _FOLDER / run
    new = file.with_name(f".{run}")
    with new.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        new.rename(file)  # so the name never exists without the lock
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
    """Mark a run as crashed if Prefect shows it as Running.

    Returns:
        False if Prefect's server failed, so that a later run must try again.
    """
    crashed: State[Any] = Crashed(message="Its process was killed; a later run noticed.")
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
            if state and state.is_running():
                client.set_flow_run_state(run, crashed, force=True)
    except ObjectNotFound:  # the run belongs to another server
        return True
    except httpx.HTTPError:
        return False
    return True
