"""What a study takes from the Hugging Face hub, pinned in params.yaml to its newest commit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi

from flows.engine import stages
from tasks.artifacts.errors import EckartError
from tasks.config import yaml_edit
from tasks.config.validation import typed_section
from tasks.data.hub_ids import hub_id
from tasks.data.packaged_datasets import PACKAGED

_COMMIT = re.compile(r"[0-9a-f]{40}")


class CannotPin(EckartError):
    """The hub does not say which commit is the newest; params.yaml is as it was."""


@dataclass(frozen=True)
class Pin:
    """A revision in params.yaml."""

    section: str
    name: str
    """On the hub."""
    before: str | None
    now: str


def pin() -> list[Pin]:
    """Write the newest commits of base model and data set into params.yaml, where these are of the hub.

    A branch or tag stays: whoever wrote it wants that one.

    Returns:
        Each revision that was null or a commit, also where it is the newest already.

    Raises:
        CannotPin: the hub cannot be asked, or has no such repository.
    """
    stages.check_workspace()
    model, data, api = typed_section("model"), typed_section("data"), HfApi()
    asked: list[tuple[str, str | None, str | None, Callable[..., Any]]] = [
        ("model", hub_id(model.base), model.revision, api.model_info),
        ("data", hub_id(data.source, PACKAGED), data.revision, api.dataset_info),
    ]
    found = [
        Pin(part, name, revision, _newest(name, newest))
        for part, name, revision, newest in asked
        if name and (revision is None or _COMMIT.fullmatch(revision))
    ]
    if new := {one.section: {"revision": one.now} for one in found if one.now != one.before}:
        yaml_edit.update(new)
    return found


def _newest(name: str, info: Callable[..., Any]) -> str:
    try:
        return str(info(name).sha)
    except Exception as error:  # those of its HTTP client have no class that is huggingface_hub's
        raise CannotPin(f"the hub does not say which commit of {name} is the newest: {error}") from error
