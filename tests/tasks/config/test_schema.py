"""params.yaml, section by section: what is right is typed, what is wrong is named by its path."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from tasks.config.params_file import ParamsError, parse, read, section
from tasks.config.schema import Benchmark, Check, Data, Importance, Seed, Sizes, Study, Training
from tests.workspace import merged, tiny_params, write_params

PATH = Path("params.yaml")


def mistakes(content: Any, kind: Any, name: str) -> list[str]:
    """The lines of the message about `content`, one for each mistake."""
    with pytest.raises(ParamsError) as caught:
        parse(content, kind, PATH, name)
    heading, *lines = str(caught.value).splitlines()
    assert str(PATH) in heading
    return [line.strip() for line in lines]


def only(lines: list[str], path: str) -> str:
    """The single line, which is about `path` and has an advice."""
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{path}: ")
    problem, advice = lines[0].removeprefix(f"{path}: ").split("; ", 1)
    assert problem
    assert advice
    return lines[0]


def data(**changes: Any) -> dict[str, Any]:
    return merged(tiny_params()["data"], changes)


def study(**changes: Any) -> dict[str, Any]:
    return {**tiny_params()["study"], **changes}


def teacher(**changes: Any) -> dict[str, Any]:
    return {**tiny_params()["teacher"], **changes}


def test_a_part_of_a_section_is_found_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params(tmp_path, tiny_params(data={"sizes": {"train": 7}}))
    monkeypatch.chdir(tmp_path)
    assert section("data.sizes", Sizes).train == 7
    assert section("seed", Seed) == 0


def test_a_section_is_read_though_another_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage depends on its own sections only, as DVC has it."""
    write_params(tmp_path, tiny_params(study={"keeps": ["many"]}))
    monkeypatch.chdir(tmp_path)
    assert section("benchmark", Benchmark).repetitions == 6


@pytest.mark.parametrize("name", ["absent", "seed.absent"])
def test_an_absent_section_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_params(tmp_path, tiny_params())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamsError, match=rf"\s{name}: "):
        section(name, Sizes)


def test_a_key_is_not_mistaken_for_one_of_another_mapping() -> None:
    """`lable` stands beside text_pair, not beside the label that data has not: nothing near it is missing there."""
    content = data(lable="label")
    del content["columns"]["label"]
    lines = mistakes(content, Data, "data")
    assert any(line.startswith("data.lable:") and "label" not in line.split(";")[1] for line in lines)


@pytest.mark.parametrize(
    ("kind", "section", "old", "new"),
    [
        (Importance, "importance", {"evidence": ["inputs"]}, "statistics"),
        (Check, "check", {"fewest_rows": 7}, "fewest_examples"),
        (Check, "check", {"drift_rows": 7}, "drift_examples"),
    ],
)
def test_a_key_of_an_earlier_version_is_named_as_it_is_now(
    kind: Any, section: str, old: dict[str, Any], new: str
) -> None:
    assert only(mistakes(old, kind, section), f"{section}.{next(iter(old))}").endswith(f" {section}.{new}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("batch_size", value) for value in ("8", 8.0, True, datetime.date(2020, 1, 1))),
        *(("learning_rate", value) for value in ("1e-4", 0, float("nan"))),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(key: str, value: Any) -> None:
    only(mistakes(teacher(**{key: value}), Training, "teacher"), f"teacher.{key}")


def test_each_wrong_keep_is_named_by_its_place() -> None:
    lines = mistakes(study(keeps=[0.5, 0, 1.5]), Study, "study")
    assert [line.split(":")[0] for line in lines] == ["study.keeps.1", "study.keeps.2"]


@pytest.mark.parametrize("content", ["seed: [0\n", "seed: 0\nseed: 1\n"])
def test_broken_yaml_is_named_with_its_line(tmp_path: Path, content: str) -> None:
    (tmp_path / PATH).write_text(content)
    with pytest.raises(ParamsError, match=r"(?s)params.yaml.*line \d"):
        read(tmp_path / PATH)
