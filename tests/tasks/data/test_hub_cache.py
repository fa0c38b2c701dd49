"""A data set of the hub, without the hub: the cache gives the commit and the configuration that are asked for, or none.

Folders stand for the hub. The library keeps what it downloaded once under OWNER___NAME/CONFIGURATION/VERSION/COMMIT.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import datasets
import pytest

from tasks.artifacts.task_spec import load_task
from tests.tasks.sources import extracted, refusal
from tests.workspace import reviews

OLD, NEW, NEVER = "0" * 40, "1" * 40, "2" * 40
GIVEN = {"splits": {"train": "train", "test": "validation"}}


@pytest.fixture
def cache(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of someone/reviews, the newer of which was loaded last; `main` and `v1` are the older."""
    found = tmp_path / "cache" / "someone___reviews" / "default" / "0.0.0"
    for age, (commit, rows) in enumerate({OLD: 12, NEW: 24}.items()):
        folder = tmp_path / commit / "reviews"
        folder.mkdir(parents=True)
        for name, frame in {"train": reviews(), "validation": reviews().head(rows)}.items():
            frame.to_csv(folder / f"{name}.csv", index=False)
        loaded = Path(datasets.load_dataset(str(folder))["train"].cache_files[0]["filename"]).parent
        found.mkdir(parents=True, exist_ok=True)
        loaded.rename(found / commit)
        os.utime(found / commit, (age, age))
    hub = tmp_path / "hub" / "datasets--someone--reviews"
    (hub / "snapshots" / OLD).mkdir(parents=True)
    (hub / "snapshots" / OLD / "README.md").touch()
    (hub / "refs").mkdir()
    for branch in ("main", "v1"):
        (hub / "refs" / branch).write_text(OLD)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return found


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("revision", "rows"), [(OLD, 12), (NEW, 24), (None, 12), ("v1", 12)])
def test_the_cache_gives_the_commit_that_is_asked_for(revision: str | None, rows: int) -> None:
    splits = extracted("someone/reviews", revision=revision, sizes={"test": 100}, **GIVEN)
    assert set(splits["test"]["text"]) == set(reviews().head(rows)["text"])
    assert load_task().labels == ("negative", "positive")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("revision", [NEVER, "v2"])
def test_a_commit_that_was_never_loaded_is_refused(revision: str) -> None:
    assert re.search(rf"\bcache\b.*\b{revision}\b", refusal("someone/reviews", revision=revision, **GIVEN))


@pytest.mark.parametrize("config", [None, "de"])
def test_another_configuration_is_refused(cache: Path, config: str | None) -> None:
    """The default one may have any name, which only the hub tells."""
    cache.parent.rename(cache.parent.with_name("en"))
    for info in cache.parents[1].glob("en/*/*/dataset_info.json"):
        info.write_text(info.read_text().replace('"config_name": "default"', '"config_name": "en"'))
    said = refusal("someone/reviews", config=config, revision=OLD, **GIVEN)
    assert re.search(r"\ben\b" if config is None else r"\bde\b", said)
    assert len(extracted("someone/reviews", config="en", revision=OLD, sizes={"test": 100}, **GIVEN)["test"]) == 12
