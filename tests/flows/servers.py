"""Servers on free ports of loopback, and waiting for other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from prefect.settings import PREFECT_API_URL, temporary_settings

from deploy.services import free_port as free_port
from flows.environment import settings
from tests.flows.toy import ENVIRONMENT

_IDLE = ("FOREMAN", "LATE_RUNS", "SCHEDULER", "PAUSE_EXPIRATIONS", "REPOSSESSOR", "CANCELLATION_CLEANUP", "TRIGGERS")
NO_MORE_THAN_RECORDS = {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _IDLE}
"""Settings of a server without schedules, which need not poll its database."""


def until(holds: Callable[[], object], seconds: float = 600) -> None:
    """Wait until a condition holds; fail the test if it never does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def start_prefect(home: Path) -> tuple[dict[str, str], subprocess.Popen[bytes]]:
    """Start Prefect's server with its database in `home`, and return the environment for flows and its process."""
    port = str(free_port())
    address = f"http://{settings.LOOPBACK}:{port}/api"
    places = {"PREFECT_HOME": str(home), "PREFECT_API_URL": address}
    # What `prefect server start` starts, which takes three seconds more.
    command = [
        "uvicorn",
        "--factory",
        "prefect.server.api.server:create_app",
        "--host",
        settings.LOOPBACK,
        "--port",
        port,
    ]
    command += ["--lifespan", "on", "--log-level", "error"]
    environment = ENVIRONMENT | NO_MORE_THAN_RECORDS | {"PREFECT_HOME": str(home)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        until(lambda: settings.answers(f"{address}/health"))
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return places, process


@contextmanager
def prefect_server(home: Path) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Run Prefect's server while the block runs, and yield the environment for flows and its process."""
    places, process = start_prefect(home)
    try:
        yield places, process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def mlflow_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run an MLflow server with all its data in `folder`, and yield its address and process."""
    port = str(free_port())
    store = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--default-artifact-root", str(folder)]
    command = ["mlflow", "server", *store, "--host", settings.LOOPBACK, "--port", port, "--workers", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = ENVIRONMENT | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
    address = f"http://{settings.LOOPBACK}:{port}"
    try:
        until(lambda: settings.answers(f"{address}/health"))
        yield address, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pages(prefect: dict[str, str], key: str, text: str) -> list[str]:
    """Return the Markdown artifacts with this key and text."""
    wanted = ArtifactFilter.model_validate({"key": {"any_": [key]}})
    with temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
        return [str(page.data) for page in client.read_artifacts(artifact_filter=wanted) if text in str(page.data)]


@contextmanager
def one_answer(status: int = 200, seconds: float = 0) -> Iterator[str]:
    """Run a server that takes this long for each answer, which has this status, and yield its address."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(seconds)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"true")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((settings.LOOPBACK, 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{settings.LOOPBACK}:{server.server_port}"
        server.shutdown()


@contextmanager
def sink() -> Iterator[tuple[str, list[Any]]]:
    """Run a server that takes JSON by POST, and yield its address and the list of what it has taken."""
    taken: list[Any] = []

    class Taking(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((settings.LOOPBACK, 0), Taking) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{settings.LOOPBACK}:{server.server_port}", taken
        server.shutdown()
