"""The parameters of a study with every default filled in, and the file that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML

from tasks.config.schema import RESOLVED

_NOTE = "# Written by the stage `resolve` from params.yaml and the code; edits are overwritten.\n"


def resolve(content: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of params.yaml.

    Args:
        content: params.yaml as plain data, without mistakes.

    Returns:
        The whole tree as plain data, in the order of the types.
    """
    return dict(content)


def write(content: Mapping[str, Any]) -> None:
    """Write resolved.yaml in the working directory; the file may be a link into DVC's cache, so it is replaced."""
    new = RESOLVED.with_name(f"{RESOLVED.name}.new")
    with new.open("w") as file:
        file.write(_NOTE)
        YAML().dump(dict(content), file)
    new.replace(RESOLVED)
