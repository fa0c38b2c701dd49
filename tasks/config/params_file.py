"""Read params.yaml and resolved.yaml, fill in defaults, and parse sections as the types of tasks/config/schema.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from ruamel.yaml import YAML

from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import candidate_name
from tasks.config.mistakes import describe, report
from tasks.config.schema import Export, Params
from tasks.runtime.code_folders import PIPELINE

PARAMS = Path("params.yaml")
RESOLVED = Path("resolved.yaml")
"""File with the parameters that every other stage reads; the stage `resolve` writes it from params.yaml."""

T = TypeVar("T")


class ParamsError(EckartError):
    """Mistakes in params.yaml; the message lists all of them."""


def with_defaults(content: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Return `content` with the defaults of the type `kind` added, in the order of its fields. Present values stay."""
    result: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner = content.get(name, {})
            result[name] = with_defaults(inner, field.annotation) if isinstance(inner, Mapping) else inner
        elif name in content:
            result[name] = content[name]
        elif not field.is_required():
            result[name] = to_jsonable_python(field.default)
    return {**result, **{name: value for name, value in content.items() if name not in result}}


def sections(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return params.yaml with all defaults filled in, except in `recipes` and `recovery`."""
    tree = with_defaults(content, Params)
    study, promotion = tree["study"], tree["promotion"]
    if isinstance(study, dict) and isinstance(promotion, dict) and promotion["model"] == "":
        promotion["model"] = study.get("name")
    return tree


def keeps() -> tuple[str, ...]:
    """Return the keeps as params.yaml writes them (1, not 1.0), since they are parts of file names."""
    return tuple(map(str, section("study.keeps", tuple[int | float, ...])))


def exported() -> tuple[str, ...]:
    """Return the names of the candidates that are exported."""
    return tuple(candidate_name(recipe, keep) for recipe in section("export", Export).recipes for keep in keeps())


def read(path: Path = PARAMS) -> dict[str, Any]:
    """Read params.yaml as plain data.

    Raises:
        ParamsError: the file is missing or is not a YAML mapping.
    """
    try:
        content = deepcopy(_loaded(path.read_text()))
    except FileNotFoundError as error:
        raise ParamsError(
            f"{path} does not exist: run this in the root of a workspace; `eckart init FOLDER` makes one"
        ) from error
    except OSError:
        raise
    except Exception as error:  # any type: Python refuses the values of some tags and dates
        raise ParamsError(f"{path} is not valid YAML: {error or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise ParamsError(f"{path} must be a mapping of sections, not {type(content).__name__}")
    if lines := list(_invalid_keys(content)):
        raise ParamsError(report(path, lines))
    return content


@lru_cache(maxsize=4)
def _loaded(text: str) -> Any:
    """Load YAML, once for each text: a stage asks for a dozen sections of one file."""
    return YAML(typ="safe").load(text)


def _invalid_keys(content: Any, above: tuple[Any, ...] = (), within: tuple[int, ...] = ()) -> Iterator[str]:
    """Yield a line for each key that is not a printable word, and each value that contains itself; YAML allows both.

    Args:
        above: keys on the path to `content`.
        within: ids of the values that contain `content`.
    """
    if id(content) in within:
        yield f"{'.'.join(map(str, above))}: contains itself; write out its value"
        return
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        place = (*above, key)
        if isinstance(content, dict) and not (isinstance(key, str) and key.isprintable() and key.strip()):
            yield f"{'.'.join(map(str, place))}: is not a valid key; write a word, in quotes if it is a number"
        else:
            yield from _invalid_keys(value, place, (*within, id(content)))


@overload
def section(name: str, kind: type[T]) -> T: ...
@overload
def section(name: str, kind: Any) -> Any: ...
def section(name: str, kind: Any) -> Any:
    """Return the resolved parameters at the dotted path `name`, parsed as the type `kind`.

    Raises:
        ParamsError: these parameters have mistakes; the message lists all of them.
    """
    content: Any = resolved()
    for key in name.split("."):
        if not isinstance(content, dict) or key not in content:
            raise ParamsError(report(PARAMS, [f"{name}: is missing; add it"]))
        content = content[key]
    return parse(content, kind, PARAMS, name)


def resolved() -> dict[str, Any]:
    """Load the parameters that stages read, from resolved.yaml; if it and dvc.yaml are missing, from params.yaml.

    Raises:
        ParamsError: the file is missing or is not a YAML mapping.
    """
    if PIPELINE.exists() and not RESOLVED.exists():
        raise ParamsError(f"{RESOLVED} does not exist: `eckart run` or `dvc repro resolve` writes it from {PARAMS}")
    return read(RESOLVED) if RESOLVED.exists() else sections(read())


@overload
def parse(content: Any, kind: type[T], path: Path, prefix: str = "") -> T: ...
@overload
def parse(content: Any, kind: Any, path: Path, prefix: str = "") -> Any: ...
def parse(content: Any, kind: Any, path: Path, prefix: str = "") -> Any:
    """Parse `content` as the type `kind`, strictly: a string is not accepted for a number.

    Raises:
        ParamsError: there are mistakes. The message has a line for each, with its path and a correction.
    """
    try:
        return TypeAdapter(kind).validate_json(as_json(content), strict=True)
    except ValidationError as error:
        raise ParamsError(report(path, describe(error, content, prefix, kind))) from error


def as_json(content: Any) -> str:
    """Return YAML content as JSON, since pydantic's strict mode accepts a list for a tuple only if it parses JSON.

    A value that JSON cannot express, such as a date, becomes a mapping that every type refuses, with the value's path.
    """
    return json.dumps(content, default=lambda value: {"neither text nor number": str(value)})
