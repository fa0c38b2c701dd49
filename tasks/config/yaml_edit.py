"""Edits of params.yaml that keep its comments, order and layout."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from tasks.artifacts import atomic_files
from tasks.config.params_file import PARAMS

_NEEDS_QUOTES = re.compile("[?:\x85]")


def update(changes: Mapping[str, Any], path: Path = PARAMS) -> None:
    """Write `changes`, which may be nested, into the YAML file `path`. The rest of the file does not change."""
    content = yaml().load(path.read_text())
    change(content, changes)
    text = io.StringIO()
    yaml().dump(content, text)
    atomic_files.write(path, text.getvalue())


def change(content: MutableMapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Write `changes`, which may be nested, into the mapping `content`. What is empty replaces what is there."""
    for key, value in _quoted(changes).items():
        if isinstance(value, Mapping) and value and isinstance(content.get(key), MutableMapping):
            change(content[key], value)
        elif isinstance(value, list) and value and isinstance(content.get(key), list):
            content[key][:] = value  # keeps the list object, which stores its layout
        elif key not in content and isinstance(content, CommentedMap) and not isinstance(value, Mapping):
            content.insert(0, key, value)  # as the last key, it would come after the empty line that ends the section
        else:
            content[key] = value


def _quoted(value: Any) -> Any:
    """Put text into quotes that ruamel could not read back without them, such as `{label: Positive?}`."""
    if isinstance(value, Mapping):
        return {key: _quoted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_quoted(part) for part in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) and _NEEDS_QUOTES.search(value) else value


def yaml() -> YAML:
    """Return a YAML reader and writer in the style of params.yaml: it wraps no lines, and writes null as a word."""
    editor = YAML()
    editor.width = 4096
    editor.preserve_quotes = True
    editor.indent(mapping=2, sequence=4, offset=2)
    editor.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    return editor
