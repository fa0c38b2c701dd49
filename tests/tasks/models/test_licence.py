"""The licence of the base model, and its head: carried from the base model to the report of the dense model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.models.licence import stated, write
from tests.workspace import BASE, bert, run_stage, tiny_workspace

OWN = {"license": "other", "license_name": "own", "license_link": "https://example.org/terms"}


def card(text: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# Text\n", {"license": "apache-2.0"}),
        ("---\nlicense: other\nlicense_name: own\nlicense_link: https://example.org/terms\n---\n", OWN),
        ("---\ntags: [a]\n---\n", {}),
        ("---\nlicense: [mit, gpl]\n---\n", {}),  # what the hub does not take
        ("# Text\nlicense: mit\n", {}),
        ("---\n- mit\n---\n", {}),
        ("---\nlicense: 'mit\n---\n", {}),
        ("", {}),
    ],
)
def test_the_licence_is_read_from_a_card(text: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert stated(card(text, tmp_path)) == expected


def test_a_folder_without_a_card_has_no_licence(tmp_path: Path) -> None:
    assert stated(tmp_path) == {}
    write(tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_a_written_licence_is_read(tmp_path: Path) -> None:
    write(tmp_path, OWN)
    assert stated(tmp_path) == OWN


def test_licence_and_head_are_carried_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_workspace(tmp_path, recipes={"kfac": {"recovery": {"steps": 0}}}))
    card("---\nlicense: mit\n---\nThe base model.\n", Path(BASE))
    bert(id2label={0: "joy", 1: "anger", 2: "fear"}).save_pretrained(BASE)
    for stage in ("extract", "teacher", "control", "dense"):
        run_stage(stage)
    report = json.loads(Path("reports/dense.json").read_text())
    assert report["licence"] == {"license": "mit"}
    assert "joy" in report["head"]  # which another took the place of
    assert "The base model" not in Path("models/teacher/README.md").read_text()


def test_a_new_head_without_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_workspace(tmp_path, teacher={"epochs": 0}))
    bert(id2label={0: "joy", 1: "anger", 2: "fear"}).save_pretrained(BASE)
    run_stage("extract")
    with pytest.raises(SystemExit, match=r"teacher\.epochs"):
        run_stage("teacher")
    assert not Path("models/teacher").exists()
