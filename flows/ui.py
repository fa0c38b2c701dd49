"""The pages of Prefect and MLflow, on loopback unless told otherwise."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from flows import settings
from flows.server import command

_ANY = "0.0.0.0"


@dataclass(frozen=True)
class Page:
    """A server to start and where a browser finds it; without a command it runs already."""

    address: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


def serve(console: Console, host: str = settings.LOOPBACK) -> None:
    """Start both servers, print their addresses, and stop both on Ctrl-C or when one of them ends.

    Args:
        host: the IPv4 address, or its name, to listen at; 0.0.0.0 is every address of this machine.
    """
    prefect, mlflow = _prefect(host), _mlflow(host)
    with _running(prefect, mlflow):
        console.print(f"Prefect: {prefect.address}\nMLflow:  {mlflow.address}")
        if not _is_loopback(host):
            console.print("Both answer anyone who reaches this machine: see docs/safety.md.")
        console.print("Ctrl-C stops what was started here.")
        os.wait()  # until the first of them ends
        sys.exit("a server ended: is its port in use? Its message is above")


@contextmanager
def _running(*pages: Page) -> Iterator[None]:
    servers: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        servers += (subprocess.Popen(page.command, env=page.environment) for page in pages if page.command)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()


def _prefect(host: str) -> Page:
    # The page asks the server that it came from. By default it is told PREFECT_API_URL, be there a password in it.
    environment = {"PREFECT_UI_API_URL": "/api", **os.environ}
    return Page(_address(host, settings.PREFECT_ADDRESS), tuple(command(host)), environment)


def _mlflow(host: str) -> Page:
    store = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{Path.cwd() / 'mlflow.db'}")
    if store.startswith("http"):
        return Page(settings.shown(store))
    port = settings.MLFLOW_ADDRESS.rpartition(":")[2]
    # A store may hold a password, and everyone on this machine can read command lines.
    environment = {**_admitted(host, port), **os.environ, "MLFLOW_BACKEND_STORE_URI": store}
    words = (str(Path(sys.executable).parent / "mlflow"), "ui", "--host", host, "--port", port)
    return Page(_address(host, settings.MLFLOW_ADDRESS), words, environment)


def _admitted(host: str, port: str) -> dict[str, str]:
    """The names by which MLflow may be asked for: it refuses others, lest a page of another site speak with it."""
    if _is_loopback(host):
        return {}  # its default
    names = dict.fromkeys(["localhost", settings.LOOPBACK, *_names(host)])
    return {
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{name}:{port}" for name in names),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in names),
    }


def _address(host: str, local: str) -> str:
    return f"http://{_names(host)[0]}:{local.rpartition(':')[2]}"


def _names(host: str) -> list[str]:
    """What a browser may call `host`, the best first."""
    if host != _ANY:
        return [host]
    addresses = [one.address for some in psutil.net_if_addrs().values() for one in some if one.family == socket.AF_INET]
    return [socket.gethostname(), socket.getfqdn(), *addresses]


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")
