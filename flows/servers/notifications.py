"""Who is told of a deployment's runs: automations of Prefect's server, which send by notification blocks of its own.

A block, and not params.yaml, holds the address: that of a webhook is a secret, and Prefect encrypts blocks. The server
sends, and not the run: one that was killed, or never began, is told of, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from uuid import UUID

from prefect._vendor.croniter import croniter
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from flows.environment.redaction import shown
from tasks.artifacts.errors import EckartError

_TOLD = ("Failed", "Crashed", "Late", "Refused", "Promoted")
"""Names of the states of a flow run."""
_SUCCESSES = ("Completed", "Refused", "Promoted")
_GRACE = timedelta(hours=2)  # by which a run may take longer than the one before
_BEGIN, _LONG, _LEAST = datetime(2024, 1, 1), timedelta(days=35), 15  # runs of a schedule that show its gaps

_SUBJECT = "{{ flow.name }}/{{ deployment.name }}: {{ flow_run.state.name }}"
_BODY = "{{ flow_run.name }}{% if flow_run.state.message %}: {{ flow_run.state.message }}{% endif %}\n\n"
_PAGE = "/runs/flow-run/{{ flow_run.id }}"


class NotificationError(EckartError):
    """Nobody can be told in that way; the message says what to do."""


def set_up(deployment: str, blocks: Sequence[str], silence: timedelta) -> None:
    """Have the server tell of the runs of a deployment of the study by these blocks, instead of by those before.

    Args:
        deployment: its name; it may be made later.
        blocks: each TYPE/NAME, such as `slack-webhook/team`; none tells nobody.
        silence: after which the lack of a success is told.

    Raises:
        NotificationError: the server has no such block, or it cannot notify.
    """
    owner = f"eckart.notifications.{deployment}"
    with get_client(sync_client=True) as client:
        found = [_block(client, name) for name in blocks]
        client.delete_resource_owned_automations(owner)
        if found:
            pages = shown(get_current_settings().ui_url or str(client.api_url).rstrip("/").removesuffix("/api"))
            client.create_automation(_of_states(deployment, found, owner, pages))
            client.create_automation(_of_silence(deployment, found, owner, silence))


def longest_gap(cron: str) -> timedelta:
    """The longest time between two runs of a schedule, and some more: after it a success is missing."""
    times = [_BEGIN]
    following = croniter(cron, _BEGIN)
    while len(times) < _LEAST or times[-1] < _BEGIN + _LONG:
        times.append(following.get_next(datetime))
    return max(after - before for before, after in pairwise(times[1:])) + _GRACE


def _block(client: SyncPrefectClient, name: str) -> UUID:
    kind, _, own = name.partition("/")
    try:
        found = client.read_block_document_by_name(own, kind)
    except ObjectNotFound as error:
        raise NotificationError(
            f"Prefect's server has no block {name}: write TYPE/NAME, such as slack-webhook/team; "
            "`prefect block ls` lists its blocks, and its page Blocks makes one"
        ) from error
    if not found.block_schema or "notify" not in found.block_schema.capabilities:
        raise NotificationError(f"{name} is no notification block: docs/operations.md names some")
    return found.id


def _of_states(deployment: str, blocks: Sequence[UUID], owner: str, pages: str) -> AutomationCore:
    body = f"{_BODY}{pages}{_PAGE}"  # the server itself may not know how it is reached
    return AutomationCore(
        name=f"eckart {deployment}: what came of a run",
        description=f"Tells when a run is {', '.join(_TOLD)}.",
        trigger=EventTrigger(expect=_events(_TOLD), match_related=_runs_of(deployment)),
        actions=[SendNotification(block_document_id=one, subject=_SUBJECT, body=body) for one in blocks],
        owner_resource=owner,
    )


def _of_silence(deployment: str, blocks: Sequence[UUID], owner: str, silence: timedelta) -> AutomationCore:
    """Tells when it has lasted since the last success, or since this was set up."""
    hours = f"{silence.total_seconds() / 3600:.3g} hours"
    subject = f"study/{deployment}: no success in {hours}"
    body = f"No run of study/{deployment} has succeeded in {hours}. Is `eckart serve`, or its worker, running?"
    return AutomationCore(
        name=f"eckart {deployment}: no success in {hours}",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after=_events(_SUCCESSES),  # each begins to wait anew
            expect=_events(_SUCCESSES),
            within=silence,
            match_related=_runs_of(deployment),
        ),
        actions=[SendNotification(block_document_id=one, subject=subject, body=body) for one in blocks],
        owner_resource=owner,
    )


def _events(states: Sequence[str]) -> set[str]:
    return {f"prefect.flow-run.{state}" for state in states}


def _runs_of(deployment: str) -> list[ResourceSpecification]:
    """By name, since the deployment may not be there yet, and is made anew under another id."""
    related = {"flow": "study", "deployment": deployment}
    return [
        ResourceSpecification.model_validate({"prefect.resource.role": role, "prefect.resource.name": name})
        for role, name in related.items()
    ]
