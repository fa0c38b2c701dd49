"""docs/how-to/extend.md as it stands: its methods and its task go through the stages of a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.workspace import REPOSITORY, tiny_workspace

KEEP = "0.5"
RECIPES = ("energy", "pull")
FEW = {"steps": 3, "batch_size": 8}
RUN = f"""
import gc
import os
import shutil
from pathlib import Path
import mlflow.pyfunc
import pandas as pd
import eckart
from flows.registry.model_package import settings_of
from flows.registry.pyfunc_model import Served
from tasks import resolve
from tasks.artifacts.task_spec import load_task
from tasks.config.validation import check
from tasks.nlp_tasks import kind_of
from tests.workspace import run_stage, tiny_workspace

gc.freeze()  # what was imported
assert Path(eckart.__file__).is_relative_to(Path.cwd())
resolve.main()
for stage in ("extract", "teacher", "control", "dense", "calibration", "importance"):
    run_stage(stage)
for recipe in {RECIPES}:
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, recipe, "{KEEP}")
run_stage("benchmark")
run_stage("compare")
shutil.copy("resolved.yaml", "before.yaml")
with Path("eckart/ranks/energy.py").open("a") as file:
    file.write("# edited\\n")
resolve.main()

limits = dict(fewest_of_class=None, fewest_examples=None)
os.chdir(tiny_workspace(Path("task"), data=dict(task="second_word", metric="error_rate"), check=limits))
check()
for stage in ("extract", "check", "teacher", "control", "dense"):
    run_stage(stage)
served = Served()
served.load_context(mlflow.pyfunc.PythonModelContext(dict(model="models/teacher"), settings_of(load_task(), 4, 0)))
answers = served.predict(None, pd.DataFrame(dict(text=["the plot is dull"])))
assert list(answers) == list(kind_of(load_task()).answer_columns)
Path("answer.json").write_text(answers.to_json(orient="records"))
"""


def block(language: str, after: str) -> str:
    """The first fenced block of `language` behind `after` in the document."""
    document = (REPOSITORY / "docs/how-to/extend.md").read_text()
    found = re.search(rf"{re.escape(after)}.*?^```{language}\n(.*?)^```", document, re.S | re.M)
    assert found
    return found[1]


def extended(root: Path) -> None:
    """Copy the code, add the methods and the task as the document says, and run all stages of both."""
    for name in ("eckart", "tasks", "flows"):
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
    (root / "tasks/nlp_tasks/second_word.py").write_text(block("python", "`tasks/nlp_tasks/second_word.py`:"))
    recipe = YAML(typ="safe").load(block("yaml", "And `params.yaml` gets"))["recipes"]["energy"]
    quick = {**recipe, "recovery": FEW}
    recipes = {"energy": quick, "pull": {**quick, "ranks": {"kind": "pull", **FEW}}}
    tiny_workspace(root, study={"recipes": [*RECIPES]}, recipes=recipes)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_DATASETS_CACHE": str(root / "cache")}
    command = [sys.executable, "-c", RUN]  # the code in `root` comes before the repository's
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_two_rank_searches_and_a_task_are_a_file_each(tmp_path: Path) -> None:
    """One test, since xdist would run the stages anew in each process that takes a part of several tests."""
    extended(tmp_path)
    a_task_is_one_file(tmp_path)
    for recipe in RECIPES:
        the_budget_is_met_and_used(tmp_path, recipe)
    the_search_that_trains_is_counted_and_explained(tmp_path)
    its_code_is_a_dependency_of_the_searches_that_use_it(tmp_path)


def a_task_is_one_file(root: Path) -> None:
    task, dense = read(root / "task/data/splits/task.json"), read(root / "task/reports/dense.json")
    assert "plot" in task["labels"]
    assert dense["score"]["metric"] == dense["score"]["metrics"]["error_rate"]
    assert read(root / "task/answer.json")[0]["label"] in task["labels"]


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def the_budget_is_met_and_used(root: Path, recipe: str) -> None:
    targets = read(root / "data/importance/targets.json")["targets"]
    dense = sum(target["out_features"] * target["in_features"] for target in targets)
    kept = read(root / f"reports/evaluate/{recipe}-{KEEP}.json")["target_parameters"]
    assert 0.4 * dense < kept <= 0.5 * dense


def the_search_that_trains_is_counted_and_explained(root: Path) -> None:
    assert read(root / f"models/ranks/pull-{KEEP}/ranks.json")["steps"] == FEW["steps"]
    last = (root / f"reports/search/pull-{KEEP}.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["pull"] > 0
    assert "Norm of the gradients of all targets." in (root / "reports/comparison.html").read_text()
    assert (root / f"models/ranks/pull-{KEEP}/shaped/model.safetensors").exists()  # its trained weights
    assert not (root / f"models/ranks/energy-{KEEP}/shaped").exists()


def its_code_is_a_dependency_of_the_searches_that_use_it(root: Path) -> None:
    before, after = (
        YAML(typ="safe").load((root / name).read_text())["code"] for name in ("before.yaml", "resolved.yaml")
    )
    changed = {name: digests for name, digests in after.items() if digests != before[name]}
    assert changed == {"search": after["search"], "compare": after["compare"]}
    assert after["search"]["pull"] == before["search"]["pull"]
