"""Every method, and recipes that recombine their parts, through the stages of a candidate in a tiny workspace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import eckart as eckart  # teaches transformers to load the candidates
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import factorized, low_rank_layers, pivoted, residual_rows
from eckart.model.targets import weight_of
from eckart.recipe import captions
from tasks.training.loop import train
from tests.workspace import (
    TO_IMPORTANCE,
    digests,
    inside,
    merged,
    repository_params,
    run_stage,
    tiny_params,
    tiny_workspace,
    write_params,
)

KEEP = "0.5"
FEW = {"steps": 4, "batch_size": 8}
PRUNING = {"warmup": 0.1, "weight_decay": 0.01, "remaining": [0.5], "start": 0.25, "end": 0.25, "learning_rate": 1e-3}
IN_ORDER = {"anchor": 0.0, "ridge": 0.01}
DISTILLED = {"distillation": {"layers": 1.0, "logits": 1.0, "temperature": 2.0}}

# Cut down to seconds; steps of the threshold are those that its rate needs to pass every singular value.
METHODS: dict[str, dict[str, Any]] = {
    "ars": {"ranks": FEW},
    "drone_tolerance": {"ranks": {"grid": 3, "examples": 8}},
    "softlm": {"ranks": {"steps": 60, "batch_size": 8, "threshold_learning_rate": 0.05}},
    "lpaf_sensitivity": {"shaping": FEW},
    "losparse": {"residual": {"low_rank": 0.2}},
}
RECOMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kfac_lpaf": ("kfac", {"shaping": {"kind": "pruning", "score": "zero_order", **PRUNING, **FEW}}),
    "elements": ("ars", {"ranks": {"selection": "elements", "split": "calibration", **FEW}}),
    "gates": ("ars", {"ranks": {"hypernetwork": False, "examples": 6, **FEW}}),
    "losparse_then_distilled": ("losparse", {"residual": {"low_rank": 0.2, "window": 2}}),
    "kfac_anchored": (
        "kfac",
        {
            "ranks": {"kind": "calibrated", "examples": 3, "held_out": 9, "alpha": [1.0], "multiple": 1},
            "storage": "pivoted",
            "sequential": {**IN_ORDER, "anchor": 0.5},
            "recovery": DISTILLED,
        },
    ),
    "pruned_in_order": (
        "lpaf_sensitivity",
        {"shaping": FEW, "weighting": {"kind": "inputs"}, "sequential": IN_ORDER, "recovery": DISTILLED},
    ),
    "pruned_base": ("lpaf", {"shaping": {**FEW, "learning_rate": 1e-12}}),
    "losparse_base": ("losparse", {"source": "base", "residual": {"low_rank": 0.2}}),
    "svd_at_drone": (
        "svd",
        {"ranks": {"kind": "borrowed", "weighting": {"kind": "inputs"}, "ranks": "drone_tolerance"}},
    ),
}
IN_TURN = "losparse_then_distilled"
NAMES = [*METHODS, *RECOMBINATIONS]


@cache
def recipes() -> dict[str, Any]:
    own = repository_params()["recipes"]
    recipes = {name: merged(own[name], changes) for name, changes in METHODS.items()}
    for name, (origin, changes) in RECOMBINATIONS.items():
        recipes[name] = merged(own[origin], changes)
        for part in ("weighting", "ranks"):
            if "kind" in changes.get(part, {}):  # of another kind, which has other settings
                recipes[name][part] = changes[part]
        ranks = recipes[name]["ranks"]
        if "ranks" in ranks:  # the search of another recipe, by name
            recipes[name]["ranks"] = {**ranks, "ranks": recipes[ranks["ranks"]]["ranks"]}
    quick = {name: merged(parts, {"recovery": FEW}) for name, parts in recipes.items() if name != IN_TURN}
    first = quick["losparse"]["recovery"]
    both = {"kind": "in_turn", "first": first, "then": {**first, **DISTILLED}}
    return {**quick, IN_TURN: {**recipes[IN_TURN], "recovery": both}}


def write(root: Path, chosen: dict[str, Any]) -> None:
    """Write params.yaml of a study of these recipes."""
    params = tiny_params(study={"recipes": list(chosen)})
    write_params(root, {**params, "recipes": chosen})


def run(recipe: str, *stages: str) -> None:
    """Run stages of a candidate, in a study of two recipes: to validate all of them each time takes seconds."""
    write(Path(), {name: recipes()[name] for name in (IN_TURN, recipe)})
    for stage in stages:
        run_stage(stage, recipe, KEEP)


@pytest.fixture(scope="module", autouse=True)
def _workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A workspace after importance, as the working directory."""
    root = tiny_workspace(tmp_path_factory.mktemp("methods"))
    write(root, recipes())
    with inside(root, *TO_IMPORTANCE):
        yield


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest, _workspace: None) -> str:
    """A candidate, after all its stages; the teacher is as it was."""
    before = digests(Path("models/teacher"))
    run(request.param, "search", "factorize", "finetune", "evaluate")
    assert digests(Path("models/teacher")) == before
    return f"{request.param}-{KEEP}"


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def points(path: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def model(folder: str) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def logits(folder: str) -> torch.Tensor:
    batch = AutoTokenizer.from_pretrained(folder)(["the plot is dull", "the cast is warm"], return_tensors="pt")
    with torch.no_grad():
        return model(folder)(**batch).logits


def has(name: str, part: str, kind: str) -> bool:
    return (recipes()[name.rpartition("-")[0]][part] or {}).get("kind") == kind


def test_a_candidate_uses_its_budget_and_no_more(name: str) -> None:
    evaluation, targets = read(f"reports/evaluate/{name}.json"), read("data/importance/targets.json")["targets"]
    before = sum(target["out_features"] * target["in_features"] for target in targets)
    assert 0.35 * before < evaluation["target_parameters"] <= 0.5 * before
    saved = load_file(f"models/finetuned/{name}/model.safetensors")
    dense = load_file("models/teacher/model.safetensors")
    floats = [
        sum(value.numel() for value in weights.values() if value.is_floating_point()) for weights in (saved, dense)
    ]
    assert floats[1] - floats[0] == before - evaluation["target_parameters"]


def test_a_candidate_loads_as_an_ordinary_model(name: str) -> None:
    small = model(f"models/finetuned/{name}")
    assert factorized(small)
    assert torch.isfinite(logits(f"models/finetuned/{name}")).all()
    evaluation = read(f"reports/evaluate/{name}.json")
    assert {k: v["rank"] for k, v in evaluation["targets"].items() if v["rank"] is not None} == factorized(small)
    assert {k: v["rows"] for k, v in evaluation["targets"].items() if v["rows"]} == residual_rows(small)
    assert (evaluation["shaped"] is not None) == has(name, "shaping", "pruning")
    assert (evaluation["factorized"] is None) == has(name, "residual", "sparse_rows")


def test_a_search_that_trains_writes_its_curve_and_counts_its_steps(name: str) -> None:
    decision, curve = read(f"models/ranks/{name}/ranks.json"), points(f"reports/search/{name}.jsonl")
    assert decision["steps"] == (curve[-1]["step"] if curve else 0)
    learned = has(name, "shaping", "pruning") or has(name, "ranks", "hypernetwork") or has(name, "ranks", "threshold")
    assert bool(curve) == learned
    assert [point["step"] for point in curve] == sorted({point["step"] for point in curve})
    if has(name, "ranks", "hypernetwork"):
        assert {"task_loss", "R", "R_align"} <= set(curve[-1])
    assert (decision["average_rank"] is not None) == has(name, "shaping", "pruning")


def test_every_measure_has_a_caption(name: str) -> None:
    curves = points(f"reports/search/{name}.jsonl") + points(f"reports/finetune/{name}.jsonl")
    measured = {measure for point in curves for measure in point}
    assert measured <= {"step", "loss", "learning_rate", "grad_norm", "task_loss", *captions()}


@pytest.mark.parametrize("name", ["drone_tolerance", "softlm", "elements"], indirect=True)
def test_factorizing_weights_of_low_rank_loses_nothing(name: str) -> None:
    """For soft thresholds, for the ranks that tolerance found, and for selected elements."""
    torch.testing.assert_close(
        logits(f"models/factorized/{name}"), logits(f"models/ranks/{name}/shaped"), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["kfac_anchored"], indirect=True)
def test_recovered_factors_are_stored_as_pivots(name: str) -> None:
    factors, small = model(f"models/factorized/{name}"), model(f"models/finetuned/{name}")
    assert pivoted(small) == list(factorized(small)) == list(low_rank_layers(factors))
    saved = sum(rank**2 for rank in factorized(small).values())
    assert small.num_parameters() == factors.num_parameters() - saved


@pytest.mark.parametrize("name", ["svd_at_drone"], indirect=True)
def test_borrowed_ranks_are_factorized_under_the_recipes_own_weighting(name: str) -> None:
    run("drone_tolerance", "search")
    ranks = read(f"models/ranks/{name}/ranks.json")["ranks"]
    assert ranks == read(f"models/ranks/drone_tolerance-{KEEP}/ranks.json")["ranks"]
    small = model(f"models/factorized/{name}")
    for target, layer in low_rank_layers(small).items():
        left, right = decompose(weight_of(model("models/teacher").get_submodule(target)), ErrorNorm()).truncate(
            layer.rank
        )
        torch.testing.assert_close(layer.dense(), (left @ right).float())


@pytest.mark.parametrize("name", ["losparse", IN_TURN], indirect=True)
def test_before_recovery_factors_and_residual_add_up_to_the_weight(name: str) -> None:
    torch.testing.assert_close(logits(f"models/factorized/{name}"), logits("models/teacher"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["losparse_base"], indirect=True)
def test_a_recipe_may_start_from_the_base_model(name: str) -> None:
    factors, untaught = logits(f"models/factorized/{name}"), logits("models/untaught")
    torch.testing.assert_close(factors, untaught, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(untaught, logits("models/teacher"), rtol=1e-2)


@pytest.mark.parametrize("name", [IN_TURN], indirect=True)
def test_a_two_phase_recovery_prunes_first_and_distills_then(name: str) -> None:
    curve = points(f"reports/finetune/{name}.jsonl")
    assert [point["step"] for point in curve] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ["rows" in point for point in curve] == [True] * 4 + [False] * 4
    assert ["distill_layers" in point for point in curve] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("name", ["pruned_base"], indirect=True)
def test_shaping_may_start_from_the_base_model(name: str) -> None:
    """Its learning rate is so small that no weight moves; one that was zeroed and comes back stays near 0."""
    untaught, shaped = (load_file(f"models/{at}/model.safetensors") for at in ("untaught", f"ranks/{name}/shaped"))
    for target in read("data/importance/targets.json")["targets"]:
        before, after = (weights[f"{target['name']}.weight"] for weights in (untaught, shaped))
        torch.testing.assert_close(after, torch.where(after.abs() > 1e-9, before, 0))


@pytest.mark.parametrize("name", ["pruned_base", "lpaf_sensitivity", "kfac_lpaf", "pruned_in_order"], indirect=True)
def test_shaping_prunes_the_weights_that_are_factorized(name: str) -> None:
    weights = load_file(f"models/ranks/{name}/shaped/model.safetensors")
    for target in read("data/importance/targets.json")["targets"]:
        weight = weights[f"{target['name']}.weight"]
        assert int((weight != 0).sum()) == round(0.5 * weight.numel())


@pytest.mark.parametrize(("recipe", "seen"), [("ars", 32), ("gates", 6), ("elements", 16)])
def test_a_search_trains_on_the_examples_it_asks_for(recipe: str, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 32; the recipe `gates` asks for six, and `elements` for the 16 of the calibration."""
    examples = []

    def recording(model: Any, collate: Any, data: Any, *arguments: Any, **options: Any) -> int:
        examples.append({tuple(ids) for ids in data["input_ids"]})
        return train(model, collate, data, *arguments, **options)

    monkeypatch.setattr("tasks.training.loop.train", recording)
    run(recipe, "search")
    assert [len(texts) for texts in examples] == [seen]


@pytest.mark.parametrize("name", ["ars"], indirect=True)
def test_the_same_seed_gives_the_same_bytes(name: str) -> None:
    folders = [Path(folder) / name for folder in ("models/ranks", "models/factorized", "models/finetuned")]
    before = [digests(folder) for folder in folders]
    run(name.removesuffix(f"-{KEEP}"), "search", "factorize", "finetune")
    assert [digests(folder) for folder in folders] == before
