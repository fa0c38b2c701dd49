"""Workspaces of `eckart init`, which have no code of their own: two of their files follow from what is installed.

dvc.yaml is the repository's, but its stages are run by the installed command, and `resolve` depends on code.yaml in
place of folders of code. A clone of the repository has no code.yaml.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path

from tasks.runtime.code_folders import CODE, PIPELINE, all_code

log = logging.getLogger(__name__)

HOME = Path(__file__).resolve().parents[2]
"""Holds this code, and dvc.yaml as the repository has it."""

_NOTE = "# Written by `eckart`, by what is installed; edits are overwritten.\n"


def refresh() -> None:
    """Bring dvc.yaml and code.yaml of the working directory up to the installed code; leave a clone as it is."""
    if not CODE.exists():
        return
    for path, text in derived().items():
        if path.read_text() != text:
            log.warning("%s follows the installed eckart %s: commit it", path, version("eckart"))
            new = path.with_name(f"{path.name}.new")  # a process that reads meanwhile finds the old file or the new one
            new.write_text(text)
            new.replace(path)


def derived() -> dict[Path, str]:
    """Return the files that follow from the installed code, by their paths in a workspace."""
    pipeline = (HOME / PIPELINE).read_text()
    pipeline = pipeline.replace("cmd: python -m tasks.", "cmd: eckart stage ")
    pipeline = pipeline.replace("[params.yaml, eckart, tasks]", f"[params.yaml, {CODE}]")
    return {PIPELINE: _NOTE + pipeline, CODE: f"{_NOTE}eckart: {version('eckart')}\ndigest: '{all_code()}'\n"}
