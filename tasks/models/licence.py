"""The licence of the base model, from its model card. Models made from the base model have the same licence."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import metadata_load, metadata_save
from transformers.utils import cached_file
from yaml import YAMLError

Licence = dict[str, str]
"""Entries of a model card: `license`; also `license_name` and `license_link` if the hub has no name for the licence."""

_CARD = "README.md"
_KEYS = ("license", "license_name", "license_link")


def stated(source: str | Path, revision: str | None = None) -> Licence:
    """Read the licence from the card of a model; return an empty dict if the card states none.

    Args:
        source: a folder, or the id of a model on the hub.
    """
    try:
        card = metadata_load(str(cached_file(source, _CARD, revision=revision))) or {}
    except (OSError, ValueError, YAMLError):  # no card, or none that can be read
        return {}
    return {key: card[key] for key in _KEYS if isinstance(card.get(key), str)}


def write(folder: Path, licence: Licence) -> None:
    """Write the licence, if there is one, into the model card in `folder`."""
    if licence:
        metadata_save(folder / _CARD, licence)
