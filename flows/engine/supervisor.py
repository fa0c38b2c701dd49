"""The supervisor: parent process of a stage, which kills all that the stage has started.

It does so when the stage ends, when the flow ends, or on SIGTERM.

`python -P supervisor.py FLOW COMMAND [STAGE]`: FLOW is a file descriptor that gives end-of-file when the flow ends. A
shell runs COMMAND, unless it already runs in the child process with the id STAGE.

A process that the stage starts may leave the stage's session and lose its parent. On Linux it then becomes a child of
the supervisor, which is a "child subreaper". Python offers neither that nor the signal at a parent's death, so `prctl`
is called with ctypes. This module imports no other module of ours.
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

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
_PAUSE = 0.01  # seconds between two looks for processes that are left
_LOOKS = 1000  # number of looks before giving up: processes of another user cannot be killed


def fork() -> int:
    """Fork as `os.fork` does. The child, the future stage, is in a new session; the parent becomes its supervisor."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it waits until `_watch` handles it
    supervisor = os.getpid()
    if stage := os.fork():
        return stage
    os.setsid()
    die_with_parent()
    if os.getppid() != supervisor:  # the supervisor was killed before the call above
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return 0


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make Linux send this process a signal when the thread that started it ends, alone or with its process."""
    _prctl(_PR_SET_PDEATHSIG, number)


_LIBC = ctypes.CDLL(None)  # loaded at import, since nothing may be loaded between a fork and an exec


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _watch(stage: int, flow: int) -> NoReturn:
    """Wait for the stage and exit with its code; exit with 1 on SIGTERM or when the flow ends."""

    def follow() -> None:
        while os.read(flow, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    signals = {signal.SIGTERM, signal.SIGCHLD}  # blocked, and read with sigwait, so that none interrupts `_end`
    signal.signal(signal.SIGCHLD, lambda *_: None)  # sigwait does not see ignored signals
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=follow, daemon=True).start()
    while (status := _status(stage)) is None:
        if signal.sigwait(signals) == signal.SIGTERM:
            _end(1)
    code = os.waitstatus_to_exitcode(status)
    _end(code if code >= 0 else 128 - code)  # for a stage that a signal killed, the same code as from a shell


def _status(stage: int) -> int | None:
    """Return the exit status of the stage, or None while it runs. Other children that have ended are reaped."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in (0, stage):
            return status if ended else None


def _end(code: int) -> NoReturn:
    """Kill all descendants of this process, then exit."""
    for _ in range(_LOOKS):
        if not _has_children():
            break
        import psutil  # a slow import, and most stages leave no processes behind

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
        time.sleep(_PAUSE)
    os._exit(code)


def _has_children() -> bool:
    """Whether a child still runs. Children that have ended are reaped."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    process = int(sys.argv[3]) if sys.argv[3:] else fork()
    if not process:
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; a shell's commands should not
            signal.signal(ignored, signal.SIG_DFL)
        os.execl("/bin/sh", "sh", "-c", sys.argv[2])
    _watch(process, int(sys.argv[1]))
