"""Other studies: what a file of studies/ may say, the workspaces made of it, and two seeds of a tiny one, all real."""

import copy
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows import other_studies, workspaces
from flows.cli import app
from flows.options import Options
from flows.other_studies import check_committed, folder_of, prepare
from flows.workspaces import WorkspaceError, carry
from tasks import study_file
from tasks.metrics import METRICS, MetricName
from tasks.params import ParamsError
from tasks.report import published
from tasks.report import seeds_table as summary
from tasks.report.published import Published
from tasks.study_file import StudyFile, load, merge
from tests.flows.toy import ENVIRONMENT, call
from tests.workspace import REVIEWS, tiny_params, tiny_workspace, write_params

ROOT = Path(__file__).parents[2]

MAPPINGS = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2),
        lambda inner: st.dictionaries(st.sampled_from(["a", "b", "kind"]), inner, max_size=3),
        max_leaves=6,
    ),
)


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


def commit(root: Path) -> None:
    call(root, "git", "add", "-A")
    call(root, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "state")


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
        old = {"weighting": {"kind": "fisher", "axis": "input"}, "ranks": {"kind": "uniform"}}
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
    def test_only_what_is_stated_differs(self, write: Callable[..., Path], tmp_path: Path) -> None:
        study = only(write({"study": {"keeps": [0.25]}, "teacher": {"epochs": 2}}))
        expected = tiny_params(study={"keeps": [0.25]}, teacher={"epochs": 2})
        assert study.content(0) == expected
        assert (study.name, study.path) == ("other", Path("studies/other.yaml"))

    def test_a_whole_new_recipe_may_be_added(self, write: Callable[..., Path], tmp_path: Path) -> None:
        mine = {**tiny_params()["recipes"]["svd"], "weighting": {"kind": "inputs"}}
        study = only(write({"study": {"recipes": ["mine"]}, "recipes": {"mine": mine}}))
        assert set(study.params["recipes"]) == {"svd", "kfac", "mine"}

    def test_a_recipe_s_part_may_become_another_kind(self, write: Callable[..., Path], tmp_path: Path) -> None:
        parts = {"ranks": {"kind": "uniform"}, "weighting": {"kind": "fisher", "axis": "input"}}
        study = only(write({"recipes": {"kfac": parts}}))
        assert study.params["recipes"]["kfac"]["weighting"] == parts["weighting"]
        again = {"recipes": {"kfac": {"weighting": {"kind": "none"}}}}
        assert only(write(again)).params["recipes"]["kfac"]["weighting"] == {"kind": "none"}

    def test_all_mistakes_are_named_with_the_study_s_file(self, write: Callable[..., Path], tmp_path: Path) -> None:
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
    def test_seeds_are_checked(self, write: Callable[..., Path], tmp_path: Path, seeds: object, message: str) -> None:
        with pytest.raises(ParamsError, match=rf"studies/other.yaml has mistakes:\n  {re.escape(message)}"):
            load(write({"seeds": seeds}))

    def test_each_seed_is_a_workspace_with_that_seed(self, write: Callable[..., Path], tmp_path: Path) -> None:
        study = only(write({"seeds": [3, 1]}))
        assert study.seeds == (3, 1)
        assert [study.content(seed)["seed"] for seed in study.seeds] == [3, 1]
        assert "seeds" not in study.content(3)
        assert folder_of(study, 3) == Path("workspaces/other-seed3")

    def test_without_seeds_there_is_one_workspace(self, write: Callable[..., Path], tmp_path: Path) -> None:
        assert only(write({"study": {"keeps": [0.25]}})).seeds == (tiny_params()["seed"],)
        assert only(write({"seed": 5})).seeds == (5,)

    def test_seeds_of_the_command_line_win(self, write: Callable[..., Path], tmp_path: Path) -> None:
        assert only(write({"seeds": [0, 1]}), [7, 8, 7]).seeds == (7, 8)
        assert only(write({"seed": 5}), [7]).content(7)["seed"] == 7

    def test_seed_and_seeds_contradict_each_other(self, write: Callable[..., Path], tmp_path: Path) -> None:
        with pytest.raises(ParamsError, match="seed: stands beside seeds"):
            load(write({"seed": 5, "seeds": [5]}))

    def test_a_file_that_cannot_be_one(self, write: Callable[..., Path], tmp_path: Path) -> None:
        with pytest.raises(ParamsError, match="does not exist"):
            load(Path("studies/none.yaml"))
        with pytest.raises(ParamsError, match="write letters"):
            load(write({"seed": 1}, "a b.yaml"))
        with pytest.raises(ParamsError, match="outside the repository"):
            load(tmp_path.parent)

    def test_parameters_are_written_as_they_were_read(self, tmp_path: Path) -> None:
        tricky = {"rate": 5.0e-5, "text": "1.0", "off": "no", "nothing": None, "int": 1, "float": 1.0, "list": [0.5, 1]}
        content = {**tiny_params(), "tricky": tricky, "long": "a: # " * 60}
        other_studies._write(content, tmp_path / "params.yaml", "# comment\n")
        again = read(tmp_path / "params.yaml")
        assert again == content
        assert {type(again["tricky"][key]) for key in ("int", "float")} == {int, float}
        assert list(again) == list(content)
        assert (tmp_path / "params.yaml").read_text().startswith("# comment\n")


FILE = {"teacher": {"epochs": 2}, "tasks": {"one": {"data": {"seed": 1}}, "two": {"data": {"metric": "f1"}}}}


class TestTasks:
    """Several tasks in one file, each on top of it."""

    def test_each_is_merged_on_top_of_the_file(self, write: Callable[..., Path], tmp_path: Path) -> None:
        one, two = load(write(FILE))
        expected = tiny_params(teacher={"epochs": 2}, data={"seed": 1}, study={"name": "tiny-one"})
        assert one.content(0) == expected
        assert (two.params["data"]["seed"], two.metric, two.params["teacher"]["epochs"]) == (0, "f1", 2)

    def test_each_has_a_workspace_and_an_experiment_of_its_own(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        named = {**FILE, "seeds": [0, 3], "tasks": {"one": {}, "two": {"study": {"name": "mine"}}}}
        one, two = load(write(named))
        assert [folder_of(study, 3) for study in (one, two)] == [
            Path("workspaces/other-one-seed3"),
            Path("workspaces/other-two-seed3"),
        ]
        assert [study.params["study"]["name"] for study in (one, two)] == ["tiny-one", "mine"]
        assert one.seeds == two.seeds == (0, 3)

    def test_some_may_be_chosen(self, write: Callable[..., Path], tmp_path: Path) -> None:
        file = write(FILE)
        assert [study.task for study in load(file, (), ["two"])] == ["two"]
        with pytest.raises(ParamsError, match="there is no three; choose from one, two"):
            load(file, (), ["two", "three"])
        with pytest.raises(ParamsError, match="there is no one; leave out --task"):
            load(write({"seed": 1}), (), ["one"])

    def test_each_mistake_is_named_once_where_it_stands(self, write: Callable[..., Path], tmp_path: Path) -> None:
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

    def test_what_a_task_puts_right_is_no_mistake(self, write: Callable[..., Path], tmp_path: Path) -> None:
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
    def test_tasks_are_checked(self, write: Callable[..., Path], tmp_path: Path, tasks: object, message: str) -> None:
        with pytest.raises(ParamsError, match=rf"studies/other.yaml has mistakes:\n  {re.escape(message)}"):
            load(write({"tasks": tasks}))


ROW = {"source": "Doe 2024, table 1", "method": "ARS", "keep": 0.5, "units": "percent", "note": "of 3 seeds"}


class TestPublished:
    """Numbers of papers: what may stand in a file, and how it is printed."""

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
        self, write: Callable[..., Path], tmp_path: Path, row: dict[str, Any], message: str
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
    def test_rows_are_typed(
        self, write: Callable[..., Path], tmp_path: Path, row: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ParamsError, match=re.escape(message)):
            load(write({"published": [{**ROW, **row}]}))

    def test_a_study_without_tasks_has_a_score_and_other_benchmarks(
        self, write: Callable[..., Path], tmp_path: Path
    ) -> None:
        rows = [{**ROW, "score": 80}, {**ROW, "keep": None, "note": None, "scores": {"BoolQ": 61.5}}]
        study = only(write({"published": rows}))
        heads, lines = published.cells(study.published, {None: "accuracy"})
        assert heads == ["method", "keep", "accuracy, %", "BoolQ", "source", "note"]
        assert lines[0] == ["ARS", "0.5", "80", "–", "Doe 2024, table 1", "1"]
        assert lines[1] == ["ARS", "–", "–", "61.5", "Doe 2024, table 1", ""]

    def test_means_are_over_the_tasks_that_a_paper_has(self) -> None:
        rows = [
            Published(**{**ROW, "scores": {"a": 80.25, "b": 50.0, "c": 99.0}}),
            Published(**{**ROW, "units": "metric", "scores": {"b": 0.5}}),
        ]
        heads, lines = published.cells(rows, {"a": "accuracy", "b": "matthews"})
        assert heads[2:5] == ["a", "b", "mean"]
        assert [line[2:5] for line in lines] == [["80.25", "50", "65.12"], ["–", "50", "50.00 of 1"]]

    def test_rows_of_tasks_that_are_not_shown_are_left_out(self) -> None:
        rows = [Published(**{**ROW, "scores": {"a": 80.0}}), Published(**{**ROW, "scores": {"b": 80.0}})]
        assert published.beside(rows, {"b": "f1"}) == rows[1:]
        assert published.beside(rows, {None: "f1"}) == rows


MAIN = """\
import os, pathlib, sys, time
seed = int(pathlib.Path("params.yaml").read_text().rsplit("seed: ")[1])
print(sys.argv, os.environ["MLFLOW_TRACKING_URI"], file=open("ran.log", "a"))
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(600 if seed == 9 else 0)
sys.exit(seed == 1)
"""
"""In place of flows/__main__.py: fails with seed 1, and takes long with seed 9."""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git and DVC repository whose study only notes that it ran; the working directory."""
    root = tmp_path / "main"
    for folder in ("eckart", "tasks", "flows", "studies", "docs", "data/raw", "models/base"):
        (root / folder).mkdir(parents=True)
        (root / folder / ".gitkeep").touch()
    (root / "flows/__main__.py").write_text(MAIN)
    (root / "eckart/svd.py").write_text("a = 1\n")
    (root / "params.yaml").write_text("# comment\nstudy: {name: toy}\nseed: 0\n")
    (root / "studies/toy.yaml").write_text("seeds: [0]\n")
    for name in (".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, root / name)
    call(root, "git", "init", "-q", "-b", "main")
    call(root, "dvc", "init", "-q")
    commit(root)
    monkeypatch.chdir(root)
    return root


def toy(*seeds: int) -> StudyFile:
    return StudyFile(Path("studies/toy.yaml"), {"study": {"name": "toy"}, "seed": 0}, seeds or (0,))


class TestCommitted:
    def test_a_clean_repository_passes_and_other_files_may_be_edited(self, repository: Path) -> None:
        check_committed(toy())
        for name in ("docs/new.md", "studies/another.yaml", "README.md", "data/raw/own.csv", "eckart/x.pyc"):
            (repository / name).write_text("edited\n")
        check_committed(toy())

    @pytest.mark.parametrize(
        "name",
        ["eckart/svd.py", "flows/__main__.py", "params.yaml", "dvc.yaml", "tasks/new.py", "eckart/new/deep.py",
         "studies/toy.yaml"],
    )  # fmt: skip
    def test_code_that_would_not_be_used_is_refused(self, repository: Path, name: str) -> None:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("edited\n")
        with pytest.raises(WorkspaceError, match=rf"Commit these.*\n  {name}$"):
            check_committed(toy())

    def test_all_are_named_staged_deleted_and_renamed_ones_too(self, repository: Path) -> None:
        call(repository, "git", "mv", "eckart/svd.py", "eckart/renamed.py")
        (repository / "flows/__main__.py").unlink()
        with pytest.raises(WorkspaceError) as caught:
            check_committed(toy())
        names = str(caught.value).splitlines()[1:]
        assert names == ["  eckart/renamed.py", "  eckart/svd.py", "  flows/__main__.py"]

    def test_a_study_file_that_git_ignores_is_refused(self, repository: Path) -> None:
        call(repository, "git", "rm", "-q", "--cached", "studies/toy.yaml")
        (repository / ".git/info/exclude").write_text("/studies/\n")
        with pytest.raises(WorkspaceError, match=r"studies/toy\.yaml"):
            check_committed(toy())

    def test_a_folder_of_a_repository_is_no_root(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(repository / "eckart")
        with pytest.raises(WorkspaceError, match="not the root"):
            check_committed(toy())


class TestWorkspaces:
    def test_a_worktree_at_head_with_the_shared_cache(self, repository: Path) -> None:
        (repository / "data/raw/own.csv").write_text("a,b\n")
        folder = prepare(toy(), 3)
        assert folder == Path("workspaces/toy-seed3")
        assert call(folder, "git", "rev-parse", "HEAD") == call(repository, "git", "rev-parse", "HEAD")
        assert call(folder, "git", "branch", "--show-current") == ""
        assert call(folder, "dvc", "cache", "dir") == call(repository, "dvc", "cache", "dir")
        assert (folder / "params.yaml").read_text().startswith("# Made from params.yaml and studies/toy.yaml")
        assert read(folder / "params.yaml") == {"study": {"name": "toy"}, "seed": 3}
        assert (folder / "data/raw/own.csv").samefile(repository / "data/raw/own.csv")
        assert call(repository, "git", "status", "--porcelain") == ""
        assert call(folder, "git", "status", "--porcelain") == " M params.yaml\n"

    def test_a_workspace_is_reused_at_the_new_commit_and_keeps_its_outputs(self, repository: Path) -> None:
        folder = prepare(toy(), 0)
        (folder / "reports").mkdir()
        for name in ("reports/comparison.csv", "dvc.lock"):
            (folder / name).write_text("made\n")
        (folder / "eckart/svd.py").write_text("tampered = 1\n")
        for name in ("eckart/svd.py", "dvc.lock"):
            (repository / name).write_text("committed = 2\n")
        commit(repository)
        prepare(toy(), 0)
        assert (folder / "eckart/svd.py").read_text() == "committed = 2\n"
        assert {(folder / name).read_text() for name in ("reports/comparison.csv", "dvc.lock")} == {"made\n"}
        assert read(folder / "params.yaml")["seed"] == 0

    def test_a_folder_that_was_deleted_is_made_again(self, repository: Path) -> None:
        shutil.rmtree(prepare(toy(), 0))
        assert (prepare(toy(), 0) / "eckart/svd.py").exists()

    @pytest.mark.parametrize("own", [False, True], ids=["a folder", "a repository"])
    def test_a_folder_that_is_something_else_is_refused(self, repository: Path, own: bool) -> None:
        """Git would look for a repository above it, find the main workspace and change that."""
        folder = repository / "workspaces/toy-seed0"
        folder.mkdir(parents=True)
        if own:
            call(folder, "git", "init", "-q")
        (repository / "docs/draft.md").write_text("uncommitted\n")
        (repository / "params.yaml").write_text("seed: 4\n")
        with pytest.raises(WorkspaceError, match="is no worktree"):
            prepare(toy(), 0)
        assert call(repository, "git", "branch", "--show-current") == "main\n"
        assert (repository / "params.yaml").read_text() == "seed: 4\n"

    def test_hooks_and_their_environment_do_not_reach_a_workspace(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hook = repository / ".git/hooks/post-checkout"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\ntouch hooked\n")
        hook.chmod(0o755)
        with monkeypatch.context() as hooked:
            hooked.setenv("GIT_DIR", str(repository / ".git"))
            hooked.setenv("GIT_WORK_TREE", str(repository))
            for _ in range(2):
                folder = prepare(toy(), 0)
        assert not (folder / "hooked").exists()
        assert call(repository, "git", "branch", "--show-current") == "main\n"

    def test_git_and_dvc_of_the_main_workspace_do_not_see_it(self, repository: Path) -> None:
        prepare(toy(), 0)
        for tool in ("git", "dvc"):
            assert call(repository, tool, "check-ignore", "workspaces").strip() == "workspaces"


class TestRunning:
    @pytest.fixture(autouse=True)
    def tracking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")

    def test_a_failing_seed_does_not_stop_the_others(self, repository: Path) -> None:
        failed = other_studies.run_all(toy(0, 1, 2), Options(workers=2, timeout=9))
        assert list(failed) == [1]
        for seed in (0, 1, 2):
            said = (repository / f"workspaces/toy-seed{seed}/ran.log").read_text()
            assert "'run', '--workers=2', '--timeout=9'" in said
            assert "sqlite:///mine.db" in said

    def test_a_workspace_that_cannot_be_made_is_a_failed_seed(self, repository: Path) -> None:
        (repository / "workspaces/toy-seed0").mkdir(parents=True)
        failed = other_studies.run_all(toy(0, 2), Options())
        assert list(failed) == [0]
        assert "is no worktree" in failed[0]

    def test_two_studies_do_not_share_a_workspace(self, repository: Path) -> None:
        with workspaces.held(repository / "workspaces/toy-seed0"):
            failed = other_studies.run_all(toy(0), Options())
        assert "already" in failed[0]
        assert not other_studies.run_all(toy(0), Options())

    def test_who_is_terminated_takes_the_study_along(self, repository: Path) -> None:
        script = (
            "import os, sys; from pathlib import Path\n"
            "from flows import options, other_studies; from tasks import study_file\n"
            "study = study_file.StudyFile(Path('studies/toy.yaml'), {'study': {'name': 'toy'}, 'seed': 9}, (9,))\n"
            "os.chdir(sys.argv[1])\n"
            "other_studies.run_all(study, options.Options())"
        )
        command = [sys.executable, "-c", script, str(repository)]
        process = subprocess.Popen(command, cwd=ROOT, env={**ENVIRONMENT, "MLFLOW_TRACKING_URI": "sqlite:///mine.db"})
        pid = repository / "workspaces/toy-seed9/pid"
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 128 + signal.SIGTERM
        assert not Path("/proc", pid.read_text()).exists()


class TestCarry:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> tuple[Path, Path]:
        source, target = tmp_path / "source", tmp_path / "target"
        (source / "deep").mkdir(parents=True)
        (source / "a.csv").write_text("a\n")
        (source / "deep/b.csv").write_text("b\n")
        return source, target

    @staticmethod
    def content(folder: Path) -> dict[str, str]:
        return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}

    def test_the_same_files_as_hard_links(self, folders: tuple[Path, Path]) -> None:
        carry(*folders)
        assert self.content(folders[1]) == {"a.csv": "a\n", "deep/b.csv": "b\n"}
        assert (folders[1] / "deep/b.csv").samefile(folders[0] / "deep/b.csv")

    def test_what_the_source_lost_or_changed(self, folders: tuple[Path, Path]) -> None:
        source, target = folders
        carry(source, target)
        shutil.rmtree(source / "deep")
        (source / "deep").write_text("a file now\n")
        (source / "a.csv").unlink()
        (source / "a.csv").mkdir()
        (source / "a.csv/c").write_text("c\n")
        carry(source, target)
        assert self.content(target) == {"deep": "a file now\n", "a.csv/c": "c\n"}
        shutil.rmtree(source)
        carry(source, target)
        assert not target.exists()

    def test_copies_where_links_are_refused(self, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError("another file system")

        monkeypatch.setattr(workspaces.os, "link", refuse)
        source, target = folders
        carry(source, target)
        assert self.content(target) == self.content(source)
        before = (target / "a.csv").stat()
        carry(source, target)
        assert (target / "a.csv").stat().st_ino == before.st_ino
        (source / "a.csv").write_text("longer\n")
        carry(source, target)
        assert self.content(target) == self.content(source)

    def test_links_to_folders_are_carried_and_never_cleared(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        source, target = folders
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "c.csv").write_text("c\n")
        (source / "linked").symlink_to(elsewhere)
        carry(source, target)
        assert self.content(target)["linked/c.csv"] == "c\n"
        (target / "stray").symlink_to(elsewhere)
        carry(source, target)
        assert not (target / "stray").is_symlink()
        assert (elsewhere / "c.csv").exists()
        shutil.rmtree(target)
        target.symlink_to(elsewhere)
        carry(source, target)
        assert self.content(elsewhere) == {"c.csv": "c\n"}
        assert self.content(target).keys() == {"a.csv", "deep/b.csv", "linked/c.csv"}


def made_up(metric: MetricName = "accuracy", seeds: int = 2) -> pd.DataFrame:
    """Two candidates at each of two keeps; `b` is better at 0.5 and `a` at 0.25."""
    recovered = {("a", "0.25"): 0.7, ("b", "0.25"): 0.6, ("a", "0.5"): 0.8, ("b", "0.5"): 0.84}
    return pd.DataFrame(
        {
            "seed": seed,
            "recipe": recipe,
            "keep": keep,
            "metric": metric,
            "dense": 0.8 + 0.1 * seed,
            "factorized": None if recipe == "a" else 0.5,
            "recovered": value + 0.02 * seed,
            "target_parameters": 500,
            "model_parameters": 1_500_000,
            "macs_per_token": 3_000,
            "speedup": 1.5 + seed,
            "search_steps": 10,
            "average_rank": 380.0 if recipe == "a" else None,
            "test_rows": 1000,
            "retained": METRICS[metric].retained(value + 0.02 * seed, 0.8 + 0.1 * seed),
            "target_share": 0.5,
            "model_share": 0.6,
            "macs_share": 0.75,
        }
        for seed in range(seeds)
        for (recipe, keep), value in recovered.items()
    )


def finished(root: Path, rows: pd.DataFrame) -> None:
    """Fill `root` with what `collect` reads of a study that found `rows`."""
    relative = ["seed", "test_rows", "retained", *(f"{a}_share" for a in ("target", "model", "macs"))]
    for folder in ("reports", "data/importance"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    rows.drop(columns=relative).to_csv(root / summary.COMPARISON, index=False)
    dense: dict[str, Any] = {"score": {"metric": 0.8, "metrics": {}, "loss": 1.0, "rows": 20}}
    dense["size"] = {"model_parameters": 3_000_000, "macs_per_token": 6_000, "bytes": 1}
    dense["zero_shot"] = {}
    (root / summary.DENSE_METRICS).write_text(str(dense).replace("'", '"'))
    (root / summary.TARGETS).write_text('{"targets": [], "excluded": {}}')


def page_of(rows: pd.DataFrame, params: dict[str, Any], command: str = "") -> str:
    """The page of a study without tasks that found `rows`."""
    study = StudyFile(Path("studies/two.yaml"), params, (0, 1))
    return summary.page([study], {None: rows}, "two", command)[1]


class TestSummary:
    def test_mean_and_sample_standard_deviation(self) -> None:
        heads, lines = summary.cells(made_up())
        row = dict(zip(heads, lines[0], strict=True))
        assert row["dense, %"] == "85.0 ± 7.1"  # of 80 and 90: √(2 · 5²)
        assert row["recovered, %"] == "85.0 ± 1.4"
        assert row["retained, %"] == "100.3 ± 6.7"  # of 105 and 95.6
        assert row["factorized, %"] == "50.0 ± 0.0"
        plain = {head: cell.replace("\N{NO-BREAK SPACE}", " ") for head, cell in row.items()}
        assert plain["targets"] == "50.0 %"
        assert plain["model parameters"] == "1.50 M (60.0 %)"
        assert plain["MACs per token"] == "3.00 k (75.0 %)"
        assert plain["speedup"] == "2.00 ×"
        assert plain["search steps"] == "10"
        assert plain["rank after pruning"] == "–"  # of a candidate that was not shaped

    def test_larger_keeps_first_then_what_recovers_best(self) -> None:
        _, lines = summary.cells(made_up())
        assert [line[:2] for line in lines] == [["b", "0.5"], ["a", "0.5"], ["a", "0.25"], ["b", "0.25"]]

    def test_what_was_not_measured_is_no_number(self) -> None:
        heads, lines = summary.cells(made_up())
        assert dict(zip(heads, lines[1], strict=True))["factorized, %"] == "–"

    def test_zero_shot_tasks_have_a_table_with_the_dense_model(self) -> None:
        rows = made_up(seeds=1).assign(**{"zero_shot.piqa.acc": 0.6, "dense.zero_shot.piqa.acc": 0.75})
        heads, lines = summary.zero_shot(rows)
        assert heads == ["recipe", "keep", "piqa acc"]
        assert lines[0] == ["dense", "–", "75.0"]
        assert {line[2] for line in lines[1:]} == {"60.0"}
        assert len(lines) == 1 + len(rows)

    def test_one_seed_has_no_spread(self) -> None:
        heads, lines = summary.cells(made_up(seeds=1))
        assert dict(zip(heads, lines[0], strict=True))["recovered, %"] == "84.0"
        assert "±" not in summary.to_text(*summary.cells(made_up(seeds=1)))

    def test_a_correlation_is_no_percentage(self) -> None:
        heads, lines = summary.cells(made_up("matthews"))
        assert dict(zip(heads, lines[0], strict=True))["recovered"] == "0.850 ± 0.014"

    def test_a_perplexity_is_better_the_lower_it_is(self) -> None:
        rows = made_up("perplexity")
        heads, lines = summary.cells(rows)
        assert [line[:2] for line in lines] == [["a", "0.5"], ["b", "0.5"], ["b", "0.25"], ["a", "0.25"]]
        assert dict(zip(heads, lines[1], strict=True))["retained, %"] == "99.9 ± 6.7"  # of 80 ÷ 84 and 90 ÷ 86
        data = {"task": "language_modeling", "metric": "perplexity"}
        text = page_of(rows, tiny_params(data=data))
        assert "- Metric: perplexity (lower is better) on 1,000 test rows; retained is dense ÷ recovered.\n" in text
        assert "retained is recovered ÷ dense" in page_of(made_up(), tiny_params())

    def test_a_perplexity_has_the_digits_that_its_size_asks_for(self) -> None:
        rows = made_up("perplexity")
        rows["dense"], rows["recovered"], rows["factorized"] = 20 + rows.seed, 1000.0 + rows.seed, 1e5 * (1 + rows.seed)
        heads, lines = summary.cells(rows)
        row = dict(zip(heads, lines[0], strict=True))
        assert (row["dense"], row["recovered"]) == ("20.50 ± 0.71", "1,000 ± 1")  # √½
        assert row["factorized"] == "1.5e5 ± 7.1e4"

    def test_what_is_retained_is_read_in_the_metric_s_direction(self, tmp_path: Path) -> None:
        finished(tmp_path, made_up("perplexity", seeds=1))
        rows = summary.collect({0: tmp_path})
        assert rows.retained.tolist() == pytest.approx([0.8 / value for value in (0.7, 0.6, 0.8, 0.84)])
        finished(tmp_path, made_up("rouge1", seeds=1))
        rows = summary.collect({0: tmp_path})
        assert rows.retained.tolist() == pytest.approx([value / 0.8 for value in (0.7, 0.6, 0.8, 0.84)])

    def test_the_page_says_how_it_was_made_and_is_the_same_anywhere(self, tmp_path: Path) -> None:
        command = "python -m flows study studies/two.yaml"
        text = page_of(made_up(), tiny_params(), command)
        assert text == page_of(made_up(), tiny_params(), command)
        for part in (
            command,
            "Seeds: 0, 1;",
            "1,000 test rows",
            REVIEWS,
            "models/base/tiny",
            "core",
            "[two.csv](two.csv)",
        ):
            assert part in text
        assert str(Path.cwd()) not in text
        summary.write(tmp_path / "new/two.md", made_up(), text)
        assert (tmp_path / "new/two.md").read_text() == text
        assert len((tmp_path / "new/two.csv").read_text().splitlines()) == 9

    def test_a_recipe_may_be_called_none(self, tmp_path: Path) -> None:
        """Words that pandas would read as missing values, and keeps as they are written."""
        tables = made_up(seeds=1)
        tables["recipe"] = ["none", "NA", "null", "nan"]
        tables["keep"] = ["0.50", "0.5", "1", "1.0"]
        finished(tmp_path, tables)
        rows = summary.collect({0: tmp_path, 5: tmp_path})
        assert list(rows.recipe) == ["none", "NA", "null", "nan"] * 2
        assert list(rows.keep) == ["0.50", "0.5", "1", "1.0"] * 2
        assert list(rows.seed) == [0] * 4 + [5] * 4
        assert set(rows.model_share) == {0.5}


OF_TASKS: published.TaskMetrics = {"one": "accuracy", "two": "matthews"}


class TestSeveralTasks:
    """One table of all tasks, and a page."""

    @staticmethod
    def rows() -> pd.DataFrame:
        """`two` is 10 points worse than `one`, everywhere."""
        two = made_up("matthews")
        two[["dense", "recovered"]] -= 0.1
        return summary.joined({"one": made_up(), "two": two})

    def test_points_and_their_mean_with_the_dense_model_first(self) -> None:
        heads, lines = summary.combined(self.rows(), OF_TASKS)
        assert heads == ["recipe", "keep", "one, accuracy", "two, Matthews correlation", "mean"]
        assert lines[0] == ["dense", "–", "85.0 ± 7.1", "75.0 ± 7.1", "80.0 ± 7.1"]
        assert lines[1] == ["b", "0.5", "85.0 ± 1.4", "75.0 ± 1.4", "80.0 ± 1.4"]
        assert [line[:2] for line in lines[2:]] == [["a", "0.5"], ["a", "0.25"], ["b", "0.25"]]

    def test_the_mean_is_over_the_seeds_that_all_tasks_have(self) -> None:
        rows = self.rows()
        _, lines = summary.combined(rows[(rows.task == "one") | (rows.seed == 1)], OF_TASKS)
        assert lines[1] == ["b", "0.5", "85.0 ± 1.4", "76.0", "81.0"]

    def test_a_task_that_failed_is_a_dash_and_so_is_the_mean(self) -> None:
        _, lines = summary.combined(self.rows(), {**OF_TASKS, "three": "f1"})
        assert lines[1] == ["b", "0.5", "85.0 ± 1.4", "75.0 ± 1.4", "–", "–"]

    def test_a_perplexity_is_printed_as_it_is_and_has_no_mean(self) -> None:
        rows = summary.joined({"one": made_up(), "text": made_up("perplexity")})
        heads, lines = summary.combined(rows, {"one": "accuracy", "text": "perplexity"})
        assert heads[2:] == ["one, accuracy", "text, perplexity"]
        assert lines[0][2:] == ["85.0 ± 7.1", "0.850 ± 0.071"]

    def test_the_page_has_all_tables_and_what_is_published(self, tmp_path: Path) -> None:
        cited = (Published(**{**ROW, "scores": {"one": 80.0}}),)
        studies = [
            StudyFile(Path("studies/two.yaml"), tiny_params(data={"metric": metric}), (0, 1), str(task), cited)
            for task, metric in OF_TASKS.items()
        ]
        rows, text = summary.page(studies, {"one": made_up(), "two": made_up("matthews")}, "two", "made by")
        heads = [line for line in text.splitlines() if line.startswith("#")]
        assert heads == ["# two", "## Published", "## one", "## two"]
        assert "| ARS | 0.5 | 80 | – | 80.00 of 1 | Doe 2024, table 1 | 1 |" in re.sub(" +", " ", text)
        assert "\n1. of 3 seeds\n" in text
        assert list(rows.columns[:3]) == ["task", "seed", "recipe"]
        assert list(rows.task) == ["one"] * 8 + ["two"] * 8


class TestCommand:
    @pytest.fixture(autouse=True)
    def stubbed(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the repository, where seed 1 of two fails."""
        monkeypatch.chdir(repository)
        monkeypatch.setattr(study_file, "load", lambda *_: (toy(0, 1),))
        monkeypatch.setattr(other_studies, "run", lambda _study, seed, *_: seed != 1)
        monkeypatch.setattr(summary, "collect", lambda folders: made_up(seeds=len(folders)))

    def test_a_failed_seed_is_named_and_no_table_is_written(self) -> None:
        done = CliRunner().invoke(app, ["study", "studies/toy.yaml", "--table", "docs/toy.md"])
        assert done.exit_code == 1
        assert "1 of 2 seeds failed" in done.output
        assert "seed 1: " in done.output
        assert "84.0" in done.output  # of the seed that finished
        assert not Path("docs/toy.md").exists()

    def test_edited_code_stops_it_before_anything_runs(self) -> None:
        Path("eckart/svd.py").write_text("edited\n")
        done = CliRunner().invoke(app, ["study", "studies/toy.yaml"])
        assert done.exit_code == 1
        assert "eckart/svd.py" in done.output
        assert "seed 0" not in done.output

    def test_a_task_that_fails_does_not_stop_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        params = {"study": {"name": "toy"}, "data": {"metric": "accuracy"}}
        studies = [StudyFile(Path("studies/toy.yaml"), params, (0,), task) for task in ("one", "two", "three")]
        monkeypatch.setattr(study_file, "load", lambda *_: tuple(studies))
        monkeypatch.setattr(other_studies, "run", lambda study, *_: study.task != "two")
        done = CliRunner().invoke(app, ["study", "studies/toy.yaml", "--table", "docs/toy.md"])
        assert done.exit_code == 1
        assert "1 of 3 runs failed" in done.output
        assert "task two, seed 0: " in done.output
        assert re.search(r"dense +– +80.0 +– +80.0 +–", done.output)
        assert not Path("docs/toy.md").exists()

    def test_a_table_is_markdown(self) -> None:
        assert "ends with .md" in CliRunner().invoke(app, ["study", "studies/toy.yaml", "--table", "toy.csv"]).output


STUDY = """\
# One recipe, two seeds.
seeds: [0, 1]
study: {name: two, recipes: [svd]}
teacher: {epochs: 3, learning_rate: 7.0e-3}
"""
TABLE = "docs/results/two.md"


def study_repository(root: Path) -> Path:
    """A clone of the code with tiny parameters and a study, committed; its svd.py says where it is."""
    for name in ("eckart", "tasks", "flows"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    with (root / "eckart/svd.py").open("a") as code:
        code.write("\nprint('svd of', __file__, flush=True)\n")
    tiny_workspace(root)
    (root / "studies").mkdir()
    (root / "studies/two.yaml").write_text(STUDY)
    call(root, "git", "init", "-q")
    call(root, "dvc", "init", "-q")
    commit(root)
    return root


def counts(said: str) -> list[dict[str, int]]:
    """How many stages were executed, restored and cached, for each run that `said` tells of."""
    lines = re.findall(r"^\d+ stages in \d+ s: (.*)$", said, re.MULTILINE)
    return [{word: int(number) for number, word in re.findall(r"(\d+) (\w+)", line)} for line in lines]


def test_two_seeds_end_to_end(tmp_path: Path) -> None:
    """The real command, twice: what seeds share runs once, the second time nothing runs, and the table has a spread.

    Each workspace runs its own code, though the package that is installed is another one.
    """
    root = study_repository(tmp_path / "main")
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}

    def study(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows", "study", *options],
            cwd=root,
            env={**environment, "PREFECT_HOME": str(tmp_path / "prefect")},
            capture_output=True,
            text=True,
            timeout=1800,
        )

    first = study("studies/two.yaml", "--table", TABLE)
    said = first.stdout + first.stderr
    assert first.returncode == 0, said
    stages = sum(counts(said)[0].values())
    assert counts(said) == [{"executed": stages}, {"restored": 1, "executed": stages - 1}]  # extract knows no seed
    homes = [Path(path) for path in re.findall(r"search@svd-0.5' - svd of (\S+)", said)]
    assert homes == [root / f"workspaces/two-seed{seed}/eckart/svd.py" for seed in (0, 1)]

    rows = pd.read_csv((root / TABLE).with_suffix(".csv"))
    assert list(rows.seed) == [0, 1]
    mean, spread = statistics.mean(100 * rows.recovered), statistics.stdev(100 * rows.recovered)
    table = (root / TABLE).read_text()
    assert re.search(r"^\| svd +\| +0\.5 \| ", table, re.MULTILINE)
    assert f" {mean:.1f} ± {spread:.1f} " in table
    assert f" {statistics.mean(rows.speedup):.2f}\N{NO-BREAK SPACE}× " in table
    assert f"`python -m flows study studies/two.yaml --table {TABLE}`" in table
    assert str(tmp_path) not in table

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("two")
    assert experiment
    assert experiment.artifact_location == (root / "mlruns").as_uri()
    assert len(client.search_runs([experiment.experiment_id])) == 4  # a study and a candidate for each seed
    assert not list(root.glob("workspaces/*/ml*"))

    second = study("--params", "studies/two.yaml", "--seed", "1")
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"\n{stages} stages in " in second.stdout
    assert "Nothing was recomputed" in second.stdout
    assert f" {100 * rows.recovered[1]:.1f} " in second.stdout
    assert (root / TABLE).read_text() == table
