"""Whose a deployment is: it carries the folder that its runs work in, and a run that begins in another one refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from socket import gethostname

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment

from tasks.errors import EckartError

_TAG = "workspace "


class OtherWorkspace(EckartError):
    """A deployment is of another folder; the message names both."""


def tag() -> str:
    """What a deployment of the working directory carries."""
    return f"{_TAG}{gethostname()}:{Path.cwd()}"


def check() -> None:
    """Refuse a run of a deployment that another folder has made; one that says nothing is anybody's.

    Raises:
        OtherWorkspace: it is.
    """
    if not deployment.id:
        return
    owner = _owner(lambda client: client.read_deployment(deployment.id))
    if owner not in (None, tag()):
        raise OtherWorkspace(f"this run is of {_place(owner)}, and began in {_place(tag())}: nothing was run")


def check_name(name: str) -> None:
    """Refuse to take over the deployment of another folder.

    Raises:
        OtherWorkspace: the name is taken.
    """
    owner = _owner(lambda client: client.read_deployment_by_name(f"study/{name}"))
    if owner not in (None, tag()):
        raise OtherWorkspace(
            f"the deployment study/{name} is of {_place(owner)}: write --name with another name, or, where nobody "
            f"serves that one any more, delete it on Prefect's page Deployments"
        )


def _owner(read: Callable[[SyncPrefectClient], DeploymentResponse]) -> str | None:
    """The tag of a deployment, if it is there and has one."""
    with get_client(sync_client=True) as client:
        try:
            found = read(client)
        except ObjectNotFound:
            return None
    return next((one for one in found.tags if one.startswith(_TAG)), None)


def _place(tag: str | None) -> str:
    return (tag or "").removeprefix(_TAG)
