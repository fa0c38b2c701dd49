"""Digests of code and dvc.yaml: a stage depends on its parameters, on the code that it can run, and on no other."""

from __future__ import annotations

import ast
import gc
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tasks.config import params_file
from tasks.runtime import code_digests
from tasks.runtime.code_digests import StageCode
from tasks.runtime.code_folders import PIPELINE
from tests.workspace import REPOSITORY, tiny_params

STAGES = YAML(typ="safe").load((REPOSITORY / PIPELINE).read_text())["stages"]
OTHERS = [name for name in STAGES if name != "resolve"]


def modules(stage: str, **changes: Any) -> set[str]:
    return StageCode({"control_recovery": {"kind": "finetune"}, **tiny_params(**changes)}).modules(stage)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_runs_its_own_module(name: str) -> None:
    assert STAGES[name]["cmd"].split()[:3] == ["python", "-m", f"tasks.{name}"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_stage_reads_its_parameters_and_its_code_from_resolved_yaml_alone(name: str) -> None:
    ((file, paths),) = STAGES[name]["params"][0].items()
    assert (len(STAGES[name]["params"]), file) == (1, "resolved.yaml")
    assert paths[0] == f"code.{name}" + (".${item.recipe}" if "recipe" in STAGES[name].get("matrix", ()) else "")
    assert all(dep.startswith(("data/", "models/", "reports/")) for dep in STAGES[name]["deps"])


def test_a_stage_reaches_its_own_module_and_what_that_imports_late() -> None:
    assert {"tasks.importance", "tasks.runtime.stage_runner", "eckart.calibration.statistics"} <= modules("importance")


def test_a_search_can_run_its_own_rank_search_and_no_other() -> None:
    searches = {f"eckart.ranks.{name}" for name in ("uniform", "waterfill", "threshold", "tolerance", "hypernetwork")}
    assert modules("search@svd-0.5") & searches == {"eckart.ranks.uniform"}
    assert modules("search@kfac-0.5") & searches == {"eckart.ranks.waterfill"}
    assert not modules("finetune@kfac-0.5") & searches
    assert modules("compare") & searches == {"eckart.ranks.uniform", "eckart.ranks.waterfill"}


def test_a_method_within_a_method_is_one_that_is_used() -> None:
    recovery = {"kind": "in_turn", "first": {"kind": "mixed_rank"}, "then": [{"kind": "finetune"}]}
    reached = modules("control", control_recovery=recovery)
    assert {"eckart.recovery.in_turn", "eckart.recovery.mixed_rank", "eckart.recovery.finetune"} <= reached
    assert "eckart.recovery.mixed_rank" not in modules("control")


def test_a_stage_can_run_the_nlp_task_of_the_study() -> None:
    for task in ("token_classification", "summarization", "question_answering"):
        assert f"tasks.nlp_tasks.{task}" in modules("teacher", data={"task": task})
    assert "tasks.nlp_tasks.summarization" not in modules("teacher")


SOURCE = b'''"""A module."""

import pydantic


class Limits(pydantic.BaseModel):
    """Of something."""

    steps: int = pydantic.Field(3, ge=1)
    """Optimizer steps."""
    name: str

    alone: ClassVar[bool] = False

    def half(self) -> int:
        return self.steps // 2
'''


def test_neither_a_default_nor_its_description_is_code() -> None:
    digested = code_digests._without_defaults(SOURCE)
    edited = SOURCE.replace(b"Field(3, ge=1)", b"Field(\n        4\n    )").replace(b"Optimizer steps.", b"Of AdamW.")
    assert code_digests._without_defaults(edited) == digested


@pytest.mark.parametrize(
    ("before", "after"), [(b"// 2", b"// 3"), (b"= False", b"= True"), (b"steps: int", b"steps: float")]
)
def test_all_else_in_a_class_is_code(before: bytes, after: bytes) -> None:
    edited = SOURCE.replace(before, after)
    assert code_digests._without_defaults(edited) != code_digests._without_defaults(SOURCE)


def test_source_is_parsed_although_other_code_is_parsed_meanwhile() -> None:
    """As by another thread, which gets its turn when garbage is collected: two parsers share a count in CPython."""
    collected = iter(range(3))

    def parse(phase: str, info: dict[str, int]) -> None:
        if next(collected, None) is not None:
            ast.parse("1")

    source, thresholds = SOURCE * 20, gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(20)
    try:
        code_digests._without_defaults(source)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parse)
    assert next(collected, None) is None


def test_code_is_not_checked_where_nothing_names_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code_digests.check_stage("extract")
    params_file.RESOLVED.write_text("code: {}\n")
    code_digests.check_stage("extract")
    params_file.RESOLVED.write_text(f"code: {{extract: other}}\n{YAML_PARAMETERS}")
    with pytest.raises(code_digests.CodeChanged):
        code_digests.check_stage("extract")


YAML_PARAMETERS = "study: {recipes: []}\nrecipes: {}\ndata: {task: regression}\n"


@pytest.mark.parametrize("name", [".finetune.py.swp", ".DS_Store", "page.html~", "page.html.orig"])
def test_what_editors_leave_beside_code_is_no_code(tmp_path: Path, name: str) -> None:
    """A digest that changed would fail the stages that run, at their end."""
    package = tmp_path / "__init__.py"
    package.touch()
    before = code_digests._digest("tasks", package)
    (tmp_path / name).write_text("left")
    assert code_digests._digest("tasks", package) == before
    (tmp_path / "page.html").write_text("data")
    assert code_digests._digest("tasks", package) != before
