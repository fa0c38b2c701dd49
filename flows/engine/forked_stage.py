"""Become a stage: what a process does that stage_processes.py has forked from the warm server.

It imports nothing that a stage imports: `tasks` and `eckart` must be those of the stage's workspace, as they are when
it starts, and no stage needs DVC.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection

from flows.engine import supervisor


def become(command: str, words: list[str], root: str, env: dict[str, str], writer: Connection) -> None:
    """Become the supervisor of a child that runs a module in `root` and prints to `writer`.

    Both end with the process that asked for them.

    Args:
        command: the stage's command, to be seen in lists of processes.
        words: the module and its arguments.
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
    """Become supervisor.py, a small program whose environment other processes can read."""
    flow = multiprocessing.parent_process()
    assert flow
    os.set_inheritable(flow.sentinel, True)
    os.execv(sys.executable, [sys.executable, "-P", supervisor.__file__, str(flow.sentinel), command, str(child)])


def be_module(words: list[str], root: str) -> None:
    """Run a module in `root` as `python -m` does."""
    os.chdir(root)
    if not sys.flags.safe_path:  # otherwise the code is installed, and its folder is on the path
        sys.path[0] = root
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
