"""Every method, and recombinations of their parts, through the stages of a candidate in a tiny workspace."""

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
    digests,
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
ROWS = {"kind": "sparse_rows", "low_rank": 0.2, "smoothing": 0.85, "start": 0.25, "end": 0.25, "window": None}
IN_ORDER = {"anchor": 0.0, "ridge": 0.01}
DISTILLED = {"distillation": {"layers": 1.0, "logits": 1.0, "temperature": 2.0}}

THRESHOLD = {"steps": 60, "batch_size": 8, "threshold_learning_rate": 0.05}

# Cut down to seconds; steps of the threshold are those that its rate needs to pass every singular value.
METHODS: dict[str, dict[str, Any]] = {
    "ars": {"ranks": FEW},
    "drone_tolerance": {"ranks": {"grid": 3, "rows": 8}},
    "softlm": {"ranks": THRESHOLD},
    "lpaf": {"shaping": FEW},
    "losparse": {"residual": {"low_rank": 0.2}},
}
RECOMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kfac_ars": ("ars", {"weighting": {"kind": "kfac", "shrinkage": 0.0}, "ranks": FEW}),
    "kfac_losparse": ("kfac", {"residual": ROWS}),
    "kfac_lpaf": ("kfac", {"shaping": {"kind": "pruning", "score": "zero_order", **PRUNING, **FEW}}),
    "kfac_distilled": ("kfac", {"recovery": DISTILLED}),
    "pruned_ars": ("lpaf", {"shaping": FEW, "ranks": "ars"}),
    "elements": ("ars", {"ranks": {"selection": "elements", **FEW}}),
    "gates": ("ars", {"ranks": {"hypernetwork": False, "rows": 6, **FEW}}),
    "pruning_alone": ("losparse", {"residual": {"low_rank": 0.0}}),
    "factors_alone": ("losparse", {"residual": {"low_rank": 1.0}}),
    "losparse_distilled": ("losparse", {"residual": {"low_rank": 0.2}, "recovery": DISTILLED}),
    "losparse_then_distilled": ("losparse", {"residual": {"low_rank": 0.2, "window": 2}}),
    "kfac_pivoted": ("kfac", {"storage": "pivoted"}),
    "softlm_pivoted": ("softlm", {"storage": "pivoted", "ranks": THRESHOLD}),
    "drone_in_order": ("drone", {"sequential": IN_ORDER}),
    "kfac_anchored": ("kfac", {"sequential": {**IN_ORDER, "anchor": 0.5}}),
    "pruned_in_order": ("lpaf", {"shaping": FEW, "weighting": {"kind": "inputs"}, "sequential": IN_ORDER}),
    "pruned_base": ("lpaf", {"source": "base", "shaping": {**FEW, "learning_rate": 1e-12}}),
    "losparse_base": ("losparse", {"source": "base", "residual": {"low_rank": 0.2}}),
    "lpaf_distilled": ("lpaf", {"shaping": FEW, "recovery": DISTILLED}),
    "svd_at_drone": (
        "svd",
        {"ranks": {"kind": "borrowed", "weighting": {"kind": "inputs"}, "ranks": "drone_tolerance"}},
    ),
}
IN_TURN = "losparse_then_distilled"
NAMES = [*METHODS, *RECOMBINATIONS]
OF_LOW_RANK = ["drone_tolerance", "softlm", "softlm_pivoted", "elements"]
PIVOTED = ["kfac_pivoted", "softlm_pivoted"]
WITH_ROWS = [
    "losparse",
    "kfac_losparse",
    "pruning_alone",
    "factors_alone",
    "losparse_distilled",
    "losparse_then_distilled",
]
PRUNED = ["pruned_base", "lpaf", "kfac_lpaf", "pruned_ars", "lpaf_distilled", "pruned_in_order"]


@cache
def recipes() -> dict[str, Any]:
    own = repository_params()["recipes"]
    made = {name: merged(own[name], changes) for name, changes in METHODS.items()}
    for name, (origin, changes) in RECOMBINATIONS.items():
        if changes.get("ranks") == "ars":
            changes = {**changes, "ranks": made["ars"]["ranks"]}
        made[name] = merged(own[origin], changes)
        for part in ("weighting", "ranks"):
            if "kind" in changes.get(part, {}):  # of another kind, which has other settings
                made[name][part] = changes[part]
        if "ranks" in made[name]["ranks"]:
            made[name]["ranks"] = {**made[name]["ranks"], "ranks": made[made[name]["ranks"]["ranks"]]["ranks"]}
    quick = {name: merged(parts, {"recovery": FEW}) for name, parts in made.items() if name != IN_TURN}
    first = quick["losparse"]["recovery"]
    both = {"kind": "in_turn", "first": first, "then": {**first, **DISTILLED}}
    return {**quick, IN_TURN: {**made[IN_TURN], "recovery": both}}


def write(root: Path, chosen: dict[str, Any]) -> None:
    """params.yaml of a study of these recipes."""
    params = tiny_params(study={"recipes": list(chosen)})
    write_params(root, {**params, "recipes": chosen})


def run(recipe: str, *stages: str) -> None:
    """Stages of a candidate, in a study of one more recipe: to read all again and again takes seconds."""
    write(Path(), {name: recipes()[name] for name in (IN_TURN, recipe)})
    for stage in stages:
        run_stage(stage, recipe, KEEP)


@pytest.fixture(scope="module", autouse=True)
def _workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A workspace after importance, as the working directory."""
    root = tiny_workspace(tmp_path_factory.mktemp("methods"))
    write(root, recipes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root.parent / "cache")
        for stage in ("extract", "teacher", "importance"):
            run_stage(stage)
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


def test_the_budget_is_met_and_used(name: str) -> None:
    evaluation, targets = read(f"reports/evaluate/{name}.json"), read("data/importance/targets.json")["targets"]
    before = sum(target["out_features"] * target["in_features"] for target in targets)
    assert 0.35 * before < evaluation["target_parameters"] <= 0.5 * before
    saved = load_file(f"models/finetuned/{name}/model.safetensors")
    dense = load_file("models/teacher/model.safetensors")
    floats = [
        sum(value.numel() for value in weights.values() if value.is_floating_point()) for weights in (saved, dense)
    ]
    assert floats[1] - floats[0] == before - evaluation["target_parameters"]


def test_it_is_an_ordinary_model(name: str) -> None:
    small = model(f"models/finetuned/{name}")
    assert factorized(small)
    assert torch.isfinite(logits(f"models/finetuned/{name}")).all()
    evaluation = read(f"reports/evaluate/{name}.json")
    assert {k: v["rank"] for k, v in evaluation["targets"].items() if v["rank"] is not None} == factorized(small)
    assert {k: v["rows"] for k, v in evaluation["targets"].items() if v["rows"]} == residual_rows(small)


def test_a_search_that_trains_writes_its_curve_and_counts_its_steps(name: str) -> None:
    decision, curve = read(f"models/ranks/{name}/ranks.json"), points(f"reports/search/{name}.jsonl")
    assert decision["steps"] == (curve[-1]["step"] if curve else 0)
    learned = has(name, "shaping", "pruning") or has(name, "ranks", "hypernetwork") or has(name, "ranks", "threshold")
    assert bool(curve) == learned
    assert [point["step"] for point in curve] == sorted({point["step"] for point in curve})
    if has(name, "ranks", "hypernetwork"):
        assert {"task_loss", "R", "R_align"} <= set(curve[-1])
    assert (decision["average_rank"] is not None) == has(name, "shaping", "pruning")


def test_whatever_is_measured_is_explained(name: str) -> None:
    curves = points(f"reports/search/{name}.jsonl") + points(f"reports/finetune/{name}.jsonl")
    measured = {measure for point in curves for measure in point}
    assert measured <= {"step", "loss", "learning_rate", "grad_norm", "task_loss", *captions()}


@pytest.mark.parametrize("name", OF_LOW_RANK, indirect=True)
def test_factorizing_what_has_low_rank_loses_nothing(name: str) -> None:
    """Law 12, and the same for the ranks that tolerance found and for selected elements."""
    torch.testing.assert_close(
        logits(f"models/factorized/{name}"), logits(f"models/ranks/{name}/shaped"), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", PIVOTED, indirect=True)
def test_pivots_take_the_place_of_the_recovered_factors(name: str) -> None:
    factors, small = model(f"models/factorized/{name}"), model(f"models/finetuned/{name}")
    assert pivoted(small) == list(factorized(small)) == list(low_rank_layers(factors))
    saved = sum(rank**2 for rank in factorized(small).values())
    assert small.num_parameters() == factors.num_parameters() - saved


@pytest.mark.parametrize("name", ["svd_at_drone"], indirect=True)
def test_borrowed_ranks_are_the_lenders_and_the_factors_the_recipes_own(name: str) -> None:
    run("drone_tolerance", "search")
    ranks = read(f"models/ranks/{name}/ranks.json")["ranks"]
    assert ranks == read(f"models/ranks/drone_tolerance-{KEEP}/ranks.json")["ranks"]
    small = model(f"models/factorized/{name}")
    for target, layer in low_rank_layers(small).items():
        left, right = decompose(weight_of(model("models/teacher").get_submodule(target)), ErrorNorm()).truncate(
            layer.rank
        )
        torch.testing.assert_close(layer.dense(), (left @ right).float())


@pytest.mark.parametrize("name", WITH_ROWS, indirect=True)
def test_before_recovery_a_residual_leaves_nothing_out(name: str) -> None:
    """Law 11."""
    torch.testing.assert_close(logits(f"models/factorized/{name}"), logits("models/teacher"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["losparse_base"], indirect=True)
def test_a_recipe_may_begin_with_the_model_that_has_not_learned_the_task(name: str) -> None:
    factors, untaught = logits(f"models/factorized/{name}"), logits("models/untaught")
    torch.testing.assert_close(factors, untaught, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(untaught, logits("models/teacher"), rtol=1e-2)


@pytest.mark.parametrize("name", [IN_TURN], indirect=True)
def test_the_second_training_of_a_recovery_begins_when_the_first_has_pruned(name: str) -> None:
    curve = points(f"reports/finetune/{name}.jsonl")
    assert [point["step"] for point in curve] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ["rows" in point for point in curve] == [True] * 4 + [False] * 4
    assert ["distill_layers" in point for point in curve] == [False] * 4 + [True] * 4


@pytest.mark.parametrize("name", ["pruned_base"], indirect=True)
def test_shaping_may_begin_with_it_too(name: str) -> None:
    """It has trained at a rate at which nothing moves."""
    untaught, shaped = (load_file(f"models/{at}/model.safetensors") for at in ("untaught", f"ranks/{name}/shaped"))
    for target in read("data/importance/targets.json")["targets"]:
        before, after = (weights[f"{target['name']}.weight"] for weights in (untaught, shaped))
        torch.testing.assert_close(after, torch.where(after != 0, before, 0))


def test_what_shaping_left_is_scored_before_it_is_factorized(name: str) -> None:
    assert (read(f"reports/evaluate/{name}.json")["shaped"] is not None) == has(name, "shaping", "pruning")


def test_a_factorized_model_is_scored_unless_it_is_not_small_yet(name: str) -> None:
    is_small = not has(name, "residual", "sparse_rows")
    assert (read(f"reports/evaluate/{name}.json")["factorized"] is not None) == is_small


@pytest.mark.parametrize("name", PRUNED, indirect=True)
def test_pruned_weights_are_what_is_factorized(name: str) -> None:
    weights = load_file(f"models/ranks/{name}/shaped/model.safetensors")
    for target in read("data/importance/targets.json")["targets"]:
        weight = weights[f"{target['name']}.weight"]
        assert int((weight != 0).sum()) == round(0.5 * weight.numel())


@pytest.mark.parametrize(("recipe", "seen"), [("ars", 32), ("gates", 6)])
def test_a_search_sees_the_rows_of_its_sample_alone(recipe: str, seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are there; the recipe of gates asks for six."""
    samples = []

    def recording(model: Any, collate: Any, data: Any, *arguments: Any, **options: Any) -> int:
        samples.append({tuple(ids) for ids in data["input_ids"]})
        return train(model, collate, data, *arguments, **options)

    monkeypatch.setattr("tasks.training.loop.train", recording)
    run(recipe, "search")
    assert [len(rows) for rows in samples] == [seen]


@pytest.mark.parametrize("recipe", ["ars", "softlm", "lpaf", "losparse"])
def test_the_same_seed_gives_the_same_bytes(recipe: str) -> None:
    folders = ("models/ranks", "models/factorized", "models/finetuned")
    found = []
    for _ in range(2):
        run(recipe, "search", "factorize", "finetune")
        found.append([digests(Path(folder) / f"{recipe}-{KEEP}") for folder in folders])
    assert found[0] == found[1]
