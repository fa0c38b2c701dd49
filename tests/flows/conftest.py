"""Fixtures of all tests of flows: one Prefect server and one finished study for all processes of pytest."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, closing, contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from click.testing import Result
from mlflow import MlflowClient
from prefect import __version__ as prefect_version
from prefect import main as main  # sets up logging; inside of CliRunner, absl would then close the stream of pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.cli import app
from flows.engine import stage_processes
from tests.flows import forked
from tests.flows.forked import Command
from tests.flows.servers import start_prefect
from tests.flows.toy import BARE, MLFLOW, Flows, Study, tiny_repository

forked.preload()
at_exit = ExitStack()
atexit.register(at_exit.close)  # by now: after Prefect, which delivers at an exit what it has, and tries for minutes


@pytest.fixture(autouse=True)
def _a_flow_that_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the flag that the flow has ended, after which no stage may begin in this process."""
    monkeypatch.setattr(stage_processes, "_stopping", threading.Event())


@contextmanager
def shared(name: str, factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bool]]:
    """Yield a folder shared by all of xdist's processes, locked, and whether this process must fill it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        filled = folder / "filled"
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
            folder.mkdir()
        yield folder, not filled.exists()
        filled.touch()


@pytest.fixture(scope="session")
def prefect_home(prefect: dict[str, str]) -> Callable[[Path], Path]:
    """Return a function that makes a home with a ready database for another Prefect server."""
    return lambda parent: Path(shutil.copytree(Path(prefect["PREFECT_HOME"]).with_name("new"), parent / "prefect"))


def copy_database(home: Path, new: Path) -> None:
    """Copy the database of a running server, for Prefect's own servers and for ours."""
    new.mkdir()
    for name in ("prefect.db", f"eckart-{prefect_version}.db"):
        with closing(sqlite3.connect(home / "prefect.db")) as theirs, closing(sqlite3.connect(new / name)) as copy:
            theirs.backup(copy)


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment for one Prefect server, which all of xdist's processes share.

    The first process that needs it starts it; it ends with the last process that used it.
    """
    with shared("prefect", tmp_path_factory) as (folder, new):
        users = (folder / "users").open("w")
        fcntl.flock(users, fcntl.LOCK_SH)
        if new:
            places, server = start_prefect(folder / "home")
            copy_database(folder / "home", folder / "new")
            (folder / "places.json").write_text(json.dumps([places, server.pid]))
    places, pid = json.loads((folder / "places.json").read_text())
    at_exit.callback(end_with_the_last, users, pid)
    return places


def end_with_the_last(users: IO[str], server: int) -> None:
    """Stop the server unless another process uses it."""
    with users, suppress(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(server, signal.SIGTERM)


@pytest.fixture
def flows(prefect: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Flows:
    """Return a function: `flows(root, "run")` does `eckart run` in `root`, in this process, which has imported all."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in prefect.items():
        monkeypatch.setenv(name, value)

    def invoke(root: Path, *words: str) -> Result:
        with chdir(root), temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}):
            return CliRunner().invoke(app, words)

    return invoke


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database to be copied, since making one takes seconds. Made once for all of xdist's processes."""
    with shared("database", tmp_path_factory) as (folder, new):
        file = folder / MLFLOW
        if new:
            MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(scope="session")
def study(database: Path, prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The tiny study, run with a temporary server. Made once for all of xdist's processes."""
    with shared("study", tmp_path_factory) as (folder, new):
        root, said = folder / "workspace", folder / "said"
        if new:
            tiny_repository(root, export={"recipes": ["kfac"]})
            shutil.copy(database, root)
            code, printed = Command(root, BARE | {"PREFECT_HOME": str(prefect_home(folder))}, "run").end()
            assert code == 0, printed
            said.write_text(printed)
    return Study(root, said.read_text(), database)
