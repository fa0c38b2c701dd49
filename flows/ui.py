"""The pages of Prefect and MLflow, on loopback: from another machine they are reached by `ssh -L`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flows import secrets, settings
from flows.engine.stage_processes import terminable
from flows.prefect_server import command
from flows.tracking import database


@dataclass(frozen=True)
class Page:
    """A server to start and where a browser finds it; without a command it runs already."""

    address: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


def show_pages(console: Console) -> None:
    """Start both servers, print their addresses, and stop both on Ctrl-C or when one of them ends."""
    pages = {"Prefect: ": _prefect(), "MLflow:  ": _mlflow()}
    servers: list[subprocess.Popen[bytes]] = []
    with terminable():
        try:
            servers += (subprocess.Popen(page.command, env=page.environment) for page in pages.values() if page.command)
            for name, page in pages.items():
                console.print(f"{name}{page.address}")
            console.print("Ctrl-C stops what was started here.")
            os.wait()  # until the first of them ends
            sys.exit("a server ended: is its port in use? Its message is above")
        except KeyboardInterrupt:
            pass
        finally:
            for server in servers:
                server.terminate()
            for server in servers:
                server.wait()


def _prefect() -> Page:
    # The page asks the server that it came from. By default it is told PREFECT_API_URL, which may hold a password.
    environment = {"PREFECT_UI_API_URL": "/api", **os.environ}
    return Page(settings.PREFECT_ADDRESS, tuple(command()), environment)


def _mlflow() -> Page:
    database.set_aside_damaged()
    store = os.environ.get("MLFLOW_TRACKING_URI", database.address())
    if store.startswith("http"):
        return Page(secrets.shown(store))
    port = settings.MLFLOW_ADDRESS.rpartition(":")[2]
    # A store may hold a password, and everyone on this machine can read command lines.
    environment = {**os.environ, "MLFLOW_BACKEND_STORE_URI": store}
    words = (str(Path(sys.executable).parent / "mlflow"), "ui", "--host", settings.LOOPBACK, "--port", port)
    return Page(settings.MLFLOW_ADDRESS, words, environment)
