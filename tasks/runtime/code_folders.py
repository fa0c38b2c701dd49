"""Where the code of stages lies: beside each other in a clone of the repository, apart where pip installed them."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

PIPELINE = Path("dvc.yaml")
PACKAGES = ("eckart", "tasks")
"""The code that a stage can run; in a clone the stage `resolve` depends on these folders."""
CODE = Path("code.yaml")
"""In a workspace of `eckart init`, which has no code: the digest of what is installed, on which `resolve` depends."""


def code_folders() -> dict[str, Path]:
    """Return package → its folder, without importing it."""
    specs = {name: find_spec(name) for name in PACKAGES}
    return {name: Path(spec.origin).parent for name, spec in specs.items() if spec and spec.origin}


def all_code() -> str:
    """Return the digest of all code that stages can run."""
    digest = hashlib.sha256()
    for package, folder in code_folders().items():
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:32]
