"""The license of the base model, and its head: carried from the base model to the report of the dense model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter

from tasks.models.model_license import of_base, stated, write
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
def test_the_license_is_read_from_a_card(text: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert stated(card(text, tmp_path)) == expected


def test_a_folder_without_a_card_has_no_license(tmp_path: Path) -> None:
    assert stated(tmp_path) == {}
    write(tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_a_written_license_is_read(tmp_path: Path) -> None:
    write(tmp_path, OWN)
    assert stated(tmp_path) == OWN


LOCAL = "models/base/mine"


@pytest.mark.parametrize(
    ("text", "config", "license", "named"),
    [
        ("", {}, {}, ["names no other model"]),
        ("---\nlicense: mit\n---\n", {}, {"license": "mit"}, ["names no other model"]),
        ("---\nbase_model: some/one\n---\n", {"_name_or_path": "another/one"}, {}, ["some/one", "another/one"]),
    ],
)
def test_a_folder_says_what_it_was_made_from(
    text: str, config: dict[str, str], license: dict[str, str], named: list[str], tmp_path: Path
) -> None:
    (card(text, tmp_path) / "config.json").write_text(json.dumps(config))
    found = of_base(LOCAL, tmp_path)
    assert {**found, "origin": ""} == {**license, "origin": ""}
    assert found["origin"].startswith("a local folder")
    assert all(name in found["origin"] for name in named)


@pytest.mark.parametrize("name", ["/home/me/secret/model", "secret", "../secret/model", "secret/[model](x)"])
def test_a_path_of_another_machine_is_not_told(name: str, tmp_path: Path) -> None:
    (card("", tmp_path) / "config.json").write_text(json.dumps({"_name_or_path": name}))
    assert "secret" not in of_base(LOCAL, tmp_path)["origin"]


def test_a_model_of_the_hub_needs_no_origin(tmp_path: Path) -> None:
    assert of_base("some/one", card("---\nlicense: mit\n---\n", tmp_path)) == {"license": "mit"}


@pytest.mark.parametrize("metadata", ["maker-1.0.dist-info/METADATA", "PKG-INFO"])
def test_a_package_tells_its_name_and_its_own_license(metadata: str, tmp_path: Path) -> None:
    """The license of the model is what the model's card states, which may be another one."""
    folder = card("---\nlicense: apache-2.0\n---\n", tmp_path / "maker" / "model")
    (tmp_path / metadata).parent.mkdir(exist_ok=True)
    (tmp_path / metadata).write_text(
        "Metadata-Version: 2.1\nName: maker\nVersion: 1.0\nSummary: A *copy* of some/one\nLicense: MIT\n"
    )
    found = of_base("pypi://maker==1.0/maker/model", folder)
    assert found["license"] == "apache-2.0"
    for fact in ("the package maker 1.0", "A copy of some/one", "license is MIT"):
        assert fact in found["origin"]


def test_the_header_of_a_gguf_file_states_the_license(tmp_path: Path) -> None:
    """Unless a card beside the file states it."""
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_name("Small 1B")
    writer.add_organization("Makers")
    writer.add_license("apache-2.0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = of_base(f"{LOCAL}/small.gguf", tmp_path, "small.gguf")
    assert found["license"] == "apache-2.0"
    assert found["origin"].startswith("a local GGUF file")
    assert "Small 1B of Makers" in found["origin"]
    card("---\nlicense: mit\n---\n", tmp_path)
    assert of_base(f"{LOCAL}/small.gguf", tmp_path, "small.gguf")["license"] == "mit"


def test_license_and_head_are_carried_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_workspace(tmp_path, recipes={"kfac": {"recovery": {"steps": 0}}}))
    card("---\nlicense: mit\n---\nThe base model.\n", Path(BASE))
    bert(id2label={0: "joy", 1: "anger", 2: "fear"}).save_pretrained(BASE)
    for stage in ("extract", "teacher", "control", "dense"):
        run_stage(stage)
    report = json.loads(Path("reports/dense.json").read_text())
    assert report["license"] == {"license": "mit", "origin": "a local folder, which names no other model"}
    assert "joy" in report["head"]  # which another took the place of
    assert "The base model" not in Path("models/teacher/README.md").read_text()


def test_a_new_head_without_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_workspace(tmp_path, teacher={"epochs": 0}))
    bert(id2label={0: "joy", 1: "anger", 2: "fear"}).save_pretrained(BASE)
    run_stage("extract")
    with pytest.raises(SystemExit, match=r"teacher\.epochs"):
        run_stage("teacher")
    assert not Path("models/teacher").exists()


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_missing_head_without_training_is_a_warning(
    epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no error, since the recovery fine-tuning may train the head."""
    monkeypatch.chdir(tiny_workspace(tmp_path, teacher={"epochs": epochs}))
    run_stage("extract")
    run_stage("teacher")
    assert ("WARNING: model.base has no head" in capsys.readouterr().out) is (epochs == 0)
