"""Write the output of `eckart params`, and docs/reference/params.md, from the descriptions in the types of params.yaml.

`python -m tasks.config.reference` prints the page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from eckart.factorization.factorize import InOrder
from eckart.factorization.refinement import Refine
from eckart.factorization.weightings import Weighting
from eckart.published_recipes import PUBLISHED
from eckart.ranks import RankSearch
from eckart.recipe import PARTS, Recipe
from eckart.recovery import Recovery
from eckart.recovery.distillation import Distillation
from eckart.residual import Residual
from eckart.shaping import Shaping
from tasks.artifacts.generation import Generation
from tasks.config.mistakes import kinds_of, models_in
from tasks.config.params_file import ParamsError
from tasks.config.schema import Goal, NewModel, Params, Text

_COLUMN = 40  # where comments begin
_WIDTH = 120
_FAMILIES = {
    "shaping": Shaping,
    "weighting": Weighting,
    "ranks": RankSearch,
    "residual": Residual,
    "recovery": Recovery,
}


def text(tree: Mapping[str, Any], path: str = "") -> str:
    """Return resolved parameters as YAML. A comment describes each parameter where it first occurs.

    Args:
        tree: all parameters, as `resolve` returns them.
        path: dotted path of the part to return; empty: all parameters.

    Raises:
        ParamsError: there is no parameter at `path`.
    """
    content: Any = tree
    models: list[type[BaseModel]] = [Params]
    for key in filter(None, path.split(".")):
        if not isinstance(content, Mapping) or key not in content:
            near = get_close_matches(key, content, n=1) if isinstance(content, Mapping) else []
            raise ParamsError(
                f"there is no parameter {path}: " + (f"write {near[0]}" if near else "see `eckart params`")
            )
        part = {key: content[key]}
        content, here, models = content[key], models, _models_at(models, key, content[key])
    lines = _lines(tree, [Params], "", set()) if not path else _lines(part, here, "", set())
    return "\n".join(lines) + "\n"


def _models_at(models: list[type[BaseModel]], key: str, value: Any) -> list[type[BaseModel]]:
    """Return the types that `value` may have; `key` is its key in a mapping that has one of the types `models`."""
    if models == [Params] and key in ("recipes", "recovery"):
        types: list[type[BaseModel]] = [Recipe] if key == "recipes" else models_in(Recovery)
    elif models in ([Recipe], [Text]) and key not in models[0].model_fields:
        return models  # the name of a recipe, or of a text
    else:
        types = [inner for model in models if key in model.model_fields for inner in _inner(model, key)]
    kind = value.get("kind") if isinstance(value, Mapping) else None
    return [model for model in types if kind in kinds_of(model)] or types


def _inner(model: type[BaseModel], key: str) -> list[type[BaseModel]]:
    return models_in(model.model_fields[key].annotation)


def _lines(
    content: Mapping[str, Any], models: list[type[BaseModel]], indent: str, mentioned: set[tuple[type, str]]
) -> Iterator[str]:
    for key, value in content.items():
        comment = _comment(models, key, mentioned)
        if isinstance(value, Mapping) and value:
            yield from _commented(f"{indent}{key}:", comment, indent)
            yield from _lines(value, _models_at(models, key, value), indent + "  ", mentioned)
        else:
            yield from _commented(f"{indent}{key}: {_flow(value)}", comment, indent)
        if not indent and len(content) > 1:
            yield ""


def _comment(models: list[type[BaseModel]], key: str, mentioned: set[tuple[type, str]]) -> str:
    if models == [Recipe] and key in PUBLISHED:
        return PUBLISHED[key].title
    for model in models:
        if key in model.model_fields and (model, key) not in mentioned:
            mentioned.add((model, key))
            return model.model_fields[key].description or ""
    return ""


def _commented(line: str, comment: str, indent: str) -> Iterator[str]:
    beside = f"{line:<{_COLUMN}}  # {comment}"
    if comment and len(beside) > _WIDTH:
        yield from textwrap.wrap(comment, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    yield beside if comment and len(beside) <= _WIDTH else line


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
        .removesuffix("...\n")
        .strip()
    )


def page() -> str:
    """Return the text of docs/reference/params.md."""
    lines = [
        "# Parameters",
        "",
        "<!-- Written by `make docs` from the types; edits are overwritten. -->",
        "",
        "`params.yaml` states what differs from these defaults. It must have `study.name`, `study.recipes`,",
        "`study.keeps` and `export.recipes`. `eckart params` prints all parameters of a study, and",
        "`eckart params recipes.kfac` a part of them.",
        "",
        "Where a parameter has a `kind`, one word is enough: `weighting: inputs` means `weighting: {kind: inputs}`.",
    ]
    for name, field in Params.model_fields.items():
        if name not in ("recipes", "recovery"):
            inner = _inner(Params, name)
            lines += ["", f"## {name}", "", f"{_sentence(field.description)}", ""]
            lines += _table(inner[0]) if inner else [f"Default: `{_flow(field.default)}`."]
        if name == "study":
            lines += ["", "### Goals", "", "An entry of `study.goals` has exactly one limit.", "", *_table(Goal)]
        if name == "data":
            lines += ["", "Keys of `data.generation`:", "", *_table(Generation)]
        if name == "model":
            lines += ["", "### New models", "", "Keys of `model.new`.", "", *_table(NewModel)]
        if name == "evaluate":
            texts = "Keys of each text in `evaluate.texts` and `data.calibration_texts`."
            lines += ["", "### Texts", "", texts, "", *_table(Text)]
    lines += ["", "## recipes", "", f"{_sentence(Params.model_fields['recipes'].description)}", "", *_built_in()]
    lines += ["", "A recipe has these parts; the sections below describe the kinds of each.", "", *_table(Recipe)]
    lines += ["", "Keys of `sequential`:", "", *_table(InOrder)]
    lines += ["", "Keys of `sequential.refine`:", "", *_table(Refine)]
    for name, family in _FAMILIES.items():
        lines += ["", f"## {name}", "", f"{_sentence(Recipe.model_fields[name].description)}"]
        for method in models_in(family):
            kinds = " or ".join(f"`{kind}`" for kind in kinds_of(method))
            lines += ["", f"{kinds}: {method.model_fields['kind'].description}.", "", *_table(method)]
    lines += ["", "Keys of `distillation`:", "", *_table(Distillation)]
    return "\n".join(line for place, line in enumerate(lines) if line or lines[place - 1]) + "\n"


def _sentence(words: str | None) -> str:
    return f"{(words or '')[:1].upper()}{(words or '')[1:]}."


def _built_in() -> list[str]:
    rows = [
        f"| `{name}` | {f'[{recipe.title}]({recipe.paper})' if recipe.paper else recipe.title} "
        f"| `{_flow(dict(recipe.parts))}` |"
        for name, recipe in PUBLISHED.items()
    ]
    return ["| built-in recipe | method | what differs from the defaults |", "|---|---|---|", *rows]


def _table(model: type[BaseModel]) -> list[str]:
    rows = [f"| `{name}` | {default} | {meaning} |" for name, default, meaning in _rows(model) if name != "kind"]
    return ["| key | default | meaning |", "|---|---|---|", *rows] if rows else []


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        inner = _inner(model, name)
        if isinstance(field.annotation, type) and inner and not kinds_of(inner[0]):
            yield from _rows(inner[0], f"{prefix}{name}.")
            continue
        value = None if field.is_required() else to_jsonable_python(field.default)
        if isinstance(value, dict) and name in PARTS:
            value = value["kind"]
        default = "required" if field.is_required() else f"`{_flow(value)}`"
        yield f"{prefix}{name}", default, (field.description or "").replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
