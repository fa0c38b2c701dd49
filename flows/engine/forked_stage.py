"""What a process that stage_processes.py forks does to become a stage.

It imports nothing that a stage may import: `tasks` and `eckart` are to be those of the workspace that it runs in, as
they are by then, and DVC belongs into no stage.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection

from flows.engine import supervisor


def become(command: str, words: list[str], root: str, env: dict[str, str], writer: Connection) -> None:
    """Be the supervisor of a child that is `command`, `python -m MODULE ARGUMENTS`, in `root`, and prints to `writer`.

    It ends with the process that asked for it.
    """
    os.setsid()
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    writer.close()
    os.environ.update(env)
    if child := supervisor.fork():
        _supervise(command, child)
    be_module(words, root)


def _supervise(command: str, child: int) -> None:
    """As a program of its own, which is small, and whose environment other processes can read."""
    flow = multiprocessing.parent_process()
    assert flow
    os.set_inheritable(flow.sentinel, True)
    os.execv(sys.executable, [sys.executable, "-P", supervisor.__file__, str(flow.sentinel), command, str(child)])


def be_module(words: list[str], root: str) -> None:
    """Run a module as the main one, in `root`."""
    os.chdir(root)
    if not sys.flags.safe_path:  # else the code is installed, and its folder is on the path
        sys.path[0] = root
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
