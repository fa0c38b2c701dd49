"""Run `eckart …` and `dvc …` in processes of their own, without the seconds of imports.

They are forked from the warm server of stages, which has only imported other packages: our code is imported from the
workspace, as by a fresh interpreter. Their stages are forked from that server, too.
"""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from uuid import UUID

import psutil

_PRELOAD = [
    "dvc.cli",
    "dvc.repo",
    "mlflow.data.meta_dataset",
    "mlflow.store.tracking.sqlalchemy_store",
    "prefect.flow_engine",
]
_OURS = ("eckart", "flows", "tasks", "tests")


class Command:
    """An `eckart` command, started in `root` with only this environment. Its output goes into a file."""

    def __init__(self, root: Path, environment: Mapping[str, str], *words: str) -> None:
        file, self._said = tempfile.mkstemp()
        os.close(file)
        self._process = start(_become, ["flows", *words], str(root), dict(environment), self._said)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> tuple[int | None, str]:
        """Wait until the command ends, and return its exit code and output."""
        self._process.join(600)
        self._process.kill()  # one that waits for ever would hold what others wait for
        said = Path(self._said).read_text()
        Path(self._said).unlink()
        return self._process.exitcode, said


def start(target: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a process that calls a function of a test's module."""
    from flows.engine import stage_processes

    stage_processes._context.set_forkserver_preload(stage_processes._PRELOAD)
    process = stage_processes._context.Process(target=_with_our_server, args=(target, *arguments))
    process.start()
    return process


def _with_our_server(target: Callable[..., object], *arguments: object) -> None:
    gc.freeze()  # as a stage does
    gc.enable()
    # It would start one of its own, with seconds of imports.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    target(*arguments)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Collection[int]) -> bool:
    """Whether all processes end within a few seconds."""
    for _ in range(100):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.1)
    return False


def preload() -> None:
    """Have the server import the packages of commands, too; call it before the server starts."""
    from flows.engine import stage_processes

    stage_processes._PRELOAD += _PRELOAD


def dvc(root: Path, environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run `dvc WORDS` in `root` with only this environment."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = dvc_begun(root, environment, *words, streams=(out.name, err.name))
        process.join()
        return subprocess.CompletedProcess(["dvc", *words], process.exitcode or 0, out.read(), err.read())


def dvc_begun(
    root: Path, environment: Mapping[str, str], *words: str, streams: Sequence[str] = (os.devnull, os.devnull)
) -> BaseProcess:
    """Start `dvc WORDS` in `root`; `streams` are the files for its output and errors."""
    return start(_dvc, words, str(root.absolute()), dict(environment), *streams)


def _dvc(words: Sequence[str], root: str, environment: dict[str, str], *streams: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(root)
    for number, name in enumerate(streams, start=1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    from dvc.cli import main

    sys.exit(main(list(words)))


def _become(words: list[str], root: str, environment: dict[str, str], said: str) -> None:
    from prefect.context import refresh_global_settings_context

    from flows.engine import forked_stage, supervisor
    from flows.environment import settings

    os.environ.clear()
    os.environ.update(environment)
    settings.apply()  # before Prefect reads them, which a fresh interpreter imports after that
    refresh_global_settings_context()
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    os.setsid()
    supervisor.die_with_parent()
    file = os.open(said, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    forked_stage.be_module(words, root)


def run_promoting(root: str, environment: Mapping[str, str], run: UUID, said: str) -> None:
    """Run the study as Prefect's runner does for a flow run, in the process that it starts."""
    become(root, {**environment, "PREFECT__FLOW_RUN_ID": str(run)}, said)
    from prefect.flow_engine import load_flow_run, run_flow

    from flows.study import study

    run_flow(study, flow_run=load_flow_run(run), return_type="state")


def become(root: str, environment: Mapping[str, str], said: str) -> None:
    """Set up the process with only this environment, and without the slow smoke tests of versions."""
    from prefect.context import refresh_global_settings_context

    os.environ.clear()
    os.environ.update(environment)
    refresh_global_settings_context()
    os.chdir(root)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream)
    from flows.promotion import flow as promotion
    from flows.registry.versions import Registry

    Registry.smoke = promotion._smoke = lambda *_: None  # type: ignore[assignment,method-assign,misc]
