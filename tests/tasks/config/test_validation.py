"""The whole of params.yaml at once: the repository's own and the tiny one pass, each mistake gets one line.

Of a line the path is compared, which stands before the colon, and the names that it gives to choose from; its wording
is for tests/test_messages.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eckart.calibration.statistics import STATISTIC_KINDS
from tasks.artifacts.metrics import METRICS
from tasks.config import validation as checking
from tasks.config.params_file import ParamsError
from tasks.config.schema import Importance, Params
from tasks.config.validation import check, mistakes
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class
from tasks.runtime import code_folders
from tests.workspace import REPOSITORY, merged, plain, repository_params, tiny_params, write_params

Place = tuple[str | int, ...]
TINY = tiny_params()


def tiny(**changes: Any) -> dict[str, Any]:
    return merged(TINY, changes)


def paths(lines: list[str]) -> list[str]:
    return [line.split(":")[0] for line in lines]


def only(params: Mapping[str, Any], path: str) -> str:
    """The single mistake of `params`, which is about `path` and has an advice."""
    lines = mistakes(params)
    assert paths(lines) == [path], lines
    assert lines[0].split("; ", 1)[1]
    return lines[0]


def advice(line: str) -> set[str]:
    """The words of what to write."""
    return set(re.findall(r"\w+", line.split("; ", 1)[1]))


def places(content: Any, above: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every place in `content` with what stands there."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*above, key), value
        yield from places(value, (*above, key))


def parent(content: Any, place: Place) -> Any:
    for key in place[:-1]:
        content = content[key]
    return content


def put(place: Place, value: Any) -> dict[str, Any]:
    """The tiny parameters with another value at a place."""
    params = plain(TINY)
    parent(params, place)[place[-1]] = value
    return params


def without(place: Place) -> dict[str, Any]:
    params = plain(TINY)
    del parent(params, place)[place[-1]]
    return params


def dotted(place: Place) -> str:
    return ".".join(map(str, place))


EVERYWHERE = dict(places(TINY))
KEYS = [place for place in EVERYWHERE if isinstance(place[-1], str)]
MAPPINGS = [place for place, value in EVERYWHERE.items() if isinstance(value, dict) and place != ("recipes",)]
NUMBERS = [place for place, value in EVERYWHERE.items() if type(value) in (int, float)]
KINDS_OF_PARTS = [place for place in KEYS if place[-1] == "kind"]


@pytest.fixture(autouse=True)
def _in_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_repository_s_own_parameters_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert {"recipes", "recovery", *check()} == set(Params.model_fields)


class TestFoundGood:
    """What was found good is not checked again, as long as nothing that decides it has changed."""

    @pytest.fixture
    def checks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What was checked since; params.yaml in `tmp_path` was checked once, by code in `tmp_path`/code."""
        contents: list[Any] = []

        def mistakes(content: Any) -> list[str]:
            contents.append(content)
            return ["seed: is bad"] if content["seed"] == 1 else []

        (tmp_path / "code/part").mkdir(parents=True)
        monkeypatch.setattr(code_folders, "code_folders", lambda: {"code": tmp_path / "code"})
        monkeypatch.setattr(checking, "mistakes", mistakes)
        write_params(tmp_path, tiny())
        check()
        contents.clear()
        return contents

    def test_while_file_and_code_stand(
        self, tmp_path: Path, checks: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert check()["seed"] == tiny()["seed"]
        write_params(tmp_path / "elsewhere", tiny())
        assert not checks
        monkeypatch.chdir(tmp_path / "elsewhere")
        check()
        assert checks

    def test_other_code_checks_anew(self, tmp_path: Path, checks: list[Any]) -> None:
        (tmp_path / "code/part/new.py").write_text("")
        check()
        assert len(checks) == 1

    def test_mistakes_are_found_every_time(self, tmp_path: Path, checks: list[Any]) -> None:
        for _ in range(2):
            write_params(tmp_path, tiny(seed=1))
            with pytest.raises(ParamsError, match=r"\n  seed: "):
                check()
        assert len(checks) == 2

    @pytest.mark.parametrize("content", [b"\xff", None])
    def test_what_cannot_be_read_was_not_found_good(
        self, tmp_path: Path, checks: list[Any], content: bytes | None
    ) -> None:
        """None: a folder in the place of the file, which is not written either."""
        good = tmp_path / ".eckart/params-found-good"
        good.unlink()
        if content is None:
            good.mkdir()
        else:
            good.write_bytes(content)
        check()
        assert len(checks) == 1


def test_a_missing_key_takes_its_default_and_one_without_a_default_is_one_line() -> None:
    required = [("study", "name"), ("study", "recipes"), ("study", "keeps"), ("export", "recipes")]
    for place in {*KEYS} - {*required, ("study",), ("export",)}:
        assert mistakes(without(place)) == [], place
    for place in required:
        only(without(place), dotted(place))


def test_an_unknown_kind_is_one_line_with_those_there_are() -> None:
    for place in KINDS_OF_PARTS:
        (line,) = mistakes(put(place, "magic"))
        assert line.startswith(dotted(place[:-1]))
        assert "magic" in line
        assert EVERYWHERE[place] in advice(line)


def test_an_unknown_key_is_one_line() -> None:
    for place in MAPPINGS:
        only(put((*place, "colour"), "red"), f"{dotted(place)}.colour")


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        ({"kind": "tolerance", "rows": 8}, "recipes.mine.ranks"),
        ({"kind": "hypernetwork", "rows": None, "examples": 8}, "recipes.mine.ranks"),
        ({"kind": "borrowed", "ranks": {"kind": "tolerance", "rows": 8}}, "recipes.mine.ranks.ranks"),
    ],
)
def test_a_setting_of_an_earlier_version_is_named_as_it_is_now(ranks: dict[str, Any], place: str) -> None:
    assert advice(only(tiny(recipes={"mine": {"ranks": ranks}}), f"{place}.rows")) == {
        "write",
        *place.split("."),
        "examples",
    }


@pytest.mark.parametrize("value", [None, ["a"]], ids=["null", "list"])
def test_a_section_that_is_no_mapping_is_one_line(value: Any) -> None:
    for place in MAPPINGS:
        only(put(place, value), dotted(place))


def test_no_number_is_below_zero() -> None:
    for place in NUMBERS:
        only(put(place, -1), dotted(place))


@pytest.mark.parametrize("value", [None, [], ["svd"]], ids=str)
def test_recipes_that_are_none_are_one_line(value: Any) -> None:
    """There is no use in a line for each recipe of the study then: what may it be replaced by?"""
    only(put(("recipes",), value), "recipes")


def test_a_range_begins_with_its_least() -> None:
    only(tiny(check={"label_range": [5.0, 0.0]}), "check.label_range")


def test_a_range_is_for_numbers() -> None:
    only(tiny(check={"label_range": [0.0, 5.0]}), "check.label_range")
    assert mistakes(tiny(data=data_of("regression"), check={"label_range": [0.0, 5.0]})) == []


def test_a_misspelt_section_is_told_from_an_unknown_one() -> None:
    params = plain(TINY)
    params["techer"] = params.pop("teacher")
    assert "teacher" in advice(only(params, "techer"))


def test_a_recipe_that_there_is_not_is_named_with_those_there_are() -> None:
    line = only(tiny(study={"recipes": ["svd", "kfca"]}), "study.recipes")
    assert "kfca" in line
    assert {"svd", "kfac"} <= advice(line)


@pytest.mark.parametrize(("key", "values"), [("recipes", ["svd", "kfac", "svd"]), ("keeps", [0.5, 0.25, 0.50])])
def test_a_repetition_is_one_line(key: str, values: list[Any]) -> None:
    assert re.search(rf"{values[0]} 2\b", only(tiny(study={key: values}), f"study.{key}"))


@pytest.mark.parametrize("recipes", [["drone"], ["svd", "svd"]])
def test_what_is_exported_are_recipes_of_the_study(recipes: list[str]) -> None:
    assert recipes[0] in only(tiny(export={"recipes": recipes}), "export.recipes")


def test_a_summary_s_model_is_not_exported() -> None:
    params = merged(tiny(export={"recipes": ["svd"]}), {"data": data_of("summarization")})
    only(params, "export.recipes")


def test_statistics_that_a_weighting_lacks_is_named() -> None:
    line = only(tiny(importance={"statistics": ["inputs"]}), "importance.statistics")
    assert "output_gradients" in line
    assert "recipes.kfac" in line


def test_statistics_that_only_an_unused_recipe_reads_is_not_asked_for() -> None:
    assert mistakes(tiny(study={"recipes": ["svd"]}, importance={"statistics": ["fisher"]})) == []


@pytest.mark.parametrize(("name", "value"), [("labels", "drawn"), ("clip", [0.1, 10.0]), ("edges", 0.125)])
def test_a_setting_of_gradients_that_no_recipe_reads_is_refused(name: str, value: object) -> None:
    set_ = {"importance": {name: value}}
    assert mistakes(tiny(**set_)) == []  # kfac reads them
    assert "study.recipes" in only(tiny(study={"recipes": ["svd"]}, **set_), f"importance.{name}")
    fwsvd = mistakes(tiny(study={"recipes": ["fwsvd"]}, **set_))
    assert len(fwsvd) == (name != "labels")  # which change Fisher's scores, too
    refined = {"weighting": "inputs", "sequential": {"refine": {"error": "gradients"}}}
    assert len(mistakes(tiny(study={"recipes": ["own"]}, recipes={"own": refined}, **set_))) == (name != "labels")


COLUMNS = {
    "question_answering": {"text": "question", "text_pair": "context", "label": "answers"},
    "language_modeling": {"text": "text", "text_pair": None, "label": None},
}
"""Of the kinds whose columns are not those of the tiny parameters."""
SECTIONS = {"embedding": {"importance": {"labels": "drawn"}, "teacher": {"epochs": 0}}}
"""Of the kinds that need other values in other sections than the tiny parameters."""


def data_of(task: TaskName, **changes: Any) -> dict[str, Any]:
    """What `data` is for a kind of task, with `changes`."""
    own = {"columns": COLUMNS.get(task, {}), "target_length": 8 if task == "summarization" else None}
    return merged({"task": task, "metric": task_class(task).metrics[0], **own}, changes)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_a_metric_fits_its_task(task: TaskName) -> None:
    own = set(task_class(task).metrics)
    assert mistakes(tiny(data=data_of(task), **SECTIONS.get(task, {}))) == []
    other = next(metric for metric in METRICS if metric not in own)
    wrong = tiny(data=data_of(task, metric=other), **SECTIONS.get(task, {}))
    assert advice(only(wrong, "data.metric")) & {*METRICS, *own} == own


@pytest.mark.parametrize(
    ("task", "column", "name"),
    [
        ("classification", "label", None),
        ("language_modeling", "label", "label"),
        ("question_answering", "text_pair", None),
        ("summarization", "text_pair", "other"),
    ],
)
def test_a_task_has_the_columns_that_it_reads(task: TaskName, column: str, name: str | None) -> None:
    params = tiny(data=data_of(task, columns={column: name}))
    line = only(params, f"data.columns.{column}")
    assert task in line
    assert ("null" in advice(line)) is (name is not None)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("target_length", 8, "summarization"),
        ("prefix", "summarize: ", "summarization"),
        ("generation", {"beams": 8, "length_penalty": 2.0}, "summarization"),
        ("pooling", "cls", "embedding"),
        ("stride", 8, "question_answering"),
        ("separator", "</s>", "language_modeling"),
        ("calibration_blocks", "random", "language_modeling"),
        ("first", "bos", "language_modeling"),
    ],
)
def test_a_key_that_one_kind_of_task_reads_is_refused_beside_others(key: str, value: Any, kind: TaskName) -> None:
    assert mistakes(tiny(data=data_of(kind, **{key: value}), **SECTIONS.get(kind, {}))) == []
    assert kind in only(tiny(data=data_of("classification", **{key: value})), f"data.{key}")


@pytest.mark.parametrize(
    ("labels", "task", "other"),
    [("expected", "classification", "regression"), ("drawn", "language_modeling", "token_classification")],
)
def test_labels_of_the_statistics_fit_the_task(labels: str, task: TaskName, other: TaskName) -> None:
    assert mistakes(tiny(data=data_of(task), importance={"labels": labels})) == []
    assert "given" in advice(only(tiny(data=data_of(other), importance={"labels": labels}), "importance.labels"))


def test_zero_shot_tasks_are_for_language_models_and_need_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tiny(evaluate={"zero_shot": ["piqa"]})
    only(params, "evaluate.zero_shot")
    language_models = merged(params, {"data": data_of("language_modeling")})
    assert mistakes(language_models) == []
    monkeypatch.setattr("tasks.config.contradictions.find_spec", lambda name: None)
    assert {"pip", "install"} <= advice(only(language_models, "evaluate.zero_shot"))


OTHER = {"source": "data/raw/other.txt"}


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"written": {"examples": 8}}, "data.written.examples"),
        ({"calibration_texts": {"a": OTHER}}, "data.calibration_texts"),
    ],
)
def test_only_a_language_model_is_calibrated_with_other_texts(data: dict[str, Any], path: str) -> None:
    only(tiny(data=data_of("classification", **data)), path)
    assert mistakes(tiny(data=data_of("language_modeling", sizes={"calibration": 0}, **data))) == []


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"sizes": {"calibration": 0}}, "data.sizes.calibration"),
        ({"written": {"examples": 8, "prompts": 16}}, "data.written.prompts"),
        (
            {"calibration_texts": {"a": OTHER, "b": {"source": "./data/raw/wiki", "split": "new"}}},
            "data.calibration_texts.b.split",
        ),
        ({"calibration_texts": {"a": {"source": "data/raw/wiki/new.txt"}}}, "data.calibration_texts.a.source"),
    ],
)
def test_texts_to_calibrate_with_are_there_and_are_not_those_of_the_scores(data: dict[str, Any], path: str) -> None:
    source = {"source": "data/raw/wiki", "splits": {"train": "old", "test": "new"}}
    only(tiny(data=data_of("language_modeling", **source, **data)), path)


def test_a_text_to_calibrate_with_is_found_by_its_absolute_path_too() -> None:
    texts = {"a": {"source": str(Path("data/raw/wiki/new.txt").absolute())}}
    data = data_of("language_modeling", source="data/raw/wiki", calibration_texts=texts)
    only(tiny(data=data), "data.calibration_texts.a.source")


@pytest.mark.parametrize(
    ("scored", "calibrating"),
    [
        ({"source": "editorials"}, {"source": "editorials"}),
        (OTHER, {**OTHER, "split": "test"}),  # a file has one split, whatever it is called
        (OTHER, {"source": "data/raw", "split": "other"}),
    ],
)
def test_a_text_to_score_on_is_none_to_calibrate_with(scored: dict[str, str], calibrating: dict[str, str]) -> None:
    data = data_of("language_modeling", calibration_texts={"a": {"source": "news"}, "b": calibrating})
    only(tiny(data=data, evaluate={"texts": {"own": scored}}), "data.calibration_texts.b")


def test_a_text_to_score_on_is_not_what_candidates_are_trained_on() -> None:
    data = data_of("language_modeling", source="data/raw/wiki", splits={"train": "old", "test": "new"})
    texts = {
        "seen": {"source": "./data/raw/wiki", "split": "old"},
        "other": {"source": "data/raw/wiki", "split": "odd"},
    }
    only(tiny(data=data, evaluate={"texts": texts}), "evaluate.texts.seen")
    only(tiny(data=data, evaluate={"texts": {"a": {"source": "data/raw/wiki/old.txt"}}}), "evaluate.texts.a")
    data = data_of("language_modeling", source="data/raw/text.txt")
    texts = {"a": {"source": "data/raw/text.txt", "split": "test"}, "b": {"source": "data/raw/text.jsonl"}}
    only(tiny(data=data, evaluate={"texts": texts}), "evaluate.texts.a")


def test_other_texts_are_for_language_models_and_have_a_source_and_a_name() -> None:
    params = tiny(evaluate={"texts": {"news": {"source": "news"}}})
    only(params, "evaluate.texts")
    params = merged(params, {"data": data_of("language_modeling")})
    assert mistakes(params) == []
    misspelled = merged(params, {"evaluate": {"texts": {"news": {"separater": ""}}}})
    only(misspelled, "evaluate.texts.news.separater")
    wrong = merged(params, {"evaluate": {"texts": {"a/b": {"source": "news"}, "c": {}}}})
    assert paths(mistakes(wrong)) == ["evaluate.texts.a/b", "evaluate.texts.c.source"]


def test_windows_of_a_language_model_overlap() -> None:
    assert mistakes(tiny(data=data_of("language_modeling", stride=15))) == []
    assert "16" in advice(only(tiny(data=data_of("language_modeling", stride=16)), "data.stride"))


def test_summaries_have_a_length() -> None:
    only(tiny(data=data_of("summarization", target_length=None)), "data.target_length")


@pytest.mark.parametrize("key", ["task", "metric"])
@pytest.mark.parametrize("value", [None, ["accuracy"], "magic"])
def test_a_kind_or_metric_that_there_is_not_is_one_line(key: str, value: Any) -> None:
    assert paths(mistakes(put(("data", key), value))) == [f"data.{key}"]


@pytest.mark.parametrize("gain", [-1, 1])
def test_only_a_perplexity_can_gain_as_much_as_1(gain: float) -> None:
    params = tiny(promotion={"least_gain": gain})
    assert "accuracy" in only(params, "promotion.least_gain")
    assert mistakes(merged(params, {"data": data_of("language_modeling")})) == []


@pytest.mark.parametrize("role", ["label", "text_pair"])
def test_the_text_is_no_other_column_too(role: str) -> None:
    only(tiny(data={"columns": {role: "text"}}), f"data.columns.{role}")


@pytest.mark.parametrize("drop", [1, 5.0])
def test_only_a_perplexity_can_fall_by_1(drop: float) -> None:
    """Of accuracy, this would be a limit that no model misses; who writes it means points."""
    goals = [{"speedup": 1.5}, {"largest_drop": drop}]
    params = tiny(promotion={"largest_drop": drop}, study={"goals": goals})
    found = mistakes(params)
    assert paths(found) == ["promotion.largest_drop", "study.goals.1.largest_drop"]
    assert all("accuracy" in line for line in found)
    assert mistakes(merged(params, {"data": data_of("language_modeling")})) == []
    embedding = tiny(data=data_of("embedding"), promotion={"largest_drop": drop}, **SECTIONS.get("embedding", {}))
    only(embedding, "promotion.largest_drop")  # by a metric of its own


@pytest.mark.parametrize("name", ["my-kfac", "", "a.b"])
def test_a_recipe_s_name_is_a_word(name: str) -> None:
    """It becomes a part of stage names, where a dash comes before the keep, and of folders."""
    only(put(("recipes", name), TINY["recipes"]["svd"]), f"recipes.{name}")


@pytest.mark.parametrize("name", ["absent", "mixed"])
def test_the_control_recovers_as_a_recipe_that_a_dense_model_can(name: str) -> None:
    params = plain(TINY)
    mixed = {"kind": "mixed_rank", "initial": 0.5, "until": 0.5, "consistency": 1.0, "consistency_after": False}
    svd = params["recipes"]["svd"]
    shared = {key: value for key, value in svd["recovery"].items() if key != "lora"}
    params["recipes"]["mixed"] = {**svd, "recovery": {**shared, **mixed}}
    params["study"]["control"] = name
    line = only(params, "study.control")
    assert name in line
    assert advice(line) & {*params["recipes"]} == {"svd", "kfac"}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"shares": {"validation": 0.5, "test": 0.5}}, "data.shares"),
        ({"splits": {"validation": "test", "test": "test"}}, "data.splits"),
    ],
)
def test_splits_leave_something_to_each(change: dict[str, Any], path: str) -> None:
    only(merged(TINY, {"data": change}), path)


def test_all_mistakes_of_the_file_are_in_one_message(tmp_path: Path) -> None:
    params = merged(
        tiny(),
        {
            "study": {"recipes": ["svd", "absent"]},
            "seed": "0",
            "data": {"sizes": {"train": "all"}},
            "teacher": {"epochs": -1},
            "targets": None,
            "importance": {"statistics": ["inputs", "hearsay"]},
            "recipes": {"kfac": {"weighting": {"kind": "magic"}}, "x-y": TINY["recipes"]["svd"]},
            "colour": "red",
        },
    )
    write_params(tmp_path, params)
    with pytest.raises(ParamsError) as caught:
        check()
    assert set(paths([line.strip() for line in str(caught.value).splitlines()[1:]])) == {
        "study.recipes",
        "seed",
        "data.sizes.train",
        "teacher.epochs",
        "targets",
        "importance.statistics.1",
        "recipes.kfac.weighting",
        "recipes.x-y",
        "colour",
    }


FINETUNE = repository_params()["recipes"]["svd"]["recovery"]
IN_ORDER = {"anchor": 0.0, "ridge": 0.01}
CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({"weighting": {"kind": "movement"}}, "weighting"),
    ({"ranks": "softlm", "weighting": {"kind": "kfac", "shrinkage": 0.0}}, "weighting"),
    ({"ranks": "softlm", "shaping": "lpaf"}, "shaping"),
    ({"ranks": "drone_tolerance", "residual": "losparse"}, "residual"),
    ({"recovery": "lpaf", "residual": "losparse"}, "recovery"),
    ({"residual": "losparse", "recovery.steps": 0}, "recovery.steps"),
    ({"residual": "losparse", "residual.start": 0.8}, "residual"),
    ({"residual": "losparse", "residual.window": 43}, "residual.window"),
    ({"residual": "movement_pruning", "residual.window": 10}, "residual.window"),
    ({"recovery": {"kind": "in_turn", "first": FINETUNE, "then": {**FINETUNE, "steps": 0}}}, "recovery.then.steps"),
    ({"shaping": "lpaf", "shaping.end": 0.95}, "shaping"),
    ({"ranks": "ars", "ranks.last_rate": 0.1}, "ranks.last_rate"),
    ({"ranks": "softlm", "recovery": "lpaf"}, "recovery"),
    ({"ranks": "drone_tolerance", "recovery": "lpaf"}, "recovery"),
    ({"ranks": "kfac", "residual": "losparse", "residual.low_rank": 0.0}, "ranks"),
    ({"shaping": "lpaf", "shaping.steps": 0}, "shaping.steps"),
    ({"ranks": "ars", "ranks.selection": "elements", "residual": "losparse"}, "residual"),
    (
        {"ranks": {"kind": "borrowed", "weighting": {"kind": "movement"}, "ranks": {"kind": "uniform", "by": "share"}}},
        "ranks.weighting",
    ),
    (
        {"ranks": {"kind": "borrowed", "weighting": "inputs", "ranks": {"kind": "waterfill", "narrow": True}}},
        "ranks.ranks",
    ),
    ({"storage": "pivoted", "ranks": "ars"}, "storage"),
    ({"storage": "pivoted", "residual": "losparse"}, "storage"),
    ({"sequential": IN_ORDER}, "sequential"),
    ({"shaping": "lpaf", "weighting": {"kind": "movement"}, "sequential": IN_ORDER}, "sequential"),
    (
        {"weighting": {"kind": "kfac", "shrinkage": 0.0}, "ranks": "drone_tolerance", "sequential": IN_ORDER},
        "sequential",
    ),
    ({"weighting": {"kind": "kfac", "shrinkage": 0.0}, "residual": "losparse", "sequential": IN_ORDER}, "sequential"),
    ({"source": "base", "weighting": {"kind": "kfac", "shrinkage": 0.0}}, "source"),
    ({"source": "base", "ranks": "ars"}, "source"),
    ({"source": "base", "ranks": "drone_tolerance"}, "source"),
    ({"weighting": {"kind": "kfac", "shrinkage": 0.0}, "sequential": {**IN_ORDER, "anchor": 1.5}}, "sequential.anchor"),
    ({"weighting": {"kind": "kfac", "shrinkage": 0.0}, "sequential": {**IN_ORDER, "ridge": 0.0}}, "sequential.ridge"),
    (
        {"weighting": {"kind": "kfac", "shrinkage": 0.0}, "sequential": {"anchor": 0.0, "ridge": 0.1, "sums": True}},
        "sequential.sums",
    ),
]


def test_parts_that_make_no_sense_together_are_refused() -> None:
    """A part is given as itself or by the recipe it is taken from."""
    ours = repository_params()
    for parts, where in CONTRADICTIONS:
        params = plain(ours)
        recipe = params["recipes"]["svd"]
        for path, value in parts.items():
            part, _, key = path.partition(".")
            if key:
                recipe[part][key] = value
            else:
                recipe[part] = plain(params["recipes"][value][part]) if value in list(params["recipes"]) else value
        only(params, f"recipes.svd.{where}")


def test_the_parameters_know_every_kind_of_statistics() -> None:
    """They have a list of their own, since that of eckart comes with torch."""
    (kinds, _) = get_args(Importance.model_fields["statistics"].annotation)
    assert get_args(kinds) == STATISTIC_KINDS


def test_mean_gradients_are_asked_for_and_need_given_labels() -> None:
    ours = repository_params()
    ours["recipes"]["zs_svd"] = {"weighting": "inputs", "ranks": "zero_sum"}
    ours["study"]["recipes"], ours["export"]["recipes"] = ["svd", "zs_svd"], []
    assert "gradients" in only(ours, "importance.statistics")
    ours["importance"] = {"statistics": ["inputs", "gradients"]}
    assert mistakes(ours) == []
    ours["importance"]["labels"] = "drawn"
    assert "zs_svd" in only(ours, "importance.labels")


@pytest.mark.parametrize("option", ["products", "tied"])
def test_targets_of_two_linear_layers_are_refused_for_a_method_without_them(option: str) -> None:
    ours = repository_params()
    ours["targets"][option] = True
    ours["study"]["recipes"], ours["export"]["recipes"] = ["svd", "kfac", "drone_tolerance"], []
    assert mistakes(ours) == []
    for name, kind in (("ars", "hypernetwork"), ("softlm", "threshold"), ("losparse", "sparse_rows")):
        ours["study"]["recipes"] = [name]
        assert re.search(rf"{kind} .*recipes\.{name}\b", only(ours, f"targets.{option}"))


class TestProcesses:
    """What several processes cannot train together is found before anything runs."""

    def test_each_training_of_a_recovery_has_them(self) -> None:
        both = {"kind": "in_turn", "first": {**FINETUNE, "batch_size": 4}, "then": {**FINETUNE, "batch_size": 5}}
        params = tiny(trainer={"processes": 2})
        params["recipes"]["svd"]["recovery"] = both
        assert paths(mistakes(params)) == ["recipes.svd.recovery.then.batch_size"]

    def test_a_step_of_shaping_has_them_too(self) -> None:
        lpaf = repository_params()["recipes"]["lpaf"]
        params = tiny(trainer={"processes": 2}, recipes={"svd": {"shaping": {**lpaf["shaping"], "batch_size": 7}}})
        assert paths(mistakes(params)) == ["recipes.svd.shaping.batch_size"]

    def test_a_search_that_trains_gates_has_no_micro_batches(self) -> None:
        params = tiny(trainer={"micro_batch": 2})
        assert mistakes(params) == []
        params["recipes"]["svd"]["ranks"] = repository_params()["recipes"]["ars"]["ranks"]
        assert "hypernetwork" in only(params, "trainer.micro_batch")


def test_saved_logits_are_for_language_models_and_have_no_hidden_states() -> None:
    params = tiny()
    path = "recipes.svd.recovery.distillation.top"
    params["recipes"]["svd"]["recovery"]["distillation"] = {"layers": 0.0, "logits": 1.0, "temperature": 2.0, "top": 8}
    assert "language" in only(params, path)
    params["recipes"]["svd"]["recovery"]["distillation"]["layers"] = 1.0
    assert paths(mistakes(params)) == [path, path]


def test_updates_freeze_a_residual() -> None:
    params = tiny()
    updated = {**FINETUNE, "distillation": None, "lora": {"rank": 8, "alpha": 16.0}}
    losparse = repository_params()["recipes"]["losparse"]["residual"]
    params["recipes"]["svd"] |= {"residual": losparse, "recovery": {"kind": "in_turn", "first": updated}}
    assert paths(mistakes(params)) == ["recipes.svd.recovery.first.lora"]


def test_a_goal_of_a_runtime_needs_something_that_is_exported() -> None:
    goals = {"goals": [{"speedup": 1.5}, {"bytes": 5, "runtime": "int8"}]}
    line = only(tiny(study=goals, export={"recipes": []}), "study.goals.1.runtime")
    assert "recipes" in advice(line)
    assert mistakes(tiny(study=goals, export={"recipes": ["svd"]})) == []


ODD_NAMES = ["", " ", "a b", "a\nb", "\x85", "..", "/", "a/b", "日本", "-x", "x" * 300, "${item}", "a: b", "1", "null"]
ODD_KEYS: list[Any] = [*ODD_NAMES, None, 1, True, math.nan]
ODD_VALUES: list[Any] = [None, True, 0, -1, 0.5, 1e308, 10**30, math.nan, math.inf, *ODD_NAMES]
ODD_VALUES += [[], [None], [[]], [0.0, 1.0, 2.0], [["svd"]], {}, {"a\nb": 1}, {1: 2}, {"kind": "a\nb"}, {"kind": []}]
PLACES = list(EVERYWHERE)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """The tiny parameters with up to three changes: another value or key, a key more, or one that is gone."""
    params = plain(TINY)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(PLACES))
        try:
            above = parent(params, place)
            value = above[place[-1]]
        except (KeyError, IndexError, TypeError):  # an earlier change
            continue
        change = draw(st.sampled_from(["value", "value", "key", "more", "gone"]))
        if change == "value":
            above[place[-1]] = draw(st.sampled_from(ODD_VALUES))
        elif change == "gone" or isinstance(above, list):
            del above[place[-1]]
        else:
            above[draw(st.sampled_from(ODD_KEYS))] = value
            if change == "key":
                above.pop(place[-1], None)
    return params


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=mutated())
def test_whatever_stands_in_the_file_is_taken_or_said_in_lines(params: dict[str, Any], tmp_path: Path) -> None:
    """Each with a path and what to write, whatever name or value it quotes."""
    write_params(tmp_path, params)
    try:
        check()
    except ParamsError as error:
        head, *lines = str(error).split("\n")
    else:
        return
    assert head.startswith("params.yaml")
    assert lines
    for line in lines:
        assert re.fullmatch(r"  .*: .+; .+", line)
        assert line.isprintable()
        assert len(line) < 1500


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("study: &it\n  name: tiny\n  goals: *it\n", "study.goals"),
        ("? [a, b]\n: 1\n", "('a', 'b')"),
        ("study: {name: !!binary aGVsbG8=}\n", "study.name"),
        ("seed: 2020-01-01\n", "seed"),
        ("seed: !!python/object:os.system {}\n", ""),
        ("seed: \udcff\n", ""),
        ("- a list\n", ""),
        ("[" * 3000, ""),
        ("seed: 2020-99-99\n", ""),
    ],
)
def test_what_yaml_has_and_parameters_have_not_is_said(tmp_path: Path, text: str, path: str) -> None:
    (tmp_path / "params.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ParamsError, match=r"^params\.yaml ") as caught:
        check()
    assert not path or f"\n  {path}: " in str(caught.value)
