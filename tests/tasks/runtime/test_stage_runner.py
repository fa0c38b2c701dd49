"""What every stage does around its work: errors in one line, outputs all or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from tasks.artifacts.errors import StageError
from tasks.artifacts.names import candidate_name, candidate_of, recipe_and_keep, stage_name
from tasks.runtime.stage_runner import output, run
from tests.workspace import run_stage, tiny_params, write_params


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fill(path: Path, name: str, error: BaseException | None = None) -> None:
    """Write a file called `name` into the output `path`, and then fail with `error`."""
    with output(path) as folder:
        (folder / name).write_text(name)
        if error:
            raise error


def exit_message(name: str, *candidate: str) -> str:
    """What a stage that fails in this process says at its end."""
    with pytest.raises(SystemExit) as caught:
        run_stage(name, *candidate)
    assert isinstance(caught.value.code, str)  # which Python prints, before it exits with 1
    return caught.value.code


def test_a_mistake_of_the_input_names_the_stage(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown data set, with no hub to ask."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_params(here, tiny_params(data={"source": "nobody/nothing"}))
    assert exit_message("extract").startswith("extract: nobody/nothing")
    assert not Path("data/splits").exists()


def test_a_mistake_of_the_parameters_names_the_stage(here: Path) -> None:
    write_params(here, tiny_params(data={"max_length": "long"}))
    message = exit_message("extract")
    assert message.startswith("extract: ")
    assert "data.max_length" in message


def test_a_stage_refuses_code_that_its_parameters_were_not_resolved_for(here: Path) -> None:
    YAML().dump({**tiny_params(), "code": {"extract": "other"}}, here / "resolved.yaml")
    assert exit_message("extract").startswith("extract: the code has changed ")


def take_all() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def take_all_of_python() -> None:
    bytearray(2**60)


@pytest.mark.parametrize("work", [take_all, take_all_of_python])
def test_memory_that_is_used_up_is_said_with_the_stage(
    here: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]
) -> None:
    write_params(here, tiny_params())
    monkeypatch.setattr(sys, "argv", ["extract"])
    with pytest.raises(SystemExit, match=r"^extract: .*--workers"):
        run("extract", work)


def test_a_recipe_that_there_is_not_is_a_mistake(here: Path) -> None:
    write_params(here, tiny_params())
    message = exit_message("search", "absent", "0.5")
    assert message.startswith("search@absent-0.5: ")
    assert "recipes.absent" in message


@pytest.mark.parametrize(("stage", "arguments"), [("extract", ()), ("search", ("svd", "0.5"))])
def test_a_stage_takes_the_threads_of_its_kind(
    here: Path, monkeypatch: pytest.MonkeyPatch, stage: str, arguments: tuple[str, ...]
) -> None:
    """They order the sums, so they are part of the result."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    write_params(here, {**tiny_params(threads={"shared": 3, "candidate": 5}), "data": None, "recipes": None})
    exit_message(stage, *arguments)
    assert asked[0] == {"extract": 3, "search": 5}[stage]


@pytest.mark.parametrize("keep", ["0.33", "1e-05"])
def test_a_name_says_what_it_was_made_of(keep: str) -> None:
    candidate = candidate_name("kfac_2", keep)
    assert recipe_and_keep(candidate) == ("kfac_2", keep)
    assert candidate_of(stage_name("finetune", candidate)) == candidate
    assert candidate_of("teacher") == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("numbers", [10, 10**6])
def test_a_full_disk_is_named_although_torch_does_not_name_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, numbers: int
) -> None:
    """As a checkpoint is written: few numbers fail with another error than many."""
    write_params(here, tiny_params())
    monkeypatch.setattr(sys, "argv", ["work"])
    with pytest.raises(SystemExit, match=r"^work: "):
        run("work", lambda: torch.save({"state": torch.zeros(numbers)}, "/dev/full"))


def cut_off() -> None:
    """Fail as an export does if the disk is full when onnxruntime writes a graph."""
    raise StageError("onnxruntime cannot quantize the file: Error parsing message with type 'onnx.ModelProto'")


def test_a_full_disk_is_named_although_an_export_takes_it_for_a_fault_of_the_model(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_params(here, tiny_params())
    monkeypatch.setattr(sys, "argv", ["work"])
    with pytest.raises(SystemExit, match=r"^work: the disk is full"):
        run("work", cut_off)


def test_an_output_appears_when_it_is_complete(here: Path) -> None:
    path = here / "models/ranks/svd-0.5"
    with output(path) as folder:
        (folder / "ranks.json").write_text("{}")
        assert not path.exists()
    assert [file.name for file in path.iterdir()] == ["ranks.json"]
    assert [folder.name for folder in path.parent.iterdir()] == ["svd-0.5"]


@pytest.mark.parametrize("error", [StageError, KeyboardInterrupt])
def test_an_output_that_fails_leaves_what_was_there_and_the_next_one_replaces_it(
    here: Path, error: type[BaseException]
) -> None:
    """The old files may be read-only, as DVC leaves them where its cache is linked into the workspace."""
    with pytest.raises(error):
        fill(here / "result", "part", error("half-way"))
    assert not (here / "result").exists()
    fill(here / "result", "old")
    (here / "result/old").chmod(0o444)
    with pytest.raises(error):
        fill(here / "result", "rest", error("half-way"))
    assert [path.name for path in (here / "result").iterdir()] == ["old"]
    fill(here / "result", "new")
    assert [path.name for path in (here / "result").iterdir()] == ["new"]
    assert [path.name for path in here.iterdir()] == ["result"]
