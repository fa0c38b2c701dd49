"""Publishing: which files of a candidate go to the hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.engine import nothing_to_do
from flows.hub.publish import publish


def test_files_in_subfolders_are_published_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding model has some: without 1_Pooling/config.json, the repository would pool in another way."""
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "1_Pooling/config.json"):
        (file := Path("models/finetuned/kfac-0.5", name)).parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(nothing_to_do, "plan", lambda: [SimpleNamespace(name="finetune@kfac-0.5", cached=True)])
    files = publish("kfac-0.5", "user/small", dry_run=True).files
    assert set(files) == {"config.json", "1_Pooling/config.json", "README.md"}
    assert files["1_Pooling/config.json"] == Path("models/finetuned/kfac-0.5/1_Pooling/config.json")
