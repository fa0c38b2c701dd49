"""What tests of flows share: one Prefect server for each process of pytest, and one finished study for all of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import Result
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.cli import app
from flows.engine import processes
from tests.flows import forked
from tests.flows.servers import prefect_server
from tests.flows.toy import BARE, MLFLOW, Flows, Study, tiny_repository

forked.preload()


@pytest.fixture(autouse=True)
def _a_flow_that_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each test's own: when a flow ends no stage of the process begins, but the tests that follow run some."""
    monkeypatch.setattr(processes, "_stopping", threading.Event())


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment that leads to a server for all flows of this process, none of which then starts its own."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as (places, _):
        yield places


@pytest.fixture
def flows(prefect: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Flows:
    """`flows(root, "run")` is `python -m flows run` in `root`, but in this process, which has imported everything."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in prefect.items():
        monkeypatch.setenv(name, value)

    def invoke(root: Path, *words: str) -> Result:
        with chdir(root), temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}):
            return CliRunner().invoke(app, words)

    return invoke


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The tiny study, run as a newcomer runs it: no server is there. Once for all of xdist's processes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "study"
    found = Study(folder / "workspace", "", "")
    with (shared / "study.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "stderr").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
            _run(tiny_repository(found.root), folder)
    return Study(found.root, (folder / "stdout").read_text(), (folder / "stderr").read_text())


def _run(root: Path, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows", "run"],
        cwd=root,
        env=BARE | {"PREFECT_HOME": str(folder / "prefect")},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    MlflowClient(f"sqlite:///{folder / MLFLOW}").search_experiments()
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
