"""Which runs are taken for killed: those whose file nobody holds."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

import pytest

from flows import open_runs


def test_a_run_that_nobody_holds_is_ended_and_one_that_goes_on_or_begins_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended: list[UUID] = []
    monkeypatch.setattr(open_runs, "_end", lambda run: ended.append(run) or True)
    killed, begins = uuid4(), uuid4()
    with open_runs.noted(str(uuid4())):
        (open_runs._FOLDER / str(killed)).touch()
        (open_runs._FOLDER / f".{begins}").touch()
        with open_runs.noted(str(uuid4())):
            assert ended == [killed]
    assert [file.name for file in open_runs._FOLDER.iterdir()] == [f".{begins}"]
