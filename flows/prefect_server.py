"""A Prefect server to talk to, which schedules and workers need: a temporary one serves a single run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from flows import secrets, settings, with_parent
from tasks.errors import EckartError

_PATIENCE = 300  # seconds until a server must answer; a first start builds its database


class ServerError(EckartError):
    """No Prefect server can be used; the message says why."""


@contextmanager
def prefect_server() -> Iterator[str]:
    """The address of the API: the one Prefect was told of, or one of its own on loopback for as long as this lasts.

    Raises:
        ServerError: the user's does not answer, or none can be started.
    """
    if address := require():
        yield address
        return
    # Errors go to stderr. In a session of its own, as Ctrl-C ends it only after what needs it.
    server = subprocess.Popen(command(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        address = f"{settings.PREFECT_ADDRESS}/api"
        _await(server, address)
        with temporary_settings({PREFECT_API_URL: address}):
            yield address
    finally:
        server.terminate()
        try:
            server.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()


def command() -> list[str]:
    """What starts Prefect's server at `settings.PREFECT_ADDRESS`."""
    port = settings.PREFECT_ADDRESS.rpartition(":")[2]
    prefect = Path(sys.executable).parent / "prefect"
    return [str(prefect), "server", "start", "--host", settings.LOOPBACK, "--port", port]


def require() -> str | None:
    """The address of the API that Prefect was told to use, by the environment or a profile, if there is one.

    Raises:
        ServerError: it does not answer.
    """
    told = get_current_settings().api
    # A server that others keep busy gets the time that Prefect gives it in each of its own requests.
    if (address := told.url) and not settings.answers(f"{address.rstrip('/')}/health", told.request_timeout):
        raise ServerError(
            f"Prefect's server at {secrets.shown(address)} does not answer: start it, or unset PREFECT_API_URL"
        )
    return address


def tie_to_run() -> None:
    """Have a temporary server of Prefect's end with this process, also where that is killed, and not before.

    It begins in a session of its own: Ctrl-C ends it only after what needs it.
    """
    from prefect.server.api import server  # a slow import, which the temporary server needs anyway

    class _Subprocess:
        Popen = staticmethod(_start_with_parent)
        TimeoutExpired = subprocess.TimeoutExpired

    server.subprocess = _Subprocess  # type: ignore[assignment]


def _start_with_parent(args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `PYTHON -m MODULE ARGUMENT …`."""
    python, _, *words = args
    watched = [python, "-P", with_parent.__file__, str(os.getpid()), *words]
    return subprocess.Popen(watched, start_new_session=True, **options)


def _await(server: subprocess.Popen[bytes], address: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not settings.answers(f"{address}/health"):
        if server.poll() is not None:
            raise ServerError(f"Prefect's server ended: is {settings.PREFECT_ADDRESS} in use? Its message is above")
        if time.monotonic() > end:
            raise ServerError(f"Prefect's server did not answer within {_PATIENCE} s")
        time.sleep(0.2)
