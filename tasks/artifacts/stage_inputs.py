"""What a stage was run with: its parameters and the digests of its code, as the stage itself found them.

DVC's entry of a stage says which inputs its outputs belong to. This record says it from inside the stage, so that an
entry which no run of the stage wrote can be told from one that a run did: `eckart verify`. No stage reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

from tasks.artifacts.names import candidate_of, recipe_and_keep
from tasks.config.schema import PARAMS
from tasks.runtime.code_folders import PIPELINE, is_code

FOLDER = Path("reports/inputs")
_VARIABLE = re.compile(r"\$\{([\w.]+)\}")  # of dvc.yaml: a parameter, or the item of a matrix


class Inputs(BaseModel):
    """Parameters by their dotted paths, and MD5 digests of code by path.

    A recipe's name is `*`: a stage that computes the same under another name writes the same record.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: dict[str, Any]
    code: dict[str, str]


def file_of(stage: str) -> Path:
    """Where a stage of dvc.yaml, such as `finetune@svd-0.5`, records what it was run with."""
    return FOLDER / f"{stage.replace('@', '/')}.json"


def found(stage: str) -> Inputs | None:
    """What the stage depends on by dvc.yaml, as it is now; None where there is no dvc.yaml, and so no record."""
    if not PIPELINE.exists():
        return None
    described = _loaded(PIPELINE)["stages"][stage.partition("@")[0]]
    code = {path: _digest(Path(path)) for path in described["deps"] if is_code(path)}
    return Inputs(parameters=dict(_parameters(described.get("params", []), stage)), code=code)


def write(stage: str, inputs: Inputs) -> None:
    """Write the record of the stage."""
    file = file_of(stage)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(inputs.model_dump(), indent=1, sort_keys=True) + "\n")


def nameless(parameter: str, stage: str) -> str:
    """The path of a parameter without the name of the stage's recipe."""
    if not (candidate := candidate_of(stage)):
        return parameter
    own = f"recipes.{recipe_and_keep(candidate)[0]}."
    return f"recipes.*.{parameter.removeprefix(own)}" if parameter.startswith(own) else parameter


def _parameters(described: list[Any], stage: str) -> Iterator[tuple[str, Any]]:
    """Those that dvc.yaml names, of params.yaml and of other files."""
    values: dict[str, Any] = _loaded(PARAMS)
    values["item"] = dict(zip(("recipe", "keep"), recipe_and_keep(candidate_of(stage)), strict=True))
    for item in described:
        for file, paths in item.items() if isinstance(item, Mapping) else [(str(PARAMS), [item])]:
            content = _loaded(Path(file))
            for path in paths:
                named = _VARIABLE.sub(lambda found: str(_at(values, found[1])), path)
                yield nameless(named, stage), _at(content, named)


def _at(content: Any, path: str) -> Any:
    for key in path.split("."):
        content = content[key]
    return content


def _loaded(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


def _digest(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
