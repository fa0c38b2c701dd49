"""Trials of a study's recipes, and the choice among them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.multi_seed import trials
from tasks.multi_seed.trials import Trials
from tests.workspace import tiny_params

FASTER = {"recovery": {"learning_rate": 1e-3}}
SHORTER = {"recovery": {"steps": 1}, "ranks": {"kind": "waterfill", "multiple": 1, "embedding_price": 1.0}}
ASKED = {"seed": 3, "keep": 0.25, "recipes": {"svd": [{}, FASTER, SHORTER], "kfac": [FASTER]}}


def scored(root: Path, name: str, validation: float) -> None:
    """Write what the study of the trials found of a candidate."""
    score = {"metric": 1.0, "loss": 1.0, "examples": 4, "metrics": {}}
    found = {"shaped": None, "factorized": None, "recovered": score, "validation": {**score, "metric": validation}}
    size = {"model_parameters": 1, "macs_per_token": 1, "bytes": 1}
    found |= {"size": size, "zero_shot": {}, "continuations": [], "targets": {}, "target_parameters": 1}
    (root / "reports/evaluate").mkdir(parents=True, exist_ok=True)
    (root / f"reports/evaluate/{name}.json").write_text(json.dumps(found))


def test_each_trial_is_a_recipe_of_a_study_of_their_own() -> None:
    content = tiny_params(export={"recipes": ["kfac"]})
    study = trials.study(content, Trials.model_validate(ASKED))
    assert study["study"]["recipes"] == ["svd", "svd_trial2", "svd_trial3", "kfac_trial1"]
    assert (study["study"]["keeps"], study["seed"]) == ([0.25], 3)
    assert study["study"]["name"] != content["study"]["name"]  # an experiment of its own
    assert study["export"]["recipes"] == []  # though the study exports some
    recipes = study["recipes"]
    assert recipes["svd"] == content["recipes"]["svd"]
    assert recipes["svd_trial2"]["recovery"] == {**content["recipes"]["svd"]["recovery"], "learning_rate": 1e-3}
    assert recipes["svd_trial3"]["ranks"] == {"kind": "waterfill", "multiple": 1, "embedding_price": 1.0}
    assert content == tiny_params(export={"recipes": ["kfac"]})


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 0.8), ("perplexity", 0.5)])
def test_validation_rows_choose_in_the_metric_s_direction_and_the_first_of_equals(
    metric: Any, best: float, tmp_path: Path
) -> None:
    for name, validation in {"svd": 0.6, "svd_trial2": best, "svd_trial3": best, "kfac_trial1": 0.7}.items():
        scored(tmp_path, f"{name}-0.25", validation)
    tried = trials.results(Trials.model_validate(ASKED), metric, tmp_path)
    assert [(trial.recipe, trial.change) for trial in tried if trial.chosen] == [("svd", FASTER), ("kfac", FASTER)]
    assert [trial.validation for trial in tried] == [0.6, best, best, 0.7]
    chosen = trials.best(tiny_params(), tried)
    assert chosen["recipes"] == tiny_params(recipes={"kfac": FASTER, "svd": FASTER})["recipes"]
