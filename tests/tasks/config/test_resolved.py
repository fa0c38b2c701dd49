"""Defaults: what params.yaml does not state, every type does, with a description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

import eckart
from eckart.recipe import Recipe, recipes
from tasks.config import reference
from tasks.config.mistakes import models_in
from tasks.config.params_file import ParamsError, section
from tasks.config.resolved import resolve
from tasks.config.schema import Goal, Params
from tasks.config.validation import mistakes
from tests.workspace import REPOSITORY, repository_params, write_params

LEAST: dict[str, Any] = {"study": {"name": "mine", "recipes": ["svd"], "keeps": [0.5]}, "export": {"recipes": []}}
RATE = {"warmup": 0.1, "schedule": "linear", "last_rate": 0.0, "weight_decay": 0.01}
FINETUNE = {"steps": 60, "batch_size": 16, "learning_rate": 5e-5, **RATE}


def least(**sections: Any) -> dict[str, Any]:
    return {**LEAST, **sections}


def every_model(kind: Any, seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """The types in an annotation, and those in their fields."""
    for model in set(models_in(kind)) - seen:
        seen.add(model)
        for field in model.model_fields.values():
            every_model(field.annotation, seen)
    return seen


def test_names_recipes_keeps_and_exports_are_all_that_must_be_stated() -> None:
    assert mistakes(LEAST) == []


@pytest.mark.parametrize("params", [LEAST, repository_params()], ids=["least", "repository"])
def test_what_is_resolved_stays_as_it_is(params: dict[str, Any]) -> None:
    resolved = resolve(params)
    assert resolve(resolved) == resolved
    assert mistakes(resolved) == []


def test_the_defaults_are_the_default_study() -> None:
    """The numbers of the study whose results docs/results shows."""
    params = resolve(LEAST)
    assert params["data"]["sizes"] == {"train": 3000, "validation": 1000, "test": 2000, "calibration": 256}
    assert params["teacher"] == {"epochs": 1, "batch_size": 32, "learning_rate": 1e-4, **RATE}
    assert params["recipes"]["kfac"] == {
        "source": "teacher",
        "shaping": None,
        "weighting": {"kind": "kfac", "shrinkage": 0.0, "input_shrinkage": 0.0, "correlation_shrinkage": 0.0},
        "ranks": {"kind": "waterfill", "multiple": 8, "embedding_price": 1.0, "narrow": False, "one_width": False},
        "residual": None,
        "storage": "factors",
        "sequential": None,
        "recovery": {"kind": "finetune", **FINETUNE, "distillation": None, "lora": None},
    }
    assert params["recipes"]["anchored"]["sequential"] == {"anchor": 0.5, "ridge": 0.1, "sums": False, "refine": None}
    assert params["recipes"]["softlm"]["ranks"]["steps"] == 3000
    assert params["promotion"]["model"] == "mine"
    own = repository_params()
    assert {key for key in params if params[key] != own[key]} == {"study", "export", "promotion"}


def test_a_bare_word_is_a_kind_and_a_part_states_what_differs() -> None:
    short = {"weighting": "inputs", "ranks": {"by": "rank"}, "recovery": "mixed_rank", "shaping": {"steps": 7}}
    recipe = resolve(least(recipes={"mine": short}))["recipes"]["mine"]
    assert recipe["weighting"] == {"kind": "inputs"}
    assert recipe["ranks"] == {"kind": "uniform", "by": "rank"}
    assert (recipe["recovery"]["kind"], recipe["recovery"]["initial"]) == ("mixed_rank", 0.5)
    assert (recipe["shaping"]["kind"], recipe["shaping"]["steps"]) == ("pruning", 7)
    nested = {"ranks": {"kind": "borrowed", "weighting": "fisher", "ranks": "waterfill"}}
    borrowed = resolve(least(recipes={"mine": nested}))["recipes"]["mine"]["ranks"]
    assert borrowed["weighting"] == {"kind": "fisher", "axis": "input"}
    assert borrowed["ranks"]["multiple"] == 8


def test_a_recipe_with_a_built_in_name_changes_that_recipe() -> None:
    changed = resolve(least(recipes={"kfac": {"ranks": {"multiple": 1}}}))["recipes"]["kfac"]
    assert changed["ranks"] == {
        "kind": "waterfill",
        "multiple": 1,
        "embedding_price": 1.0,
        "narrow": False,
        "one_width": False,
    }
    assert changed["weighting"]["kind"] == "kfac"


def test_one_recovery_holds_for_every_recipe_that_states_no_other() -> None:
    own = {"long": {"recovery": {"steps": 500}}}
    resolved = resolve(least(recovery={"steps": 5, "distillation": {"layers": 2.0}}, recipes=own))["recipes"]
    assert (resolved["svd"]["recovery"]["steps"], resolved["long"]["recovery"]["steps"]) == (5, 500)
    assert resolved["long"]["recovery"]["distillation"]["layers"] == 2.0
    mixed = resolved["lpaf"]["recovery"]  # of another kind: the settings that it has as well
    assert (mixed["kind"], mixed["steps"], mixed["initial"]) == ("mixed_rank", 5, 0.5)


def test_a_mistake_in_the_common_recovery_is_named_once() -> None:
    (line,) = mistakes(least(recovery={"steps": -1}))
    assert line.startswith("recovery.steps: ")


def test_a_common_recovery_need_not_fit_recipes_that_are_not_used() -> None:
    assert mistakes(least(recovery={"steps": 0})) == []  # losparse prunes while it trains
    (line,) = mistakes(least(recovery={"steps": 0}, study={**LEAST["study"], "recipes": ["losparse"]}))
    assert line.startswith("recipes.losparse.recovery.steps: ")


def test_the_control_is_the_first_recipe_that_an_original_model_can_recover_as() -> None:
    study = {**LEAST["study"], "recipes": ["lpaf", "kfac"]}
    assert resolve(least(study=study))["study"]["control"] == "kfac"
    (line,) = mistakes(least(study={**study, "recipes": ["lpaf"]}, importance={}))
    assert line.startswith("study.control: ")


def test_a_misspelt_key_of_a_part_is_told_the_right_one() -> None:
    (line,) = mistakes(least(recipes={"mine": {"weighting": {"kind": "kfac", "shrinkge": 0.1}}}))
    assert line == "recipes.mine.weighting.shrinkge: is unknown; write shrinkage"
    (line,) = mistakes(least(data={"sizes": {"trian": 5}}))
    assert line == "data.sizes.trian: is unknown; write train"


def test_eckart_has_the_recipes_of_the_pipeline() -> None:
    assert eckart.recipes() == {name: Recipe.model_validate(parts) for name, parts in recipes().items()}


def test_a_section_has_its_defaults_where_the_file_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_params(tmp_path, LEAST)
    monkeypatch.chdir(tmp_path)
    assert section("benchmark.repetitions", int) == 20


@pytest.mark.parametrize("kind", [Params, Goal, Recipe])
def test_every_field_has_a_description(kind: Any) -> None:
    for model in every_model(kind, set()):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_the_parameters_are_printed_as_yaml_that_says_the_same() -> None:
    params = repository_params()
    printed = reference.text(params)
    assert YAML(typ="safe").load(printed) == params
    assert YAML(typ="safe").load(reference.text(params, "recipes.kfac")) == {"kfac": params["recipes"]["kfac"]}
    assert YAML(typ="safe").load(reference.text(params, "recipes.kfac.ranks.multiple")) == {"multiple": 8}
    with pytest.raises(ParamsError, match="kfac"):
        reference.text(params, "recipes.kfca")


def test_the_reference_page_is_that_of_the_types() -> None:
    assert (REPOSITORY / "docs/reference/params.md").read_text() == reference.page(), "run `make docs`"
