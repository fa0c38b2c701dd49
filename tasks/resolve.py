"""Stage resolve: write resolved.yaml with all parameters, defaults included, and a digest of each stage's code."""

from __future__ import annotations

import hashlib
import io
import sys
from typing import Any

from ruamel.yaml import YAML

from tasks.artifacts import atomic_files, stage_inputs
from tasks.artifacts.errors import EckartError
from tasks.config import validation
from tasks.config.params_file import PARAMS, RESOLVED, read
from tasks.config.resolved import resolve
from tasks.runtime.code_digests import CodeChanged, code_of_stages
from tasks.runtime.code_folders import CODE, PIPELINE, all_code


def main() -> None:
    """Check params.yaml and write resolved.yaml. Both are in the working directory, the root of a workspace.

    Raises:
        CodeChanged: code.yaml exists and has another digest than the installed code.
    """
    # Without this check, DVC would record results of the installed code as results of the code that code.yaml names.
    if CODE.exists() and YAML(typ="safe").load(CODE.read_text())["digest"] != all_code():
        raise CodeChanged(f"{CODE} names another eckart than is installed: `eckart run` brings it up to date")
    validation.check()
    source = hashlib.md5(PARAMS.read_bytes(), usedforsecurity=False).hexdigest()
    parameters = _with_used_recipes(resolve(read()))
    stages = YAML(typ="safe").load(PIPELINE.read_text())["stages"]
    text = io.StringIO()
    text.write(f"# Written by the stage `resolve` from params.yaml and code {all_code()}; edits are overwritten.\n")
    YAML().dump({**parameters, "code": code_of_stages(stages, parameters)}, text)
    atomic_files.write(RESOLVED, text.getvalue())
    stage_inputs.write("resolve", stage_inputs.Inputs(parameters={str(PARAMS): source}))


def _with_used_recipes(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters without unused recipes, and with the control's recovery settings as `control_recovery`."""
    study, recipes = parameters["study"], parameters["recipes"]
    used = dict.fromkeys([*study["recipes"], *filter(None, [study["control"]])])
    return {
        **parameters,
        "recipes": {name: recipes[name] for name in used},
        "control_recovery": recipes[study["control"]]["recovery"] if study["control"] else None,
    }


if __name__ == "__main__":
    try:
        main()
    except EckartError as error:
        sys.exit(f"resolve: {error}")
