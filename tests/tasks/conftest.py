"""Fixtures of the tests of stages."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty workspace with a cache of its own and no hub the working directory."""
    folder = tmp_path / "workspace"
    (folder / "data" / "raw").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder
