"""The licence of the base model, as its card states it; models that are made from the base model carry it on."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import metadata_load, metadata_save
from transformers.utils import cached_file
from yaml import YAMLError

Licence = dict[str, str]
"""`license` by the hub's name for it; where the hub has none, `license_name` and `license_link`, too. May be empty."""

_CARD = "README.md"
_KEYS = ("license", "license_name", "license_link")


def stated(source: str | Path, revision: str | None = None) -> Licence:
    """Read the licence from the card of a model.

    Args:
        source: a folder, or the id of a model on the hub.
    """
    try:
        card = metadata_load(str(cached_file(source, _CARD, revision=revision))) or {}
    except (OSError, ValueError, YAMLError):  # no card, or none that can be read
        return {}
    return {key: card[key] for key in _KEYS if isinstance(card.get(key), str)}


def write(folder: Path, licence: Licence) -> None:
    """Write the licence, if there is one, into the card in `folder`."""
    if licence:
        metadata_save(folder / _CARD, licence)
