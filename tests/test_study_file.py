"""What a file of studies/ may say, and the parameters that are made of it."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tasks.merge import merge
from tasks.params import ParamsError
from tasks.report.published import Published
from tasks.study_file import StudyFile, load
from tasks.trials import Trial, Trials
from tests.test_published import ROW
from tests.test_trials import ASKED, FASTER
from tests.workspace import tiny_params, write_params

MAPPINGS = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2),
        lambda inner: st.dictionaries(st.sampled_from(["a", "b", "kind"]), inner, max_size=3),
        max_leaves=6,
    ),
)


class TestMerge:
    @given(MAPPINGS, MAPPINGS)
    def test_what_is_stated_holds_and_the_rest_stays(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        before = copy.deepcopy((old, new))
        both = merge(old, new)
        assert (old, new) == before
        assert set(both) == {*old, *new}
        assert all(both[key] == value for key, value in new.items() if not isinstance(value, dict))
        assert all(both[key] == value for key, value in old.items() if key not in new)
        assert merge(both, new) == both
        assert merge(old, {}) == merge(old, old) == old

    def test_mappings_merge_key_by_key_lists_and_scalars_replace(self) -> None:
        old = {"data": {"sizes": {"train": 1, "test": 2}}, "keeps": [0.5, 0.3], "seed": 0}
        new = {"data": {"sizes": {"test": 3}}, "keeps": [0.1], "seed": 4}
        assert merge(old, new) == {"data": {"sizes": {"train": 1, "test": 3}}, "keeps": [0.1], "seed": 4}

    def test_another_kind_replaces_the_whole_part(self) -> None:
        old = {"weighting": {"kind": "fisher", "axis": "input"}, "ranks": {"kind": "uniform", "by": "share"}}
        assert merge(old, {"weighting": {"kind": "none"}}) == {**old, "weighting": {"kind": "none"}}

    @pytest.mark.parametrize("change", [{"axis": "output"}, {"kind": "fisher", "axis": "output"}])
    def test_the_same_kind_stated_or_not_keeps_the_other_keys(self, change: dict[str, str]) -> None:
        old = {"weighting": {"kind": "fisher", "axis": "input", "power": 1}}
        assert merge(old, {"weighting": change}) == {"weighting": {"kind": "fisher", "axis": "output", "power": 1}}

    def test_a_part_can_be_switched_on_and_off(self) -> None:
        part = {"kind": "pruning", "steps": 3}
        assert merge({"shaping": None}, {"shaping": part}) == {"shaping": part}
        assert merge({"shaping": part}, {"shaping": None}) == {"shaping": None}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a study file beside tiny parameters; the working directory is their workspace."""
    monkeypatch.chdir(tmp_path)
    write_params(tmp_path, tiny_params())
    Path("studies").mkdir()

    def write(content: Any, name: str = "other.yaml") -> Path:
        file = Path("studies", name)
        with file.open("w") as stream:
            YAML().dump(content, stream)
        return file

    return write


def only(file: Path, *seeds: list[int]) -> StudyFile:
    """The study of a file without tasks."""
    (study,) = load(file, *seeds)
    return study


class TestStudyFiles:
    def test_only_what_is_stated_differs(self, write: Callable[..., Path]) -> None:
        study = only(write({"study": {"keeps": [0.25]}, "teacher": {"epochs": 2}}))
        expected = tiny_params(study={"keeps": [0.25]}, teacher={"epochs": 2})
        assert study.content(0) == expected
        assert (study.name, study.path) == ("other", Path("studies/other.yaml"))

    def test_a_whole_new_recipe_may_be_added(self, write: Callable[..., Path]) -> None:
        mine = {**tiny_params()["recipes"]["svd"], "weighting": {"kind": "inputs"}}
        study = only(write({"study": {"recipes": ["mine"]}, "recipes": {"mine": mine}}))
        assert set(study.params["recipes"]) == {"svd", "kfac", "mine"}

    def test_a_recipe_s_part_may_become_another_kind(self, write: Callable[..., Path]) -> None:
        parts = {"ranks": {"kind": "uniform", "by": "share"}, "weighting": {"kind": "fisher", "axis": "input"}}
        study = only(write({"recipes": {"kfac": parts}}))
        assert study.params["recipes"]["kfac"]["weighting"] == parts["weighting"]
        again = {"recipes": {"kfac": {"weighting": {"kind": "none"}}}}
        assert only(write(again)).params["recipes"]["kfac"]["weighting"] == {"kind": "none"}

    def test_all_mistakes_are_named_with_the_study_s_file(self, write: Callable[..., Path]) -> None:
        file = write({"study": {"keeps": [1.5], "recipes": ["mine"]}, "teacher": {"epoch": 2}, "bnechmark": {}})
        with pytest.raises(ParamsError) as caught:
            load(file)
        head, *lines = str(caught.value).splitlines()
        assert head == "studies/other.yaml on top of params.yaml has mistakes:"
        for mistake in (
            "study.keeps.0: is 1.5",
            "there is no recipe mine",
            "teacher.epoch: is unknown",
            "bnechmark: is",
        ):
            assert any(mistake in line for line in lines), mistake

    @pytest.mark.parametrize(
        ("seeds", "message"),
        [
            ([], "seeds: is empty"),
            ([-1], "seeds.0: is -1"),
            (["one"], 'seeds.0: is "one"'),
            (3, "seeds: is 3"),
            ([1, 0, 1], "seeds: has 1 twice"),
        ],
    )
    def test_seeds_are_checked(self, write: Callable[..., Path], seeds: object, message: str) -> None:
        with pytest.raises(ParamsError, match=rf"studies/other.yaml has mistakes:\n  {re.escape(message)}"):
            load(write({"seeds": seeds}))

    def test_each_seed_is_a_workspace_with_that_seed(self, write: Callable[..., Path]) -> None:
        study = only(write({"seeds": [3, 1]}))
        assert study.seeds == (3, 1)
        assert [study.content(seed)["seed"] for seed in study.seeds] == [3, 1]
        assert "seeds" not in study.content(3)

    def test_without_seeds_there_is_one_workspace(self, write: Callable[..., Path]) -> None:
        assert only(write({"study": {"keeps": [0.25]}})).seeds == (tiny_params()["seed"],)
        assert only(write({"seed": 5})).seeds == (5,)

    def test_seeds_of_the_command_line_win(self, write: Callable[..., Path]) -> None:
        assert only(write({"seeds": [0, 1]}), [7, 8, 7]).seeds == (7, 8)
        assert only(write({"seed": 5}), [7]).content(7)["seed"] == 7

    def test_seed_and_seeds_contradict_each_other(self, write: Callable[..., Path]) -> None:
        with pytest.raises(ParamsError, match="seed: stands beside seeds"):
            load(write({"seed": 5, "seeds": [5]}))

    def test_a_file_that_cannot_be_one(self, write: Callable[..., Path], tmp_path: Path) -> None:
        with pytest.raises(ParamsError, match="does not exist"):
            load(Path("studies/none.yaml"))
        with pytest.raises(ParamsError, match="write letters"):
            load(write({"seed": 1}, "a b.yaml"))
        with pytest.raises(ParamsError, match="outside the repository"):
            load(tmp_path.parent)


FILE = {"teacher": {"epochs": 2}, "tasks": {"one": {"data": {"seed": 1}}, "two": {"data": {"metric": "f1"}}}}


class TestTasks:
    """Several tasks in one file, each on top of it."""

    def test_each_is_merged_on_top_of_the_file(self, write: Callable[..., Path]) -> None:
        one, two = load(write(FILE))
        expected = tiny_params(teacher={"epochs": 2}, data={"seed": 1}, study={"name": "tiny-one"})
        assert one.content(0) == expected
        assert (two.params["data"]["seed"], two.metric, two.params["teacher"]["epochs"]) == (0, "f1", 2)

    def test_each_has_a_name_and_an_experiment_of_its_own(self, write: Callable[..., Path]) -> None:
        named = {**FILE, "seeds": [0, 3], "tasks": {"one": {}, "two": {"study": {"name": "mine"}}}}
        one, two = load(write(named))
        assert [study.name for study in (one, two)] == ["other-one", "other-two"]
        assert [study.params["study"]["name"] for study in (one, two)] == ["tiny-one", "mine"]
        assert one.seeds == two.seeds == (0, 3)

    def test_some_may_be_chosen(self, write: Callable[..., Path]) -> None:
        file = write(FILE)
        assert [study.task for study in load(file, (), ["two"])] == ["two"]
        with pytest.raises(ParamsError, match="there is no three; choose from one, two"):
            load(file, (), ["two", "three"])
        with pytest.raises(ParamsError, match="there is no one; leave out --task"):
            load(write({"seed": 1}), (), ["one"])

    def test_each_mistake_is_named_once_where_it_stands(self, write: Callable[..., Path]) -> None:
        """Of all tasks, the chosen ones or not."""
        tasks = {"one": {"data": {"metric": "pearson"}}, "two": {"bnechmark": {}}, "three": {}}
        with pytest.raises(ParamsError) as caught:
            load(write({"teacher": {"epoch": 1}, "tasks": tasks}), (), ["three"])
        lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
        assert [line.partition(": ")[0] for line in lines] == [
            "teacher.epoch",
            "tasks.one.data.metric",
            "tasks.two.bnechmark",
        ]

    def test_what_a_task_puts_right_is_no_mistake(self, write: Callable[..., Path]) -> None:
        task = {"columns": {"label": None}, "task": "language_modeling", "metric": "perplexity"}
        (study,) = load(write({"data": {"metric": "perplexity"}, "tasks": {"text": {"data": task}}}))
        assert study.metric == "perplexity"

    @pytest.mark.parametrize(
        ("tasks", "message"),
        [
            ({"a/b": {}}, "tasks.a/b: becomes the name of a folder"),
            ({"..": {}}, "tasks...: becomes"),
            ({}, "tasks: is"),
            ({"one": None}, "tasks.one: is null"),
            ({"one": {"seed": 3}}, "tasks.one.seed: all tasks have the same seeds"),
        ],
    )
    def test_tasks_are_checked(self, write: Callable[..., Path], tasks: object, message: str) -> None:
        with pytest.raises(ParamsError, match=rf"studies/other.yaml has mistakes:\n  {re.escape(message)}"):
            load(write({"tasks": tasks}))


class TestPublished:
    """Numbers of papers that may stand in a file."""

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"scores": {"three": 80}}, "published.0.scores.three: there is no task three; write one of one, two"),
            ({"score": 80}, "published.0.score: does not say of which task"),
            ({}, "published.0: needs a score or scores"),
            ({"scores": {"one": 180}}, "published.0.scores.one: is 180, more than 100 percent"),
            ({"scores": {"one": 80}, "units": "metric"}, "published.0.scores.one: is 80, and accuracy lies between"),
            ({"scores": {"two": 80}}, "published.0.scores.two: perplexity is no percentage"),
        ],
    )
    def test_what_cannot_stand_beside_a_task(
        self, write: Callable[..., Path], row: dict[str, Any], message: str
    ) -> None:
        text = {"columns": {"label": None}, "task": "language_modeling", "metric": "perplexity"}
        tasks = {"one": {}, "two": {"data": text}}
        with pytest.raises(ParamsError, match=re.escape(message)):
            load(write({"tasks": tasks, "published": [{**ROW, **row}]}))

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"keep": 48, "score": 80}, "published.0.keep: is 48"),
            ({"units": "points", "score": 80}, 'published.0.units: is "points"'),
            ({"score": "80"}, 'published.0.score: is "80"'),
            ({"score": 80, "page": 3}, "published.0.page: is unknown"),
        ],
    )
    def test_rows_are_typed(self, write: Callable[..., Path], row: dict[str, Any], message: str) -> None:
        with pytest.raises(ParamsError, match=re.escape(message)):
            load(write({"published": [{**ROW, **row}]}))

    def test_a_study_without_tasks_has_a_score_and_other_benchmarks(self, write: Callable[..., Path]) -> None:
        rows = [{**ROW, "score": 80}, {**ROW, "keep": None, "note": None, "scores": {"BoolQ": 61.5}}]
        assert only(write({"published": rows})).published == tuple(Published(**row) for row in rows)


class TestTrials:
    """What may be tried first; tests/test_trials.py has the rest."""

    def test_the_study_and_its_trials_have_workspaces_of_their_own(self, write: Callable[..., Path]) -> None:
        study = only(write({"trials": ASKED, "seeds": [0, 1]}))
        assert study.trials == Trials.model_validate(ASKED)
        first = study.of_trials(study.trials)
        assert (first.name, first.seeds, first.trials) == ("other-trials", (3,), None)
        tried = (Trial("svd", FASTER, 0.5, True),)
        best = study.at_its_best(tried)
        assert (best.name, best.seeds, best.trials, best.tried) == ("other", (0, 1), None, tried)
        assert best.params["recipes"]["svd"]["recovery"]["learning_rate"] == 1e-3

    def test_tasks_have_the_same_trials(self, write: Callable[..., Path]) -> None:
        one, two = load(write({"trials": ASKED, "tasks": {"one": {}, "two": {"data": {"seed": 4}}}}))
        assert one.of_trials(one.trials).name == "other-one-trials"  # type: ignore[arg-type]
        assert two.of_trials(two.trials).params["data"]["seed"] == 4  # type: ignore[arg-type]

    def test_what_the_study_does_not_run_is_not_tried(self, write: Callable[..., Path]) -> None:
        with pytest.raises(ParamsError, match=r"\n  trials\.recipes\.kfac"):
            load(write({"trials": ASKED, "study": {"recipes": ["svd"]}}))

    def test_no_recipe_is_replaced_by_a_trial(self, write: Callable[..., Path]) -> None:
        mine = tiny_params()["recipes"]["svd"]
        with pytest.raises(ParamsError, match=r"\n  trials\.recipes\.svd"):
            load(write({"trials": ASKED, "recipes": {"svd_trial2": mine}}))

    @pytest.mark.parametrize(
        ("change", "where"),
        [
            ({"keep": 2}, "trials.keep"),
            ({"recipes": {"mine": [{}]}}, "trials.recipes.mine"),
            ({"recipes": {"svd": []}}, "trials.recipes.svd"),
            ({"recipes": {"svd": [FASTER, {}, FASTER]}}, "trials.recipes.svd"),
            ({"recipes": {"svd": [{}, {"recovery": {"rate": 1}}]}}, "trials.recipes.svd.1.recovery.rate"),
            ({"recipes": {"svd": [{}, {"recovery": {"steps": 2}}]}}, "trials.recipes.svd: has"),
        ],
    )
    def test_mistakes_are_named(self, write: Callable[..., Path], change: dict[str, Any], where: str) -> None:
        with pytest.raises(ParamsError, match=rf"\n  {re.escape(where)}"):
            load(write({"trials": {**ASKED, **change}}))
