"""Serve the pages of Prefect and MLflow on loopback; `ssh -L` reaches them from another machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prefect.settings import get_current_settings
from rich.console import Console

from flows.engine.stage_processes import terminable
from flows.environment import redaction, settings
from flows.servers import access_key, prefect_server
from flows.tracking import database
from tasks.artifacts.errors import EckartError
from tasks.config import schema

_MLFLOW, _PREFECT = "MLflow ", "Prefect "
"""How our servers name themselves at `access_guard.SERVES`; the name of the database follows."""


@dataclass(frozen=True)
class Page:
    """A page in the browser."""

    address: str
    shows: str
    """The runs that it shows, in words."""
    ours: bool
    """Whether this process has started its server."""
    remote: bool = False
    """Whether the user's environment names its server."""


def show_pages(console: Console, port: int | None = None, mlflow_port: int | None = None) -> None:
    """Start the servers that do not run yet, print all addresses, and stop the started ones on Ctrl-C or a failure.

    Args:
        port: of Prefect's page; None takes that of the environment.
        mlflow_port: of MLflow's page; None takes that of the environment.

    Raises:
        ServerError: one does not start, or another workspace has its port.
    """
    usual = [urlsplit(address).port or 0 for address in (settings.PREFECT_ADDRESS, settings.MLFLOW_ADDRESS)]
    ports = [port or usual[0], mlflow_port or usual[1]]
    with terminable(), ExitStack() as stack:
        try:
            mlflow, server = stack.enter_context(_mlflow(ports[1]))  # starts while Prefect's does
            prefect = stack.enter_context(_prefect(ports[0]))
            while server and not prefect_server.is_ours(mlflow.address):
                if server.poll() is not None:
                    sys.exit("MLflow's server ended: its message is above")
                time.sleep(0.2)
            _print(console, prefect, mlflow)
            if ports != usual and not prefect.remote:
                variables = f"PREFECT_SERVER_API_PORT={ports[0]} MLFLOW_PORT={ports[1]}"
                console.print(f"Other commands find them with {variables}.", soft_wrap=True)
            if not (prefect.ours or mlflow.ours):
                return
            console.print("Ctrl-C stops the servers that were started here.")
            os.wait()  # until the first of them ends
            sys.exit("a server ended: its message is above")
        except KeyboardInterrupt:
            pass


def _print(console: Console, prefect: Page, mlflow: Page) -> None:
    for name, page in (("Prefect: ", prefect), ("MLflow:  ", mlflow)):
        there = "" if page.ours else ". It was running already"
        console.print(f"{name}{page.address}\n  {page.shows}{there}", soft_wrap=True, highlight=False)
    if access_key.auth_string() and not (prefect.remote and mlflow.remote):
        who = "Both ask" if not (prefect.remote or mlflow.remote) else "The page on this machine asks"
        console.print(f'{who} for the key, USER:PASSWORD. This prints it: echo "{access_key.where()}"', soft_wrap=True)


@contextmanager
def _prefect(port: int) -> Iterator[Page]:
    """Yield Prefect's page, which all workspaces share."""
    known, address = get_current_settings(), f"http://{settings.LOOPBACK}:{port}"
    if (url := known.api.url) and settings.answers(f"{url.rstrip('/')}/health"):
        place = redaction.shown(known.ui_url or url.rstrip("/").removesuffix("/api"))
        yield Page(place, "all runs of the server that PREFECT_API_URL names", ours=False, remote=True)
    elif prefect_server.is_ours(address) and not prefect_server.serves(address).startswith(_MLFLOW):  # `eckart serve`'s
        yield Page(address, _runs(address), ours=False)
    else:
        with prefect_server.started(port, pages=True, auth=access_key.auth_string()) as address:
            yield Page(address, _runs(address), ours=True)


def _runs(address: str) -> str:
    return (
        f"the runs of all your workspaces, in {prefect_server.serves(address).removeprefix(_PREFECT) or 'a database'}"
    )


@contextmanager
def _mlflow(port: int) -> Iterator[tuple[Page, subprocess.Popen[bytes] | None]]:
    """Yield MLflow's page of this workspace's store, and its process if it is started here.

    Raises:
        ServerError: another program has the port, or a server of ours for another store.
    """
    database.set_aside_damaged()
    store, address = database.address(), f"http://{settings.LOOPBACK}:{port}"
    if store.startswith("http"):
        shows = f"{_study()}, at the server that MLFLOW_TRACKING_URI names"
        yield Page(redaction.shown(store), shows, ours=False, remote=True), None
        return
    shows, serves = f"{_study()}, in {redaction.shown(store)}", f"{_MLFLOW}{redaction.shown(store)}"
    if (there := prefect_server.serves(address)) == serves:
        yield Page(address, shows, ours=False), None
        return
    another = "set MLFLOW_PORT, or `eckart ui --mlflow-port`, to another port"
    if there:
        raise access_key.ServerError(
            f"port {port} shows another database, {there}: stop that `eckart ui`, or {another}"
        )
    try:
        socket.create_server((settings.LOOPBACK, port)).close()
    except (OSError, ValueError, OverflowError) as error:
        raise access_key.ServerError(f"MLflow cannot listen at port {port} ({error}): {another}") from error
    command = [str(Path(sys.executable).parent / "mlflow"), "server", "--app-name", "eckart"]
    command += ["--host", settings.LOOPBACK, "--port", str(port)]
    server = subprocess.Popen(command, env=_environment(store, address, serves))
    try:
        yield Page(address, shows, ours=True), server
    finally:
        server.terminate()
        server.wait()


def _study() -> str:
    """Name the study whose runs are in the store, or its folder."""
    try:
        return f"the study {schema.read()['study']['name']} of {Path.cwd()}"
    except (EckartError, OSError, KeyError, TypeError):
        return str(Path.cwd())


def _environment(store: str, address: str, serves: str) -> dict[str, str]:
    """Return the environment of MLflow's server. The store may hold a password, which a command line would show."""
    auth = access_key.auth_string()
    return {
        **os.environ,
        **settings.importable(),
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{settings.LOOPBACK}:*,localhost:*",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": os.environ.get("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false"),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": address,
        "ECKART_SERVER_KEY": access_key.made(),
        "ECKART_SERVES": serves,
        **({"ECKART_AUTH_STRING": auth} if auth else {}),
    }
