"""The record of the parameters that a stage was run with, as the stage itself read them.

DVC's entry of a stage says which inputs its outputs belong to. This record says it from inside the stage, so that
`eckart verify` can tell an entry that no run wrote from one that a run did. No stage reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

from tasks.artifacts.names import candidate_of, recipe_and_keep
from tasks.config import schema
from tasks.runtime.code_folders import PIPELINE

FOLDER = Path("reports/inputs")
_VARIABLE = re.compile(r"\$\{([\w.]+)\}")  # of dvc.yaml: a parameter, or the item of a matrix


class Inputs(BaseModel):
    """Parameters by their dotted paths, with `code.STAGE`, the digest of the code; for `resolve`, that of params.yaml.

    A recipe's name is `*`: a stage that computes the same under another name writes the same record.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: dict[str, Any]


def file_of(stage: str) -> Path:
    """Return the file in which a stage of dvc.yaml, such as `finetune@svd-0.5`, records what it was run with."""
    return FOLDER / f"{stage.replace('@', '/')}.json"


def load(stage: str) -> Inputs | None:
    """Load the parameters that the stage depends on by dvc.yaml; None in a folder without a pipeline."""
    if not PIPELINE.exists():
        return None
    described = YAML(typ="safe").load(PIPELINE.read_text())["stages"][stage.partition("@")[0]]
    paths = [path for files in described.get("params", []) for path in files[str(schema.RESOLVED)]]
    return Inputs(parameters=dict(_parameters(paths, stage)))


def write(stage: str, inputs: Inputs) -> None:
    """Write the record of the stage."""
    file = file_of(stage)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # it may be a link into DVC's cache
    file.write_text(json.dumps(inputs.model_dump(), indent=1, sort_keys=True) + "\n")


def nameless(parameter: str, stage: str) -> str:
    """Return the path of a parameter with `*` for the name of the stage's recipe."""
    if not (candidate := candidate_of(stage)):
        return parameter
    recipe = re.escape(recipe_and_keep(candidate)[0])
    return re.sub(rf"^(recipes|code\.\w+)\.{recipe}(?=\.|$)", r"\1.*", parameter)


def _parameters(paths: list[str], stage: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each parameter."""
    values = schema.resolved()
    item = dict(zip(("recipe", "keep"), recipe_and_keep(candidate_of(stage)), strict=True))
    for path in paths:
        named = _VARIABLE.sub(lambda variable: str(_at({**values, "item": item}, variable[1])), path)
        yield nameless(named, stage), _at(values, named)


def _at(content: Any, path: str) -> Any:
    for key in path.split("."):
        content = content[key]
    return content
