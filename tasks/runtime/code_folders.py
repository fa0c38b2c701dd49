"""Folders with the code of stages, in a clone of the repository or as pip installed them, and a digest of this code."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

PIPELINE = Path("dvc.yaml")
PACKAGES = ("eckart", "tasks")
"""Packages with the code that a stage can run; in a clone, the stage `resolve` depends on their folders."""
CODE = Path("code.yaml")
"""File with the digest of the installed code, on which the stage `resolve` depends in a workspace of `eckart init`."""


def code_folders() -> dict[str, Path]:
    """Return package → its folder, without importing the package."""
    specs = {name: find_spec(name) for name in PACKAGES}
    return {name: Path(spec.origin).parent for name, spec in specs.items() if spec and spec.origin}


def belongs(file: Path) -> bool:
    """Whether a file in a package is part of it: no bytecode, and nothing that editors, merges or a desktop leave."""
    return not (file.name.startswith(".") or file.name.endswith((".pyc", "~", ".orig", ".rej")))


def all_code() -> str:
    """Return the digest of all code that stages can run."""
    digest = hashlib.sha256()
    for package, folder in code_folders().items():
        for file in sorted(folder.rglob("*")):
            if file.is_file() and belongs(file):
                digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:32]
