"""Write resolved.yaml: the parameters with all defaults filled in, and digests of the code that each stage can run."""

from __future__ import annotations

import sys

from ruamel.yaml import YAML

from tasks.artifacts.errors import EckartError
from tasks.config import resolved, validation
from tasks.config.schema import read
from tasks.runtime.code_digests import CodeChanged, code_of_stages
from tasks.runtime.code_folders import CODE, PIPELINE, all_code


def main() -> None:
    """Check params.yaml and write resolved.yaml, in the root of a workspace."""
    _check_installed()
    validation.check()
    parameters = resolved.resolve(read())
    stages = YAML(typ="safe").load(PIPELINE.read_text())["stages"]
    resolved.write({**parameters, "code": code_of_stages(stages, parameters)})


def _check_installed() -> None:
    """Check that the installed code is what code.yaml names, in a workspace that has such a file.

    Raises:
        CodeChanged: it is other code, and DVC would take the result for that of the code that is named.
    """
    if CODE.exists() and YAML(typ="safe").load(CODE.read_text())["digest"] != all_code():
        raise CodeChanged(f"{CODE} names another eckart than is installed: `eckart run` brings it up to date")


if __name__ == "__main__":
    try:
        main()
    except EckartError as error:
        sys.exit(f"resolve: {error}")
