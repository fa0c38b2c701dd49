"""The stages of a candidate: they do what `eckart.compress` does, and read the parameters that DVC watches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from ruamel.yaml import YAML
from transformers import AutoModelForSequenceClassification

import eckart
from tasks.artifacts.decision import load_decision
from tasks.artifacts.paths import FACTORIZED
from tasks.artifacts.task_spec import load_task
from tasks.data.loading import batches, encoded
from tasks.evaluate import EvaluationParts
from tasks.factorize import FactorizationParts
from tasks.finetune import RecoveryParts
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.search import SearchParts
from tasks.training.checkpoints import CHECKPOINTS
from tasks.training.refined_blocks import RefinedBlocks
from tests.workspace import REPOSITORY, TO_IMPORTANCE, run_stage, tiny_params, tiny_workspace


class Killed(Exception):
    pass


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compress_gives_what_the_stages_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the stage factorize is killed after its first refined block."""
    order = {"anchor": 0.5, "ridge": 0.1, "refine": {"passes": 1, "learning_rate": 1e-3, "error": "gradients"}}
    changes = {"recipes": {"kfac": {"sequential": order}}, "importance": {"clip": [1.0, 1.0]}}
    monkeypatch.chdir(tiny_workspace(tmp_path, **changes))
    for stage in TO_IMPORTANCE:
        run_stage(stage)
    run_stage("search", "kfac", "0.5")
    with monkeypatch.context() as patched:
        patched.setattr(RefinedBlocks, "save", _killed_after(RefinedBlocks.save))
        with pytest.raises(Killed):
            run_stage("factorize", "kfac", "0.5")
    assert len([*CHECKPOINTS.rglob("*.safetensors")]) == 1
    run_stage("factorize", "kfac", "0.5")
    assert not [*CHECKPOINTS.rglob("*.safetensors")]
    blocks = json.loads((FACTORIZED / "kfac-0.5/refinement.json").read_text())
    assert [block["name"] for block in blocks] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    model, tokenizer = load(TEACHER, AutoModelForSequenceClassification)
    collate = kind_of(load_task()).collate(tokenizer, model)
    data = list(batches(encoded("calibration", tokenizer), collate, 8, "cpu"))
    recipe = tiny_params()["recipes"]["kfac"] | {"sequential": order}
    small, report = eckart.compress(model, data, 0.5, recipe, clip=(1, 1))
    expected, _ = load(FACTORIZED / "kfac-0.5", AutoModelForSequenceClassification)
    assert {name: target.rank for name, target in report.targets.items()} == load_decision("kfac-0.5").ranks
    assert report.refined == {block["name"]: (block["before"], block["after"]) for block in blocks}
    assert "held-out error" in str(report)
    own, theirs = small.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name]) for name, values in own.items())
    unclipped = eckart.compress(model, data, 0.5, recipe).report.predicted_loss
    assert unclipped != pytest.approx(report.predicted_loss, rel=0.1, abs=0)


def _killed_after(save: Any) -> Any:
    def save_and_die(*args: Any) -> None:
        save(*args)
        raise Killed

    return save_and_die


@pytest.mark.parametrize(
    ("stage", "parts"),
    [
        ("search", SearchParts),
        ("factorize", FactorizationParts),
        ("finetune", RecoveryParts),
        ("evaluate", EvaluationParts),
    ],
)
def test_a_stage_reads_the_parts_of_a_recipe_that_dvc_watches(stage: str, parts: type[BaseModel]) -> None:
    described = YAML(typ="safe").load(REPOSITORY / "dvc.yaml")["stages"][stage]["params"]
    assert set(re.findall(r"recipes\.\$\{item\.recipe\}\.(\w+)", str(described))) == set(parts.model_fields)
