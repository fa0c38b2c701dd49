"""Publishing: which files of a candidate go to the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.engine import nothing_to_do
from flows.hub.publish import publish
from tests.flows.hub import TOKEN, hub


def candidate(root: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """Make `root` the working directory, with a candidate kfac-0.5 that has these files."""
    monkeypatch.chdir(root)
    for path in (*(f"models/finetuned/kfac-0.5/{name}" for name in files), "reports/cards/kfac-0.5.md"):
        (file := Path(path)).parent.mkdir(parents=True, exist_ok=True)
        file.write_text("new")
    monkeypatch.setattr(nothing_to_do, "plan", lambda: [SimpleNamespace(name="finetune@kfac-0.5", cached=True)])


def test_files_in_subfolders_are_published_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding model has some: without 1_Pooling/config.json, the repository would pool in another way."""
    candidate(tmp_path, monkeypatch, "config.json", "1_Pooling/config.json")
    files = publish("kfac-0.5", "user/small", dry_run=True).files
    assert set(files) == {"config.json", "1_Pooling/config.json", "README.md"}
    assert files["1_Pooling/config.json"] == Path("models/finetuned/kfac-0.5/1_Pooling/config.json")


def test_weights_of_another_candidate_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would load model.safetensors in place of parts, and transformers.js the files of onnx/."""
    parts = ("model-00001-of-00001.safetensors", "model.safetensors.index.json")
    candidate(tmp_path, monkeypatch, *parts)
    with hub() as there:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", there.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        own = ("LICENSE", "adapter_model.safetensors")
        there.repositories["user/small"] = dict.fromkeys(("model.safetensors", "onnx/model.onnx", *own), b"")
        removed = publish("kfac-0.5", "user/small").removed
    assert set(there.repositories["user/small"]) == {*parts, *own, "README.md"}
    assert set(removed) == {"model.safetensors", "onnx/model.onnx"}
