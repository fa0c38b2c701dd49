"""Turn a process that stage_processes.py has forked from the warm server into a stage.

This module imports nothing of `tasks` and `eckart`: the stage must load them from its own workspace when it starts.
It does not import DVC either, which no stage needs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection

from flows.engine import supervisor


def become(command: str, words: list[str], root: str, env: dict[str, str], writer: Connection) -> None:
    """Fork a child that runs a stage's module in `root`, and turn this process into the child's supervisor.

    Both end when the flow ends. To become the supervisor, this process executes supervisor.py as a new program, which
    is small. Other processes can read the environment of a new program, while for a fork the system shows the warm
    server's environment.

    Args:
        command: the stage's command, which is only shown in lists of processes.
        words: the module and its arguments.
        env: variables to add to the environment.
        writer: end of a pipe, into which all that the stage prints is written.
    """
    gc.freeze()  # else each collection visits all that the server has imported, and so copies its pages to this process
    gc.enable()  # off in the server
    os.setsid()
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    writer.close()
    os.environ.update(env)
    if child := supervisor.fork():
        flow = multiprocessing.parent_process()
        assert flow
        os.set_inheritable(flow.sentinel, True)
        os.execv(sys.executable, [sys.executable, "-P", supervisor.__file__, str(flow.sentinel), command, str(child)])
    be_module(words, root)


def be_module(words: list[str], root: str) -> None:
    """Run a module in `root` as `python -m` does."""
    os.chdir(root)
    if not sys.flags.safe_path:  # with `python -P` the code is installed, and its folder is on the path already
        sys.path[0] = root
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
