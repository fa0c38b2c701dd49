"""A data set of the hub, without the hub: the cache gives the commit and the configuration that are asked for, or none.

Folders stand for the hub. The library keeps what it downloaded once under OWNER___NAME/CONFIGURATION/VERSION/COMMIT.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import datasets
import pytest
import yaml

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


def test_a_data_set_without_a_card_is_read(cache: Path, tmp_path: Path) -> None:
    (card,) = tmp_path.glob("hub/*/snapshots/*/README.md")
    card.unlink()
    assert len(extracted("someone/reviews", sizes={"test": 100}, **GIVEN)["test"]) == 12


@pytest.mark.parametrize("config", [None, "de", "en"])
@pytest.mark.parametrize("default", ["de", "en"])
@pytest.mark.parametrize("present", [["en"], ["en", "de"]])
def test_the_configuration_is_the_one_that_is_asked_for_or_the_default(
    cache: Path, tmp_path: Path, config: str | None, default: str, present: list[str]
) -> None:
    """The library would take the only one in the cache for any default, and refuse to choose among two."""
    rows = {"en": 12, "de": 24}
    for name in present:  # the commits of `cache`, as two configurations of one commit
        folder = cache.parents[1] / name / "0.0.0" / OLD
        folder.parent.mkdir(parents=True)
        (cache / {12: OLD, 24: NEW}[rows[name]]).rename(folder)
        info = folder / "dataset_info.json"
        info.write_text(info.read_text().replace('"config_name": "default"', f'"config_name": "{name}"'))
    shutil.rmtree(cache.parent)
    (card,) = tmp_path.glob("hub/*/snapshots/*/README.md")
    configs = [{"config_name": name, "data_files": f"{name}.csv", "default": name == default} for name in ("de", "en")]
    card.write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    given = {"config": config, "revision": OLD, "sizes": {"test": 100}, **GIVEN}
    asked = config or default
    if asked in present:
        assert len(extracted("someone/reviews", **given)["test"]) == rows[asked]
    else:
        assert re.search(r"\ben\b", refusal("someone/reviews", **given))
