"""The license of the base model, and where it comes from. Models made from the base model have the same license."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load, metadata_save
from transformers.integrations.gguf.reader import read_gguf_metadata
from yaml import YAMLError

from tasks.data import pypi_archives
from tasks.data.hub_ids import hub_id

License = dict[str, str]
"""Entries of a model card: `license`; also `license_name` and `license_link` if the hub has no name for the license.

`origin` says where a model comes from that is not on the hub, as far as its files tell.
"""

_CARD = "README.md"
_KEYS = ("license", "license_name", "license_link")
_IN_GGUF = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
}


def stated(folder: Path) -> License:
    """Read the license from the card of a model, and the origin; return an empty dict if the card states none."""
    return _texts(_card(folder), {key: key for key in (*_KEYS, "origin")})


def of_base(base: str, folder: Path, gguf_file: str | None = None) -> License:
    """Return the license of a base model, from its card or else from the header of a GGUF file, and its origin.

    Args:
        base: `model.base` of params.yaml.
        folder: the folder that holds it.
        gguf_file: name of a GGUF file in the folder.
    """
    card = _card(folder)
    header: Mapping[str, Any] = read_gguf_metadata(str(folder / gguf_file))[0] if gguf_file else {}
    terms = _texts(card, {key: key for key in _KEYS}) or _texts(header, _IN_GGUF)
    if hub_id(base):
        return terms
    what = "GGUF file" if gguf_file else "folder"
    place = f"a {what} of {_package(folder)}" if base.startswith(pypi_archives.SCHEME) else f"a local {what}"
    facts = list(_facts(folder, card, header))
    return {**terms, "origin": "; ".join([place, *facts] if facts else [f"{place}, which names no other model"])}


def write(folder: Path, license: License) -> None:
    """Write the license and the origin, if they are known, into the model card in `folder`."""
    if license:
        metadata_save(folder / _CARD, license)


def _card(folder: Path) -> dict[str, Any]:
    """Return the metadata of a model's card; empty if there is no card, or none that can be read."""
    try:
        card = metadata_load(str(folder / _CARD))
    except (OSError, ValueError, YAMLError):
        return {}
    return card or {}


def _texts(entries: Mapping[str, Any], keys: Mapping[str, str]) -> License:
    return {ours: entries[theirs] for ours, theirs in keys.items() if isinstance(entries.get(theirs), str)}


def _package(path: Path) -> str:
    """Describe the package in which `path` lies, by its metadata."""
    for folder in path.parents:
        for file in (*folder.glob("*.dist-info/METADATA"), *folder.glob("PKG-INFO")):
            about: Any = PathDistribution(file.parent).metadata
            terms = about.get("License-Expression") or about.get("License")
            summary = f" ({_plain(about['Summary'])})" if about.get("Summary") else ""
            return f"the package {_plain(about['Name'])} {_plain(about['Version'])}{summary}" + (
                f", whose own license is {_plain(terms)}" if terms else ""
            )
    return "a package"


def _facts(folder: Path, card: Mapping[str, Any], header: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the files of a model say about other models and about its license."""
    if header.get("general.name"):
        maker = f" of {_plain(header['general.organization'])}" if header.get("general.organization") else ""
        yield f"its header names {_plain(header['general.name'])}{maker}"
    elif not header and (name := _name_in_config(folder)):
        yield f"its config.json names {name}"
    if isinstance(card.get("base_model"), str):
        yield f"its card names {_plain(card['base_model'])} as its base model"
    for file in sorted(folder.glob("LICEN[CS]E*")):
        yield f"its folder has a file {_plain(file.name)}"


def _name_in_config(folder: Path) -> str | None:
    """Return the id on the hub from which a model was loaded before it was saved; a path says nothing to others."""
    try:
        name = json.loads((folder / "config.json").read_text()).get("_name_or_path")
    except (OSError, ValueError):
        return None
    return name if isinstance(name, str) and "/" in name and hub_id(name) else None


def _plain(text: Any) -> str:
    """Return the beginning of `text` on one line, without what Markdown would take for markup."""
    return " ".join(re.sub(r"[^\w\s.,:;/()@+-]", "", str(text)).split())[:200]
