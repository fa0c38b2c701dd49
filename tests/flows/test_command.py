"""The command `eckart` is `python -m flows`, where there is a pipeline."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import eckart
import eckart_command
from flows.cli import _refuse_old, app
from tests import tiny
from tests.flows.toy import toy_workspace
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


def test_programs_and_their_child_processes_load_compressed_models(tmp_path: Path) -> None:
    """The program imports no eckart, looks for transformers first, and a sitecustomize of the user's own still runs."""
    eckart.compress(tiny.bert(), tiny.batches(tiny.samples(4), 4), 0.5, "svd").model.save_pretrained(tmp_path / "small")
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.own = True")
    load = "own; from importlib.util import find_spec; assert find_spec('transformers'); "
    load += f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path / 'small')!r})"
    child = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {load!r}]).returncode)"
    command = [sys.executable, str(REPOSITORY / "eckart_command.py")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([*command, "with", "python", "-c", child], check=True, env=environment, cwd=tmp_path)
    missing = subprocess.run([*command, "with", "no-such-program"], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "python -m no-such-program" in missing.stderr


def test_where_there_is_no_workspace_it_says_how_to_make_one(tmp_path: Path) -> None:
    words = [sys.executable, str(REPOSITORY / "eckart_command.py"), "run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "eckart init" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unreadable_file_ends_a_command_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the place of a file stands for all that the system refuses."""
    root = toy_workspace(tmp_path / "workspace")
    (root / ".dvc/config").unlink()
    (root / ".dvc/config").mkdir()
    monkeypatch.chdir(root)
    done = CliRunner().invoke(app, ["push"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert ".dvc/config" in done.output


COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_in_the_help_of_a_command_are_valid_command_lines(name: str) -> None:
    command = COMMANDS[name]
    heading, *examples = command.epilog.splitlines()
    assert heading == "Examples:"
    assert examples
    for example in examples:
        program, called, *words = shlex.split(example.rpartition("&&")[2].partition(">")[0])
        assert (program, called) == ("eckart", name)
        command.make_context(name, words)  # raises an error if an option is unknown


def test_each_command_has_one_line_in_the_table_of_contents() -> None:
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output.splitlines()
    for name, command in COMMANDS.items():
        summary = command.help.partition("\n")[0]
        assert any(line.strip("│ ").split(maxsplit=1) == [name, summary] for line in lines), summary


def test_a_folder_named_by_its_absolute_path_is_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").touch()
    Path("model").mkdir()
    _refuse_old(str(tmp_path / "model"))  # raises nothing
