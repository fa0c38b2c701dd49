"""Pin base model and data of a study to their newest commits on the Hugging Face hub."""

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
    """The hub does not name the newest commit. params.yaml is unchanged."""


@dataclass(frozen=True)
class Pin:
    """A pinned revision in params.yaml."""

    section: str
    name: str
    """The repository on the hub."""
    before: str | None
    now: str


def pin() -> list[Pin]:
    """Write the newest commits of base model and data set into params.yaml if they are on the hub.

    A branch or tag stays, since somebody chose it.

    Returns:
        Each revision that was null or a commit, even if it is the newest already.
    """
    stages.check_workspace()
    model, data, api = typed_section("model"), typed_section("data"), HfApi()
    inputs: list[tuple[str, str | None, str | None, Callable[..., Any]]] = [
        ("model", hub_id(model.base), model.revision, api.model_info),
        ("data", hub_id(data.source, PACKAGED), data.revision, api.dataset_info),
    ]
    pins = [
        Pin(part, name, revision, _newest(name, newest))
        for part, name, revision, newest in inputs
        if name and (revision is None or _COMMIT.fullmatch(revision))
    ]
    if new := {pin.section: {"revision": pin.now} for pin in pins if pin.now != pin.before}:
        yaml_edit.update(new)
    return pins


def _newest(name: str, info: Callable[..., Any]) -> str:
    try:
        return str(info(name).sha)
    except Exception as error:  # errors of its HTTP client are no classes of huggingface_hub
        raise CannotPin(f"the hub does not name the newest commit of {name}: {error}") from error
