"""A file that notes the last champion of each model, so that a workspace can tell a lost registry from a new one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from flows.tracking import database
from tasks.artifacts import atomic_files

_FILE = Path(".eckart/champions.json")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Noted:
    """The last champion of a model that this workspace has seen."""

    version: str
    registry: str
    """URL of the registry, without a password."""


_Champions = TypeAdapter(dict[str, Noted])


def last(model: str) -> Noted | None:
    """Return the last champion of the model that this workspace has seen, if any."""
    return _read().get(model)


def is_first(model: str) -> bool:
    """Whether no model can have been registered here: MLflow has no database yet, and no champion is noted."""
    return database.all_is_local() and not database.file().exists() and not last(model)


def note(model: str, champion: Noted) -> None:
    """Note that a version of the model is the champion. If the disk is full, only log a warning."""
    champions = _read()
    if champions.get(model) == champion:
        return
    try:
        _FILE.parent.mkdir(exist_ok=True)
        atomic_files.write(_FILE, _Champions.dump_json(champions | {model: champion}, indent=1).decode())
    except OSError as error:
        log.warning("the champion cannot be noted: %s", error)


def _read() -> dict[str, Noted]:
    try:
        return _Champions.validate_json(_FILE.read_bytes())
    except (OSError, ValueError):
        return {}
