"""The process above a stage. It kills all that the stage started when the stage ends, the flow ends, or it is told to.

`python -P supervisor.py FLOW COMMAND [STAGE]`: FLOW is a file descriptor that ends with the flow; COMMAND is run by a
shell, unless its process STAGE is a child already. What a stage starts may leave its session and lose its parent: on
Linux it then becomes a child of this process, a "child subreaper". Python offers neither that nor the death signal of a
parent, so `prctl` is called by ctypes. This module imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_PAUSE = 0.01  # seconds between two looks at what is left
_LOOKS = 1000  # then it is left: what another user runs cannot be killed


def fork() -> int:
    """Fork a stage in a session of its own, as `os.fork` does; the calling process then becomes its supervisor."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until `_watch` can heed it
    supervisor = os.getpid()
    if stage := os.fork():
        return stage
    os.setsid()
    die_with_parent()
    if os.getppid() != supervisor:  # it was killed before the line above
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return 0


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when the thread that started it ends, be it with its whole process."""
    _prctl(_PR_SET_PDEATHSIG, number)


_LIBC = ctypes.CDLL(None)  # here: between a fork and an exec nothing may be loaded


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _watch(stage: int, flow: int) -> NoReturn:
    """End when the stage does, with its code, or when the flow does."""
    signals = {signal.SIGTERM, signal.SIGCHLD}  # taken one after the other: none interrupts `_end`
    signal.signal(signal.SIGCHLD, lambda *_: None)  # sigwait does not see ignored signals
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=_follow, args=(flow,), daemon=True).start()
    while (status := _status(stage)) is None:
        if signal.sigwait(signals) == signal.SIGTERM:
            _end(1)
    code = os.waitstatus_to_exitcode(status)
    _end(code if code >= 0 else 128 - code)  # as a shell has it


def _status(stage: int) -> int | None:
    """Return how the stage ended, or None while it runs. Orphans that have ended are forgotten."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, stage):
            return status if ended else None


def _follow(flow: int) -> None:
    while os.read(flow, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _end(code: int) -> NoReturn:
    """Kill all that is below this process, then end it."""
    for _ in range(_LOOKS):
        if not _has_children():
            break
        import psutil  # slow, and most stages leave nothing behind

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        time.sleep(_PAUSE)
    os._exit(code)


def _has_children() -> bool:
    """Whether a child still runs; those that have ended are forgotten."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _shell(command: str) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.execl("/bin/sh", "sh", "-c", command)


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    process = int(sys.argv[3]) if sys.argv[3:] else fork()
    if not process:
        _shell(sys.argv[2])
    _watch(process, int(sys.argv[1]))
