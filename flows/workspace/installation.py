"""Workspaces without code: what their stages depend on is the installed code.

There dvc.yaml names no files of code. Each stage depends on its entry in code.yaml, a digest of the code that it can
run, and both files are derived from what is installed. A clone of the repository has its own code, and no code.yaml.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tasks.runtime.code_folders import PIPELINE, code_folders, is_code

log = logging.getLogger(__name__)

HOME = Path(__file__).resolve().parents[2]
"""Holds this code, and dvc.yaml as the repository has it."""
CODE = Path("code.yaml")

_NOTE = "# Written by `eckart`, by what is installed; edits are overwritten.\n"


def refresh() -> None:
    """Bring dvc.yaml and code.yaml of the working directory up to the installed code; a clone has none, and stays."""
    if not CODE.exists():
        return
    for path, text in derived().items():
        if path.read_text() != text:
            log.warning("%s follows the installed eckart %s: commit it", path, version("eckart"))
            replace(path, text)


def derived() -> dict[Path, str]:
    """The files that follow from the installed code, by their paths in a workspace."""
    return {PIPELINE: _dumped(_pipeline()), CODE: _dumped({"eckart": version("eckart"), "stages": _digests()})}


def other_code(stage: str) -> str | None:
    """That the workspace asks for other code of `stage` than is installed, and what to do; None where it does not."""
    if not CODE.exists():
        return None
    recorded = YAML(typ="safe").load(CODE.read_text())
    if recorded["stages"].get(stage) == _digests().get(stage):
        return None
    return (
        f"its code in the installed eckart {version('eckart')} is other than {CODE} of this workspace has it, of "
        f"{recorded['eckart']}: install that one again, or take the present code with `eckart run`"
    )


def replace(path: Path, text: str) -> None:
    """Write `text`; who reads meanwhile finds the old or the new."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def _source() -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load((HOME / PIPELINE).read_text())
    return content


def _pipeline() -> dict[str, Any]:
    """dvc.yaml of the repository, with digests in place of code and with the installed command."""
    content = _source()
    for name, stage in content["stages"].items():
        stage["cmd"] = stage["cmd"].replace("python -m tasks.", "eckart stage ")
        stage["deps"] = [dep for dep in stage["deps"] if not is_code(dep)]
        stage["params"] = [{str(CODE): [f"stages.{name}"]}, *stage.get("params", [])]
    return content


def _digests() -> dict[str, str]:
    return {name: _digest(filter(is_code, stage["deps"])) for name, stage in _source()["stages"].items()}


def _digest(files: Any) -> str:
    found, folders = hashlib.sha256(), code_folders()
    for file in files:
        package, _, rest = file.partition("/")
        found.update(f"{file}\n".encode() + (folders[package] / rest).read_bytes())
    return found.hexdigest()[:32]


def _dumped(content: Mapping[str, Any]) -> str:
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.dump(dict(content), text)
    return _NOTE + text.getvalue()
