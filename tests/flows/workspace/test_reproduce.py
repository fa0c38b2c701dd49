"""Clones share results through a remote, and stages of any revision are reproduced."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.engine import cached_objects, dvc_transport, stage_processes
from flows.engine import stages as engine
from flows.workspace import reproduce as module
from flows.workspace import worktrees
from flows.workspace.reproduce import CannotReproduce, Reproduction, record
from tasks.artifacts.task_spec import REFERENCE
from tests.flows.forked import Command, gone
from tests.flows.servers import until
from tests.flows.toy import BARE, MLFLOW, Study, call, commit, ran, spoil, stale
from tests.workspace import digests

ROOT = Path(__file__).parents[3]

PARAMS = "study: {recipes: [a, b], keeps: [0.5]}\ngain: 1\n"
PIPELINE = """\
vars: [params.yaml]
stages:
  extract:
    cmd:
      - echo extract >> ran.log
      - rm -rf data/splits && mkdir -p data/splits && tr a-z A-Z < data/raw/rows.csv > data/splits/train
    deps: [data/raw]
    outs: [data/splits]
  finetune:
    matrix: {recipe: "${study.recipes}", keep: "${study.keeps}"}
    cmd:
      - echo finetune@${item.recipe}-${item.keep} >> ran.log
      - mkdir -p models/finetuned/${item.recipe}-${item.keep}/deep reports/finetune
      - (cat data/splits/train; echo ${item.recipe}) > models/finetuned/${item.recipe}-${item.keep}/model
      - grep gain params.yaml > models/finetuned/${item.recipe}-${item.keep}/deep/config
      - echo ${item.recipe} > reports/finetune/${item.recipe}-${item.keep}.jsonl
    deps: [data/splits]
    params: [gain]
    outs:
      - models/finetuned/${item.recipe}-${item.keep}
      - reports/finetune/${item.recipe}-${item.keep}.jsonl
"""
CHECKED = f"""{PIPELINE}
  check:
    cmd: echo check >> ran.log && echo passed > data/checked
    deps: [{REFERENCE}, data/splits]
    outs: [data/checked]
""".replace("deps: [data/splits]", "deps: [data/splits, data/checked]")
MODEL = "models/finetuned/a-0.5/model"
CONFIGURATION = "models/finetuned/a-0.5/deep/config"
CURVE = "reports/finetune/a-0.5.jsonl"


def run(root: Path) -> dict[str, str]:
    """Bring every stage up to date, as the flow does, in the working directory: name → status."""
    statuses = {}
    for stage in engine.plan():
        statuses[stage.name] = engine.run(stage, lambda command: stage_processes.run(command, root, print, {})).status
    return statuses


def repository(root: Path) -> Path:
    """The repository's set-up of git and DVC, and nothing committed."""
    (root / ".dvc").mkdir(parents=True)
    for name in (".gitignore", ".dvcignore", ".dvc/.gitignore", ".dvc/config"):
        shutil.copy(ROOT / name, root / name)
    call(root, "git", "init", "-q")
    return root


def finish(root: Path, params: str, pipeline: str) -> Path:
    """Run a toy pipeline in a `repository`, with its input in DVC, and commit its results."""
    (root / "params.yaml").write_text(params)
    (root / "dvc.yaml").write_text(pipeline)
    (root / "data/raw").mkdir(parents=True)
    (root / "data/raw/rows.csv").write_text("rows\n")
    call(root, "dvc", "add", "-q", "data/raw")
    call(root, "dvc", "repro", "-q")
    ran(root)
    commit(root)
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy workspace after a run: its input in DVC, its results committed, and a remote beside it that is empty."""
    return finish(repository(tmp_path_factory.mktemp("versions") / "main"), PARAMS, PIPELINE)


@pytest.fixture
def main(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished toy workspace, as the working directory."""
    root = tmp_path / "main"
    shutil.copytree(finished, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


def clone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another clone of the working directory, entered."""
    call(Path.cwd(), "git", "clone", "-q", str(Path.cwd()), str(folder))
    monkeypatch.chdir(folder)
    return folder


def another(main: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run and push what `main` is now, and pull it into a clone, entered."""
    run(main)
    ran(main)
    dvc_transport.push()
    commit(main)
    other = clone(folder / "other", monkeypatch)
    assert dvc_transport.pull().lacking == []
    return other


def own_files(root: Path) -> dict[str, str]:
    """Return the files of a workspace except those of git, DVC, Python and other workspaces."""
    others = (".git/", ".dvc/", "workspaces/", "data/.gitignore", "models/.gitignore")
    found = digests(root).items()
    return {name: each for name, each in found if not name.startswith(others) and "__pycache__" not in name}


def forget(root: Path, parts: tuple[str, ...] = ("files", "runs")) -> None:
    """Empty the cache."""
    for part in parts:
        shutil.rmtree(root / ".dvc/cache" / part)


def reproduce(name: str = "a-0.5", revision: str = "HEAD", again: bool = False) -> Reproduction:
    return module.reproduce(record(name, revision), again)


def works_in(folder: Path, process: psutil.Process) -> bool:
    try:
        return process.environ().get("DVC_ROOT") == str(folder.resolve())
    except psutil.Error:
        return False


class TestClones:
    def test_push_and_pull_are_enough_with_and_without_the_lock_file(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dvc_transport.push()
        assert (tmp_path / "eckart-storage").is_dir()  # beside the clones, without any setting
        for name, status in (("with", "Cached"), ("without", "Restored")):
            other = clone(tmp_path / name, monkeypatch)
            if name == "without":
                (other / "dvc.lock").unlink()
            assert dvc_transport.pull().lacking == []
            assert set(run(other).values()) == {status}
            assert ran(other) == []
            assert own_files(other).keys() == own_files(main).keys()
            assert stale(other) == []
            monkeypatch.chdir(main)

    def test_results_of_earlier_parameters_travel_too(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (main / "params.yaml").write_text(PARAMS.replace("gain: 1", "gain: 2"))
        other = another(main, tmp_path, monkeypatch)
        (other / "params.yaml").write_text(PARAMS)
        pulled = dvc_transport.pull()
        assert pulled.lacking == []
        assert set(pulled.stale) == {"finetune@a-0.5", "finetune@b-0.5"}
        assert (other / CONFIGURATION).read_text() == "gain: 1\n"
        assert run(other) == {"extract": "Cached", "finetune@a-0.5": "Restored", "finetune@b-0.5": "Restored"}
        assert ran(other) == []

    def test_a_check_against_a_champion_travels_without_its_data(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (main / "dvc.yaml").write_text(CHECKED)
        (main / REFERENCE).mkdir()
        (main / REFERENCE / ".gitkeep").touch()
        (main / REFERENCE / "train").write_text("ROWS\n")
        other = another(main, tmp_path, monkeypatch)
        statuses = run(other)
        assert statuses.pop("check") == "Executed"
        assert set(statuses.values()) == {"Cached"}

    def test_pull_names_lost_objects_and_brings_the_rest(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dvc_transport.push()
        gone = cached_objects.measured(main / MODEL)[""]
        other = clone(tmp_path / "other", monkeypatch)
        cached_objects.object_path(tmp_path / "eckart-storage", gone).unlink()
        done = CliRunner().invoke(app, ["pull"])
        assert done.exit_code == 1
        assert "finetune@a-0.5" in done.output
        assert run(other) == {"extract": "Cached", "finetune@a-0.5": "Executed", "finetune@b-0.5": "Cached"}

    def test_push_asks_the_remote_about_each_file(self, main: Path, tmp_path: Path) -> None:
        """DVC takes the files of a folder for present if the remote has the folder's list, or its index names them."""
        dvc_transport.push()
        digest = cached_objects.measured(main / MODEL)[""]
        remote, here = (
            cached_objects.object_path(root, digest) for root in (tmp_path / "eckart-storage", main / ".dvc/cache")
        )
        remote.unlink()
        assert dvc_transport.push() == set()
        assert remote.read_bytes() == here.read_bytes()
        shutil.rmtree(tmp_path / "eckart-storage")
        here.unlink()
        with pytest.raises(dvc_transport.TransportFailed, match=str(Path(MODEL).parent)):
            dvc_transport.push()
        folder = next(path for path in (main / ".dvc/cache/files").rglob("*.dir") if digest in path.read_text())
        promise = tmp_path / "eckart-storage/files" / folder.relative_to(main / ".dvc/cache/files")
        assert not promise.exists()  # DVC would take it for one that the remote has all files

    def test_pull_asks_the_remote_of_an_input(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call(main, "dvc", "remote", "add", "-q", "large", str(tmp_path / "large"))
        with (main / "data/raw.dvc").open("a") as file:
            file.write("  remote: large\n")
        commit(main)
        dvc_transport.push()
        other = clone(tmp_path / "other", monkeypatch)
        assert dvc_transport.pull().lacking == []
        assert (other / "data/raw/rows.csv").read_text() == "rows\n"

    def test_pull_brings_what_was_imported_from_another_repository(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        registry = tmp_path / "elsewhere/registry"
        shutil.copytree(main, registry, symlinks=True)
        call(registry, "dvc", "push", "-q", "data/raw")  # to its own remote
        call(main, "dvc", "remove", "-q", "data/raw.dvc")
        shutil.rmtree(main / "data/raw")
        call(main, "dvc", "import", "-q", str(registry), "data/raw", "-o", "data/raw")
        commit(main)
        dvc_transport.push()
        other = clone(tmp_path / "other", monkeypatch)
        assert dvc_transport.pull().lacking == []
        assert (other / "data/raw/rows.csv").read_text() == "rows\n"

    def test_before_anyone_pushed_pull_says_what_is_missing(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clone(tmp_path / "other", monkeypatch)
        done = CliRunner().invoke(app, ["pull"])
        assert done.exit_code == 1
        assert "data/raw.dvc" in done.output
        with pytest.raises(engine.WorkspaceUnusable, match=r"data/raw.*eckart pull"):
            engine.plan()

    def test_without_a_remote_pull_takes_from_the_cache_and_push_names_what_nobody_has(self, main: Path) -> None:
        call(main, "dvc", "remote", "remove", "storage")
        shutil.rmtree(main / "data/raw")
        (main / MODEL).unlink()
        assert dvc_transport.pull() == dvc_transport.Pulled([], [])
        assert (main / "data/raw/rows.csv").read_text() == "rows\n"
        assert (main / MODEL).exists()

    def test_push_names_what_neither_the_cache_nor_the_remote_has(
        self, main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clone(tmp_path / "other", monkeypatch)
        done = CliRunner().invoke(app, ["push"])
        assert done.exit_code == 1
        assert "data/raw" in done.output
        assert "models/finetuned/a-0.5" in done.output

    def test_pull_fills_a_lost_cache_again(self, main: Path) -> None:
        """Unedited files are not taken for edited ones."""
        dvc_transport.push()
        forget(main)
        assert dvc_transport.pull() == dvc_transport.Pulled([], [])

    def test_what_is_not_to_be_pushed_is_not_missed(self, main: Path) -> None:
        file = main / "data/raw.dvc"
        file.write_text(file.read_text().replace("outs:\n- ", "outs:\n- push: false\n  "))
        assert dvc_transport.push() == set()

    def test_an_unusable_remote_is_reported_in_a_line(self, main: Path) -> None:
        call(main, "dvc", "remote", "modify", "--local", "storage", "url", "s3://nowhere")  # whose plug-in is missing
        for command in ("push", "pull"):
            done = CliRunner().invoke(app, [command])
            assert done.exit_code == 1
            assert "`dvc remote list`" in done.output


class TestInputs:
    def test_a_changed_input_is_noted_as_dvc_repro_does(self, main: Path, tmp_path: Path) -> None:
        other = tmp_path / "by-hand"
        shutil.copytree(main, other, symlinks=True)
        for root in (main, other):
            (root / "data/raw/more.csv").write_text("more\n")
        run(main)
        call(other, "dvc", "repro", "-q")
        assert stale(main) == []
        assert (main / "data/raw.dvc").read_text() == (other / "data/raw.dvc").read_text()

    def test_data_of_another_commit_are_not_taken_for_an_edit(self, main: Path) -> None:
        """As after `git pull`, which brings the new .dvc file and leaves the old data."""
        (main / "data/raw/rows.csv").write_text("newer\n")
        call(main, "dvc", "add", "-q", "data/raw")
        commit(main)
        newer = (main / "data/raw.dvc").read_text()
        call(main, "git", "checkout", "-q", "HEAD~")
        for brought in ("rows\n", "newer\n"):
            with pytest.raises(engine.WorkspaceUnusable, match="eckart pull"):
                engine.plan()
            assert stale(main) != []
            dvc_transport.pull()
            assert (main / "data/raw/rows.csv").read_text() == brought
            engine.plan()
            call(main, "git", "checkout", "-q", "-")
        assert (main / "data/raw.dvc").read_text() != newer
        call(main, "dvc", "add", "-q", "data/raw")
        engine.plan()
        assert (main / "data/raw.dvc").read_text() == newer

    def test_data_that_are_edited_back_or_that_the_cache_lacks_are_no_data_of_another_commit(self, main: Path) -> None:
        shutil.rmtree(main / ".dvc/cache/files")
        engine.plan()
        for rows in ("newer\n", "rows\n"):
            (main / "data/raw/rows.csv").write_text(rows)
            engine.plan()
            commit(main)

    def test_the_workspace_of_a_seed_gets_the_present_data_with_their_file_of_dvc(
        self, main: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last commit may name other data."""
        for number, rows in enumerate(("newer\n", "rows\n")):
            if number:
                commit(main)
            (main / "data/raw/rows.csv").write_text(rows)
            call(main, "dvc", "add", "-q", "data/raw")
        worktrees.follow(main / "workspaces/seed", worktrees.sources())
        monkeypatch.chdir(main / "workspaces/seed")
        assert Path("data/raw/rows.csv").read_text() == "rows\n"
        engine.plan()

    def test_pull_brings_the_newer_input_and_spares_an_edited_one(self, main: Path) -> None:
        raw = main / "data/raw/rows.csv"
        raw.write_text("newer\n")
        engine.plan()
        dvc_transport.push()
        newer = (main / "data/raw.dvc").read_bytes()
        call(main, "git", "checkout", "data/raw.dvc")
        assert dvc_transport.pull().lacking == []
        assert raw.read_text() == "rows\n"
        (main / "data/raw.dvc").write_bytes(newer)
        assert "data/raw.dvc" not in dvc_transport.pull().stale
        assert raw.read_text() == "newer\n"
        raw.write_text("edited\n")
        assert "data/raw.dvc" in dvc_transport.pull().stale
        assert raw.read_text() == "edited\n"

    def test_pull_leaves_a_folder_with_an_own_file_whole(self, main: Path) -> None:
        """Not a part of it in the newer state."""
        raw = main / "data/raw"
        (raw / "rows.csv").write_text("newer\n")
        (raw / "more.csv").write_text("more\n")
        engine.plan()
        dvc_transport.push()
        newer = (main / "data/raw.dvc").read_bytes()
        call(main, "git", "checkout", "data/raw.dvc")
        dvc_transport.pull()
        (main / "data/raw.dvc").write_bytes(newer)
        (raw / "note.csv").write_text("mine\n")
        before = digests(raw)
        assert "data/raw.dvc" in CliRunner().invoke(app, ["pull"]).output
        assert digests(raw) == before
        (raw / "note.csv").rename(main / "note.csv")
        assert "data/raw.dvc" not in dvc_transport.pull().stale
        assert sorted(digests(raw)) == ["more.csv", "rows.csv"]

    def test_a_note_in_git_beside_the_inputs_is_not_all_of_them(self, main: Path) -> None:
        call(main, "git", "rm", "-q", "data/raw.dvc")
        (main / "data/raw/README.md").write_text("where the rows are from\n")
        call(main, "git", "add", "--force", "data/raw/README.md")
        commit(main)
        forget(main)
        assert reproduce().same

    def test_inputs_in_git_are_those_of_the_revision(self, main: Path) -> None:
        call(main, "git", "rm", "-q", "data/raw.dvc")
        call(main, "git", "add", "--force", "data/raw/rows.csv")
        commit(main)
        (main / "data/raw/rows.csv").write_text("newer\n")
        forget(main)
        assert reproduce().same


class TestReproduce:
    @pytest.fixture(autouse=True)
    def untouched(self, main: Path) -> Iterator[None]:
        """Whatever happens, the user's own workspace stays as it is."""
        before = own_files(main), call(main, "git", "log", "--format=%H", "-1")
        yield
        assert (own_files(main), call(main, "git", "log", "--format=%H", "-1")) == before

    def test_from_the_cache(self, main: Path) -> None:
        found = reproduce()
        assert found.same
        assert [file.path for file in found.files] == [CONFIGURATION, MODEL, CURVE]
        for name in (CONFIGURATION, MODEL, CURVE):
            assert (found.folder / name).read_bytes() == (main / name).read_bytes()
        assert ran(found.folder) == []

    def test_a_lost_result_is_made_again_and_kept(self, main: Path) -> None:
        raw = cached_objects.measured(main / "data/raw")["rows.csv"]
        outs = record("a-0.5").outs
        call(main, "dvc", "push", "-q", "data/raw")
        forget(main)
        found = reproduce()
        assert found.same
        assert found.origin == "made again"
        assert ran(found.folder) == ["extract", "finetune@a-0.5"]
        assert not any(cached_objects.missing(main / ".dvc/cache", digest) for digest in outs.values())
        assert cached_objects.object_path(main / ".dvc/cache", raw).exists()
        shutil.rmtree(found.folder)
        assert reproduce().origin != "made again"

    @pytest.mark.parametrize("pushed", [True, False])
    def test_a_corrupt_object_is_found_and_replaced(self, main: Path, pushed: bool) -> None:
        reproduce()  # DVC has looked at it before
        if pushed:
            dvc_transport.push()
        path = cached_objects.object_path(main / ".dvc/cache", cached_objects.measured(main / MODEL)[""])
        spoil(path)
        found = reproduce()
        assert found.same
        assert ran(found.folder) == ([] if pushed else ["finetune@a-0.5"])
        assert path.read_bytes() == (main / MODEL).read_bytes()

    def test_a_corrupt_object_of_an_upstream_stage_is_not_used(self, main: Path) -> None:
        spoil(cached_objects.object_path(main / ".dvc/cache", cached_objects.measured(main / "data/splits/train")[""]))
        cached_objects.object_path(main / ".dvc/cache", cached_objects.measured(main / MODEL)[""]).unlink()
        found = reproduce()
        assert found.same
        assert ran(found.folder) == ["extract", "finetune@a-0.5"]

    def test_again_runs_all_upstream_stages_and_leaves_the_cache_in_a_hook_of_git_too(
        self, main: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = digests(main / ".dvc/cache")
        with monkeypatch.context() as hook:
            hook.setenv("GIT_DIR", str(main / ".git"))
            hook.setenv("GIT_WORK_TREE", str(main))
            found = reproduce(again=True)
        assert found.same
        assert ran(found.folder) == ["extract", "finetune@a-0.5"]
        assert digests(main / ".dvc/cache") == before

    def test_a_result_that_differs_is_named_and_replaces_nothing(self, main: Path) -> None:
        """DVC writes what it made into dvc.lock: the comparison is with git, and the cache still gives the record."""
        script = main / "dvc.yaml"
        script.write_text(PIPELINE.replace("cat data/splits/train;", "date +%s.%N;"))
        run(main)
        commit(main)
        ran(main)
        recorded = (main / MODEL).read_bytes()
        runs = digests(main / ".dvc/cache/runs")
        done = CliRunner().invoke(app, ["reproduce", "a-0.5", "--again"])
        assert done.exit_code == 1
        assert "DIFFERS" in done.output
        assert MODEL in str(done.exception)
        assert CONFIGURATION not in str(done.exception)
        assert digests(main / ".dvc/cache/runs") == runs
        found = reproduce()
        assert found.same
        assert (found.folder / MODEL).read_bytes() == recorded
        script.write_text(PIPELINE)  # what `untouched` looks at
        call(main, "git", "reset", "-q", "--hard", "HEAD~1")
        call(main, "dvc", "checkout", "-q")

    def test_any_revision_with_any_present_parameters(self, main: Path) -> None:
        first = call(main, "git", "rev-parse", "HEAD").strip()
        (main / "params.yaml").write_text(PARAMS.replace("[a, b]", "[b]").replace("gain: 1", "gain: 2"))
        run(main)
        commit(main)
        ran(main)
        for again in (False, True):
            found = reproduce(revision=first[:8], again=again)
            assert found.same
            assert (found.folder / CONFIGURATION).read_text() == "gain: 1\n"
        assert (reproduce("b-0.5").folder / "models/finetuned/b-0.5/deep/config").read_text() == "gain: 2\n"
        assert reproduce("a-0.5").same  # which this revision records and does not run any more
        call(main, "git", "reset", "-q", "--hard", first)
        call(main, "dvc", "checkout", "-q")

    def test_inputs_that_git_and_dvc_do_not_have_are_carried_and_compared(self, main: Path) -> None:
        first = call(main, "git", "rev-parse", "HEAD").strip()
        call(main, "git", "rm", "-q", "--cached", "data/raw.dvc")
        (main / "data/raw.dvc").rename(main.parent / "raw.dvc")
        commit(main)
        assert reproduce(again=True).same
        (main / "data/raw/rows.csv").write_text("others\n")
        done = CliRunner().invoke(app, ["reproduce", "a-0.5", "--again"])
        assert done.exit_code == 1
        advised = re.search(r"`git (-C \S+ diff dvc\.lock)`", str(done.exception))
        assert advised
        assert re.search(r"path: data/raw\n.*\n-.*\bmd5:", call(main, "git", *advised[1].split()))
        (main / "data/raw/rows.csv").write_text("rows\n")
        call(main, "git", "reset", "-q", "--hard", first)

    def test_an_unrecorded_stage_or_revision_is_refused_with_advice(self, main: Path) -> None:
        for arguments, named in {
            ("c-0.5",): r"dvc\.lock\b.* c-0\.5\b.* a-0\.5, b-0\.5$",
            ("a-0.5", "--rev", "nope"): r"^nope .*`git log --oneline`",
            ("a-0.5", "--rev", "--all"): r"^--all .*`git log --oneline`",
        }.items():
            done = CliRunner().invoke(app, ["reproduce", *arguments])
            assert done.exit_code == 1
            assert re.search(named, done.output.strip())
        call(main, "git", "rm", "-q", "--cached", "dvc.lock")
        call(main, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "state")
        with pytest.raises(CannotReproduce, match=r"dvc\.lock\b"):
            record("a-0.5")
        call(main, "git", "reset", "-q", "HEAD~1")

    def test_a_lost_input_is_named(self, main: Path) -> None:
        forget(main)
        with pytest.raises(CannotReproduce, match=r"\bdata/raw .*data/raw\.dvc\b"):
            reproduce()

    def test_a_killed_reproduction_leaves_no_process_and_the_next_one_works(self, main: Path) -> None:
        hold = main.parent / "hold"
        waiting = f"echo extract >> ran.log && while [ -e {hold} ]; do sleep 0.1; done"
        (main / "dvc.yaml").write_text(PIPELINE.replace("echo extract >> ran.log", waiting))
        run(main)
        ran(main)  # before it is committed
        commit(main)
        hold.touch()
        folder = record("a-0.5").folder
        command = Command(main, BARE, "reproduce", "a-0.5", "--again")
        until(lambda: (folder / "ran.log").exists() or command.poll() is not None)
        left = [stage.pid for stage in psutil.process_iter() if works_in(folder, stage)]
        assert left
        command.kill()
        command.end()
        assert gone(left)
        hold.unlink()
        assert reproduce(again=True).same
        (main / "dvc.yaml").write_text(PIPELINE)  # what `untouched` looks at
        call(main, "git", "reset", "-q", "--hard", "HEAD~1")
        call(main, "dvc", "checkout", "-q")

    def test_a_failing_stage_is_reported_with_its_cause(self, main: Path) -> None:
        (main / "dvc.yaml").write_text(PIPELINE.replace("tr a-z A-Z <", "tr a-z A-Z < missing"))
        commit(main)
        with pytest.raises(CannotReproduce, match=r"finetune@a-0\.5\b.*\bmissing\b"):
            reproduce(again=True)
        call(main, "git", "reset", "-q", "--hard", "HEAD~1")


def test_a_real_study_travels(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage of the repository's own pipeline, with a CSV and a model of the user's: a clone computes nothing."""
    weights = "models/finetuned/svd-0.5/model.safetensors"
    main = study.copied(tmp_path / "main")
    shutil.rmtree(main / ".eckart")  # what a run notes for the next one here
    (main / MLFLOW).unlink()
    shutil.copy(ROOT / ".dvc/config", main / ".dvc/config")  # with the remote
    monkeypatch.chdir(main)
    call(main, "dvc", "add", "-q", "data/raw", "models/base")
    commit(main)
    call(main, "dvc", "push", "-q")
    other = clone(tmp_path / "other", monkeypatch)
    call(other, "dvc", "pull", "-q")
    assert call(other, "dvc", "status", "--json").strip() == "{}"
    assert set(run(other).values()) == {"Cached"}
    assert own_files(other) == own_files(main)
    shutil.rmtree(tmp_path / "eckart-storage")
    cached_objects.object_path(other / ".dvc/cache", cached_objects.measured(other / weights)[""]).unlink()
    found = reproduce("svd-0.5")
    assert found.origin == "made again"
    assert found.same
