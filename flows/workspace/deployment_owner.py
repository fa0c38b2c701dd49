"""Tie a deployment to the folder that its runs work in: a tag names the folder, and runs in another one refuse.

`python -m flows.workspace.deployment_owner NAME` prints the tag for a deployment NAME of the working directory, unless
another folder has a deployment of that name.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from socket import gethostname

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment

from flows.environment import settings
from tasks.artifacts.errors import EckartError

_TAG = "workspace "
_ID = Path(".eckart/workspace")


class OtherWorkspace(EckartError):
    """A deployment belongs to another folder. The message names it."""


def tag() -> str:
    """Return the tag of the working directory's deployments: a random id, which is kept there, and its path."""
    if not _id():
        _ID.parent.mkdir(exist_ok=True)
        _ID.write_text(secrets.token_hex(8))
    return f"{_TAG}{_id()} {_here()}"


def check() -> None:
    """Raise if the present run is of a deployment of another folder; a deployment without a tag may run anywhere."""
    if not deployment.id:
        return
    present = _read(lambda client: client.read_deployment(deployment.id))
    if present and (owner := _owner(present)) and not _is_own(owner):
        raise OtherWorkspace(f"this run belongs to {_place(owner)}, but started in {_here()}: nothing was run")


def check_name(name: str) -> None:
    """Raise if a deployment of this name belongs to another folder, or has no tag."""
    present = _read(lambda client: client.read_deployment_by_name(f"study/{name}"))
    if present and not _is_own(owner := _owner(present)):
        raise OtherWorkspace(
            f"the deployment study/{name} belongs to {_place(owner)}: choose another name (`eckart serve --name`), or, "
            "if that one is no longer served, delete it on Prefect's page Deployments"
        )


def _read(read: Callable[[SyncPrefectClient], DeploymentResponse]) -> DeploymentResponse | None:
    with get_client(sync_client=True) as client:
        try:
            return read(client)
        except ObjectNotFound:
            return None


def _owner(present: DeploymentResponse) -> str:
    """Return the tag of a deployment; empty if it has none."""
    return next((tag for tag in present.tags if tag.startswith(_TAG)), "")


def _is_own(owner: str) -> bool:
    """Whether a tag is of the working directory: by host and path, or by id and path if the host was renamed."""
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
