"""Changes to params.yaml that leave its comments, its order and its layout as they are."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from tasks.config.schema import PARAMS


def update(changes: Mapping[str, Any], path: Path = PARAMS) -> None:
    """Write `changes`, mappings within mappings, over what `path` states."""
    content = yaml().load(path.read_text())
    change(content, changes)
    text = io.StringIO()
    yaml().dump(content, text)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text.getvalue())
    os.replace(new, path)  # a run that reads it meanwhile sees one or the other


def change(content: MutableMapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Write `changes`, mappings within mappings, over `content`."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(content.get(key), MutableMapping):
            change(content[key], value)
        elif isinstance(value, list) and isinstance(content.get(key), list):
            content[key][:] = value  # the list stays, with how it is written
        elif key not in content and isinstance(content, CommentedMap) and not isinstance(value, Mapping):
            content.insert(0, key, value)  # after the last key it would stand below the empty line that ends a section
        else:
            content[key] = value


def yaml() -> YAML:
    """Return a reader and writer of YAML as params.yaml is written: long lines, null in letters."""
    editor = YAML()
    editor.width = 4096
    editor.preserve_quotes = True
    editor.indent(mapping=2, sequence=4, offset=2)
    editor.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    return editor
