"""Options for big models, through the stages: layers at once, bfloat16, a device map. Results do not change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from eckart.calibration.statistics_files import load_statistics
from eckart.model.layers import factorize_target
from tasks.models.device import to_device
from tasks.models.model_io import TEACHER, load, size
from tests.eckart.test_methods import recipes
from tests.workspace import TO_IMPORTANCE, digests, inside, run_stage, tiny_params, tiny_workspace, write_params

AUTO = AutoModelForSequenceClassification
HALF = {"model": {"dtype": "bfloat16"}}
NAMES = ["softlm", "losparse", "kfac_anchored"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace after importance."""
    root = tiny_workspace(tmp_path_factory.mktemp("big"))
    with inside(root, *TO_IMPORTANCE):
        yield root


@pytest.fixture
def workspace(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change, as the working directory."""
    shutil.copytree(root, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def statistics() -> dict[tuple[str, str], torch.Tensor]:
    stored = load_statistics(Path("data/importance"))
    return {(kind, key): tensors[key] for kind, tensors in stored.items() for key in tensors}


def change(**changes: object) -> None:
    write_params(Path(), tiny_params(**changes))


def test_statistics_do_not_depend_on_how_memory_is_saved(workspace: Path) -> None:
    before = statistics()
    change(importance={"layers_at_once": 2, "offload_activations": True})
    run_stage("importance")
    after = statistics()
    assert set(after) == set(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert len(list(Path("data/importance").glob("inputs*"))) == 2  # of two layers, and of the pooler


def test_a_device_map_does_not_change_results(workspace: Path) -> None:
    """On one device; several are not tested here."""
    outputs = ["data/importance", *(f"models/{name}/kfac-0.5" for name in ("ranks", "factorized", "finetuned"))]
    results = []
    for device_map in (None, "auto"):
        change(model={"device_map": device_map}, recipes={"kfac": {"sequential": {"anchor": 0.5, "ridge": 0.01}}})
        run_stage("importance")
        for stage in ("search", "factorize", "finetune", "evaluate"):
            run_stage(stage, "kfac", "0.5")
        results.append([digests(Path(folder)) for folder in outputs] + [digests(Path("reports/evaluate"))])
    assert results[0] == results[1]


def offloaded() -> PreTrainedModel:
    """Load the teacher partly on the CPU and partly on the disk, where its first parameter is."""
    parts = ["bert.encoder.layer.0", "bert.pooler", "classifier"]
    disk = dict.fromkeys(["bert.embeddings", "bert.encoder.layer.1"], "disk")
    return load(TEACHER, AUTO, device_map={**dict.fromkeys(parts, "cpu"), **disk})[0]


def test_a_model_that_a_device_map_placed_stays_there(root: Path) -> None:
    model, tokenizer = load(TEACHER, AUTO, device_map="auto")
    assert to_device(model) == str(model.device)
    there, (here, _) = offloaded(), load(TEACHER, AUTO)
    assert to_device(there) == "cpu"
    assert there.bert.embeddings.word_embeddings.weight.is_meta
    assert to_device(here) == str(here.device)
    assert size(there, TEACHER, 8) == size(here, TEACHER, 8)
    batch = tokenizer(["the plot is dull"], return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(there(**batch).logits, here.eval()(**batch).logits)


def test_a_layer_on_the_disk_cannot_be_factorized(root: Path) -> None:
    model, name = offloaded(), "bert.encoder.layer.1.output.dense"
    left, right = torch.zeros(32, 2), torch.zeros(2, 64)
    with pytest.raises(ValueError, match=name):
        factorize_target(model, name, left, right)
    factorize_target(model, name.replace("1", "0"), left, right)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A workspace in bfloat16 after importance, as the working directory."""
    root = tiny_workspace(tmp_path_factory.mktemp("half"), **HALF)
    params = tiny_params(**HALF)
    params["recipes"] = recipes()
    params["study"]["recipes"] = NAMES
    write_params(root, params)
    with inside(root, *TO_IMPORTANCE):
        yield


def types(file: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_file(file).values() if tensor.is_floating_point()}


def test_weights_in_half_precision_have_statistics_in_single(half: None) -> None:
    assert types(Path("models/teacher/model.safetensors")) == {torch.bfloat16}
    assert {tensor.dtype for tensor in statistics().values()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_candidates_have_the_type_of_the_teacher(half: None, name: str) -> None:
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, name, "0.5")
    for step in ("factorized", "finetuned"):
        assert types(Path(f"models/{step}/{name}-0.5/model.safetensors")) == {torch.bfloat16}
    assert json.loads(Path(f"reports/evaluate/{name}-0.5.json").read_text())["recovered"]["loss"] < 5
