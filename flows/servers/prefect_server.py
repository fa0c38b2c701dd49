"""Find or start a Prefect server: the user's, that of `eckart ui` or `eckart serve`, or a temporary one for a run.

The servers that we start listen on loopback only. They have a guard, a key, and a database of their own.
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
from contextlib import ExitStack, contextmanager, nullcontext
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
from flows.environment.redaction import redact
from flows.servers import access_guard, access_key
from flows.servers.access_key import ServerError

PORT = int(settings.PREFECT_ADDRESS.rpartition(":")[2])
log = logging.getLogger(__name__)

_PATIENCE = 300  # seconds until a new server must answer; its first start creates the database
_GRACE = 10  # seconds to end after SIGTERM, before SIGKILL
_ANSWER = 5  # seconds for an answer
_URL, _AUTH = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"


def require() -> str | None:
    """Check the server that the environment or a Prefect profile names, and return the URL of its API.

    Returns:
        None if no server is named.

    Raises:
        ServerError: the server does not answer, is not Prefect's, or asks for another key.
    """
    api = get_current_settings().api
    if not (address := api.url):
        return None
    status, body = settings.http_get(f"{address.rstrip('/')}/health", api.request_timeout)
    if not status:
        raise ServerError(f"Prefect's server at {redact(address)} does not answer: start it, or unset {_URL}")
    if (status == 200 and body != b"true") or (status == 404 and _is_here(address)):
        raise ServerError(f"the program at {redact(address)} is no Prefect server: correct {_URL}, or unset it")
    given = api.auth_string.get_secret_value() if api.auth_string else None
    if _is_here(address) and given in (None, access_key.known()):
        if is_ours(address):
            # Use 127.0.0.1: `localhost` may also stand for an address at which another user listens and gets the key.
            _set(_client(f"http://{settings.LOOPBACK}:{urlsplit(address).port or 80}", access_key.auth_string()))
        elif given:
            raise ServerError(
                f"the server at {redact(address)} does not have this machine's key, so the key is not sent. "
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
                    f"Prefect's server at {redact(str(client.api_url))} asks for another key: set {_AUTH} to the key "
                    "that it was started with"
                ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(
                f"Prefect's server at {redact(str(client.api_url))} fails: {redact(str(error))}"
            ) from error


def use_local() -> None:
    """Use the server of `eckart ui` or `eckart serve` if it runs, unless environment or profile name another server."""
    if not get_current_settings().api.url and is_ours(settings.PREFECT_ADDRESS):
        _set(_client(settings.PREFECT_ADDRESS, access_key.auth_string()))


def use_temporary() -> None:
    """Start a server for this process only, unless the environment or a Prefect profile names a server.

    It stops when the process ends, after Prefect has sent all records to it.

    Raises:
        ServerError: the server does not start.
    """
    if get_current_settings().api.url:
        return
    if settings.http_get(f"{settings.PREFECT_ADDRESS}/api/health")[0]:
        log.warning("%s; this run starts a server of its own", _who_has(settings.PREFECT_ADDRESS))
    logging.getLogger("prefect.flow_runs").addFilter(lambda record: not record.getMessage().startswith("View at "))
    stack = ExitStack()
    atexit.register(stack.close)  # called after Prefect's threads have sent their records
    own_key = f"eckart:{secrets.token_urlsafe()}"  # gives access to no other server
    stack.enter_context(_used(stack.enter_context(started(0, pages=False, auth=own_key)), own_key))


@contextmanager
def prefect_server() -> Iterator[str]:
    """Yield the URL of the API of the server that the user names, or of ours if one runs; else start one for the block.

    Raises:
        ServerError: the user's server does not answer, or the new one does not start.
    """
    if address := require():
        yield address
        return
    auth, ours = access_key.auth_string(), settings.PREFECT_ADDRESS
    running = nullcontext(ours) if is_ours(ours) else started(PORT, pages=True, auth=auth)
    with running as address, _used(address, auth):
        yield f"{address}/api"


@contextmanager
def started(port: int, pages: bool, auth: str | None) -> Iterator[str]:
    """Start a server on loopback, and yield its URL. The server stops at the end of the block, or if this process dies.

    Args:
        port: port of the server; 0: any free port.
        pages: whether to serve the web pages, too; without them the server starts faster.
        auth: `user:password` that the server asks for; None: it asks for nothing.

    Raises:
        ServerError: the server does not start, or the port is taken.
    """
    environment = _environment(pages, auth)
    with _turn() as turn, _listener(port) as listener, tempfile.TemporaryFile() as output:
        address = f"http://{settings.LOOPBACK}:{listener.getsockname()[1]}"
        # A session of its own: Ctrl-C must not end the server before the processes that use it.
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.servers.guarded_prefect", str(listener.fileno()), str(os.getpid())],
            env=environment | {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": address},
            pass_fds=[listener.fileno()],
            stdout=output,
            start_new_session=True,
        )
        listener.close()  # otherwise clients would wait for an answer even after the server's end
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
    """Whether a server on this machine proves that it has our key.

    The key is not sent to the server, because another user's program may listen at the port.

    Raises:
        ServerError: the file of the key cannot be used, for example because others can read it.
    """
    if not _is_here(address) or not (key := access_key.known()):
        return False
    nonce, port = secrets.token_hex(), urlsplit(address).port or 80
    status, body = settings.http_get(f"http://{settings.LOOPBACK}:{port}{access_guard.PROOF}?{nonce}")
    return status == 200 and hmac.compare_digest(body, access_guard.proof(key, port, nonce).encode())


def serves(address: str) -> str:
    """Return in words the program and the database of a server of ours; empty if it is not ours, or too old to tell."""
    if not is_ours(address) or not (key := access_key.known()):
        return ""
    place = f"http://{settings.LOOPBACK}:{urlsplit(address).port or 80}{access_guard.SERVES}"
    user, _, password = key.partition(":")
    try:
        with httpx.Client(trust_env=False, timeout=_ANSWER) as client:  # the key must not reach a proxy
            answer = client.get(place, auth=(user, password))
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == httpx.codes.OK else ""


def _is_here(address: str) -> bool:
    return urlsplit(address).hostname in (settings.LOOPBACK, "localhost")


def how_to_reach(address: str) -> str:
    """Return the shell variables with which the command `prefect` uses a server of ours; they do not show the key."""
    auth = f'{_AUTH}="{access_key.where()}" ' if access_key.auth_string() else ""
    return f"{auth}{_URL}={address}"


def _turn() -> IO[str]:
    """Wait until no other server is starting, since two would create the same database.

    Return the open lock file. Other servers wait until it is closed.
    """
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
    """Return in words which program listens at a URL where we want to start a server."""
    place = address.removeprefix("http://")
    status, body = settings.http_get(f"{address}/api/health")
    if is_ours(address):
        return f"{place} is a server of `eckart ui` or `eckart serve` ({serves(address) or 'an older one'})"
    if status == 200 and body == b"true":
        return (
            f"{place} is a Prefect server that Eckart has not started, or one with another key. Whoever started it can "
            f"run code as you. If it is yours, {_URL}={address}/api uses it"
        )
    return f"{place} is taken by a program that is no Prefect server"


def _environment(pages: bool, auth: str | None) -> dict[str, str]:
    """Return the environment for the process of a Prefect server."""
    ours = get_current_settings()
    environment = {
        "PREFECT_UI_API_URL": "/api",  # relative to the server, because the URL that we know may contain a password
        **os.environ,
        **ours.to_environment_variables(exclude_unset=True),
        **settings.importable(),
        "ECKART_SERVER_KEY": access_key.read_or_create(),
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    }
    environment.pop("PREFECT_SERVER_API_AUTH_STRING", None)
    if auth:
        environment["PREFECT_SERVER_API_AUTH_STRING"] = auth
    if not ours.server.database.model_fields_set & {"connection_url", "driver"}:
        # A file for each version of Prefect, because another version would change the tables.
        file = ours.home / f"eckart-{prefect.__version__}.db"
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{file}"
    if not pages:
        environment |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
    return environment


def _client(address: str, auth: str | None) -> dict[str, str | None]:
    return {_URL: f"{address}/api", _AUTH: auth}


@contextmanager
def _used(address: str, auth: str | None) -> Iterator[None]:
    """While the block runs, make this process and its child processes use a server of ours."""
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
    while settings.http_get(f"{address}/api/health") != (200, b"true"):
        if server.poll() is not None:
            output.seek(0)
            cause = output.read().decode(errors="replace").strip()
            raise ServerError(redact(cause) or f"Prefect's server ended with code {server.returncode}")
        if time.monotonic() > end:
            raise ServerError(f"Prefect's server did not answer within {_PATIENCE} s")
        time.sleep(0.05)
