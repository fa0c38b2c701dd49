"""The pages of Prefect and MLflow, on loopback: from another machine they are reached by `ssh -L`."""

from __future__ import annotations

import os
import subprocess
import sys
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
        ServerError: Prefect's does not start.
    """
    with terminable(), ExitStack() as stack:
        try:
            mlflow = stack.enter_context(_mlflow())  # which starts while the other one does
            prefect = stack.enter_context(_prefect())
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
    with prefect_server.started(prefect_server.PORT, pages=True) as address:
        yield address


@contextmanager
def _mlflow() -> Iterator[str]:
    database.set_aside_damaged()
    store = os.environ.get("MLFLOW_TRACKING_URI", database.address())
    if store.startswith("http"):
        yield secrets.shown(store)
        return
    port = settings.MLFLOW_ADDRESS.rpartition(":")[2]
    words = [str(Path(sys.executable).parent / "mlflow"), "server", "--app-name", "eckart"]
    words += ["--host", settings.LOOPBACK, "--port", port]
    server = subprocess.Popen(words, env=_environment(store))
    try:
        yield settings.MLFLOW_ADDRESS
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
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{settings.LOOPBACK}:*,localhost:*",  # as the guard, before which it stands
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": settings.MLFLOW_ADDRESS,
        "ECKART_SERVER_KEY": key.made(),
        **({"ECKART_AUTH_STRING": auth} if auth else {}),
    }
