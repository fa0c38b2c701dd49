"""The pages of Prefect and MLflow, both on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from flows.settings import MLFLOW_ADDRESS, PREFECT_ADDRESS


def serve(console: Console) -> None:
    """Start both servers, print their addresses, and stop both on Ctrl-C or when one of them ends."""
    store = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{Path.cwd() / 'mlflow.db'}")
    bin_folder = Path(sys.executable).parent
    host, _, port = MLFLOW_ADDRESS.removeprefix("http://").partition(":")
    mlflow = [bin_folder / "mlflow", "ui", "--backend-store-uri", store, "--host", host, "--port", port]
    host, _, port = PREFECT_ADDRESS.removeprefix("http://").partition(":")
    prefect = [bin_folder / "prefect", "server", "start", "--host", host, "--port", port]
    remote = store.startswith("http")  # a server already
    commands = [prefect] if remote else [mlflow, prefect]
    servers = [subprocess.Popen([str(word) for word in command]) for command in commands]
    console.print(f"Prefect: {PREFECT_ADDRESS}\nMLflow:  {store if remote else MLFLOW_ADDRESS}")
    console.print("Ctrl-C stops what was started here.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        os.wait()  # until the first of them ends
        sys.exit("a server ended: is its port in use? Its message is above")
    except KeyboardInterrupt:
        pass
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()
