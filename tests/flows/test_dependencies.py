"""dvc.yaml against the code: a stage depends on every file it imports, and on none that it cannot use."""

from pathlib import Path

import grimp
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]

# Imported by eckart/hub.py only when a compressed model is loaded or saved; this stage loads the dense teacher.
UNREACHED = {"importance": {"eckart/layers.py"}}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("eckart", "tasks", cache_dir=None)


def files(graph: grimp.ImportGraph, stage: str) -> set[str]:
    """The files that `python -m tasks.STAGE` may run, and the data beside them."""
    seen: set[str] = set()
    todo = [f"tasks.{stage}"]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph.find_modules_directly_imported_by(module)
            todo += [module.rpartition(".")[0]] if "." in module else []  # Python runs a package before its modules
    found = set()
    for module in seen:
        path = ROOT / module.replace(".", "/")
        found.add(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        if path.is_dir():
            found |= {file for file in path.iterdir() if file.is_file() and file.suffix not in (".py", ".pyc")}
    return {str(file.relative_to(ROOT)) for file in found}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_the_code_it_can_run(graph: grimp.ImportGraph, stage: str) -> None:
    listed = {dep for dep in STAGES[stage]["deps"] if dep.startswith(("eckart/", "tasks/"))}
    assert listed == files(graph, stage) - UNREACHED.get(stage, set())


def test_flows_docs_and_tests_make_nothing_stale() -> None:
    deps = {dep for stage in STAGES.values() for dep in stage["deps"]}
    assert not any(dep.startswith(("flows", "docs", "tests", "README", "Makefile")) for dep in deps)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_its_own_module(stage: str) -> None:
    assert STAGES[stage]["cmd"].split()[:3] == ["python", "-m", f"tasks.{stage}"]
