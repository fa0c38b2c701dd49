"""The licence of the base model, as its card states it in the words of the Hugging Face hub; it is that of what is made
of it, too."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import metadata_load, metadata_save
from transformers.utils import cached_file
from yaml import YAMLError

Licence = dict[str, str]
"""`license`, and of one that the hub has no word for `license_name` and `license_link`; empty where none is stated."""

_CARD = "README.md"
_KEYS = ("license", "license_name", "license_link")


def stated(source: str | Path, revision: str | None = None) -> Licence:
    """What the card of a model says.

    Args:
        source: a folder, or the id of a model on the hub.
    """
    try:
        found = metadata_load(str(cached_file(source, _CARD, revision=revision))) or {}
    except (OSError, ValueError, YAMLError):  # no card, or none that can be read
        return {}
    return {key: found[key] for key in _KEYS if isinstance(found.get(key), str)}


def write(folder: Path, licence: Licence) -> None:
    """Have the card in `folder` say so, where there is something to say."""
    if licence:
        metadata_save(folder / _CARD, licence)
