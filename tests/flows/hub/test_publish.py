"""Publishing: which files of a candidate go to the hub; what is not of the study is neither published nor exported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.engine import nothing_to_do
from flows.hub.publish import publish
from tasks.artifacts.errors import EckartError
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


@pytest.mark.parametrize(("stage", "word"), [("finetune@kf-0.5", "kf-0.5"), ("finetune@kfac-0.5", "eckart run")])
def test_a_candidate_that_the_study_does_not_make_any_more_is_refused(
    stage: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recipe was renamed, or edited; the old folder can be exported by its path."""
    candidate(tmp_path, monkeypatch, "config.json")
    Path("dvc.yaml").touch()
    monkeypatch.setattr(nothing_to_do, "plan", lambda: [SimpleNamespace(name=stage, cached=None)])
    with pytest.raises(EckartError, match=word):
        publish("kfac-0.5", "user/small", dry_run=True)
    for options in ([], ["--int8"], ["--dense"]):
        refused = CliRunner().invoke(app, ["export", "kfac-0.5", "new.onnx", *options])
        assert word in str(refused.exception)
        assert "models/finetuned/kfac-0.5" in str(refused.exception)
