"""Run the command of a stage in its own process, and kill that process with all that it started.

A new Python process takes seconds to import torch and transformers. So a "warm server" imports them once, and each
stage is a fork of the server, which takes hundredths of a second. The fork runs the same module as
`python -m tasks.STAGE`, and a supervisor above it (supervisor.py) kills what the stage leaves behind.
"""

from __future__ import annotations

import multiprocessing.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from flows.engine import forked_stage, orphaned_processes, supervisor
from flows.environment.redaction import redact
from tasks.artifacts.errors import EckartError

# Slow imports, but none of our packages: if that was edited later, the server would still have the old version.
_PRELOAD = [
    "eckart_warm_server",  # first: no garbage collection meanwhile
    "grimp",
    "torch",
    "transformers.trainer",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.mamba2.modeling_mamba2",
    "datasets",
    "pandas",
    "scipy.stats",
    "sklearn.metrics",
    "safetensors.torch",
    "pydantic.root_model",
    "ruamel.yaml",
]

_BEGINNINGS = ("python -m tasks.", "eckart stage ")  # of a stage's command in a clone; in other workspaces
_LONGEST = 60  # largest length of the sockets' folder path: a socket's path has at most 107 bytes, its name up to 40
_PATIENCE = 10  # seconds to wait for the last lines of a stage that has ended

_Begun = tuple[Callable[[], None], IO[str], Callable[[], int]]
"""A process that has begun: a function that ends it, its output, and a function that waits for its exit code."""

_context = multiprocessing.get_context("forkserver")
_running: set[Callable[[], None]] = set()  # functions that each end a supervisor
_stopping = threading.Event()
_turn = threading.Lock()  # held while a stage begins and while all stages are killed, so that none begins meanwhile
_reading = threading.Lock()  # held while multiprocessing reads exit codes, as it also does when it starts a process


class CommandFailed(EckartError):
    """A command ended with a code other than 0, or ran out of time. The message does not name the command."""


def run(
    command: str, root: Path, log: Callable[[str], None], env: Mapping[str, str], timeout: float | None = None
) -> float:
    """Run a stage's command in the folder `root`, and return the seconds that it took.

    Args:
        log: called with each line that the command prints.
        env: variables to add to the environment.
        timeout: in seconds; None for no limit.

    Raises:
        CommandFailed: the command failed or was stopped. If its exit code is 1, the message is the last line that it
            printed, which says the cause.
    """
    begin, start = _fork if _module(command) else _shell, time.perf_counter()
    with ExitStack() as process:
        with _turn:
            check_goes_on()
            end, output, exit_code = process.enter_context(begin(command, root, env))
            _running.add(end)
        lines = _Lines(output, log, end)
        lines.start()
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            end()

        timer = threading.Timer(timeout or 0, expire)
        if timeout:
            timer.start()
        try:
            code = exit_code()
            timer.cancel()
            if code and "DVC_STAGE" in env:  # if its supervisor was killed, processes of the stage may remain
                orphaned_processes.kill(root, env["DVC_STAGE"])
            while lines.is_alive() and lines.goes_on():
                lines.join(_PATIENCE)
        finally:
            timer.cancel()
            end()
            _running.discard(end)
    if lines.failure:
        raise lines.failure
    if expired.is_set():
        raise CommandFailed(f"stopped after {timeout:g} s")
    if code:
        last = f"; its last line: {lines.last}" if lines.last else ""
        raise CommandFailed(lines.last if code == 1 and lines.last else f"{_ending(code)}{last}")
    return time.perf_counter() - start


class _Lines(threading.Thread):
    """Thread that passes each line that a stage prints to `log`, and ends the stage if `log` fails."""

    def __init__(self, output: IO[str], log: Callable[[str], None], end: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._output, self._log, self._end = output, log, end
        self.last = ""
        self.failure: Exception | None = None
        self._count, self._seen = 0, -1

    def run(self) -> None:
        try:
            with self._output:
                for line in map(redact, self._output):
                    self._count += 1
                    self.last = line.rstrip() or self.last
                    self._log(line.rstrip())
        except Exception as error:  # `log` may raise anything
            self.failure = error
            self._end()

    def goes_on(self) -> bool:
        """Whether a line was printed since the last call of this method.

        If not, the caller should no longer wait for the end of the output: a process that could not be killed may keep
        it open for ever.
        """
        before, self._seen = self._seen, self._count
        return before < self._count


def end_all() -> None:
    """Kill all stages that run, and let no new one start."""
    with _turn:
        _stopping.set()
        for end in list(_running):
            end()


def flow_has_ended() -> bool:
    """Whether the flow has ended, so that no new stage may start."""
    return _stopping.is_set()


def check_goes_on() -> None:
    """Raise CommandFailed if the flow has ended."""
    if _stopping.is_set():
        raise CommandFailed("not finished, because the run has ended")


def _ending(code: int) -> str:
    number = -code if code < 0 else code - 128
    if number == signal.SIGKILL:
        return (
            "killed by SIGKILL, as the system does where memory is short: run fewer stages at a time, or with smaller "
            "batches"
        )
    return f"killed by {signal.Signals(number).name}" if number in signal.valid_signals() else f"ended with code {code}"


@contextmanager
def reaping() -> Iterator[None]:
    """At the end of the block, or at an error in it, call `end_all`."""
    _stopping.clear()
    try:
        yield
    finally:
        end_all()


@contextmanager
def terminable() -> Iterator[None]:
    """In the block, turn SIGTERM and SIGHUP (closed terminal) into SystemExit, so that the process can clean up."""
    ending = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup protects this process from it
        ending.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _module(command: str) -> list[str] | None:
    """Parse a stage's command into `[module, *arguments]`; return None if the command needs a shell."""
    if set(command) & set("&|;<>$`*?~\n") or not command.startswith(_BEGINNINGS):
        return None
    words = shlex.split(command)[2:]
    return words if words[0].startswith("tasks.") else [f"tasks.{words[0]}", *words[1:]]


@contextmanager
def _fork(command: str, root: Path, env: Mapping[str, str]) -> Iterator[_Begun]:
    _keep_sockets_short()
    _context.set_forkserver_preload(_PRELOAD)  # has an effect only before the first stage, which starts the server
    reader, writer = _context.Pipe(duplex=False)
    arguments = (command, _module(command), str(root), dict(env), writer)
    process = _context.Process(target=forked_stage.become, args=arguments)
    with _reading:
        process.start()
    writer.close()

    def exit_code() -> int:
        wait([process.sentinel])
        with _reading:
            process.join()
        return process.exitcode or 0

    output = os.fdopen(os.dup(reader.fileno()), errors="replace")
    reader.close()
    yield process.terminate, output, exit_code
    exit_code()


def _keep_sockets_short() -> None:
    """Make multiprocessing put its folder for sockets into /tmp if the paths of sockets would otherwise be too long.

    multiprocessing makes this folder once, in the folder that `tempfile` names. Before Python 3.14 no option sets it.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > _LONGEST:
        tempfile.tempdir = "/tmp"
        multiprocessing.util.get_temp_dir()
        tempfile.tempdir = usual


@contextmanager
def _shell(command: str, root: Path, env: Mapping[str, str]) -> Iterator[_Begun]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    flow, ours = os.pipe()  # the supervisor notices the end of this process when `ours` is closed
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", supervisor.__file__, str(flow), command],
            cwd=root,
            env={**os.environ, "PATH": path, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=[flow],
        )
        os.close(flow)
        assert process.stdout
        try:
            yield process.terminate, process.stdout, process.wait
        finally:
            process.terminate()
            process.wait()
    finally:
        os.close(ours)
