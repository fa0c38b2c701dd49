"""Notifications about a deployment's runs, sent by Prefect's server with its automations and notification blocks.

The recipient's URL is in a block and not in params.yaml, because the URL of a webhook is a secret, and Prefect encrypts
blocks. The server sends the notifications, not the run, so runs that were killed or never started are also reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from uuid import UUID

from prefect._vendor.croniter import croniter  # Prefect's server computes times with it; the public API is async only
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from flows.environment.redaction import redact
from tasks.artifacts.errors import EckartError

_REPORTED = ("Failed", "Crashed", "Late", "Refused", "Promoted")
"""Names of the states of a flow run that are reported."""
_SUCCESSES = ("Completed", "Refused", "Promoted")
_GRACE = timedelta(hours=2)  # a run may take that much longer than the previous run
# The longest gap of a schedule is looked for in the 35 days from 2024-01-01, and between at least 14 runs.
_BEGIN, _LONG, _LEAST = datetime(2024, 1, 1), timedelta(days=35), 15

_SUBJECT = "{{ flow.name }}/{{ deployment.name }}: {{ flow_run.state.name }}"
# Discord refuses a message of over 2,000 characters, without a trace. The page has the whole one.
_STATE = "{{ flow_run.state.message | truncate(1500, True, ' …', 0) }}"
_BODY = f"{{{{ flow_run.name }}}}{{% if flow_run.state.message %}}: {_STATE}{{% endif %}}\n\n"
_PAGE = "/runs/flow-run/{{ flow_run.id }}"


class NotificationError(EckartError):
    """Notifications cannot be set up. The message says why and what to do."""


def set_up(deployment: str, blocks: Sequence[str], silence: timedelta) -> None:
    """Have Prefect's server send notifications about a deployment's runs. They replace earlier ones of the deployment.

    Args:
        deployment: name of the deployment, which need not exist yet.
        blocks: names of notification blocks, TYPE/NAME, such as `slack-webhook/team`; empty: no notifications.
        silence: the time without a successful run after which a notification is sent, too.

    Raises:
        NotificationError: the server has no such block, or the block cannot send notifications.
    """
    owner = f"eckart.notifications.{deployment}"
    with get_client(sync_client=True) as client:
        ids = [_block(client, name) for name in blocks]
        client.delete_resource_owned_automations(owner)
        if ids:
            pages = redact(get_current_settings().ui_url or str(client.api_url).rstrip("/").removesuffix("/api"))
            client.create_automation(_report_states(deployment, ids, owner, pages))
            client.create_automation(_report_silence(deployment, ids, owner, silence))


def longest_gap(cron: str) -> timedelta:
    """Return the longest time between two runs of a schedule, plus a margin for runs of different length."""
    times = [_BEGIN]
    following = croniter(cron, _BEGIN)
    while len(times) < _LEAST or times[-1] < _BEGIN + _LONG:
        times.append(following.get_next(datetime))
    return max(after - before for before, after in pairwise(times[1:])) + _GRACE


def _block(client: SyncPrefectClient, name: str) -> UUID:
    kind, _, own = name.partition("/")
    try:
        block = client.read_block_document_by_name(own, kind)
    except ObjectNotFound as error:
        raise NotificationError(
            f"Prefect's server has no block {name}: write TYPE/NAME, such as slack-webhook/team; "
            "`prefect block ls` lists its blocks, and its page Blocks makes one"
        ) from error
    if not block.block_schema or "notify" not in block.block_schema.capabilities:
        raise NotificationError(f"{name} is not a notification block: docs/how-to/nightly.md names some")
    return block.id


def _report_states(deployment: str, blocks: Sequence[UUID], owner: str, pages: str) -> AutomationCore:
    body = f"{_BODY}{pages}{_PAGE}"  # `pages` is our URL of the server; the server may not know it
    return AutomationCore(
        name=f"eckart {deployment}: results of runs",
        description=f"Reports a run that is {', '.join(_REPORTED)}.",
        trigger=EventTrigger(expect=_events(_REPORTED), match_related=_runs_of(deployment)),
        actions=[SendNotification(block_document_id=block, subject=_SUBJECT, body=body) for block in blocks],
        owner_resource=owner,
    )


def _report_silence(deployment: str, blocks: Sequence[UUID], owner: str, silence: timedelta) -> AutomationCore:
    """Return an automation that reports if no run succeeds within `silence`, after the last success or the set-up."""
    hours = f"{silence.total_seconds() / 3600:,.1f} hours"
    subject = f"study/{deployment}: no success in {hours}"
    body = f"No run of study/{deployment} has succeeded in {hours}. Is `eckart serve`, or its worker, running?"
    return AutomationCore(
        name=f"eckart {deployment}: no success in {hours}",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after=_events(_SUCCESSES),  # each success starts the time anew
            expect=_events(_SUCCESSES),
            within=silence,
            match_related=_runs_of(deployment),
        ),
        actions=[SendNotification(block_document_id=block, subject=subject, body=body) for block in blocks],
        owner_resource=owner,
    )


def _events(states: Sequence[str]) -> set[str]:
    return {f"prefect.flow-run.{state}" for state in states}


def _runs_of(deployment: str) -> list[ResourceSpecification]:
    """Return a filter for the deployment's runs. It uses the name, because the id may not exist yet, or may change."""
    related = {"flow": "study", "deployment": deployment}
    return [
        ResourceSpecification.model_validate({"prefect.resource.role": role, "prefect.resource.name": name})
        for role, name in related.items()
    ]
