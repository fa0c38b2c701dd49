"""Pin the base model and the data sets of a study to their newest commits on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import HfApi

from flows.engine import stages
from tasks.artifacts.errors import EckartError
from tasks.config import yaml_edit
from tasks.config.validation import typed_section
from tasks.data.hub_ids import COMMIT
from tasks.data.hub_inputs import hub_inputs


class CannotPin(EckartError):
    """The newest commit could not be read from the hub. params.yaml is unchanged."""


@dataclass(frozen=True)
class Pin:
    """A revision in params.yaml that `pin` set to the newest commit."""

    section: str
    """Place in params.yaml: model, data, evaluate.texts.NAME or data.calibration_texts.NAME."""
    name: str
    """Name of the repository on the hub."""
    before: str | None
    now: str


def pin() -> list[Pin]:
    """Write the newest commits of the base model and the data sets into params.yaml, for those that are on the hub.

    A revision in params.yaml that is a branch or a tag stays, since somebody chose it.

    Returns:
        The pinned revisions, including those that already were the newest commit.

    Raises:
        CannotPin: the hub cannot be reached, or does not have the repository.
    """
    stages.check_workspace()
    api, inputs = HfApi(), hub_inputs(*map(typed_section, ("model", "data", "evaluate")))
    pins = [
        Pin(place, name, part.revision, _newest(name, api.model_info if place == "model" else api.dataset_info))
        for place, (part, name) in inputs.items()
        if name and (part.revision is None or COMMIT.fullmatch(part.revision))
    ]
    if changed := [pin for pin in pins if pin.now != pin.before]:
        new: dict[str, Any] = {}
        for pin in changed:
            yaml_edit.change(new, _at(pin.section, {"revision": pin.now}))
        yaml_edit.update(new)
    return pins


def _at(place: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping that has `content` at the dotted path `place`."""
    for key in reversed(place.split(".")):
        content = {key: content}
    return content


def _newest(name: str, info: Callable[..., Any]) -> str:
    try:
        return str(info(name).sha)
    except Exception as error:  # errors of the HTTP client have no base class in huggingface_hub
        raise CannotPin(f"the hub does not name the newest commit of {name}: {error}") from error
