"""DVC's databases: nobody else can write them, and nothing is lost with them."""

import logging
import os
import stat
from pathlib import Path

import pytest
from dvc.repo import Repo

from flows.engine import site_cache
from flows.engine import stages as engine
from tests.flows.engine.test_stages import run_all
from tests.flows.toy import toy_workspace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(site_cache, "FOLDER", tmp_path / "folder")
    monkeypatch.delenv(site_cache.VARIABLE)
    return tmp_path / "folder"


def chosen() -> Path:
    site_cache.choose()
    return Path(os.environ[site_cache.VARIABLE])


@pytest.mark.parametrize("empty", [False, True])
def test_they_are_in_a_folder_that_no_other_user_can_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    if empty:  # DVC takes that for unset
        monkeypatch.setenv(site_cache.VARIABLE, "")
    before = os.umask(0)
    try:
        assert chosen() == folder
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_another_user_has_made_or_can_write_is_not_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, link: bool
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    if link:
        folder.symlink_to(tmp_path / "open")
    else:
        (tmp_path / "open").rename(folder)
    other = chosen()
    assert other != folder
    assert chosen() == other  # as the processes that this one starts find it
    assert [str(folder) in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("content", [b"garbage " * 999, b"half", None], ids=["garbage", "half", "folder"])
def test_damaged_ones_cost_nothing(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(site_cache.VARIABLE, str(tmp_path / "site"))
    monkeypatch.chdir(toy_workspace(tmp_path / "workspace"))
    run_all(Path.cwd())
    databases = list(Path(Repo().site_cache_dir).rglob("*.db"))
    assert len(databases) > 1
    for file in databases:
        whole = file.read_bytes()
        file.unlink()
        if content is None:
            file.mkdir()
        else:
            file.write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
        site_cache.heal.cache_clear()  # it is another process
        caplog.clear()
        assert {bool(stage.cached) for stage in engine.plan()} == {True}
        assert [stage.levelno for stage in caplog.records] == [logging.WARNING]
        site_cache.heal.cache_clear()
        caplog.clear()
        assert {bool(stage.cached) for stage in engine.plan()} == {True}
        assert not caplog.records
