"""What a process that stage_processes.py forks does to become a stage.

It imports nothing of ours: `tasks` and `eckart` are to be those of the workspace that it runs in, as they are by then,
and DVC belongs into no stage.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from multiprocessing.connection import Connection, wait


def become(words: list[str], root: str, env: dict[str, str], writer: Connection) -> None:
    """Be `python -m MODULE ARGUMENTS` in `root`, print to `writer`, and end with the process that asked for it."""
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    writer.close()
    os.chdir(root)
    os.environ.update(env)
    if not sys.flags.safe_path:  # else the code is installed, and its folder is on the path
        sys.path[0] = root
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
