"""Tie a Prefect deployment to one workspace folder: a tag names the folder, and a run in another folder is refused.

`python -m flows.workspace.deployment_owner NAME` prints the tag for a deployment NAME of the working directory. It
fails if another folder has a deployment of this name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment
from prefect.types import BANNED_CHARACTERS, WITHOUT_BANNED_CHARACTERS

from flows.environment import settings
from tasks.artifacts.errors import EckartError

_TAG = "workspace "
_ID = Path(".eckart/workspace")


class OtherWorkspace(EckartError):
    """The deployment belongs to another folder. The message names the folder."""


def tag() -> str:
    """Return the tag for deployments of the working directory: its random id, its host and its path.

    The id is made at the first call and stored in the folder.
    """
    if not _id():
        _ID.parent.mkdir(exist_ok=True)
        _ID.write_text(secrets.token_hex(8))
    return f"{_TAG}{_id()} {_here()}"


def check() -> None:
    """Raise OtherWorkspace if the present run is of a deployment that belongs to another folder.

    A deployment without a tag may run in any folder.
    """
    if not deployment.id:
        return
    owner = _owner(lambda client: client.read_deployment(deployment.id))
    if owner and not _is_own(owner):
        raise OtherWorkspace(f"this run belongs to {_place(owner)}, but started in {_here()}: nothing was run")


def check_name(name: str) -> None:
    """Raise an EckartError unless a deployment of the working directory may have this name.

    Raises:
        OtherWorkspace: a deployment of this name exists and belongs to another folder or has no tag.
        EckartError: Prefect accepts no such name.
    """
    if not re.match(WITHOUT_BANNED_CHARACTERS, name):
        raise EckartError(
            f"Prefect accepts no deployment with the name {name!r}: choose one without {' '.join(BANNED_CHARACTERS)} "
            "(`eckart serve --name`)"
        )
    owner = _owner(lambda client: client.read_deployment_by_name(f"study/{name}"))
    if owner is not None and not _is_own(owner):
        raise OtherWorkspace(
            f"the deployment study/{name} belongs to {_place(owner)}: choose another name (`eckart serve --name`), or, "
            "if that one is no longer served, delete it on Prefect's page Deployments"
        )


def own(client: SyncPrefectClient, name: str) -> UUID | None:
    """Return the id of the working directory's deployment of this name, or None if the server has none."""
    try:
        found = client.read_deployment_by_name(f"study/{name}")
    except ObjectNotFound:
        return None
    return found.id if _is_own(_tag_of(found)) else None


@contextmanager
def held(name: str) -> Iterator[None]:
    """Serve the deployment of this name alone while the block runs.

    Raises:
        EckartError: another process of this folder serves it. When one of the two ended, Prefect would pause it.
    """
    file = Path(".eckart") / f"serve-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
    file.parent.mkdir(exist_ok=True)
    with file.open("a+") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone: its runs do not inherit it
        except (BlockingIOError, PermissionError):
            lock.seek(0)
            raise EckartError(
                f"process {lock.read()} serves study/{name} of this folder already: end it first, or choose another "
                "name (`eckart serve --name`)"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _owner(read: Callable[[SyncPrefectClient], DeploymentResponse]) -> str | None:
    """Return the tag that names a deployment's folder; "" if it has no such tag, None if there is no deployment."""
    with get_client(sync_client=True) as client:
        try:
            return _tag_of(read(client))
        except ObjectNotFound:
            return None


def _tag_of(found: DeploymentResponse) -> str:
    return next((tag for tag in found.tags if tag.startswith(_TAG)), "")


def _is_own(owner: str) -> bool:
    """Whether a tag names the working directory: its path is the same, and its host or (if that was renamed) its id."""
    same = bool(_id()) and owner.startswith(f"{_TAG}{_id()} ") and owner.endswith(f":{Path.cwd()}")
    return same or _place(owner) == _here()


def _id() -> str:
    return _ID.read_text() if _ID.exists() else ""


def _here() -> str:
    return f"{gethostname()}:{Path.cwd()}"


def _place(owner: str) -> str:
    return re.sub(r"^[0-9a-f]{16} ", "", owner.removeprefix(_TAG)) or "an unknown folder"


def main() -> None:
    settings.apply()
    from flows.servers import prefect_server  # slow

    try:
        if not prefect_server.require():
            raise EckartError("no Prefect server is named: set PREFECT_API_URL")
        check_name(sys.argv[1])
        print(tag())
    except EckartError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
