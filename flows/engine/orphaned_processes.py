"""Find and kill processes of a stage that outlived its run and still write its outputs.

A stage of a flow ends with the flow (supervisor.py), but a stage of `dvc repro` goes on if `dvc repro` is killed. DVC
and the engine name the stage in the environment of its command, and all processes that the command starts inherit this
environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.artifacts.errors import EckartError

_PATIENCE = 5.0  # seconds to wait for processes that are about to end: they or their flow were just killed
_POLL = 0.1


class StillRuns(EckartError):
    """Processes of an earlier run still write outputs. The message names them and says what to do."""


def refuse(root: Path, stage: str | None = None) -> None:
    """Raise StillRuns if processes of an earlier run in `root` do not end within seconds.

    Args:
        stage: look only for processes of this stage; None: for processes of any stage.
    """
    if left := _outlast(root, stage, lambda process: None):
        raise StillRuns(
            f"an earlier run of {stage or 'a stage'} was cut off, and its processes still write in {root}: "
            f"wait until they end, or `kill -9 {' '.join(map(str, left))}`; then run again"
        )


def kill(root: Path, stage: str) -> None:
    """Kill all processes of a stage that runs in `root`.

    Forks of the warm server are not found, since the system shows the server's environment for them.
    """
    _outlast(root, stage, psutil.Process.kill)


def _outlast(root: Path, stage: str | None, act: Callable[[psutil.Process], None]) -> list[int]:
    """Call `act` on the processes of a stage until they end, and return the ids of those that do not end in time."""
    end = time.monotonic() + _PATIENCE
    while left := list(_running(root, stage)):
        if time.monotonic() > end:
            break
        for process in left:
            with suppress(psutil.Error):
                act(process)
        time.sleep(_POLL)
    return sorted(process.pid for process in left)


def _running(root: Path, stage: str | None) -> Iterator[psutil.Process]:
    me = psutil.Process()
    for pid in psutil.pids():
        with suppress(psutil.Error):  # the process has ended, or is another user's
            process = psutil.Process(pid)
            environment = process.environ()
            where, name = environment.get("DVC_ROOT"), environment.get("DVC_STAGE")
            ours = where and name and stage in (None, name) and os.path.realpath(where) == os.path.realpath(root)
            if ours and process not in (me, *me.parents()):  # the shell that called us may have these variables, too
                yield process
