"""Where the code of stages lies: beside each other in a clone of the repository, apart where pip installed them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PIPELINE = Path("dvc.yaml")
PACKAGES = ("eckart", "tasks")
"""Whose code a stage can run."""


def is_code(dependency: str) -> bool:
    """Whether a dependency that dvc.yaml names is such code."""
    return dependency.startswith(tuple(f"{package}/" for package in PACKAGES))


def code_folders() -> dict[str, Path]:
    """Package → its folder; none is imported."""
    found = {name: find_spec(name) for name in PACKAGES}
    return {name: Path(spec.origin).parent for name, spec in found.items() if spec and spec.origin}
