"""A mixture of experts goes through all stages of a candidate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

import eckart
from eckart.model.experts import unfused_experts
from eckart.model.targets import Targets
from tasks.exporting.merged_checkpoint import to_plain
from tests import tiny
from tests.workspace import BASE, TO_IMPORTANCE, repository_params, run_stage, tiny_tokenizer, tiny_workspace


def test_a_mixture_goes_through_all_stages(tmp_path: Path, monkeypatch) -> None:
    """Its experts are factorized, fine-tuned and merged again; the original model keeps its fast tensors.

    Or they are narrowed, and become a smaller plain mixture.
    """
    recipe = repository_params()["recipes"]["anchored"]
    narrow = {**recipe, "ranks": {**recipe["ranks"], "narrow": True, "one_width": True}}
    recipe["recovery"] = {"kind": "mixed_rank", "steps": 2, "batch_size": 8}
    tiny_workspace(
        tmp_path,
        study={"recipes": ["moe", "narrow"]},
        teacher={"epochs": 0},
        importance={"layers_at_once": 1},
        recipes={"moe": recipe, "narrow": narrow},
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = tiny_tokenizer()
    experts = {"num_local_experts": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes = {**tiny.LAYERS, **experts, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    shutil.rmtree(BASE)
    tiny.build("MixtralForSequenceClassification", **sizes, num_labels=2).save_pretrained(BASE)
    tokenizer.save_pretrained(BASE)
    for stage in TO_IMPORTANCE:
        run_stage(stage)
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, "moe", "0.5")
    for stage in ("search", "factorize"):
        run_stage(stage, "narrow", "0.5")
    found = Targets.model_validate_json(Path("data/importance/targets.json").read_text())
    evaluation = json.loads(Path("reports/evaluate/moe-0.5.json").read_text())
    ranks = [size["rank"] for name, size in evaluation["targets"].items() if ".experts." in name]
    assert len(ranks) + sum(".experts." in name for name in found.excluded) == 2 * 2 * 4
    assert any(ranks)
    assert evaluation["target_parameters"] <= 0.5 * found.census.targets
    assert not unfused_experts(eckart.load("models/teacher"))
    small = eckart.load("models/finetuned/moe-0.5")
    to_plain("models/finetuned/moe-0.5", Path("plain"))
    plain = eckart.load("plain")
    assert unfused_experts(small)
    assert not unfused_experts(plain)
    to_plain("models/factorized/narrow-0.5", Path("narrower"))
    assert eckart.load("narrower").num_parameters() < plain.num_parameters()
    inputs = tokenizer(["the plot is good"], return_tensors="pt")
    torch.testing.assert_close(tiny.logits(plain, inputs), tiny.logits(small, inputs), rtol=1e-4, atol=1e-4)
