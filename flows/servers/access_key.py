"""The key (`user:password`) of this user's servers, in a file that only its owner can read; created at first use."""

from __future__ import annotations

import os
import secrets
import shlex
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from prefect.settings import get_current_settings

from tasks.artifacts.errors import EckartError

_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"


class ServerError(EckartError):
    """A server cannot be started or used. The message says why and what to do."""


def path() -> Path:
    """Return the path of the key file, which may not exist yet."""
    return get_current_settings().home / "eckart.key"


def known() -> str | None:
    """Return the key, `user:password`; None if there is none yet.

    Raises:
        ServerError: the file cannot be read, is empty, belongs to another user, or can be read by others.
    """
    file = path()
    try:
        with file.open() as opened:
            status = os.fstat(opened.fileno())
            key = opened.read().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(str(error)) from error
    if not key:
        raise _unusable("it is empty")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise _unusable("it is another user's, or others can read it")
    return key


def _unusable(reason: str) -> ServerError:
    return ServerError(
        f"the key {path()} cannot be used: {reason}. Remove it, and a new one is made; or set PREFECT_HOME to another "
        "folder of your own"
    )


def read_or_create() -> str:
    """Return the key; create it if there is none. If two processes create it at once, both get the same key.

    Raises:
        ServerError: the file cannot be written, or other users can read it or write to Prefect's home folder.
    """
    file = path()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.parent.stat().st_mode & 0o022:  # somebody else could put a database there, which decides what runs
            raise ServerError(f"others can write to Prefect's home {file.parent}: `chmod go-w {file.parent}`")
        if key := known():
            return key
        descriptor, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)  # O_EXCL, mode 0600
        try:
            with open(descriptor, "w") as new:
                new.write(f"eckart:{secrets.token_urlsafe(32)}\n")
            with suppress(FileExistsError):  # only one process can create the link, and the file is complete by then
                os.link(name, file)
        finally:
            os.unlink(name)
    except OSError as error:
        raise ServerError(
            f"Prefect's home {file.parent} cannot be written ({error.strerror}): "
            "make room, or set PREFECT_HOME to another folder"
        ) from error
    if not (key := known()):
        raise _unusable("it is a link to nowhere")
    return key


def where() -> str:
    """Return a shell expression that yields the key, for messages that must not contain the key itself."""
    if auth_string() == known():
        return f"$(cat {shlex.quote(str(path()))})"
    return f"${_VARIABLE}"


def auth_string() -> str | None:
    """Return the `user:password` that our servers ask for: PREFECT_SERVER_API_AUTH_STRING if it is set, else the key.

    Returns:
        None if the variable is set but empty: then the servers ask for no password.

    Raises:
        ServerError: the variable is not `user:password`, or the key cannot be used; see `read_or_create`.
    """
    if os.environ.get(_VARIABLE) == "":  # the user wants no password
        return None
    setting = get_current_settings().server.api.auth_string
    own = setting.get_secret_value() if setting else ""
    if own and not all(own.partition(":")):
        raise ServerError(f"{_VARIABLE} must be USER:PASSWORD, with a colon")
    return own or read_or_create()
