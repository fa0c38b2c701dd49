"""Which code a stage can run, written into dvc.yaml: `make deps`.

DVC reads no imports, so each file of code is a dependency of its own. What a stage may import, at its start or later,
is taken from the import graph of the working directory; a package's data files, such as a template, belong to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grimp
from ruamel.yaml import YAML

from tasks.runtime.code_folders import PACKAGES, PIPELINE, is_code

_NO_DATA = (".py", ".pyc", ".typed", ".yaml")  # of a package: nothing that a stage reads, params.yaml but by keys


def code_of_stages() -> dict[str, list[str]]:
    """Stage → the files that `python -m tasks.STAGE` may run, and the data beside them, sorted."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    return {stage: sorted(_files(graph, f"tasks.{stage}")) for stage in _yaml().load(PIPELINE)["stages"]}


def write() -> bool:
    """Bring the code lists of dvc.yaml up to date; whether anything changed."""
    yaml = _yaml()
    content = yaml.load(PIPELINE)
    changed = False
    for stage, files in code_of_stages().items():
        deps = content["stages"][stage]["deps"]
        wanted = [*(dep for dep in deps if not is_code(dep)), *files]
        changed |= list(deps) != wanted
        deps[:] = wanted
    if changed:
        yaml.dump(content, PIPELINE)
    return changed


def _files(graph: grimp.ImportGraph, module: str) -> set[str]:
    found: set[Path] = set()
    for name in _reached(graph, module):
        path = Path(name.replace(".", "/"))
        found.add(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        if path.is_dir():
            found |= {file for file in path.iterdir() if file.is_file() and file.suffix not in _NO_DATA}
    return {str(file) for file in found}


def _reached(graph: grimp.ImportGraph, module: str) -> set[str]:
    seen: set[str] = set()
    todo = [module]
    while todo:
        if (one := todo.pop()) and one not in seen:
            seen.add(one)
            # Python runs a package before its modules.
            todo += [*graph.find_modules_directly_imported_by(one), one.rpartition(".")[0]]
    return seen


def _yaml() -> Any:
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 120
    return yaml


if __name__ == "__main__":
    print(f"{PIPELINE} {'was brought up to date' if write() else 'is up to date'}.")
