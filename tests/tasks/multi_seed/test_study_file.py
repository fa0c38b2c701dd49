"""The content of a file of studies/, and the parameters made from it.

Tests compare the path of a mistake, which stands before the colon; tests/test_messages.py has the wording.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from eckart.recipe import merge
from tasks.config.params_file import ParamsError
from tasks.config.resolved import resolve
from tasks.multi_seed.published_numbers import Published
from tasks.multi_seed.study_file import StudyFile, load
from tasks.multi_seed.trials import Trial, Trials
from tests.tasks.multi_seed.test_published_numbers import ROW
from tests.tasks.multi_seed.test_trials import ASKED, FASTER
from tests.workspace import REPOSITORY, tiny_params, write_params

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

    @pytest.mark.parametrize("old", ["kfac", {"kind": "kfac", "shrinkage": 0.5}])
    def test_a_bare_word_is_its_kind(self, old: Any) -> None:
        assert merge({"weighting": old}, {"weighting": "inputs"})["weighting"] in ("inputs", {"kind": "inputs"})
        changed = {"kind": "kfac", "shrinkage": 0.1}
        assert merge({"weighting": old}, {"weighting": {"shrinkage": 0.1}}) == {"weighting": changed}


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


def mistakes(file: Path, tasks: Sequence[str] = ()) -> list[str]:
    """The path of each mistake of studies/other.yaml."""
    with pytest.raises(ParamsError, match=r"^studies/other\.yaml ") as caught:
        load(file, (), tasks)
    return [line.strip().partition(": ")[0] for line in str(caught.value).splitlines()[1:]]


class TestStudyFiles:
    def test_only_what_is_stated_differs(self, write: Callable[..., Path]) -> None:
        study = only(write({"study": {"keeps": [0.25]}, "teacher": {"epochs": 2}}))
        expected = resolve(tiny_params(study={"keeps": [0.25]}, teacher={"epochs": 2}))
        assert study.content(0) == expected
        assert (study.name, study.path) == ("other", Path("studies/other.yaml"))

    def test_all_mistakes_are_named_with_the_study_s_file(self, write: Callable[..., Path]) -> None:
        file = write({"study": {"keeps": [1.5], "recipes": ["mine"]}, "teacher": {"epoch": 2}, "bnechmark": {}})
        assert set(mistakes(file)) == {"study.keeps.0", "study.recipes", "teacher.epoch", "bnechmark"}
        with pytest.raises(ParamsError, match=r"studies/other\.yaml .*params\.yaml"):
            load(file)

    @pytest.mark.parametrize(
        ("seeds", "path"),
        [([], "seeds"), ([-1], "seeds.0"), ([1, 0, 1], "seeds")],
    )
    def test_seeds_are_checked(self, write: Callable[..., Path], seeds: object, path: str) -> None:
        assert mistakes(write({"seeds": seeds})) == [path]

    @pytest.mark.parametrize(
        ("content", "asked", "seeds"),
        [
            ({"seeds": [0, 1]}, [7, 8, 7], (7, 8)),  # the command line wins
            ({"seed": 5}, [7], (7,)),
            ({"seed": 5}, [], (5,)),
            ({}, [], (0,)),
        ],
    )
    def test_each_seed_is_a_workspace(
        self, write: Callable[..., Path], content: dict[str, Any], asked: list[int], seeds: tuple[int, ...]
    ) -> None:
        study = only(write(content), asked)
        assert study.seeds == seeds
        assert study.content(seeds[-1])["seed"] == seeds[-1]
        assert "seeds" not in study.params

    def test_seed_and_seeds_contradict_each_other(self, write: Callable[..., Path]) -> None:
        assert mistakes(write({"seed": 5, "seeds": [5]})) == ["seed"]

    @pytest.mark.parametrize("file", ["studies/none.yaml", "studies/a b.yaml", str(REPOSITORY / "params.yaml")])
    def test_a_file_that_cannot_be_one(self, write: Callable[..., Path], file: str) -> None:
        write({"seed": 1}, "a b.yaml")
        with pytest.raises(ParamsError, match=rf"^{file}\b"):
            load(Path(file))


FILE = {"teacher": {"epochs": 2}, "tasks": {"one": {"data": {"seed": 1}}, "two": {"data": {"metric": "f1"}}}}


class TestTasks:
    """Several tasks in one file, each on top of it."""

    def test_each_is_merged_on_top_of_the_file(self, write: Callable[..., Path]) -> None:
        one, two = load(write(FILE))
        expected = resolve(tiny_params(teacher={"epochs": 2}, data={"seed": 1}, study={"name": "tiny-one"}))
        assert one.content(0) == expected
        assert (two.params["data"]["seed"], two.metric, two.params["teacher"]["epochs"]) == (0, "f1", 2)

    def test_each_has_a_name_and_an_experiment_of_its_own(self, write: Callable[..., Path]) -> None:
        named = {**FILE, "seeds": [0, 3], "tasks": {"one": {}, "two": {"study": {"name": "mine"}}}}
        one, two = load(write(named))
        assert [study.name for study in (one, two)] == ["other-one", "other-two"]
        assert [study.params["study"]["name"] for study in (one, two)] == ["tiny-one", "mine"]
        assert one.seeds == two.seeds == (0, 3)

    @pytest.mark.parametrize(("length", "asked"), [(46, None), (39, ASKED)], ids=["alone", "with trials"])
    def test_the_name_with_the_task_s_has_at_most_50_characters(
        self, write: Callable[..., Path], length: int, asked: Any
    ) -> None:
        """And with the suffix of the trials. It becomes study.name of a workspace's params.yaml."""
        file = {**({"trials": asked} if asked else {}), "tasks": {"one": {}, "two": {"study": {"name": "mine"}}}}
        (one, _) = load(write({**file, "study": {"name": length * "x"}}))
        assert one.params["study"]["name"] == length * "x" + "-one"
        assert mistakes(write({**file, "study": {"name": (length + 1) * "x"}})) == ["tasks.one.study.name"]

    def test_some_may_be_chosen(self, write: Callable[..., Path]) -> None:
        file = write(FILE)
        assert [study.task for study in load(file, (), ["two"])] == ["two"]
        with pytest.raises(ParamsError, match=r"\bthree\b.*\bone, two$"):
            load(file, (), ["two", "three"])
        with pytest.raises(ParamsError, match=r"\bone\b.*--task\b"):
            load(write({"seed": 1}), (), ["one"])

    def test_each_mistake_is_named_once_where_it_stands(self, write: Callable[..., Path]) -> None:
        """Mistakes of all tasks, chosen or not."""
        tasks = {"one": {"data": {"metric": "pearson"}}, "two": {"bnechmark": {}}, "three": {}}
        found = mistakes(write({"teacher": {"epoch": 1}, "tasks": tasks}), ["three"])
        assert found == ["teacher.epoch", "tasks.one.data.metric", "tasks.two.bnechmark"]

    def test_what_a_task_puts_right_is_no_mistake(self, write: Callable[..., Path]) -> None:
        task = {"columns": {"label": None}, "task": "language_modeling", "metric": "perplexity"}
        (study,) = load(write({"data": {"metric": "perplexity"}, "tasks": {"text": {"data": task}}}))
        assert study.metric == "perplexity"

    @pytest.mark.parametrize(
        ("tasks", "path"),
        [
            ({"a/b": {}}, "tasks.a/b"),
            ({}, "tasks"),
            ({"one": {"seed": 3}}, "tasks.one.seed"),
        ],
    )
    def test_tasks_are_checked(self, write: Callable[..., Path], tasks: object, path: str) -> None:
        assert mistakes(write({"tasks": tasks})) == [path]


class TestPublished:
    """Numbers of papers that may stand in a file."""

    @pytest.mark.parametrize(
        ("row", "path"),
        [
            ({"scores": {"three": 80}}, "published.0.scores.three"),
            ({"score": 80}, "published.0.score"),
            ({}, "published.0"),
            ({"scores": {"one": 180}}, "published.0.scores.one"),
            ({"scores": {"one": 80}, "units": "metric"}, "published.0.scores.one"),
            ({"scores": {"two": 80}}, "published.0.scores.two"),
        ],
    )
    def test_what_cannot_stand_beside_a_task(self, write: Callable[..., Path], row: dict[str, Any], path: str) -> None:
        text = {"columns": {"label": None}, "task": "language_modeling", "metric": "perplexity"}
        tasks = {"one": {}, "two": {"data": text}}
        assert mistakes(write({"tasks": tasks, "published": [{**ROW, **row}]})) == [path]

    @pytest.mark.parametrize(
        ("row", "key"),
        [({"keep": 48}, "keep"), ({"units": "points"}, "units")],
    )
    def test_rows_are_typed(self, write: Callable[..., Path], row: dict[str, Any], key: str) -> None:
        assert mistakes(write({"published": [{**ROW, "score": 80, **row}]})) == [f"published.0.{key}"]

    def test_a_study_without_tasks_has_a_score_and_other_benchmarks(self, write: Callable[..., Path]) -> None:
        rows = [{**ROW, "score": 80}, {**ROW, "keep": None, "note": None, "scores": {"BoolQ": 61.5}}]
        assert only(write({"published": rows})).published == tuple(Published(**row) for row in rows)


class TestTrials:
    """Mistakes in trials; tests/tasks/multi_seed/test_trials.py has the rest."""

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
        assert mistakes(write({"trials": ASKED, "study": {"recipes": ["svd"]}})) == ["trials.recipes.kfac"]

    @pytest.mark.parametrize(
        ("change", "path"),
        [
            ({"keep": 2}, "trials.keep"),
            ({"recipes": {"mine": [{}]}}, "trials.recipes.mine"),
            ({"recipes": {"svd": []}}, "trials.recipes.svd"),
            ({"recipes": {"svd": [{}, {"recovery": {"rate": 1}}]}}, "trials.recipes.svd.1.recovery.rate"),
        ],
    )
    def test_mistakes_are_named(self, write: Callable[..., Path], change: dict[str, Any], path: str) -> None:
        assert mistakes(write({"trials": {**ASKED, **change}})) == [path]
