"""dvc.yaml against the code: a stage depends on every file it can run and on no other; a script writes it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tasks.runtime.code_dependencies import code_of_stages
from tasks.runtime.code_folders import PIPELINE, is_code
from tests.workspace import REPOSITORY

STAGES = YAML(typ="safe").load((REPOSITORY / PIPELINE).read_text())["stages"]


def test_a_stage_depends_on_the_code_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, `make deps` mends it."""
    monkeypatch.chdir(REPOSITORY)
    listed = {name: [dep for dep in stage["deps"] if is_code(dep)] for name, stage in STAGES.items()}
    assert listed == code_of_stages()


def test_what_a_stage_newly_imports_is_written_and_nothing_else_changes(tmp_path: Path) -> None:
    for name in ("eckart", "tasks"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / PIPELINE, tmp_path)
    before = (tmp_path / PIPELINE).read_text().splitlines()
    (tmp_path / "tasks/helper.py").write_text("")
    with (tmp_path / "tasks/importance.py").open("a") as file:
        file.write("\n\ndef late() -> None:\n    import tasks.helper\n")
    subprocess.run([sys.executable, "-m", "tasks.runtime.code_dependencies"], cwd=tmp_path, check=True)
    after = (tmp_path / PIPELINE).read_text().splitlines()
    new = after.index("      - tasks/helper.py")
    assert [*after[:new], *after[new + 1 :]] == before


def test_flows_docs_and_tests_make_nothing_stale() -> None:
    deps = {dep for stage in STAGES.values() for dep in stage["deps"]}
    assert not any(dep.startswith(("flows", "docs", "tests", "README", "Makefile")) for dep in deps)


def test_no_stage_depends_on_all_parameters() -> None:
    deps = {dep for stage in STAGES.values() for dep in stage["deps"]}
    assert not any(Path(dep).name == "params.yaml" for dep in deps)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_its_own_module(stage: str) -> None:
    assert STAGES[stage]["cmd"].split()[:3] == ["python", "-m", f"tasks.{stage}"]
