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
    score = {"metric": 1.0, "loss": 1.0, "rows": 4, "metrics": {}}
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


@pytest.mark.parametrize(("metric", "best"), [("accuracy", "svd_trial2"), ("perplexity", "svd_trial3")])
def test_validation_rows_choose_in_the_metric_s_direction(metric: Any, best: str, tmp_path: Path) -> None:
    for name, validation in {"svd": 0.6, "svd_trial2": 0.8, "svd_trial3": 0.5, "kfac_trial1": 0.7}.items():
        scored(tmp_path, f"{name}-0.25", validation)
    tried = trials.results(Trials.model_validate(ASKED), metric, tmp_path)
    change = {"svd_trial2": FASTER, "svd_trial3": SHORTER}[best]
    assert [(one.recipe, one.change) for one in tried if one.chosen] == [("svd", change), ("kfac", FASTER)]
    assert [one.validation for one in tried] == [0.6, 0.8, 0.5, 0.7]
    chosen = trials.best(tiny_params(), tried)
    expected = tiny_params(recipes={"kfac": FASTER})["recipes"]
    assert chosen["recipes"]["kfac"] == expected["kfac"]
    assert chosen["recipes"]["svd"] == trials.study(tiny_params(), Trials.model_validate(ASKED))["recipes"][best]


def test_of_equal_trials_the_first_is_chosen(tmp_path: Path) -> None:
    for name in ("svd", "svd_trial2", "svd_trial3", "kfac_trial1"):
        scored(tmp_path, f"{name}-0.25", 0.5)
    tried = trials.results(Trials.model_validate(ASKED), "accuracy", tmp_path)
    assert [one.chosen for one in tried] == [True, False, False, True]
