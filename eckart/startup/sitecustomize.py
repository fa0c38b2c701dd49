"""Import eckart as soon as a program imports transformers: for programs that `eckart with` starts.

Python imports a module with this name when it starts, in child processes, too. `eckart with` puts this folder on the
path. Programs that never import transformers lose no time.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_OWN = Path(__file__).resolve().parent


def _import_eckart(_: ModuleType) -> None:
    try:
        import eckart  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "eckart":
            raise ImportError(f"eckart with: {sys.executable} has no package eckart: install it there, too") from error
        raise


def _run_hidden() -> None:
    """Run the module with this name that stands further back on the path, which this one hides, if there is one."""
    _run(PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if Path(folder).resolve() != _OWN]))


def _run(spec: ModuleSpec | None) -> ModuleType | None:
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# from its file, since `import eckart.after_import` would first run eckart/__init__.py, which imports torch
_hook = _run(spec_from_file_location("after_import", _OWN.parent / "after_import.py"))
assert _hook
_hook.call_after_import("transformers", _import_eckart)
_run_hidden()
