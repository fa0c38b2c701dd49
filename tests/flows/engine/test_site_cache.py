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
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where they may be, the best first."""
    found = [tmp_path / name for name in ("first", "second", "third")]
    monkeypatch.setattr(site_cache, "_own", lambda: iter(found))
    monkeypatch.delenv(site_cache.VARIABLE)
    return found


def chosen() -> Path:
    site_cache.choose()
    return Path(os.environ[site_cache.VARIABLE])


def test_they_are_in_a_folder_that_no_other_user_can_write(folders: list[Path]) -> None:
    before = os.umask(0)
    try:
        assert chosen() == folders[0]
    finally:
        os.umask(before)
    assert stat.S_IMODE(folders[0].stat().st_mode) == 0o700


def test_what_another_user_has_made_or_can_write_is_not_used(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folders[0].mkdir()
    folders[0].chmod(0o777)
    folders[1].symlink_to(folders[0])
    assert chosen() == folders[2]
    assert chosen() == folders[2]  # as what this process starts finds it
    assert len(caplog.records) == 1
    assert str(folders[0]) in caplog.text


def test_the_user_s_folder_is_used_if_it_can_be_written(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(site_cache.VARIABLE, str(tmp_path / "new/folder"))
    assert chosen() == tmp_path / "new/folder"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(site_cache.VARIABLE, str(tmp_path / "file/folder"))
    assert chosen() == folders[0]
    assert str(tmp_path / "file/folder") in caplog.text


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
        assert {bool(one.cached) for one in engine.plan()} == {True}
        assert [one.levelno for one in caplog.records] == [logging.WARNING]
        site_cache.heal.cache_clear()
        caplog.clear()
        assert {bool(one.cached) for one in engine.plan()} == {True}
        assert not caplog.records
