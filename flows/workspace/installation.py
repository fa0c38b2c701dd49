"""Update dvc.yaml and code.yaml in workspaces of `eckart init`, which have no code and use the installed package.

The dvc.yaml of such a workspace differs from the repository's: its stages run the installed command `eckart`, and its
stage `resolve` depends on code.yaml, which has the digest of the installed code. A clone of the repository has no
code.yaml.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path

from tasks.artifacts import atomic_files
from tasks.artifacts.paths import SHARDS
from tasks.runtime.code_folders import CODE, PIPELINE, all_code

log = logging.getLogger(__name__)

HOME = Path(__file__).resolve().parents[2]
"""Folder that contains this code and the repository's dvc.yaml."""

_NOTE = "# Written by `eckart`, by what is installed; edits are overwritten.\n"


def refresh() -> None:
    """Update dvc.yaml and code.yaml of the working directory to the installed code. In a clone, do nothing."""
    if not CODE.exists():
        return
    for path, text in derived().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            log.warning("%s follows the installed eckart %s: commit it", path, version("eckart"))
            atomic_files.write(path, text)


def derived() -> dict[Path, str]:
    """Return path → content of the files in a workspace that are made from the installed code."""
    pipeline = (HOME / PIPELINE).read_text()
    pipeline = pipeline.replace("cmd: python -m tasks.", "cmd: eckart stage ")
    pipeline = pipeline.replace("[params.yaml, eckart, tasks]", f"[params.yaml, {CODE}]")
    code = f"{_NOTE}eckart: {version('eckart')}\ndigest: '{all_code()}'\n"
    return {PIPELINE: _NOTE + pipeline, CODE: code, SHARDS / ".gitkeep": ""}
