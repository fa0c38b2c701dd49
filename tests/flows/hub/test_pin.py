"""Inputs from the hub are pinned to their newest commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.hub.pin import CannotPin, pin
from tasks.config import yaml_edit
from tests.flows.hub import Hub, hub
from tests.flows.toy import toy_workspace
from tests.workspace import REPOSITORY

OLD, NEW = "0" * 40, "1" * 40


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub() as found:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        found.newest = {"models/base": NEW, "models/someone/base": NEW, "datasets/someone/reviews": NEW}
        yield found


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """params.yaml of a workspace whose base model and data are on the hub."""
    root = toy_workspace(tmp_path / "workspace")
    monkeypatch.chdir(root)
    file = root / "params.yaml"
    file.write_text((REPOSITORY / "params.yaml").read_text())
    own = {"model": {"base": "someone/base", "revision": None}, "data": {"source": "someone/reviews", "revision": None}}
    yaml_edit.update(own)
    return file


def revisions(file: Path) -> tuple[str | None, str | None]:
    content = yaml_edit.yaml().load(file.read_text())
    return content["model"]["revision"], content["data"]["revision"]


@pytest.mark.usefixtures("there")
def test_a_text_of_the_hub_is_pinned_too(params: Path) -> None:
    others = {"a": {"source": "someone/reviews"}, "b": {"source": "news"}}
    yaml_edit.update({"evaluate": {"texts": others}, "data": {"calibration_texts": others}})
    assert ("evaluate.texts.a", None, NEW) in {(pinned.section, pinned.before, pinned.now) for pinned in pin()}
    content = yaml_edit.yaml().load(params.read_text())
    texts = content["evaluate"]["texts"]
    assert content["data"]["calibration_texts"] == texts
    assert texts == {"a": {"source": "someone/reviews", "revision": NEW}, "b": {"source": "news"}}
    assert revisions(params) == (NEW, NEW)


@pytest.mark.usefixtures("there")
def test_a_revision_that_is_null_or_a_commit_becomes_the_newest_and_all_else_stays(params: Path) -> None:
    yaml_edit.update({"data": {"revision": OLD}})
    before = params.read_text()
    assert {(pinned.section, pinned.before, pinned.now) for pinned in pin()} == {
        ("model", None, NEW),
        ("data", OLD, NEW),
    }
    assert revisions(params) == (NEW, NEW)
    after = params.read_text()
    yaml_edit.update({"model": {"revision": None}, "data": {"revision": OLD}})
    assert params.read_text().split() == before.split()  # comments stand elsewhere
    params.write_text(after)
    assert all(pinned.before == pinned.now for pinned in pin())
    assert params.read_text() == after


@pytest.mark.usefixtures("there")
def test_a_name_without_an_owner_is_of_the_hub(params: Path) -> None:
    yaml_edit.update({"model": {"base": "base"}, "data": {"source": "movie-reviews"}})
    assert [pinned.name for pinned in pin()] == ["base"]
    assert revisions(params) == (NEW, None)


@pytest.mark.usefixtures("there")
def test_a_branch_and_what_is_not_of_the_hub_stay(params: Path) -> None:
    for source in ("movie-reviews", "data/raw", "data/raw/reviews.csv"):
        yaml_edit.update({"model": {"revision": "v2"}, "data": {"source": source}})
        before = params.read_text()
        assert not pin()
        assert params.read_text() == before


def test_where_the_hub_does_not_say_nothing_is_changed(there: Hub, params: Path) -> None:
    before = params.read_text()
    del there.newest["datasets/someone/reviews"]
    with pytest.raises(CannotPin):
        pin()
    assert params.read_text() == before
