"""Whose a deployment is: it carries the folder that its runs work in, and a run that begins in another one refuses.

`python -m flows.workspace.deployment_owner NAME` prints the tag for a deployment NAME of the working directory, unless
it is taken.
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
    """A deployment is of another folder; the message names both."""


def tag() -> str:
    """What a deployment of the working directory carries: a random id, kept there, and its place."""
    if not _id():
        _ID.parent.mkdir(exist_ok=True)
        _ID.write_text(secrets.token_hex(8))
    return f"{_TAG}{_id()} {_here()}"


def check() -> None:
    """Refuse a run of a deployment that another folder has made; one that says nothing is anybody's.

    Raises:
        OtherWorkspace: it is.
    """
    if not deployment.id:
        return
    found = _read(lambda client: client.read_deployment(deployment.id))
    if found and (owner := _owner(found)) and not _is_own(owner):
        raise OtherWorkspace(f"this run is of {_place(owner)}, and began in {_here()}: nothing was run")


def check_name(name: str) -> None:
    """Refuse to take over a deployment that another folder has made, or somebody who left no word.

    Raises:
        OtherWorkspace: the name is taken.
    """
    found = _read(lambda client: client.read_deployment_by_name(f"study/{name}"))
    if found and not _is_own(owner := _owner(found)):
        raise OtherWorkspace(
            f"the deployment study/{name} is of {_place(owner)}: choose another name (`eckart serve --name`), or, "
            f"where nobody serves that one any more, delete it on Prefect's page Deployments"
        )


def _read(read: Callable[[SyncPrefectClient], DeploymentResponse]) -> DeploymentResponse | None:
    with get_client(sync_client=True) as client:
        try:
            return read(client)
        except ObjectNotFound:
            return None


def _owner(found: DeploymentResponse) -> str:
    """The tag of a deployment; empty if it has none."""
    return next((one for one in found.tags if one.startswith(_TAG)), "")


def _is_own(owner: str) -> bool:
    """By the place, or by the id where the host has another name now: a container that was made anew, say."""
    same = bool(_id()) and owner.startswith(f"{_TAG}{_id()} ") and owner.endswith(f":{Path.cwd()}")
    return same or _place(owner) == _here()


def _id() -> str:
    return _ID.read_text() if _ID.exists() else ""


def _here() -> str:
    return f"{gethostname()}:{Path.cwd()}"


def _place(owner: str) -> str:
    return re.sub(r"^[0-9a-f]{16} ", "", owner.removeprefix(_TAG)) or "somebody who left no word"


def main() -> None:
    settings.apply()
    from flows.servers import prefect_server  # slow

    try:
        if not prefect_server.require():
            raise EckartError("Prefect was told of no server: set PREFECT_API_URL")
        check_name(sys.argv[1])
        print(tag())
    except EckartError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
