"""Training in several processes and in mixed precision: the settings of the Trainer, seen from the stages."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tasks.artifacts.results_schema import CONTROL_CURVE, DENSE_METRICS, TEACHER_CURVE
from tasks.artifacts.task_spec import load_split, load_task
from tasks.models.model_io import load
from tasks.nlp_tasks import kind_of
from tasks.runtime import stage_runner
from tests.tasks.training.test_loop import points
from tests.workspace import BASE, REVIEWS, SUBJECTS, TO_IMPORTANCE, WORDS, run_stage, tiny_workspace

TAUGHT = {"study": {"control": "kfac"}, "recipes": {"kfac": {"recovery": {"steps": 3, "distillation": {}}}}}
"""Changes of params.yaml with which the control has a teacher, so that its curve has the task loss, too."""
Trained = tuple[dict[str, torch.Tensor], list[dict[str, float]]]
"""The weights and the curve of a training."""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def teacher(root: Path, *others: str, **changes: object) -> Trained:
    """Its weights and its curve, and `others` after it; without dropout, which each process draws for itself."""
    tiny_workspace(root, **changes)
    config = root / BASE / "config.json"
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps({**json.loads(config.read_text()), **rates}))
    for name in ("extract", "teacher", *others):
        run_stage(name)
    curves = [TEACHER_CURVE, *[CONTROL_CURVE] * ("control" in others)]
    return load_file("models/teacher/model.safetensors"), [point for curve in curves for point in points(curve)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The teacher of one process, in full precision, and the curve of its control, too."""
    folder = tmp_path_factory.mktemp("plain")
    with contextlib.chdir(folder):
        return teacher(folder, "control", **TAUGHT)


def test_two_processes_learn_what_one_learns(workspace: Path, plain: Trained) -> None:
    """Each takes half of the rows of a step, and their gradients are averaged: the same steps, but for rounding.

    Also where each takes its half in two micro-batches, of three rows and one.
    """
    one, curve = plain
    two, joined = teacher(workspace, "control", trainer={"processes": 2, "micro_batch": 3}, **TAUGHT)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)
    assert [point["step"] for point in joined] == [point["step"] for point in curve]
    for name in ("loss", "task_loss"):
        means = [point[name] for point in curve if name in point]
        assert means
        assert [point[name] for point in joined if name in point] == pytest.approx(means, rel=1e-3)


def test_processes_may_checkpoint_activations_of_a_model_with_unused_weights(workspace: Path) -> None:
    """An embedding does not need BERT's pooler."""
    data = {"task": "embedding", "metric": "recall_at_10", "columns": {"text_pair": None, "label": None}}
    tiny_workspace(
        workspace,
        data=data | {"sizes": {"validation": 30, "test": 30}},
        teacher={"epochs": 0},
        study={"control": None, "recipes": ["svd"]},
        importance={"statistics": ["inputs"]},
        trainer={"processes": 2, "checkpoint_activations": True},
    )
    words = [*SUBJECTS, *WORDS["positive"]]
    texts = [f"{first} {second}" for first in words for second in words]
    (workspace / REVIEWS).write_text("\n".join(["text,label", *(f"{text},0" for text in texts)]))
    for name in TO_IMPORTANCE:
        run_stage(name)
    for name in ("search", "factorize", "finetune"):
        run_stage(name, "svd", "0.5")
    assert Path("models/finetuned/svd-0.5/model.safetensors").exists()


def test_a_batch_that_processes_cannot_share_is_an_error(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of the processes; this is the first of two."""
    tiny_workspace(workspace, trainer={"processes": 2}, teacher={"batch_size": 7})
    run_stage("extract")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"^teacher: 7 .*\b2\b"):
        run_stage("teacher")
    assert not Path("models/teacher").exists()


def test_an_error_of_one_process_ends_the_stage(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes of another stage, which needs no seconds to import what trains."""
    tiny_workspace(workspace, trainer={"processes": 2})
    code = workspace / "tasks/teacher.py"
    code.parent.mkdir()
    (code.parent / "__init__.py").touch()
    code.write_text("import os, sys\nsys.exit('teacher: the cause' if os.environ['RANK'] == '1' else 0)\n")
    monkeypatch.setattr(stage_runner, "__file__", str(code))
    with pytest.raises(SystemExit, match=r"^teacher: the cause$"):
        run_stage("teacher")


def test_mixed_precision_rounds_and_keeps_the_type_of_the_weights(workspace: Path, plain: Trained) -> None:
    mixed, _ = teacher(workspace, "control", "dense", trainer={"precision": "bf16"})
    assert {value.dtype for value in mixed.values()} == {torch.float32}
    loaded, tokenizer = load(Path("models/teacher"), AutoModelForSequenceClassification)
    again = kind_of(load_task()).score(loaded, tokenizer, load_split("test"), 8, "test").score
    reported = json.loads(DENSE_METRICS.read_text())["score"]
    assert reported["loss"] == again.loss  # scored as candidates are, not in mixed precision
    assert any(not torch.equal(mixed[name], value) for name, value in plain[0].items())
    for name, value in plain[0].items():
        torch.testing.assert_close(mixed[name], value, rtol=0.1, atol=0.02)


def test_checkpointed_activations_change_nothing(workspace: Path, plain: Trained) -> None:
    again, _ = teacher(workspace, trainer={"checkpoint_activations": True})
    for name, value in plain[0].items():
        torch.testing.assert_close(again[name], value)
