"""`eckart.compress` gives, bit for bit, the model that the stages importance, search and factorize give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import eckart
from tasks.artifacts.paths import FACTORIZED, load_decision
from tasks.artifacts.task_spec import load_task
from tasks.data.loading import batches, encoded
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tests.workspace import run_stage, tiny_params, tiny_workspace


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compress_gives_what_the_stages_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = {"anchor": 0.5, "ridge": 0.1}
    monkeypatch.chdir(tiny_workspace(tmp_path, recipes={"kfac": {"sequential": order}}))
    for stage in ("extract", "teacher", "importance"):
        run_stage(stage)
    for stage in ("search", "factorize"):
        run_stage(stage, "kfac", "0.5")
    model, tokenizer = load(TEACHER, AutoModelForSequenceClassification)
    collate = kind_of(load_task()).collate(tokenizer, model)
    data = list(batches(encoded("calibration", tokenizer), collate, 8, "cpu"))
    recipe = tiny_params()["recipes"]["kfac"] | {"sequential": order}
    small, report = eckart.compress(model, data, 0.5, recipe)
    expected, _ = load(FACTORIZED / "kfac-0.5", AutoModelForSequenceClassification)
    assert {name: target.rank for name, target in report.targets.items()} == load_decision("kfac-0.5").ranks
    own, theirs = small.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name]) for name, values in own.items())
