"""The command `eckart` is `python -m flows`, where there is a pipeline."""

import sys
from pathlib import Path

import pytest

import eckart_command
from tests.workspace import REPOSITORY


def test_it_runs_the_commands_of_the_pipeline_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["eckart", "promote", "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        eckart_command.main()
    assert ended.value.code == 0
    assert "--rollback" in capsys.readouterr().out


def test_where_there_is_no_pipeline_it_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^eckart: .*\bflows/"):
        eckart_command.main()
