"""Record of the parameters with which a stage ran, one file for each stage.

A stage's entry in dvc.lock also says from which inputs its outputs were made, but DVC can write it without running the
stage (`dvc commit`). Only a run of the stage writes this record, so `eckart verify` detects such entries by comparing
the two. No stage reads the record.
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
from tasks.config import params_file
from tasks.runtime.code_folders import PIPELINE

FOLDER = Path("reports/inputs")
_VARIABLE = re.compile(r"\$\{([\w.]+)\}")  # a variable in dvc.yaml: a parameter, or the item of a matrix


class Inputs(BaseModel):
    """The parameters that a stage reads, dotted path → value, and the digest of its code under `code.` and its name.

    In each path `*` stands for the recipe's name, so that recipes that differ only in their names have equal inputs.
    The stage `resolve` reads params.yaml as a whole: its only entry is the digest of that file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: dict[str, Any]


def file_of(stage: str) -> Path:
    """Return the path of the record of a stage of dvc.yaml, such as `finetune@svd-0.5`."""
    return FOLDER / f"{stage.replace('@', '/')}.json"


def load(stage: str) -> Inputs | None:
    """Return the current values of the parameters that dvc.yaml lists for the stage; None if there is no dvc.yaml."""
    if not PIPELINE.exists():
        return None
    described = YAML(typ="safe").load(PIPELINE.read_text())["stages"][stage.partition("@")[0]]
    paths = [path for files in described.get("params", []) for path in files[str(params_file.RESOLVED)]]
    return Inputs(parameters=dict(_parameters(paths, stage)))


def write(stage: str, inputs: Inputs) -> None:
    """Write `inputs` to the record of the stage."""
    file = file_of(stage)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # it may be a link into DVC's cache
    file.write_text(json.dumps(inputs.model_dump(), indent=1, sort_keys=True) + "\n")


def without_recipe_name(parameter: str, stage: str) -> str:
    """Return the dotted path of a parameter with `*` in place of the name of the stage's recipe."""
    if not (candidate := candidate_of(stage)):
        return parameter
    recipe = re.escape(recipe_and_keep(candidate)[0])
    return re.sub(rf"^(recipes|code\.\w+)\.{recipe}(?=\.|$)", r"\1.*", parameter)


def _parameters(paths: list[str], stage: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each parameter, after filling in the variables of dvc.yaml in `paths`."""
    values = params_file.resolved()
    item = dict(zip(("recipe", "keep"), recipe_and_keep(candidate_of(stage)), strict=True))
    for path in paths:
        named = _VARIABLE.sub(lambda variable: str(_at({**values, "item": item}, variable[1])), path)
        yield without_recipe_name(named, stage), _at(values, named)


def _at(content: Any, path: str) -> Any:
    for key in path.split("."):
        content = content[key]
    return content
