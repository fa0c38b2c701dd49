"""Processes of a stage that outlived what ran it, and still write what it writes.

A stage ends with its flow (supervisor.py), but not with a `dvc repro` that is killed. DVC and the engine tell every
command of a stage which one it is, by its environment, which all that it starts inherits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.artifacts.errors import EckartError

_PATIENCE = 5.0  # seconds for what is about to end, as its flow was just killed, or it itself
_POLL = 0.1


class StillRuns(EckartError):
    """Processes of an earlier run still write; the message names them and says what to do."""


def refuse(root: Path, stage: str | None = None) -> None:
    """Refuse to begin while processes of an earlier run of a stage, or of any, work in the workspace `root`.

    Raises:
        StillRuns: some do, and do not end by themselves at once.
    """
    if found := _outlast(root, stage, lambda process: None):
        numbers = " ".join(map(str, found))
        raise StillRuns(
            f"an earlier run of {stage or 'a stage'} was cut off and left processes that still write in {root}: "
            f"wait for their end, or `kill {numbers}`; then run again"
        )


def kill(root: Path, stage: str) -> None:
    """Kill all processes of a stage but those that show other variables: such as are forked from the warm server."""
    _outlast(root, stage, psutil.Process.kill)


def _outlast(root: Path, stage: str | None, act: Callable[[psutil.Process], None]) -> list[int]:
    """Which processes of a stage, or of any, are there for longer than our patience; `act` on each meanwhile."""
    end = time.monotonic() + _PATIENCE
    while found := list(_running(root, stage)):
        if time.monotonic() > end:
            break
        for process in found:
            with suppress(psutil.Error):
                act(process)
        time.sleep(_POLL)
    return sorted(process.pid for process in found)


def _running(root: Path, stage: str | None) -> Iterator[psutil.Process]:
    me = psutil.Process()
    for pid in psutil.pids():
        with suppress(psutil.Error):  # it has ended, or is another user's
            process = psutil.Process(pid)
            # a user's shell may have these variables, too
            if _is_of(process.environ(), root, stage) and process not in (me, *me.parents()):
                yield process


def _is_of(environment: Mapping[str, str], root: Path, stage: str | None) -> bool:
    where, which = environment.get("DVC_ROOT"), environment.get("DVC_STAGE")
    if not where or not which or stage not in (None, which):
        return False
    return os.path.realpath(where) == os.path.realpath(root)
