"""Check of the whole params.yaml before anything runs. One message lists all mistakes.

The types of recipes import torch, which takes seconds, so they are imported only when the file must be checked: a file
without mistakes is not checked again until the file or the code changes. `python -m tasks.config.validation` runs the
check alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import pydantic
from pydantic import TypeAdapter, ValidationError

from tasks.config import params_file, schema
from tasks.config.contradictions import contradictions
from tasks.config.mistakes import describe, report
from tasks.config.params_file import PARAMS, ParamsError
from tasks.runtime.code_folders import all_code

if TYPE_CHECKING:
    from eckart.recipe import Recipe

_GOOD = Path(".eckart/params-found-good")
_LONGEST = 50  # most characters of a recipe's name


SECTIONS: dict[str, Any] = {
    name: kind
    for name, kind in get_type_hints(schema.Params, include_extras=True).items()
    if name in schema.Params.model_fields and name not in ("recipes", "recovery")
}


def check() -> dict[str, Any]:
    """Check params.yaml and return its sections as typed objects, without `recipes` and `recovery`.

    Raises:
        ParamsError: there are mistakes; the message lists all, with their paths and corrections.
    """
    content = params_file.read()
    if not found_good(content):
        if lines := mistakes(content):
            raise ParamsError(report(PARAMS, lines))
        with suppress(OSError):  # if the folder cannot be written, the next run checks again
            _GOOD.parent.mkdir(exist_ok=True)
            _GOOD.write_text(_state(content))
    tree = params_file.sections(content)
    return {name: params_file.parse(tree[name], kind, PARAMS, name) for name, kind in SECTIONS.items()}


def found_good(content: Mapping[str, Any]) -> bool:
    """Whether an earlier check with the same code found no mistakes in `content`. Imports nothing slow."""
    try:
        return _GOOD.read_text() == _state(content)
    except (OSError, UnicodeDecodeError):  # no readable record of a check
        return False


def _state(content: Mapping[str, Any]) -> str:
    """Return a digest of params.yaml's content and of all code that decides whether it has mistakes."""
    return hashlib.sha256(f"{pydantic.VERSION} {all_code()} {content}".encode()).hexdigest()


def mistakes(content: Mapping[str, Any]) -> list[str]:
    """Return a line for each mistake in `content`, which was read from a params.yaml."""
    lines: list[str] = []
    tree = params_file.sections(content)
    typed = {name: _parsed(content.get(name, tree[name]), kind, name, lines) for name, kind in SECTIONS.items()}
    typed["recipes"] = _recipes(tree["recipes"], tree["recovery"], lines)
    sections = schema.Params.model_fields
    for name in [name for name in content if name not in sections]:
        similar = get_close_matches(name, [other for other in sections if other not in content], n=1)
        lines.append(f"{name}: is unknown; write {similar[0]}" if similar else f"{name}: is unknown; remove it")
    return [*lines, *contradictions(typed, tree, content)]


def typed_section(name: str) -> Any:
    """Return one section of params.yaml as a typed object, even if other sections have mistakes.

    Raises:
        ParamsError: the section has mistakes; the message lists all.
    """
    return params_file.parse(params_file.sections(params_file.read())[name], SECTIONS[name], PARAMS, name)


def _parsed(content: Any, kind: Any, prefix: str, lines: list[str]) -> Any:
    """Parse `content` as the type `kind`. If it has mistakes, append them to `lines` and return None."""
    try:
        return TypeAdapter(kind).validate_json(params_file.as_json(content), strict=True)
    except ValidationError as error:
        lines += describe(error, content, prefix, kind)
        return None


def _recipes(own: Any, recovery: Any, lines: list[str]) -> dict[str, Recipe | None]:
    """Parse the built-in recipes and those of params.yaml, `own`. Append mistakes to `lines`.

    Args:
        recovery: the section recovery of params.yaml: recovery settings for all recipes, which their own override.

    Returns:
        Name → recipe, or None if the recipe has mistakes.
    """
    from eckart.recipe import Recipe, complete, recipes
    from eckart.recovery import Recovery

    if not isinstance(own, dict):
        lines.append(f"recipes: is {json.dumps(own, default=str)}; write recipes by name, or remove it")
        own = {}
    # The name becomes part of stage names, folders and registry names.
    lines += [
        f"recipes.{name}: is not a valid name; write at most {_LONGEST} letters, digits and _"
        for name in own
        if not re.fullmatch(rf"\w{{1,{_LONGEST}}}", name)
    ]
    before = len(lines)
    common = complete({"recovery": recovery})["recovery"] if isinstance(recovery, dict | str) else recovery
    _parsed(common, Recovery, "recovery", lines)
    complete_recipes = recipes(own, recovery if len(lines) == before else {})
    return {name: _parsed(parts, Recipe, f"recipes.{name}", lines) for name, parts in complete_recipes.items()}


if __name__ == "__main__":
    try:
        check()
    except ParamsError as error:
        sys.exit(str(error))
