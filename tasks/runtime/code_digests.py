"""Digests of the code that each stage can run. A stage depends on its digest, `code.STAGE` in resolved.yaml.

DVC does not know which modules a stage imports. The digest covers all modules that the stage may import, at its start
or later, according to the import graph, and the data files in the packages of these modules, such as templates. The
digest leaves out two things that cannot change the results of a stage:

- methods and NLP tasks that the stage does not use, although their package imports all of them;
- defaults of parameters, since a stage reads the values in resolved.yaml.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import grimp

from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import candidate_of, recipe_and_keep
from tasks.config import params_file
from tasks.runtime.code_folders import PACKAGES, belongs, code_folders

_METHODS = ("eckart.ranks", "eckart.recovery", "eckart.residual", "eckart.shaping")
"""Packages that import all methods of a family in order to list them."""
_NLP_TASKS = "tasks.nlp_tasks"
"""The package that imports the module of an NLP task by the task's name."""
_PARAMETER_TYPES = (
    *_METHODS,
    "tasks.config",
    "eckart.recipe",
    "eckart.recipe_parts",
    "eckart.factorization.weightings",
    "eckart.training.optimizer_settings",
)
"""Modules and packages with classes that define parameters and their defaults."""
_VALUES = {"eckart.published_recipes"}
"""Modules that contain only values of parameters, which are also in resolved.yaml."""

_KIND = re.compile(r"^    kind: Literal\[([^]]+)\]", re.MULTILINE)
_NO_DATA = (".py", ".typed", ".yaml")
"""Suffixes of files in a package that are not data of a stage."""
_RESOLVE = "resolve"
_TRIES = 10  # of parsing a file: two threads seldom do so at the same moment


class CodeChanged(EckartError):
    """The code has changed since resolved.yaml or code.yaml was written."""


class StageCode:
    """Import graph of the present code, and digests of the code that each stage can run."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """Read the imports of all code. `parameters` (resolved) name the methods and the NLP task that stages use."""
        self._graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
        self._parameters = parameters
        folders = code_folders()
        self._paths = {module: _path(module, folders) for module in self._graph.modules}
        self._digests: dict[str, str] = {}  # of the modules that were asked for

    def digest(self, stage: str) -> str:
        """Return the digest of the code that a stage, such as `dense` or `search@kfac-0.5`, can run."""
        modules = sorted(self.modules(stage))
        for module in modules:
            if module not in self._digests:
                self._digests[module] = _digest(module, self._paths[module])
        lines = [f"{module} {self._digests[module]}\n" for module in modules]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]

    def modules(self, stage: str) -> set[str]:
        """Return the names of the modules that a stage can run."""
        kinds = set(_kinds(self._parts_of_recipes(stage)))
        reached: set[str] = set()
        todo = [f"tasks.{stage.partition('@')[0]}"]
        while todo:
            module = todo.pop()
            if module not in reached:
                reached.add(module)
                todo += self._imported(module, kinds)
        # Python also runs the packages in _METHODS, but the stage does not use what they import only to list it.
        packages = {above for module in reached for above in _packages_of(module)} - reached
        return (reached | packages) - _VALUES

    def _imported(self, module: str, kinds: set[str]) -> Iterator[str]:
        """Yield the packages of a module, and the modules that it imports.

        Packages in _METHODS are left out, because they import all methods. If the module itself is such a package, the
        methods that it imports are left out unless their kind is in `kinds`.
        """
        yield from (package for package in _packages_of(module) if package not in _METHODS)
        for imported in self._graph.find_modules_directly_imported_by(module):
            listed = module in _METHODS and imported.startswith(f"{module}.")
            defined = _methods_in(self._paths[imported]) if listed else set()
            if not defined or defined & kinds:
                yield imported
        own_task = f"{_NLP_TASKS}.{self._parameters['data']['task']}"
        if module == _NLP_TASKS and own_task in self._paths:
            yield own_task

    def _parts_of_recipes(self, stage: str) -> list[Any]:
        """Return the parts of recipes that a stage reads."""
        recipes = self._parameters["recipes"]
        if candidate := candidate_of(stage):
            return [recipes[recipe_and_keep(candidate)[0]]]
        if stage == "control":
            return [self._parameters["control_recovery"]]
        return [recipes[name] for name in self._parameters["study"]["recipes"]]


def code_of_stages(pipeline: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `code` of resolved.yaml: stage → digest or, for stages of candidates, → recipe → digest."""
    code = StageCode(parameters)
    recipes = parameters["study"]["recipes"]
    return {
        name: {recipe: code.digest(f"{name}@{recipe}") for recipe in recipes}
        if "recipe" in stage.get("matrix", ())
        else code.digest(name)
        for name, stage in pipeline.items()
        if name != _RESOLVE
    }


def check_stage(stage: str) -> None:
    """Check that the code of a stage still has the digest in resolved.yaml, if there is one.

    Raises:
        CodeChanged: the digests differ.
    """
    if not params_file.RESOLVED.exists():
        return
    parameters = params_file.resolved()
    recorded: Any = parameters.get("code", {}).get(stage.partition("@")[0])
    if recorded and (candidate := candidate_of(stage)):
        recorded = recorded.get(recipe_and_keep(candidate)[0])
    if recorded and recorded != StageCode(parameters).digest(stage):
        raise CodeChanged(f"the code has changed since {params_file.RESOLVED} was written; run again")


def _packages_of(module: str) -> list[str]:
    """Return the packages that contain a module, the outermost first; Python runs them before the module."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _is_in(module: str, names: Sequence[str]) -> bool:
    """Whether a module is one of `names`, or lies in a package of `names`."""
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def _path(module: str, folders: Mapping[str, Path]) -> Path:
    package, *names = module.split(".")
    path = folders[package].joinpath(*names)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _digest(module: str, path: Path) -> str:
    """Return the digest of a module's file; for a package, of its `__init__.py` and of the data files beside it."""
    files = [path]
    if path.name == "__init__.py":
        beside = (file for file in path.parent.iterdir() if file.is_file() and belongs(file))
        files += sorted(file for file in beside if file.suffix not in _NO_DATA)
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".py" and _is_in(module, _PARAMETER_TYPES):
            content = _without_defaults(content)
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _methods_in(path: Path) -> set[str]:
    """Return the kinds of the methods that a module defines; empty if it defines none."""
    return {kind for literal in _KIND.findall(path.read_text()) for kind in re.findall(r'"(\w+)"', literal)}


def _kinds(value: Any) -> Iterator[str]:
    """Yield the kinds of the methods in a part of the parameters: the values of all keys `kind`, at any depth."""
    if isinstance(value, Mapping):
        if isinstance(kind := value.get("kind"), str):
            yield kind
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from _kinds(part)


@cache  # a stage asks twice
def _without_defaults(source: bytes) -> bytes:
    """Return the source of a module without the defaults of fields and the docstrings of its undecorated classes."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    cuts: list[tuple[int, int]] = []
    for node in _parsed(source).body:
        for part in node.body if isinstance(node, ast.ClassDef) and not node.decorator_list else ():
            if isinstance(part, ast.AnnAssign) and part.value and "ClassVar" not in ast.unparse(part.annotation):
                cuts.append((_end(part.annotation, starts), _end(part.value, starts)))
            elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                cuts.append((starts[part.lineno - 1] + part.col_offset, _end(part, starts)))
    for start, end in sorted(cuts, reverse=True):
        source = source[:start] + source[end:]
    return source


def _parsed(source: bytes) -> ast.Module:
    """Parse source code, again if another thread did so at the same moment, on which CPython may fail."""
    for _ in range(_TRIES - 1):
        with suppress(SystemError):  # python/cpython#106905, seen with Python 3.11
            return ast.parse(source)
    return ast.parse(source)


def _end(node: ast.expr | ast.stmt, starts: Sequence[int]) -> int:
    assert node.end_lineno
    assert node.end_col_offset is not None
    return starts[node.end_lineno - 1] + node.end_col_offset
