"""Find or start a Prefect server: the one that the user names, that of `eckart ui` or `serve`, or one for a single run.

All that we start listen on loopback, behind a guard, with a key and a database of their own.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hmac
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO
from urllib.parse import urlsplit

import httpx
import prefect
from prefect.client.base import ServerType
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings

from flows.environment import settings
from flows.environment.redaction import shown
from flows.servers import access_guard, access_key
from flows.servers.access_key import ServerError

PORT = int(settings.PREFECT_ADDRESS.rpartition(":")[2])
log = logging.getLogger(__name__)

_PATIENCE = 300  # seconds until a server must answer; a first start builds its database
_GRACE = 10  # seconds for a normal end
_ANSWER = 5  # seconds for an answer
_URL, _AUTH = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"


def require() -> str | None:
    """Return the API address that the environment or a Prefect profile names, checked; None if none is named.

    Raises:
        ServerError: it does not answer, is no Prefect server, or asks for another key.
    """
    api = get_current_settings().api
    if not (address := api.url):
        return None
    status, body = settings.asked(f"{address.rstrip('/')}/health", api.request_timeout)
    if not status:
        raise ServerError(f"Prefect's server at {shown(address)} does not answer: start it, or unset {_URL}")
    if (status == 200 and body != b"true") or (status == 404 and _is_here(address)):
        raise ServerError(f"the program at {shown(address)} is no Prefect server: correct {_URL}, or unset it")
    given = api.auth_string.get_secret_value() if api.auth_string else None
    if _is_here(address) and given in (None, access_key.known()):
        if is_ours(address):
            # By number: `localhost` may also name an address where another user listens, who would get the key.
            _set(_client(f"http://{settings.LOOPBACK}:{urlsplit(address).port or 80}", access_key.auth_string()))
        elif given:
            raise ServerError(
                f"the server at {shown(address)} does not have this machine's key, so the key is not sent. "
                "A server on another machine needs a key of its own: PREFECT_SERVER_API_AUTH_STRING"
            )
    _check_key()
    return get_current_settings().api.url


def _check_key() -> None:
    with get_client(sync_client=True) as client:
        if client.server_type is ServerType.CLOUD:
            return
        try:
            client.api_version()
        except PrefectHTTPStatusError as error:
            if error.response.status_code == 401:
                raise ServerError(
                    f"Prefect's server at {shown(str(client.api_url))} asks for another key: set {_AUTH} to the key "
                    "that it was started with"
                ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"Prefect's server at {shown(str(client.api_url))} fails: {shown(str(error))}") from error


def use_local() -> None:
    """Use the server of `eckart ui` or `serve` if it runs and neither environment nor profile names another."""
    if not get_current_settings().api.url and is_ours(settings.PREFECT_ADDRESS):
        _set(_client(settings.PREFECT_ADDRESS, access_key.auth_string()))


def use_temporary() -> None:
    """Start a server that ends with this process, after Prefect has delivered all records, unless one is named.

    Raises:
        ServerError: it does not start.
    """
    if get_current_settings().api.url:
        return
    if settings.asked(f"{settings.PREFECT_ADDRESS}/api/health")[0]:
        log.warning("%s; this run starts a server of its own", _who_has(settings.PREFECT_ADDRESS))
    logging.getLogger("prefect.flow_runs").addFilter(lambda record: not record.getMessage().startswith("View at "))
    stack = ExitStack()
    atexit.register(stack.close)  # called after Prefect's threads have delivered their records
    own_key = f"eckart:{secrets.token_urlsafe()}"  # opens no other server
    stack.enter_context(_used(stack.enter_context(started(0, pages=False, auth=own_key)), own_key))


@contextmanager
def prefect_server() -> Iterator[str]:
    """Yield the API address of the named server, or of a new one on loopback that runs while the block does.

    Raises:
        ServerError: the named one does not answer, or none can be started.
    """
    if address := require():
        yield address
        return
    auth = access_key.auth_string()
    with started(PORT, pages=True, auth=auth) as own, _used(own, auth):
        yield f"{own}/api"


@contextmanager
def started(port: int, pages: bool, auth: str | None) -> Iterator[str]:
    """Start a server on loopback and yield its address; it ends with the block, and with this process if killed.

    Args:
        port: 0 for any free one.
        pages: serve the web pages, too, which makes the start slower.
        auth: `user:password` that it asks for.

    Raises:
        ServerError: it does not start, or the port is taken.
    """
    environment = _environment(pages, auth)
    with _turn() as turn, _listener(port) as listener, tempfile.TemporaryFile() as output:
        address = f"http://{settings.LOOPBACK}:{listener.getsockname()[1]}"
        # In a session of its own: Ctrl-C must not end it before the processes that use it.
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.servers.guarded_prefect", str(listener.fileno()), str(os.getpid())],
            env=environment | {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": address},
            pass_fds=[listener.fileno()],
            stdout=output,
            start_new_session=True,
        )
        listener.close()  # otherwise clients would wait for an answer after the server has ended
        try:
            _await(server, address, output)
            turn.close()
            yield address
        finally:
            server.terminate()
            try:
                server.wait(_GRACE)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def is_ours(address: str) -> bool:
    """Whether a server on this machine proves that it has our key. The key is not sent: another user may hold the port.

    Raises:
        ServerError: others can read the key.
    """
    if not _is_here(address) or not (key := access_key.known()):
        return False
    nonce, port = secrets.token_hex(), urlsplit(address).port or 80
    status, body = settings.asked(f"http://{settings.LOOPBACK}:{port}{access_guard.PROOF}?{nonce}")
    return status == 200 and hmac.compare_digest(body, access_guard.proof(key, port, nonce).encode())


def serves(address: str) -> str:
    """Return the program and database of a server of ours; empty if it is not ours, or of an older version."""
    if not is_ours(address) or not (key := access_key.known()):
        return ""
    place = f"http://{settings.LOOPBACK}:{urlsplit(address).port or 80}{access_guard.SERVES}"
    user, _, password = key.partition(":")
    try:
        with httpx.Client(trust_env=False, timeout=_ANSWER) as client:  # no proxy gets the key
            answer = client.get(place, auth=(user, password))
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == httpx.codes.OK else ""


def _is_here(address: str) -> bool:
    return urlsplit(address).hostname in (settings.LOOPBACK, "localhost")


def how_to_reach(address: str) -> str:
    """Return shell variables with which Prefect's commands reach a server of ours, without showing the key."""
    auth = f'{_AUTH}="{access_key.where()}" ' if access_key.auth_string() else ""
    return f"{auth}{_URL}={address}"


def _turn() -> IO[str]:
    """Wait until no other server starts: two would build the same database."""
    try:
        turn = access_key.path().with_name("eckart.lock").open("a")
        fcntl.flock(turn, fcntl.LOCK_EX)
    except OSError as error:
        raise ServerError(
            f"Prefect's home cannot be written ({error}): make room, or set PREFECT_HOME to another folder"
        ) from error
    return turn


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((settings.LOOPBACK, port))
    except (OSError, OverflowError) as error:
        another = "set PREFECT_SERVER_API_PORT, or `eckart ui --port`, to another port"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ServerError(f"{_who_has(f'http://{settings.LOOPBACK}:{port}')}: stop it, or {another}") from error
        raise ServerError(f"no server can listen at {settings.LOOPBACK}:{port} ({error}): {another}") from error


def _who_has(address: str) -> str:
    """Say which program has a port that we want."""
    place = address.removeprefix("http://")
    status, body = settings.asked(f"{address}/api/health")
    if is_ours(address):
        return f"{place} is a server of `eckart ui` or `eckart serve` ({serves(address) or 'an older one'})"
    if status == 200 and body == b"true":
        return (
            f"{place} is a Prefect server that Eckart has not started, or one with another key. Whoever started it can "
            f"run code as you. If it is yours, {_URL}={address}/api uses it"
        )
    return f"{place} is taken by a program that is no Prefect server"


def _environment(pages: bool, auth: str | None) -> dict[str, str]:
    """Return the environment of a server's process."""
    ours = get_current_settings()
    environment = {"PREFECT_UI_API_URL": "/api"}  # its own; the address that we know may hold a password
    environment |= {**os.environ, **ours.to_environment_variables(exclude_unset=True)}
    environment |= {
        **settings.importable(),
        "ECKART_SERVER_KEY": access_key.made(),
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    }
    environment.pop("PREFECT_SERVER_API_AUTH_STRING", None)
    if auth:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = auth
    if not ours.server.database.model_fields_set & {"connection_url", "driver"}:
        file = ours.home / f"eckart-{prefect.__version__}.db"  # so that no other version changes its tables
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{file}"
    if not pages:
        environment |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
    return environment


def _client(address: str, auth: str | None) -> dict[str, str | None]:
    return {_URL: f"{address}/api", _AUTH: auth}


@contextmanager
def _used(address: str, auth: str | None) -> Iterator[None]:
    """Have this process and those that it starts use a server of ours, with its key, while the block runs."""
    before = {name: os.environ.get(name) for name in (_URL, _AUTH)}
    _set(_client(address, auth))
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    refresh_global_settings_context()


def _await(server: subprocess.Popen[bytes], address: str, output: IO[bytes]) -> None:
    end = time.monotonic() + _PATIENCE
    while settings.asked(f"{address}/api/health") != (200, b"true"):
        if server.poll() is not None:
            output.seek(0)
            cause = output.read().decode(errors="replace").strip()
            raise ServerError(shown(cause) or f"Prefect's server ended with code {server.returncode}")
        if time.monotonic() > end:
            raise ServerError(f"Prefect's server did not answer within {_PATIENCE} s")
        time.sleep(0.05)
