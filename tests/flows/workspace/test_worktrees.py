"""Other studies: the workspaces made of their files, and two seeds of a tiny one, all real."""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows import multi_seed
from flows.cli import app
from flows.engine.run_options import Options
from flows.multi_seed import check_committed, folder_of, prepare
from flows.tracking import database
from flows.workspace.worktrees import WorkspaceError, carry, sources
from tasks.figures import FIGURES
from tasks.multi_seed import seeds_table as summary
from tasks.multi_seed import study_file
from tasks.multi_seed.study_file import StudyFile
from tasks.multi_seed.trials import Trials
from tasks.report.figures.plot import Line, Plot
from tests.flows import forked
from tests.flows.forked import Command, gone
from tests.flows.servers import until
from tests.flows.toy import Flows, Study, call, commit
from tests.tasks.multi_seed.test_seeds_table import made_up
from tests.tasks.multi_seed.test_trials import scored

ROOT = Path(__file__).parents[3]


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


MAIN = """\
import os, pathlib, re, sys, time
seed = int(re.search(r"^seed: (\\d+)", pathlib.Path("params.yaml").read_text(), re.M)[1])
print(sys.argv, *map(os.environ.get, ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")), file=open("ran.log", "a"))
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(600 if seed == 9 else 0)
sys.exit(seed == 1)
"""
"""In place of flows/__main__.py: fails with seed 1, and takes long with seed 9."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git and DVC repository whose study only notes that it ran."""
    root = tmp_path_factory.mktemp("made") / "main"
    for folder in ("eckart", "tasks", "flows", "studies", "docs", "data/raw", "models/base"):
        (root / folder).mkdir(parents=True)
        (root / folder / ".gitkeep").touch()
    (root / "flows/__init__.py").touch()  # else the installed package is taken
    (root / "flows/__main__.py").write_text(MAIN)
    (root / "eckart/svd.py").write_text("a = 1\n")
    (root / "params.yaml").write_text("# comment\nstudy: {name: toy}\nseed: 0\n")
    (root / "studies/toy.yaml").write_text("seeds: [0]\n")
    for name in (".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, root / name)
    call(root, "git", "init", "-q", "-b", "main")
    call(root, "dvc", "init", "-q")
    commit(root)
    return root


@pytest.fixture
def repository(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; the working directory."""
    root = Path(shutil.copytree(made, tmp_path / "main", symlinks=True))
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

    def test_staged_deleted_and_renamed_files_are_all_named(self, repository: Path) -> None:
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
        with pytest.raises(WorkspaceError, match=r"\bparams\.yaml\b"):
            check_committed(toy())


class TestWorkspaces:
    def test_a_worktree_at_head_with_the_shared_cache(self, repository: Path) -> None:
        (repository / "data/raw/own.csv").write_text("a,b\n")
        folder = prepare(toy(), 3, sources())
        assert folder == Path("workspaces/toy-seed3")
        assert call(folder, "git", "rev-parse", "HEAD") == call(repository, "git", "rev-parse", "HEAD")
        assert call(folder, "git", "branch", "--show-current") == ""
        assert call(folder, "dvc", "cache", "dir") == call(repository, "dvc", "cache", "dir")
        assert (folder / "params.yaml").read_text().startswith("# Made from params.yaml and studies/toy.yaml")
        assert read(folder / "params.yaml") == {"study": {"name": "toy"}, "seed": 3}
        assert (folder / "data/raw/own.csv").samefile(repository / "data/raw/own.csv")
        assert call(repository, "git", "status", "--porcelain") == ""
        assert call(folder, "git", "status", "--porcelain") == " M params.yaml\n"

    def test_a_path_may_have_umlauts(self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """DVC writes ASCII into its settings."""
        root = Path(shutil.copytree(made, tmp_path / "Jörgs Modelle", symlinks=True))
        monkeypatch.chdir(root)
        folder = prepare(toy(), 3, sources())
        assert call(folder, "dvc", "cache", "dir") == call(root, "dvc", "cache", "dir")

    def test_a_workspace_is_reused_at_the_new_commit_and_keeps_its_outputs(self, repository: Path) -> None:
        folder = prepare(toy(), 0, sources())
        (folder / "reports").mkdir()
        for name in ("reports/comparison.csv", "dvc.lock"):
            (folder / name).write_text("made\n")
        (folder / "eckart/svd.py").write_text("tampered = 1\n")
        for name in ("eckart/svd.py", "dvc.lock"):
            (repository / name).write_text("committed = 2\n")
        commit(repository)
        prepare(toy(), 0, sources())
        assert (folder / "eckart/svd.py").read_text() == "committed = 2\n"
        assert {(folder / name).read_text() for name in ("reports/comparison.csv", "dvc.lock")} == {"made\n"}
        assert read(folder / "params.yaml")["seed"] == 0

    def test_all_seeds_have_the_commit_and_the_files_of_the_first(self, repository: Path) -> None:
        (repository / "data/raw/own.csv").write_text("a,b\n")
        start = sources()
        first = prepare(toy(), 0, start)
        (repository / "eckart/svd.py").write_text("committed = 2\n")
        commit(repository)
        assert call(prepare(toy(), 1, start), "git", "rev-parse", "HEAD") == call(first, "git", "rev-parse", "HEAD")
        (repository / "data/raw/own.csv").write_text("a,b,c\n")
        with pytest.raises(WorkspaceError, match=r"data/raw/own\.csv"):
            prepare(toy(), 2, start)
        (repository / "data/raw/own.csv").unlink()
        with pytest.raises(WorkspaceError, match=r"data/raw/own\.csv"):
            prepare(toy(), 2, start)

    @pytest.mark.parametrize("linked", [False, True])
    def test_its_mlflow_is_that_of_the_main_workspace(
        self, repository: Path, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
            monkeypatch.delenv(name, raising=False)
        if linked:
            (tmp_path / "disk").mkdir()
            (repository / "workspaces").symlink_to(tmp_path / "disk")
        folder = prepare(toy(), 0, sources())
        own = repository.parent / "workspaces/own"  # a worktree of the user's, whose parent looks like a workspace
        call(repository, "git", "worktree", "add", "-q", "--detach", str(own))
        for place, main in ((folder, repository), (own, own), (repository, repository)):
            monkeypatch.chdir(place)
            assert database.is_local()
            assert database.address() == f"sqlite:///{main / 'mlflow.db'}"
            monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
            assert database.address() == f"sqlite:///{main / 'mlflow.db'}"
            monkeypatch.delenv("MLFLOW_TRACKING_URI")
            monkeypatch.chdir(repository)

    def test_a_folder_that_was_deleted_is_made_again(self, repository: Path) -> None:
        shutil.rmtree(prepare(toy(), 0, sources()))
        assert (prepare(toy(), 0, sources()) / "eckart/svd.py").exists()

    @pytest.mark.parametrize("own", [False, True], ids=["a folder", "a repository"])
    def test_a_folder_that_is_something_else_is_refused(self, repository: Path, own: bool) -> None:
        """Git would look for a repository above it, find the main workspace and change that."""
        folder = repository / "workspaces/toy-seed0"
        folder.mkdir(parents=True)
        if own:
            call(folder, "git", "init", "-q")
        (repository / "docs/draft.md").write_text("uncommitted\n")
        (repository / "params.yaml").write_text("seed: 4\n")
        with pytest.raises(WorkspaceError, match="`git worktree repair workspaces/toy-seed0`"):
            prepare(toy(), 0, sources())
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
                folder = prepare(toy(), 0, sources())
        assert not (folder / "hooked").exists()
        assert call(repository, "git", "branch", "--show-current") == "main\n"


def run_all(study: StudyFile, options: Options) -> tuple[StudyFile, dict[int, str]]:
    with ExitStack() as held:
        return multi_seed.run_all(study, options, sources(), multi_seed.lock_all([study], held))


def run_seed(root: str, seed: int) -> None:
    os.chdir(root)
    os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///mine.db"
    run_all(toy(seed), Options())


class TestRunning:
    @pytest.fixture(autouse=True)
    def tracking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", "sqlite:///theirs.db")

    def test_a_commit_during_the_study_reaches_no_seed(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = call(repository, "git", "rev-parse", "HEAD")

        def collect(folders: Mapping[int, Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
            (repository / "eckart/svd.py").write_text(f"{len(list(Path('workspaces').iterdir()))}\n")
            commit(repository)
            return made_up(seeds=1), pd.DataFrame()

        monkeypatch.setattr(summary, "collect", collect)
        studies = [replace(toy(0), task=task) for task in ("one", "two")]
        _, _, _, failed = multi_seed.run_tasks(studies, Options(), ExitStack())
        assert not failed
        folders = [folder_of(study, 0) for study in studies]
        assert [call(folder, "git", "rev-parse", "HEAD") for folder in folders] == 2 * [before]

    def test_a_failing_seed_does_not_stop_the_others(self, repository: Path) -> None:
        _, failed = run_all(toy(0, 1, 2), Options(workers=2, timeout=9))
        assert list(failed) == [1]
        for seed in (0, 1, 2):
            said = (repository / f"workspaces/toy-seed{seed}/ran.log").read_text()
            assert "'run', '--workers=2', '--timeout=9'" in said
            assert said.endswith(
                f" sqlite:///{repository}/mine.db sqlite:///{repository}/theirs.db\n"
            )  # not the seed's own

    def test_two_studies_do_not_share_a_workspace(self, repository: Path) -> None:
        """Not even before the first is at a seed, nor after it, when its results are still to be read."""
        with ExitStack() as held:
            multi_seed.lock_all([toy(0, 1)], held)
            with pytest.raises(WorkspaceError, match="toy-seed1"):
                multi_seed.run_tasks([toy(1, 2)], Options(), ExitStack())
        assert run_all(toy(0), Options()) == (toy(0), {})

    def test_trials_run_first_and_their_best_is_what_runs(self, repository: Path) -> None:
        asked = Trials(seed=0, keep=0.5, recipes={"svd": ({}, {"rate": 2}, {"rate": 3})})
        content = {**toy().params, "data": {"metric": "accuracy"}, "recipes": {"svd": {"rate": 1}}}
        study = replace(toy(0, 2), params=content, trials=asked)
        folder = prepare(study.of_trials(asked), 0, sources())
        for name, validation in {"svd": 0.5, "svd_trial2": 0.7, "svd_trial3": 0.6}.items():
            scored(folder, f"{name}-0.5", validation)
        ran, failed = run_all(study, Options())
        assert not failed
        assert read(folder / "params.yaml")["study"]["recipes"] == ["svd", "svd_trial2", "svd_trial3"]
        assert [variant.chosen for variant in ran.tried] == [False, True, False]
        for seed in (0, 2):
            assert read(folder_of(study, seed) / "params.yaml")["recipes"] == {"svd": {"rate": 2}}

    def test_without_its_trials_no_seed_runs(self, repository: Path) -> None:
        asked = Trials(seed=1, keep=0.5, recipes={"svd": ({},)})
        study = replace(toy(0, 2), params={**toy().params, "recipes": {"svd": {}}}, trials=asked)
        _, failed = run_all(study, Options())
        assert set(failed) == {0, 2}
        assert not folder_of(study, 0).exists()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_the_study_ends_with_the_command_that_started_it(self, repository: Path, number: signal.Signals) -> None:
        process = forked.start(run_seed, str(repository), 9)
        assert process.pid
        pid = repository / "workspaces/toy-seed9/pid"
        until(lambda: (pid.exists() and pid.read_text()) or process.exitcode is not None)
        os.kill(process.pid, number)
        process.join(600)
        assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
        assert gone([int(pid.read_text())])


def content(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_carried_folder_has_the_files_of_its_source_as_hard_links_and_no_others(tmp_path: Path) -> None:
    """A link in place of the target, or in it, is replaced, and what it leads to stays."""
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    for file in (source / "a", source / "deep/b", elsewhere / "c"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    (source / "linked").symlink_to(elsewhere)
    carry(source, target)
    assert content(target) == {"a": "a", "deep/b": "b", "linked/c": "c"}
    assert (target / "deep/b").samefile(source / "deep/b")
    shutil.rmtree(source / "deep")
    (source / "deep").write_text("a file now")
    (target / "stray").symlink_to(elsewhere)
    carry(source, target)
    assert content(target) == {"a": "a", "deep": "a file now", "linked/c": "c"}
    shutil.rmtree(target)
    target.symlink_to(elsewhere)
    carry(source, target)
    assert content(elsewhere) == {"c": "c"}
    shutil.rmtree(source)
    carry(source, target)
    assert not target.exists()


def test_a_task_that_fails_does_not_stop_the_others(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"study": {"name": "toy"}, "data": {"metric": "accuracy"}}
    studies = [StudyFile(Path("studies/toy.yaml"), params, (0,), task) for task in ("one", "two", "three")]
    monkeypatch.setattr(study_file, "load", lambda *_: tuple(studies))
    monkeypatch.setattr(multi_seed, "run", lambda study, *_: study.task != "two")
    monkeypatch.setattr(summary, "collect", lambda folders: (made_up(seeds=len(folders)), pd.DataFrame()))
    done = CliRunner().invoke(app, ["study", "studies/toy.yaml", "--table", "docs/toy.md"])
    assert done.exit_code == 1
    assert "1 of 3" in done.output
    assert "task two, seed 0: " in done.output
    assert re.search(r"dense +– +80.0 +– +80.0 +–", done.output)
    assert not Path("docs/toy.md").exists()


def test_figures_of_a_study_are_means_and_scores_over_numbered_tasks(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"study": {"name": "toy", "figures": ["results"]}, "data": {"metric": "accuracy"}}
    studies = [StudyFile(Path("studies/toy.yaml"), params, (0, 1), f"block-{number}") for number in (1, 2, 3)]
    line = Line(x=(1.0, 2.0), y=(3.0, 4.0))
    for study in studies:
        for seed in study.seeds:
            drawn = folder_of(study, seed) / FIGURES / "results"
            drawn.mkdir(parents=True)
            plot = Plot(name="score", title="t", x="x", y="y", panels={"": {"svd": line}})
            (drawn / "score.json").write_text(plot.model_dump_json())
    monkeypatch.setattr(study_file, "load", lambda *_: tuple(studies))
    monkeypatch.setattr(multi_seed, "run", lambda *_: True)
    monkeypatch.setattr(summary, "collect", lambda folders: (made_up(seeds=len(folders)), pd.DataFrame()))
    done = CliRunner().invoke(app, ["study", "studies/toy.yaml", "--figures", "drawn"])
    assert done.exit_code == 0, done.output
    files = {str(file.relative_to("drawn").with_suffix("")) for file in Path("drawn").rglob("*.svg")}
    assert files == {"block-1/score", "block-2/score", "block-3/score", "score-over-block"}


def test_figures_that_a_study_does_not_draw_are_refused_before_it_runs(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = StudyFile(Path("studies/toy.yaml"), {"study": {"name": "toy", "figures": {}}}, (0,))
    monkeypatch.setattr(study_file, "load", lambda *_: (study,))
    done = CliRunner().invoke(app, ["study", "studies/toy.yaml", "--figures", "drawn"])
    assert done.exit_code == 1
    assert "figures: {results, weights}" in done.output
    assert not Path("workspaces").exists()


STUDY = """\
# One recipe, two seeds.
seeds: [0, 1]
study: {name: two, recipes: [svd]}
"""
TABLE = "docs/results/two.md"


def study_repository(root: Path) -> Path:
    """Add another study to a finished one, and commit it; weighted_svd.py prints where it is."""
    with (root / "eckart/factorization/weighted_svd.py").open("a") as code:
        code.write("\nprint('svd of', __file__, flush=True)\n")
    (root / "studies").mkdir()
    (root / "studies/two.yaml").write_text(STUDY)
    commit(root)
    return root


def counts(said: str) -> list[dict[str, int]]:
    """Return the numbers of executed, restored and cached stages of each run in the output `said`."""
    lines = re.findall(r"^\d+ stages in \d+ s: (.*)$", said, re.MULTILINE)
    return [{word: int(number) for number, word in re.findall(r"(\d+) (\w+)", line)} for line in lines]


class Forked:
    """Stands in for subprocess.Popen in multi_seed, without the seconds of imports."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], **_: object) -> None:
        self._command = Command(cwd, env, *command[3:])

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._command.kill()

    def wait(self) -> int | None:
        code, output = self._command.end()
        print(output)
        return code


def test_two_seeds_end_to_end(study: Study, flows: Flows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What seeds share runs once, and the table has a spread.

    Each workspace runs its own code, though the package that is installed is another one.
    """
    root = study_repository(study.copied(tmp_path / "main"))
    with monkeypatch.context() as patch:
        patch.setattr(multi_seed, "subprocess", SimpleNamespace(Popen=Forked))
        done = flows(root, "study", "studies/two.yaml", "--table", TABLE)
    said = done.output
    assert done.exit_code == 0, said
    stages = sum(counts(said)[0].values())
    # What the main workspace has made is there for seed 0, but for what runs weighted_svd.py, and for export_dense and
    # benchmark, as this study exports nothing and has other candidates; extract and check know no seed.
    assert counts(said) == [
        {"cached": 1, "restored": stages - 6, "executed": 5},
        {"cached": 1, "restored": 2, "executed": stages - 3},
    ]
    assert "Next: " not in said  # which would be about this folder's own candidates
    assert "workspaces/two-seed1/models/finetuned/" in said
    homes = [Path(path) for path in re.findall(r"search@svd-0.5' - svd of (\S+)", said)]
    assert homes == [root / f"workspaces/two-seed{seed}/eckart/factorization/weighted_svd.py" for seed in (0, 1)]

    rows = pd.read_csv((root / TABLE).with_suffix(".csv"))
    rows = rows[rows.recipe == "svd"].reset_index()  # there is the control, too
    assert list(rows.seed) == [0, 1]
    mean, spread = statistics.mean(100 * rows.recovered), statistics.stdev(100 * rows.recovered)
    table = (root / TABLE).read_text()
    assert re.search(r"^\| svd +\| +0\.5 \| ", table, re.MULTILINE)
    assert f" {mean:.1f} ± {spread:.1f} " in table
    assert f" {statistics.mean(rows.speedup):.2f}\N{NO-BREAK SPACE}× " in table
    assert f"`eckart study studies/two.yaml --table {TABLE}`" in table
    assert str(tmp_path) not in table

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("two")
    assert experiment
    assert experiment.artifact_location == (root / "mlruns").as_uri()
    assert len(client.search_runs([experiment.experiment_id])) == 4  # a study and a candidate for each seed
    assert not list(root.glob("workspaces/*/ml*"))
    monkeypatch.chdir(root / "workspaces/two-seed1")  # where `eckart promote` finds the run of the candidate, too
    assert database.address() == database.registry_address() == f"sqlite:///{root / 'mlflow.db'}"
    assert database.all_is_local()
