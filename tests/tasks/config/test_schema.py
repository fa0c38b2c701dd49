"""params.yaml, section by section: what is right is typed, what is wrong is named by its path."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.config.schema import (
    Benchmark,
    Data,
    Importance,
    ParamsError,
    Seed,
    Sizes,
    Study,
    Training,
    parse,
    read,
    section,
)
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


def test_a_section_is_typed_and_frozen() -> None:
    sizes = parse({"train": 4, "validation": 3, "test": 2, "calibration": 1}, Sizes, PATH)
    assert (sizes.train, sizes.validation, sizes.test, sizes.calibration) == (4, 3, 2, 1)
    with pytest.raises(ValidationError):
        sizes.train = 4


def test_a_list_stands_for_a_tuple_and_a_whole_number_for_a_float() -> None:
    assert parse(study(keeps=[1, 0.5]), Study, PATH).keeps == (1.0, 0.5)


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


@pytest.mark.parametrize("name", ["absent", "data.absent", "seed.absent"])
def test_an_absent_section_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_params(tmp_path, tiny_params())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamsError, match=rf"\s{name}: "):
        section(name, Sizes)


def test_an_unknown_key_is_refused() -> None:
    only(mistakes(data(colour="red"), Data, "data"), "data.colour")


def test_a_misspelt_key_is_told_from_an_unknown_one() -> None:
    content = data()
    content["metrics"] = content.pop("metric")
    assert only(mistakes(content, Data, "data"), "data.metrics").endswith(" metric")


def test_a_key_is_not_mistaken_for_one_of_another_mapping() -> None:
    """`lable` stands beside text_pair, not beside the label that data has not: nothing near it is missing there."""
    content = data(lable="label")
    del content["columns"]["label"]
    lines = mistakes(content, Data, "data")
    assert any(line.startswith("data.lable:") and "label" not in line.split(";")[1] for line in lines)


def test_a_missing_key_without_a_default_is_named_with_its_whole_path() -> None:
    content = study()
    del content["keeps"]
    only(mistakes(content, Study, "study"), "study.keeps")


def test_a_key_of_an_earlier_version_is_named_as_it_is_now() -> None:
    assert only(mistakes({"evidence": ["inputs"]}, Importance, "importance"), "importance.evidence").endswith(
        " importance.statistics"
    )


@pytest.mark.parametrize("value", ["8", 8.0, 8.5, True, None, [8], {}, datetime.date(2020, 1, 1)])
def test_a_count_is_a_whole_number(value: Any) -> None:
    only(mistakes(teacher(batch_size=value), Training, "teacher"), "teacher.batch_size")


@pytest.mark.parametrize("value", ["1e-4", True, None, [1e-4], datetime.date(2020, 1, 1), 0, -1e-4])
def test_a_learning_rate_is_a_number_above_zero(value: Any) -> None:
    only(mistakes(teacher(learning_rate=value), Training, "teacher"), "teacher.learning_rate")


@pytest.mark.parametrize("key", ["epochs", "learning_rate", "weight_decay", "warmup"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_is_finite(key: str, value: float) -> None:
    only(mistakes(teacher(**{key: value}), Training, "teacher"), f"teacher.{key}")


@pytest.mark.parametrize("value", [5, 0.5, False, None, ["text"], {}])
def test_a_name_is_a_string(value: Any) -> None:
    only(mistakes(data(columns={"text": value}), Data, "data"), "data.columns.text")


def test_a_date_is_no_string() -> None:
    """YAML reads `name: 2020-01-01` as a date; as a string it would be a name that nobody wrote."""
    only(mistakes(study(name=datetime.date(2020, 1, 1)), Study, "study"), "study.name")


@pytest.mark.parametrize("value", [-1, 2**32, 0.0, "0", None])
def test_a_seed_is_what_numpy_takes(value: Any) -> None:
    only(mistakes(value, Seed, "seed"), "seed")


@pytest.mark.parametrize("value", [0, -0.5, 1.5, "0.5", True, None, float("nan"), float("inf")])
def test_a_keep_is_a_share_above_zero(value: Any) -> None:
    only(mistakes(study(keeps=[value]), Study, "study"), "study.keeps.0")


def test_each_wrong_keep_is_named_by_its_place() -> None:
    lines = mistakes(study(keeps=[0.5, 0, 1.5]), Study, "study")
    assert [line.split(":")[0] for line in lines] == ["study.keeps.1", "study.keeps.2"]


@pytest.mark.parametrize("value", [[], 0.5, None, {}])
def test_keeps_are_a_list_with_something_in_it(value: Any) -> None:
    only(mistakes(study(keeps=value), Study, "study"), "study.keeps")


@pytest.mark.parametrize("value", [None, [1], "text", 3])
def test_a_section_is_a_mapping(value: Any) -> None:
    only(mistakes(value, Training, "teacher"), "teacher")


def test_all_mistakes_of_a_section_are_in_one_message() -> None:
    wrong = data(
        task="guessing", max_length=0, seed=-1, splits=None, sizes={"train": 1.5, "test": "many"}, columns={"extra": 1}
    )
    assert {line.split(":")[0] for line in mistakes(wrong, Data, "data")} == {
        "data.task",
        "data.max_length",
        "data.seed",
        "data.splits",
        "data.sizes.train",
        "data.sizes.test",
        "data.columns.extra",
    }


def test_the_advice_lists_what_may_be_written() -> None:
    line = only(mistakes(data(metric="auc"), Data, "data"), "data.metric")
    assert all(metric in line for metric in ("accuracy", "f1", "matthews", "pearson", "spearman"))


def test_an_absent_file_says_where_to_stand(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"params\.yaml"):
        read(tmp_path / PATH)


@pytest.mark.parametrize("content", ["", "# nothing but a remark\n", "- a\n- list\n", "just words\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / PATH).write_text(content)
    with pytest.raises(ParamsError, match=r"params\.yaml"):
        read(tmp_path / PATH)


@pytest.mark.parametrize(
    "content", ["seed: [0\n", "seed: 0\n  data: 1\n", "\tseed: 0\n", "seed: 0\nseed: 1\n", "a: *b\n"]
)
def test_broken_yaml_is_named_with_its_line(tmp_path: Path, content: str) -> None:
    (tmp_path / PATH).write_text(content)
    with pytest.raises(ParamsError, match=r"(?s)params.yaml.*line \d"):
        read(tmp_path / PATH)


@pytest.mark.parametrize("content", [b"seed: \x00\n", b"name: caf\xe9\n"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PATH).write_bytes(content)
    with pytest.raises(ParamsError, match=r"params\.yaml"):
        read(tmp_path / PATH)
