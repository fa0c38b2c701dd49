"""Messages about mistakes in parameters: where each is, and how to correct it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_LONGEST = 200  # most characters of a value that a message quotes
_RENAMED = {  # key of an earlier version, as a shell pattern → the last part of its path now
    "importance.evidence": "statistics",
    "check.fewest_rows": "fewest_examples",
    "check.drift_rows": "drift_examples",
    "recipes.*.ranks.rows": "examples",  # also in ranks.ranks
}


def report(path: Path, lines: Iterable[str]) -> str:
    """Return the message of a ParamsError: one mistake on each line, with unprintable characters escaped."""
    printable = ("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line) for line in lines)
    return "\n  ".join([f"{path} has mistakes:", *printable])


def describe(error: ValidationError, content: Any, prefix: str, kind: Any) -> list[str]:
    """Return a line `path: the mistake; the correction` for each mistake in an `error` of pydantic.

    Args:
        content: the data that were parsed.
        prefix: dotted path of `content` in params.yaml.
        kind: the type that `content` should have.
    """
    found = error.errors()
    # Neither a list that is too short only because its items are wrong nor the value of a wrong key is one of its own.
    wrong = {details["loc"][:end] for details in found for end in range(len(details["loc"]))}
    wrong_keys = {details["loc"][:-1] for details in found if details["loc"][-1:] == ("[key]",)}
    lines = []
    for details in found:
        if details["loc"] in wrong_keys or (details["type"] == "too_short" and details["loc"] in wrong):
            continue
        keys, free = _located(details["loc"], content, kind)
        path = ".".join(filter(None, [prefix, *keys]))
        renamed = next((name for pattern, name in _RENAMED.items() if fnmatchcase(path, pattern)), None)
        if renamed:
            lines.append(f"{path}: was renamed; write {'.'.join([prefix, *keys[:-1], renamed])}")
        else:
            lines.append(f"{path}: {_advice(details, free)}")
    return lines


def models_in(kind: Any) -> list[type[BaseModel]]:
    """Return the pydantic types in an annotation, such as the members of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in models_in(part)]


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the values of `kind` that select the method `model`; empty if the type has no field `kind`."""
    return get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()


def _located(loc: tuple[int | str, ...], content: Any, kind: Any) -> tuple[list[str], list[str]]:
    """Return the path of a mistake as a list of keys, and the valid keys that the mapping around the mistake lacks.

    Args:
        loc: path in pydantic's error. It also contains the tag of each union member, which the result leaves out.
    """
    path: list[str] = []
    free: list[str] = []
    models, tagged = models_in(kind), None
    for position, key in enumerate(loc):
        if isinstance(content, dict) and content.get("kind") == key and content is not tagged:
            tagged = content  # the tag comes first, even where a key has the same name
            models = [model for model in models if key in kinds_of(model)]
            continue
        present = content if isinstance(content, dict) else range(len(content) if isinstance(content, list) else 0)
        free = [name for model in models for name in model.model_fields if name not in present]
        if key in present or (position == len(loc) - 1 and key != "[key]"):
            path.append(str(key))
        if key in present:
            content = content[key]
            fields = [model.model_fields[key] for model in models if key in model.model_fields]
            models = [inner for field in fields for inner in models_in(field.annotation)]
    return path, free


def _advice(details: ErrorDetails, free: list[str]) -> str:
    kind, message = details["type"], details["msg"]
    if kind == "missing":
        return "is missing; add it"
    if kind == "extra_forbidden":
        similar = get_close_matches(str(details["loc"][-1]), free, n=1)
        return f"is unknown; write {similar[0]}" if similar else "is unknown; remove it"
    if kind == "union_tag_invalid":
        return f"kind is {details['ctx']['tag']!r}; write one of {details['ctx']['expected_tags']}"
    if kind == "union_tag_not_found":
        return "has no kind; add it"
    if kind == "too_short":
        return "is empty; add an item"
    if kind in ("password", "goal", "model"):
        return message  # without the value, which may be secret
    value = json.dumps(details["input"], default=str, ensure_ascii=False)
    shown = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    return f"is {shown}; write {message.removeprefix('Input should be ')}"
