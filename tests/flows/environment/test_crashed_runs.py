"""A run counts as killed if no process holds its file."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

import pytest

from flows.environment import crashed_runs


def test_a_killed_run_is_marked_as_crashed_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended: list[UUID] = []
    monkeypatch.setattr(crashed_runs, "_end", lambda run: ended.append(run) or True)
    killed, begins = uuid4(), uuid4()
    with crashed_runs.lock_run(str(uuid4())):
        (crashed_runs._FOLDER / str(killed)).touch()
        (crashed_runs._FOLDER / f".{begins}").touch()
        with crashed_runs.lock_run(str(uuid4())):
            assert ended == [killed]
    assert [file.name for file in crashed_runs._FOLDER.iterdir()] == [f".{begins}"]
