"""Mamba, saved as a language model, goes through all stages as a classifier, with SoftLM's thresholds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import eckart
from eckart.model.layers import factorized
from eckart.model.mamba import MambaForSequenceClassification
from tasks.artifacts.decision import load_decision
from tasks.artifacts.errors import StageError
from tasks.exporting.merged_checkpoint import to_plain
from tests import tiny
from tests.workspace import BASE, TO_IMPORTANCE, repository_params, run_stage, tiny_tokenizer, tiny_workspace


def test_mamba_goes_through_all_stages(tmp_path: Path, monkeypatch) -> None:
    """Its projections have a threshold for each block. Of 13 steps at most, two are taken with frozen thresholds."""
    recipe = repository_params()["recipes"]["softlm"]
    recipe |= {"source": "base", "recovery": {"kind": "finetune", "steps": 0}}
    recipe["ranks"] |= {
        "steps": 11,
        "batch_size": 8,
        "pressure": 100.0,
        "threshold_learning_rate": 2.0,
        "frozen_steps": 2,
    }
    recipe["ranks"] |= {"thresholds": "block"}
    tiny_workspace(
        tmp_path,
        study={"recipes": ["softlm"]},
        targets={"include": ["*.in_proj", "*.out_proj"]},
        recipes={"softlm": recipe},
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = tiny_tokenizer()
    shutil.rmtree(BASE)
    words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    tiny.build("MambaForCausalLM", **{**tiny.MAMBA, **words}).save_pretrained(BASE)
    tokenizer.save_pretrained(BASE)
    for stage in TO_IMPORTANCE:
        run_stage(stage)
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, "softlm", "0.5")
    decision = load_decision("softlm-0.5")
    assert decision.steps == decision.reached[0.5] + 2 <= 13
    assert decision.reached[0.75] <= decision.reached[0.5]
    assert {name.rpartition(".")[2] for name in decision.ranks} == {"in_proj", "out_proj"}
    evaluation = json.loads(Path("reports/evaluate/softlm-0.5.json").read_text())
    assert evaluation["target_parameters"] <= 0.5 * decision.parameters_before
    small = eckart.load("models/finetuned/softlm-0.5")
    assert isinstance(small, MambaForSequenceClassification)
    for folder in ("teacher", "untaught", "finetuned/softlm-0.5"):  # for the tokenizers library, which would cut texts
        assert json.loads(Path(f"models/{folder}/tokenizer.json").read_text())["truncation"] is None
    assert set(factorized(small)) == {name for name, rank in decision.ranks.items() if rank is not None}
    with pytest.raises(StageError, match="MambaForSequenceClassification"):  # transformers alone could not load it
        to_plain("models/finetuned/softlm-0.5", Path("plain"))
