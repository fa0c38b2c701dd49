"""docs/extending.md as it stands: its methods go through the stages of a repository that knew nothing of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.workspace import REPOSITORY, tiny_workspace

KEEP = "0.5"
RECIPES = ("energy", "pull")
FEW = {"steps": 3, "batch_size": 8}
RUN = f"""
from pathlib import Path
import eckart
from tasks.config.resolved import resolve
from tasks.config.schema import read
from tasks.config.validation import check
from tasks.nlp_tasks import kind_of
from tests.workspace import run_stage, write_params

assert Path(eckart.__file__).is_relative_to(Path.cwd())
check()
write_params(Path.cwd(), resolve(read()))
for stage in ("extract", "teacher", "control", "dense", "importance"):
    run_stage(stage)
for recipe in {RECIPES}:
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, recipe, "{KEEP}")
run_stage("benchmark")
run_stage("compare")
"""


def block(language: str, after: str) -> str:
    """The first fenced block of `language` behind `after` in the document."""
    document = (REPOSITORY / "docs/extending.md").read_text()
    found = re.search(rf"{re.escape(after)}.*?^```{language}\n(.*?)^```", document, re.S | re.M)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with the methods added as the document says, after all stages of both candidates."""
    root = tmp_path_factory.mktemp("extended")
    for name in ("eckart", "tasks"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    registry = root / "eckart/ranks/__init__.py"
    for name in RECIPES:
        (root / f"eckart/ranks/{name}.py").write_text(block("python", f"`eckart/ranks/{name}.py`:"))
        kind = name.capitalize()
        imported = registry.read_text().replace(
            "from pydantic", f"from eckart.ranks.{name} import {kind}\nfrom pydantic"
        )
        registry.write_text(re.sub(r"(RankSearch = Annotated\[\s*)", rf"\1{kind} | ", imported))
    recipe = YAML(typ="safe").load(block("yaml", "And `params.yaml` gets"))["recipes"]["energy"]
    quick = {**recipe, "recovery": FEW}
    recipes = {"energy": quick, "pull": {**quick, "ranks": {"kind": "pull", **FEW}}}
    tiny_workspace(root, study={"recipes": [*RECIPES]}, recipes=recipes)
    python(root, "-m", "tasks.resolve")
    python(root, "-c", RUN)
    return root


TASK_RUN = """
from pathlib import Path
import mlflow.pyfunc
import pandas as pd
from flows.registry.model_package import settings_of
from flows.registry.pyfunc_model import Served
from tasks.artifacts.task_spec import load_task
from tasks.config.validation import check
from tasks.nlp_tasks import kind_of
from tests.workspace import run_stage

check()
for stage in ("extract", "check", "teacher", "control", "dense"):
    run_stage(stage)
served = Served()
served.load_context(mlflow.pyfunc.PythonModelContext({"model": "models/teacher"}, settings_of(load_task(), 4, 0)))
found = served.predict(None, pd.DataFrame({"text": ["the plot is dull"]}))
assert list(found) == list(kind_of(load_task()).answer_columns)
Path("answer.json").write_text(found.to_json(orient="records"))
"""


def test_a_task_is_one_file(tmp_path: Path) -> None:
    for name in ("eckart", "tasks", "flows"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tasks/nlp_tasks/second_word.py").write_text(block("python", "`tasks/nlp_tasks/second_word.py`:"))
    nothing = {"fewest_of_class": None, "fewest_rows": None}
    tiny_workspace(tmp_path, data={"task": "second_word", "metric": "error_rate"}, check=nothing)
    python(tmp_path, "-c", TASK_RUN)
    task, dense = read(tmp_path / "data/splits/task.json"), read(tmp_path / "reports/dense.json")
    assert "plot" in task["labels"]
    assert dense["score"]["metric"] == dense["score"]["metrics"]["error_rate"]
    assert read(tmp_path / "answer.json")[0]["label"] in task["labels"]


def python(root: Path, *arguments: str) -> None:
    """Run the code in `root`, which comes before the repository's."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_DATASETS_CACHE": str(root / "cache")}
    done = subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_budget_is_met_and_used(root: Path, recipe: str) -> None:
    targets = read(root / "data/importance/targets.json")["targets"]
    dense = sum(target["out_features"] * target["in_features"] for target in targets)
    kept = read(root / f"reports/evaluate/{recipe}-{KEEP}.json")["target_parameters"]
    assert 0.4 * dense < kept <= 0.5 * dense


def test_the_search_that_trains_is_counted_and_what_it_measured_is_explained(root: Path) -> None:
    assert read(root / f"models/ranks/pull-{KEEP}/ranks.json")["steps"] == FEW["steps"]
    last = (root / f"reports/search/pull-{KEEP}.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["pull"] > 0
    assert "Norm of the gradients of all targets." in (root / "reports/comparison.html").read_text()


def test_its_trained_weights_are_what_is_factorized(root: Path) -> None:
    assert (root / f"models/ranks/pull-{KEEP}/shaped/model.safetensors").exists()
    assert not (root / f"models/ranks/energy-{KEEP}/shaped").exists()


def test_its_code_is_a_dependency_of_the_searches_that_use_it(root: Path) -> None:
    before = YAML(typ="safe").load((root / "resolved.yaml").read_text())["code"]
    with (root / "eckart/ranks/energy.py").open("a") as file:
        file.write("# edited\n")
    python(root, "-m", "tasks.resolve")
    after = YAML(typ="safe").load((root / "resolved.yaml").read_text())["code"]
    changed = {name: digests for name, digests in after.items() if digests != before[name]}
    assert changed == {"search": after["search"], "compare": after["compare"]}
    assert after["search"]["pull"] == before["search"]["pull"]
