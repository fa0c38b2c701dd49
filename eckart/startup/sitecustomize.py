"""Import eckart as soon as a program imports transformers: for programs that `eckart with` starts.

Python imports a module with this name when it starts, in child processes, too. `eckart with` puts this folder on the
path. Programs that never import transformers lose no time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType


class _AfterTransformers(MetaPathFinder):
    """Finder that lets the first import of transformers end with the import of eckart."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        # Programs also look for transformers without importing it, so this finder stays until the import.
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path[sys.meta_path.index(self) + 1 :])
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                run(module)
                _import_eckart()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _import_eckart() -> None:
    try:
        import eckart  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "eckart":
            raise ImportError(f"eckart with: {sys.executable} has no package eckart: install it there, too") from error
        raise


def _run_hidden() -> None:
    """Run the module with this name that stands further back on the path, which this one hides, if there is one."""
    own = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if Path(folder).resolve() != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, _AfterTransformers())
_run_hidden()
