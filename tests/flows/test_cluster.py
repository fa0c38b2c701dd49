"""Stages on workers: what goes between workspaces, what is refused, who dies, and a tiny study on two workers."""

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from mlflow import MlflowClient
from prefect.states import Completed, Failed
from ruamel.yaml import YAML

from flows import cluster, engine, workspaces
from flows.engine import Planned, cache, processes, remote
from flows.engine.remote import NotTheSame, TransportFailed
from tests.flows.servers import until
from tests.flows.toy import ENVIRONMENT, PARAMS, PIPELINE, call, ran, tiny_repository, toy_workspace

ROOT = Path(__file__).parents[2]
Enter = Callable[[Path], None]
FOLDERS = """\
stages:
  many:
    cmd: echo many >> ran.log && mkdir many && cp raw.txt many/one && seq 9 > many/two
    deps: [raw.txt]
    outs: [many]
  one:
    cmd: echo one >> ran.log && cp many/one one.txt
    deps: [many/one]
    outs: [one.txt]
"""


def commit(root: Path) -> None:
    call(root, "git", "add", "-A")
    call(root, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "state")


def stages(root: Path) -> dict[str, Any]:
    """What dvc.lock says of each stage."""
    content: dict[str, Any] = YAML(typ="safe").load((root / "dvc.lock").read_text())["stages"]
    return content


def run(one: Planned) -> engine.Outcome:
    return engine.run(one, lambda command: processes.run(command, Path.cwd(), print, {}))


def plan() -> dict[str, Planned]:
    return {one.name: one for one in engine.plan()}


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return monkeypatch.chdir


@pytest.fixture
def pair(tmp_path: Path, enter: Enter) -> tuple[Path, Path]:
    """Two workspaces that share a remote and nothing else; the first is entered."""
    both = toy_workspace(tmp_path / "here"), toy_workspace(tmp_path / "there")
    for root in both:
        call(root, "dvc", "remote", "add", "--default", "storage", str(tmp_path / "remote"))
    enter(both[0])
    return both


class TestBetweenWorkspaces:
    def test_a_stage_run_there_is_recorded_as_one_run_here(self, pair: tuple[Path, Path], enter: Enter) -> None:
        here, there = pair
        run(plan()["source"])
        remote.publish(["source"])
        order = remote.order(plan()["work@a"])
        assert str(here) not in repr(order)
        enter(there)
        assert run(remote.accept(order)).status == "Executed"
        entry = remote.publish(["work@a"])["work@a"]
        assert ran(there) == ["work@a"]
        enter(here)
        outcome = engine.run(plan()["work@a"], lambda command: remote.fetch(order, entry))
        assert ran(here) == ["source"]
        assert (here / "out/a").read_bytes() == (there / "out/a").read_bytes()
        assert stages(here)["work@a"] == stages(there)["work@a"]
        assert json.loads(call(here, "dvc", "status", "--json", "work@a")) == {}
        (here / "out/a").unlink()
        assert run(plan()["work@a"]) == replace(outcome, status="Restored", seconds=pytest.approx(0, abs=60))

    def test_only_what_is_read_and_missing_is_pulled(self, pair: tuple[Path, Path], enter: Enter) -> None:
        here, there = pair
        for root in pair:
            (root / "dvc.yaml").write_text(FOLDERS)
        run(plan()["many"])
        remote.publish(["many"])
        order = remote.order(plan()["one"])
        enter(there)
        remote.accept(order)
        assert [path.name for path in (there / "many").iterdir()] == ["one"]
        (there / "many/one").write_text("stale\n")
        run(remote.accept(order))
        assert (there / "one.txt").read_bytes() == (here / "raw.txt").read_bytes()

    def test_what_changed_here_meanwhile_is_not_recorded(self, pair: tuple[Path, Path]) -> None:
        here, _ = pair
        run(plan()["source"])
        entry = remote.publish(["source"])["source"]
        order = remote.order(plan()["source"])
        (here / "source.txt").unlink()
        (here / "raw.txt").write_text("other\n")
        with pytest.raises(engine.StageChanged, match=r"raw\.txt changed while source ran"):
            engine.run(plan()["source"], lambda command: remote.fetch(order, entry))
        assert "source" in json.loads(call(here, "dvc", "status", "--json"))

    @pytest.mark.parametrize(
        ("file", "content", "named"),
        [
            ("params.yaml", PARAMS.replace("a: 1", "a: 2"), "params.yaml"),
            ("raw.txt", "other\n", "raw.txt"),
            ("dvc.yaml", PIPELINE.replace("cp raw.txt", "cp -f raw.txt"), "dvc.yaml"),
            ("dvc.yaml", PIPELINE.replace("source:\n", "origin:\n"), "no stage source"),
        ],
    )
    def test_another_workspace_is_refused_by_what_differs(
        self, pair: tuple[Path, Path], enter: Enter, file: str, content: str, named: str
    ) -> None:
        _, there = pair
        run(plan()["source"])
        remote.publish(["source"])
        order = remote.order(plan()["work@a" if file == "params.yaml" else "source"])
        enter(there)
        (there / file).write_text(content)
        with pytest.raises(NotTheSame, match=f"{there}.* has .*{named}.*: bring it up to date"):
            remote.accept(order)
        assert ran(there) == []

    def test_a_parameter_that_the_stage_does_not_read_may_differ(self, pair: tuple[Path, Path], enter: Enter) -> None:
        _, there = pair
        order = remote.order(plan()["source"])
        enter(there)
        (there / "params.yaml").write_text(PARAMS.replace("a: 1", "a: 2"))
        assert run(remote.accept(order)).status == "Executed"

    def test_a_remote_that_lacks_an_object_is_named(self, pair: tuple[Path, Path], enter: Enter) -> None:
        _, there = pair
        run(plan()["source"])
        order = remote.order(plan()["work@a"])
        enter(there)
        with pytest.raises(TransportFailed, match="pulling what work@a reads"):
            remote.accept(order)

    @pytest.mark.parametrize("where", ["cache", "remote"])
    def test_a_corrupt_object_is_fetched_again_or_named(
        self, pair: tuple[Path, Path], enter: Enter, tmp_path: Path, where: str
    ) -> None:
        here, there = pair
        run(plan()["source"])
        remote.publish(["source"])
        order = remote.order(plan()["work@a"])
        enter(there)
        if where == "cache":
            remote.accept(order)
            (there / "source.txt").unlink()
        root = {"cache": there / ".dvc/cache", "remote": tmp_path / "remote"}[where]
        spoiled = cache.object_path(root, cache.measured(here / "source.txt")[""])
        spoiled.chmod(0o644)
        spoiled.write_text("rax\n")
        spoiled.chmod(0o444)  # which DVC takes for whole
        if where == "cache":
            remote.accept(order)
            assert (there / "source.txt").read_bytes() == (here / "source.txt").read_bytes()
        else:
            with pytest.raises(TransportFailed, match=f"object {spoiled.name} of the DVC remote is corrupt"):
                remote.accept(order)
            assert not (there / "source.txt").exists()

    def test_a_workspace_without_a_remote_is_told_how_to_get_one(self, tmp_path: Path, enter: Enter) -> None:
        enter(toy_workspace(tmp_path / "alone"))
        with pytest.raises(TransportFailed, match="dvc remote add --default NAME URL"):
            remote.check_remote()


def planned(name: str, *upstream: str, alone: bool = False) -> Planned:
    return Planned(name, upstream, alone, (), (), definition="", cached=None)


class TestWhatCanBegin:
    PLAN = (planned("a"), planned("b", "a"), planned("time@b", "b", alone=True), planned("time@a", "a", alone=True))

    def ready(self, *done: str, running: tuple[str, ...] = ()) -> list[str]:
        begun = [one for one in self.PLAN if one.name in running]
        waiting = [one for one in self.PLAN if one.name not in (*done, *running)]
        return [one.name for one in cluster._ready(waiting, begun, {name: Completed() for name in done})]

    def test_a_stage_waits_for_those_before_it(self) -> None:
        assert self.ready() == ["a"]
        assert self.ready("a") == ["b"]

    def test_what_measures_goes_last_one_at_a_time_and_alone(self) -> None:
        assert self.ready("a", running=("b",)) == []
        assert self.ready("a", "b") == ["time@b"]
        assert self.ready("a", "b", running=("time@b",)) == []
        assert self.ready("a", "b", "time@b") == ["time@a"]

    def test_what_follows_a_failure_never_begins_and_the_rest_does(self) -> None:
        waiting = [one for one in self.PLAN if one.name not in ("a", "b")]
        assert cluster._ready(waiting, [], {"a": Completed(), "b": Failed()}) == [self.PLAN[3]]

    def test_a_stage_that_reads_what_many_write_into_one_folder_stays_here(self) -> None:
        made = replace(planned("a"), writes=("/w/out/a", "/w/whole"))
        for reads, gathers in {("/w/out",): True, ("/w/out/a", "/w/whole/part"): False}.items():
            assert cluster._gathers(replace(planned("b", "a"), reads=reads), {"a": made}) is gathers


class TestRefusals:
    def test_without_dask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster, "find_spec", lambda name: None)
        with pytest.raises(cluster.ClusterError, match=r"pip install '\.\[cluster\]'"):
            cluster.require()

    def test_edited_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = toy_workspace(tmp_path / "edited")
        commit(root)
        monkeypatch.chdir(root)
        (root / "params.yaml").write_text(PARAMS.replace("a: 1", "a: 2"))
        workspaces.check_code()
        (root / "dvc.yaml").write_text(PIPELINE + "# edited\n")
        with pytest.raises(workspaces.WorkspaceError, match=r"Workers run the code of the last commit(.|\n)*dvc\.yaml"):
            workspaces.check_code()

    def test_a_worker_that_is_in_no_workspace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        done = subprocess.run(
            [sys.executable, "-m", "flows", "worker", "tcp://127.0.0.1:1"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert "run this in the root of a workspace" in done.stderr


DRIVER = """\
import json, sys, threading
from functools import partial
from pathlib import Path
from prefect import flow
from flows import cluster, engine
from flows.engine import processes
from flows.study import stage
from flows.tracking.mirror import Mirror

@flow
def toy():
    planned, root = engine.plan(), Path.cwd()
    mirror = Mirror("toy", planned, {})
    mirror.down = True
    here = partial(stage.submit, root=root, slots=threading.Semaphore(2), mirror=mirror, timeout=None)
    with processes.reaping():
        states = cluster.run(planned, here, mirror, None, 2, None)
    return {name: [state.name, state.message] for name, state in states.items()}

for line in sys.stdin:
    print("STATES", json.dumps(toy()), flush=True)
"""
TRIAL = """\
case $2 in
a) test -e $1/hung || { echo $DVC_ROOT > $1/hung; sleep 300; } ;;
b) test -e $1/mended || { echo the cause; exit 1; } ;;
esac
"""


class Driver:
    """A process that runs the toy pipeline on two workers whenever it is asked to."""

    def __init__(self, root: Path, home: Path) -> None:
        environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("PREFECT_")}
        environment |= {"PREFECT_HOME": str(home), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seen: set[psutil.Process] = set()

    def begin(self) -> None:
        stdin: IO[str] | None = self.process.stdin
        assert stdin
        stdin.write("\n")
        stdin.flush()

    def states(self) -> dict[str, list[str]]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("STATES "):
                found: dict[str, list[str]] = json.loads(line.removeprefix("STATES "))
                return found
        raise AssertionError("the driver ended")

    def family(self) -> list[psutil.Process]:
        """All that this process started and that lives, the newest last."""
        if self.process.poll() is None:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return sorted(filter(psutil.Process.is_running, self.seen), key=psutil.Process.create_time)

    def worker(self, folder: Path) -> psutil.Process:
        (found,) = [one for one in self.family() if "worker" in one.cmdline() and one.cwd() == str(folder)]
        return found


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    root = toy_workspace(tmp_path / "toy")
    (tmp_path / "trial").write_text(TRIAL)
    pipeline = PIPELINE.replace("mkdir -p out", f"sh {tmp_path}/trial {tmp_path} ${{item.item}} && mkdir -p out")
    (root / "dvc.yaml").write_text(pipeline)
    (root / ".gitignore").write_text("/out\n/workspaces\nran.log\n")
    call(
        root, "dvc", "remote", "add", "--default", "storage", "../../storage"
    )  # relative to .dvc, as in the repository
    commit(root)
    driver = Driver(root, tmp_path / "prefect")
    yield driver
    for one in reversed(driver.family()):
        one.kill()
    driver.process.kill()
    driver.process.communicate()


def test_a_killed_worker_a_failing_stage_and_a_killed_run(driver: Driver, tmp_path: Path) -> None:
    """Another worker takes over, siblings finish, the rerun does the rest; and no worker outlives its run."""
    root = tmp_path / "toy"
    driver.begin()
    until((tmp_path / "hung").exists)
    folder = Path((tmp_path / "hung").read_text().strip())
    killed = driver.worker(folder)
    stage = killed.children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    for one in stage:
        one.kill()
    first = driver.states()
    assert {name: state for name, (state, _) in first.items()} == {
        "source": "Executed",
        "work@a": "Executed",
        "work@b": "Failed",
    }
    assert first["work@b"][1].endswith("the cause")
    assert str(folder) not in first["work@a"][1]
    (tmp_path / "mended").touch()
    driver.begin()
    second = driver.states()
    assert {name: state for name, (state, _) in second.items()} == {
        "source": "Cached",
        "work@a": "Cached",
        "work@b": "Executed",
        "total": "Executed",
    }
    assert json.loads(call(root, "dvc", "status", "--json")) == {}
    alone = toy_workspace(tmp_path / "alone")
    call(alone, "dvc", "repro")
    assert outs(root) == outs(alone)

    (tmp_path / "hung").unlink()
    (root / "params.yaml").write_text(PARAMS.replace("a: 1", "a: 5"))
    driver.begin()
    until((tmp_path / "hung").exists)
    workers = [one for one in driver.family() if "worker" in one.cmdline()]
    assert len(workers) == 2
    driver.process.kill()
    until(lambda: not any(one.is_running() for one in workers), 60)
    assert outs(root) == outs(alone)


def outs(root: Path) -> dict[str, Any]:
    return {name: stage["outs"] for name, stage in stages(root).items()}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A tiny study that ran on two workers, and what it printed."""
    base = tmp_path_factory.mktemp("cluster")
    root = tiny_repository(base / "study")
    call(root, "dvc", "remote", "add", "--default", "storage", str(base / "remote"))
    commit(root)
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, "-m", "flows", "run", "--task-runner", "dask", "--workers", "2"],
        cwd=root,
        env={**environment, "PREFECT_HOME": str(base / "prefect")},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return root, done.stdout + done.stderr


class TestTinyStudy:
    def test_results_are_those_of_a_single_machine(
        self, study: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root, _ = study
        alone = tiny_repository(tmp_path / "alone")
        monkeypatch.chdir(alone)
        for one in engine.plan():
            engine.run(one, lambda command: processes.run(command, alone, print, {}))
        expected, found = stages(alone), stages(root)
        assert set(found) == set(expected)
        for name in set(found) - {"compare"}:
            part = "deps" if name.startswith("benchmark") else "outs"
            assert found[name][part] == expected[name][part], name
        assert rows(root) == rows(alone)

    def test_the_workspace_is_as_after_a_single_machine_run(
        self, study: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root, _ = study
        assert json.loads(call(root, "dvc", "status", "--json")) == {}
        monkeypatch.chdir(root)
        assert all(one.cached for one in engine.plan())
        assert call(root, "git", "status", "--porcelain").split() == ["??", "dvc.lock"]

    def test_both_workers_ran_stages_and_one_ran_all_benchmarks(self, study: tuple[Path, str]) -> None:
        root, printed = study
        ended = [line for line in printed.splitlines() if "Finished in state Executed" in line]
        places = {name: [line for line in ended if f"workspaces/{name}" in line] for name in ("worker-0", "worker-1")}
        assert all(places.values())
        assert sum(len(lines) for lines in places.values()) == len(ended) - 1  # compare
        measured = [name for name, lines in places.items() if any("'benchmark@" in line for line in lines)]
        assert measured == ["worker-0"]
        assert all((root / "workspaces" / name / ".dvc/cache/files").is_dir() for name in places)

    def test_what_stages_print_is_streamed(self, study: tuple[Path, str]) -> None:
        assert "Task run 'finetune@kfac-0.5' - step 2/2  loss" in study[1]

    def test_mlflow_is_told_of_the_candidates_and_their_curves(self, study: tuple[Path, str]) -> None:
        root, _ = study
        client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = {run.info.run_name: run for run in client.search_runs(experiments)}
        child = runs["kfac-0.5"]
        assert {run.info.status for run in runs.values()} == {"FINISHED"}
        assert "eckart.backfilled" not in child.data.tags
        curve = [json.loads(line) for line in (root / "reports/finetune/kfac-0.5.jsonl").read_text().splitlines()]
        logged = client.get_metric_history(child.info.run_id, "loss")
        assert [(point.step, point.value) for point in logged] == [(point["step"], point["loss"]) for point in curve]


def rows(root: Path) -> list[dict[str, str]]:
    """The comparison, but for what is measured in seconds."""
    with (root / "reports/comparison.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "speedup"} for row in csv.DictReader(file)]
