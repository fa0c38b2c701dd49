"""Pin the base model and the data sets of a study to their newest commits on the Hugging Face hub."""

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
    model, data, api = typed_section("model"), typed_section("data"), HfApi()
    inputs: list[tuple[str, str | None, str | None, Callable[..., Any]]] = [
        ("model", hub_id(model.base), model.revision, api.model_info),
        ("data", hub_id(data.source, PACKAGED), data.revision, api.dataset_info),
    ]
    texts = {"evaluate.texts": typed_section("evaluate").texts, "data.calibration_texts": data.calibration_texts}
    inputs += [
        (f"{place}.{name}", hub_id(text.source, PACKAGED), text.revision, api.dataset_info)
        for place, named in texts.items()
        for name, text in named.items()
    ]
    pins = [
        Pin(part, name, revision, _newest(name, newest))
        for part, name, revision, newest in inputs
        if name and (revision is None or _COMMIT.fullmatch(revision))
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
