"""The pages of Prefect and MLflow, on loopback: from another machine they are reached by `ssh -L`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from flows import key, prefect_server, secrets, settings
from flows.engine.stage_processes import terminable
from flows.tracking import database


def show_pages(console: Console) -> None:
    """Start both servers, print their addresses, and stop both on Ctrl-C or when one of them ends.

    Raises:
        ServerError: one does not start.
    """
    with terminable(), ExitStack() as stack:
        try:
            mlflow, server = stack.enter_context(_mlflow())  # which starts while the other one does
            prefect = stack.enter_context(_prefect())
            while server and not prefect_server.is_ours(mlflow):
                if server.poll() is not None:
                    sys.exit("MLflow's server ended: its message is above")
                time.sleep(0.2)
            console.print(f"Prefect: {prefect}\nMLflow:  {mlflow}")
            if key.auth_string():  # with the user before the colon
                console.print(
                    f'Both ask for the key, USER:PASSWORD, which this shows: echo "{key.where()}"', soft_wrap=True
                )
            console.print("Ctrl-C stops what was started here.")
            os.wait()  # until the first of them ends
            sys.exit("a server ended: its message is above")
        except (KeyboardInterrupt, ChildProcessError):  # none was started
            pass


@contextmanager
def _prefect() -> Iterator[str]:
    if prefect_server.is_ours(settings.PREFECT_ADDRESS):  # of `eckart serve`
        yield settings.PREFECT_ADDRESS
        return
    with prefect_server.started(prefect_server.PORT, pages=True, auth=key.auth_string()) as address:
        yield address


@contextmanager
def _mlflow() -> Iterator[tuple[str, subprocess.Popen[bytes] | None]]:
    """The address of its page, and the process, if it is started here."""
    database.set_aside_damaged()
    store = os.environ.get("MLFLOW_TRACKING_URI", database.address())
    if store.startswith("http"):
        yield secrets.shown(store), None
        return
    port = settings.MLFLOW_ADDRESS.rpartition(":")[2]
    try:
        socket.create_server((settings.LOOPBACK, int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        raise key.ServerError(
            f"MLflow cannot listen at port {port} ({error}): set MLFLOW_PORT to another one"
        ) from error
    words = [str(Path(sys.executable).parent / "mlflow"), "server", "--app-name", "eckart"]
    words += ["--host", settings.LOOPBACK, "--port", port]
    server = subprocess.Popen(words, env=_environment(store))
    try:
        yield settings.MLFLOW_ADDRESS, server
    finally:
        server.terminate()
        server.wait()


def _environment(store: str) -> dict[str, str]:
    """Of MLflow's server. A store may hold a password, and everyone on this machine can read command lines."""
    auth = key.auth_string()
    return {
        **os.environ,
        **settings.importable(),
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{settings.LOOPBACK}:*,localhost:*",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": os.environ.get("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false"),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": settings.MLFLOW_ADDRESS,
        "ECKART_SERVER_KEY": key.made(),
        **({"ECKART_AUTH_STRING": auth} if auth else {}),
    }
