"""Serve the pages of Prefect and MLflow on loopback; other machines need a tunnel (`ssh -L`) to see them."""

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
from tasks.config import params_file

_MLFLOW, _PREFECT = "MLflow ", "Prefect "
"""Beginnings of the texts that our servers return at `access_guard.SERVES`. The rest is the URL of the database."""


@dataclass(frozen=True)
class Page:
    """A web page that `eckart ui` shows."""

    address: str
    shows: str
    """The runs on the page, in words."""
    ours: bool
    """Whether this process has started the page's server."""
    remote: bool = False
    """Whether the user's settings name the page's server."""


def show_pages(console: Console, port: int | None = None, mlflow_port: int | None = None) -> None:
    """Start the servers that do not run yet, and print the URLs of both pages.

    The started servers run until Ctrl-C, or until one of them fails.

    Args:
        port: port of Prefect's page; None: the port that the environment names.
        mlflow_port: port of MLflow's page; None: the port that the environment names.

    Raises:
        ServerError: a server does not start, or another program or workspace uses its port.
    """
    usual = [urlsplit(address).port or 0 for address in (settings.PREFECT_ADDRESS, settings.MLFLOW_ADDRESS)]
    ports = [port or usual[0], mlflow_port or usual[1]]
    elsewhere = get_current_settings().api.url or database.address().startswith("http")
    if ports[0] == ports[1] and not elsewhere:
        raise access_key.ServerError(f"both pages have port {ports[0]}: give --port and --mlflow-port different ones")
    with terminable(), ExitStack() as stack:
        try:
            mlflow, server = stack.enter_context(_mlflow(ports[1]))  # both servers start at the same time
            prefect = stack.enter_context(_prefect(ports[0]))
            while server and not prefect_server.is_ours(mlflow.address):
                if server.poll() is not None:
                    sys.exit("MLflow's server ended: its message is above")
                time.sleep(0.2)
            _print(console, prefect, mlflow)
            if not mlflow.remote and (runs := _runs_of_study(mlflow.address)):
                console.print(f"Runs with their metrics: {runs}", soft_wrap=True, highlight=False)
            if ports != usual and not prefect.remote:
                variables = f"PREFECT_SERVER_API_PORT={ports[0]} MLFLOW_PORT={ports[1]}"
                console.print(f"Other commands find them with {variables}.", soft_wrap=True)
            if not (prefect.ours or mlflow.ours):
                return
            console.print("Ctrl-C stops the servers that were started here.")
            os.wait()  # returns when the first server ends
            sys.exit("a server ended: its message is above")
        except KeyboardInterrupt:
            pass


def _print(console: Console, prefect: Page, mlflow: Page) -> None:
    for name, page in (("Prefect: ", prefect), ("MLflow:  ", mlflow)):
        state = "" if page.ours else ". It was running already"
        console.print(f"{name}{page.address}\n  {page.shows}{state}", soft_wrap=True, highlight=False)
    if access_key.auth_string() and not (prefect.remote and mlflow.remote):
        who = "Both ask" if not (prefect.remote or mlflow.remote) else "The page on this machine asks"
        console.print(f'{who} for the key, USER:PASSWORD. This prints it: echo "{access_key.where()}"', soft_wrap=True)


@contextmanager
def _prefect(port: int) -> Iterator[Page]:
    """Yield Prefect's page, which shows the runs of all workspaces; start its server if needed."""
    current, address = get_current_settings(), f"http://{settings.LOOPBACK}:{port}"
    if (url := current.api.url) and settings.answers(f"{url.rstrip('/')}/health"):
        place = redaction.redact(current.ui_url or url.rstrip("/").removesuffix("/api"))
        yield Page(place, "all runs of the server that PREFECT_API_URL names", ours=False, remote=True)
    elif prefect_server.is_ours(address) and not prefect_server.serves(address).startswith(_MLFLOW):
        yield Page(address, _runs(address), ours=False)  # of `eckart serve` or another `eckart ui`
    else:
        with prefect_server.started(port, pages=True, auth=access_key.auth_string()) as address:
            yield Page(address, _runs(address), ours=True)


def _runs(address: str) -> str:
    place = prefect_server.serves(address).removeprefix(_PREFECT) or "a database"
    return f"the runs of all your workspaces, in {place}"


@contextmanager
def _mlflow(port: int) -> Iterator[tuple[Page, subprocess.Popen[bytes] | None]]:
    """Yield MLflow's page for this workspace, and the process of its server if the server is started here.

    Raises:
        ServerError: the port is taken by another program, or by a server of ours for another database.
    """
    database.check()
    store, address = database.address(), f"http://{settings.LOOPBACK}:{port}"
    if store.startswith("http"):
        shows = f"{_study()}, at the server that MLFLOW_TRACKING_URI names"
        yield Page(redaction.redact(store), shows, ours=False, remote=True), None
        return
    shows, serves = f"{_study()}, in {redaction.redact(store)}", f"{_MLFLOW}{redaction.redact(store)}"
    if (registry := database.registry_address()) != store:
        serves += f" with the registry {redaction.redact(registry)}"
    if (running := prefect_server.serves(address)) == serves:
        yield Page(address, shows, ours=False), None
        return
    another = "set MLFLOW_PORT, or `eckart ui --mlflow-port`, to another port"
    if running:
        raise access_key.ServerError(
            f"port {port} shows another database, {running}: stop that `eckart ui`, or {another}"
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


def _runs_of_study(address: str) -> str:
    """Return the URL of MLflow's list of this study's runs, with columns of metrics; empty if there are no runs."""
    from mlflow import MlflowClient  # slow imports, while the servers run already

    from flows.tracking.mirror import VIEW

    try:
        study = MlflowClient(database.address()).get_experiment_by_name(params_file.read()["study"]["name"])
    except Exception:  # of the database or params.yaml; the servers are of use without this line
        return ""
    return f"{address}/#/experiments/{study.experiment_id}/runs?viewStateShareKey={VIEW}" if study else ""


def _study() -> str:
    """Return the study of this workspace in words; only its folder if params.yaml cannot be read."""
    try:
        return f"the study {params_file.read()['study']['name']} of {Path.cwd()}"
    except (EckartError, OSError, KeyError, TypeError):
        return str(Path.cwd())


def _environment(store: str, address: str, serves: str) -> dict[str, str]:
    """Return the environment for MLflow's server.

    It contains the URLs of the stores, which may contain passwords and therefore are not on the command line.
    """
    auth = access_key.auth_string()
    return {
        **os.environ,
        **settings.importable(),
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_REGISTRY_STORE_URI": database.registry_address(),
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{settings.LOOPBACK}:*,localhost:*",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": os.environ.get("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false"),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": address,
        "ECKART_SERVER_KEY": access_key.read_or_create(),
        "ECKART_SERVES": serves,
        **({"ECKART_AUTH_STRING": auth} if auth else {}),
    }
