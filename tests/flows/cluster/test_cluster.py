"""Stages on workers: what goes between workspaces, what is refused, who dies, and a tiny study on two workers."""

import copy
import csv
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import chdir, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask
import httpx
import psutil
import pytest
from distributed import LocalCluster
from mlflow import MlflowClient
from prefect import allow_failure
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.cli import app
from flows.cluster import dask_runner
from flows.engine import cached_objects, dvc_transport, stage_processes
from flows.engine import stages as engine
from flows.engine.dvc_transport import NotTheSame, TransportFailed
from flows.engine.run_options import Options, OptionsError
from flows.engine.stage_processes import CommandFailed
from flows.engine.stages import Planned
from flows.study import _in_order, _run_all
from tasks.artifacts.errors import EckartError
from tasks.config.params_file import read
from tests.flows import forked
from tests.flows.forked import Command
from tests.flows.servers import until
from tests.flows.toy import (
    BARE,
    PARAMS,
    PIPELINE,
    Study,
    call,
    commit,
    ran,
    spoil,
    stale,
    toy_workspace,
)
from tests.workspace import merged, run_stage, write_params

ROOT = Path(__file__).parents[3]
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


def stages(root: Path) -> dict[str, Any]:
    """What dvc.lock says of each stage."""
    content: dict[str, Any] = YAML(typ="safe").load((root / "dvc.lock").read_text())["stages"]
    return content


def add_remote(root: Path, folder: Path) -> None:
    with (root / ".dvc/config").open("a") as config:
        config.write(f"[core]\n    remote = storage\n['remote \"storage\"']\n    url = {folder}\n")


def run(stage: Planned) -> engine.Outcome:
    return engine.run(stage, lambda command: stage_processes.run(command, Path.cwd(), print, {}))


def plan() -> dict[str, Planned]:
    return {stage.name: stage for stage in engine.plan()}


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Enter:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return monkeypatch.chdir


@pytest.fixture
def pair(tmp_path: Path, enter: Enter) -> tuple[Path, Path]:
    """Two workspaces that share a remote and nothing else; the first is entered."""
    both = toy_workspace(tmp_path / "here"), toy_workspace(tmp_path / "there")
    for root in both:
        add_remote(root, tmp_path / "remote")
    enter(both[0])
    return both


class TestBetweenWorkspaces:
    def test_a_stage_run_there_is_recorded_as_one_run_here(self, pair: tuple[Path, Path], enter: Enter) -> None:
        here, there = pair
        run(plan()["source"])
        dvc_transport.publish(["source"])
        order = dvc_transport.order(plan()["work@a"])
        assert str(here) not in repr(order)
        enter(there)
        assert run(dvc_transport.accept(order)).status == "Executed"
        entry = dvc_transport.publish(["work@a"])["work@a"]
        assert ran(there) == ["work@a"]
        enter(here)
        outcome = engine.run(plan()["work@a"], lambda command: dvc_transport.fetch(order, entry) or 0.0)
        assert ran(here) == ["source"]
        assert (here / "out/a").read_bytes() == (there / "out/a").read_bytes()
        assert stages(here)["work@a"] == stages(there)["work@a"]
        assert json.loads(call(here, "dvc", "status", "--json", "work@a")) == {}
        (here / "out/a").unlink()
        assert run(plan()["work@a"]) == replace(outcome, status="Restored")

    def test_what_is_read_is_pulled_in_place_of_other_files(self, pair: tuple[Path, Path], enter: Enter) -> None:
        here, there = pair
        for root in pair:
            (root / "dvc.yaml").write_text(FOLDERS)
        run(plan()["many"])
        dvc_transport.publish(["many"])
        order = dvc_transport.order(plan()["one"])
        enter(there)
        (there / "many").mkdir()
        (there / "many/one").write_text("stale\n")
        run(dvc_transport.accept(order))
        assert (there / "one.txt").read_bytes() == (here / "raw.txt").read_bytes()

    def test_data_that_were_handed_to_dvc_are_pulled_and_others_are_named(
        self, pair: tuple[Path, Path], enter: Enter
    ) -> None:
        here, there = pair
        order = dvc_transport.order(plan()["source"])
        enter(there)
        (there / "raw.txt").unlink()
        with pytest.raises(NotTheSame, match=rf"^{there} .*\braw\.txt\b"):
            dvc_transport.accept(order)
        call(here, "dvc", "add", "-q", "raw.txt")
        call(here, "dvc", "push", "-q", "raw.txt")
        shutil.copy(here / "raw.txt.dvc", there)
        assert run(dvc_transport.accept(order)).status == "Executed"
        assert (there / "raw.txt").read_bytes() == (here / "raw.txt").read_bytes()

    def test_what_changed_here_meanwhile_is_not_recorded(self, pair: tuple[Path, Path]) -> None:
        here, _ = pair
        run(plan()["source"])
        entry = dvc_transport.publish(["source"])["source"]
        order = dvc_transport.order(plan()["source"])
        (here / "source.txt").unlink()
        (here / "raw.txt").write_text("other\n")
        with pytest.raises(engine.StageChanged, match=r"raw\.txt\b.*\bsource\b"):
            engine.run(plan()["source"], lambda command: dvc_transport.fetch(order, entry))
        assert "source" in json.loads(call(here, "dvc", "status", "--json"))

    def test_what_a_worker_made_from_something_else_is_not_adopted(self, pair: tuple[Path, Path]) -> None:
        here, _ = pair
        run(plan()["source"])
        run(plan()["work@a"])
        order, entry = dvc_transport.order(plan()["work@a"]), dvc_transport.publish(["work@a"])["work@a"]
        dvc_transport.fetch(order, entry)
        before = (here / "dvc.lock").read_bytes()
        other_parameters, other_file = copy.deepcopy(entry), copy.deepcopy(entry)
        other_parameters["params"]["params.yaml"]["gain.a"] = 9
        other_file["deps"][0]["md5"] = "0" * 32
        for other in (other_parameters, other_file):
            with pytest.raises(NotTheSame, match="work@a"):
                dvc_transport.fetch(order, other)
        assert (here / "dvc.lock").read_bytes() == before

    def test_another_workspace_is_refused_by_what_differs(self, pair: tuple[Path, Path], enter: Enter) -> None:
        """A parameter that the stage does not read may differ."""
        _, there = pair
        run(plan()["source"])
        dvc_transport.publish(["source"])
        source, work = (dvc_transport.order(plan()[name]) for name in ("source", "work@a"))
        other_gain = PARAMS.replace("a: 1", "a: 2")
        enter(there)
        for order, file, content, named in (
            (work, "params.yaml", other_gain, "params.yaml"),
            (source, "raw.txt", "other\n", "raw.txt"),
            (source, "dvc.yaml", PIPELINE.replace("cp raw.txt", "cp -f raw.txt"), "dvc.yaml"),
            (source, "dvc.yaml", PIPELINE.replace("source:\n", "origin:\n"), "source"),
        ):
            whole = (there / file).read_text()
            (there / file).write_text(content)
            with pytest.raises(NotTheSame, match=rf"^{there} .*\b{named}\b"):
                dvc_transport.accept(order)
            (there / file).write_text(whole)
        assert ran(there) == []
        (there / "params.yaml").write_text(other_gain)
        assert run(dvc_transport.accept(source)).status == "Executed"

    def test_an_object_that_is_missing_or_corrupt_is_fetched_again_or_named(
        self, pair: tuple[Path, Path], enter: Enter, tmp_path: Path
    ) -> None:
        here, there = pair
        run(plan()["source"])
        order = dvc_transport.order(plan()["work@a"])
        enter(there)
        with pytest.raises(TransportFailed, match="work@a"):  # the remote lacks it
            dvc_transport.accept(order)
        enter(here)
        dvc_transport.publish(["source"])
        enter(there)
        dvc_transport.accept(order)
        digest = cached_objects.measured(here / "source.txt")[""]
        spoil(cached_objects.object_path(there / ".dvc/cache", digest))
        (there / "source.txt").unlink()
        dvc_transport.accept(order)
        assert (there / "source.txt").read_bytes() == (here / "source.txt").read_bytes()
        (there / "source.txt").unlink()
        cached_objects.object_path(there / ".dvc/cache", digest).unlink()
        spoil(cached_objects.object_path(tmp_path / "remote", digest))
        with pytest.raises(TransportFailed, match=r"source\.txt"):
            dvc_transport.accept(order)
        assert not (there / "source.txt").exists()

    def test_a_workspace_without_a_remote_is_told_how_to_get_one(self, tmp_path: Path, enter: Enter) -> None:
        enter(toy_workspace(tmp_path / "alone"))
        with pytest.raises(TransportFailed, match="dvc remote add --default NAME URL"):
            dvc_transport.check_remote()


def planned(name: str, *upstream: str, alone: bool = False) -> Planned:
    return Planned(name, upstream, alone, (), (), definition="")


def test_what_measures_waits_for_all_that_needs_no_measurement_and_for_the_others_that_measure() -> None:
    """Even where one of those fails. What a stage reads from must succeed."""
    plan = (
        planned("a"),
        planned("time@a", "a", alone=True),
        planned("b", "a"),
        planned("time@b", "b", alone=True),
        planned("table", "time@a", "time@b"),
    )
    needs: dict[str, set[str]] = {}
    follows: dict[str, set[str]] = {}

    def submit(stage: Planned, wait_for: list[Any]) -> Mock:
        needs[stage.name] = {wait.stage for wait in wait_for if not isinstance(wait, allow_failure)}
        follows[stage.name] = {wait.value.stage for wait in wait_for if isinstance(wait, allow_failure)}
        return Mock(stage=stage.name)

    _run_all(_in_order(plan), submit)
    assert needs == {stage.name: set(stage.upstream) for stage in plan}
    assert follows["time@a"] == {"a", "b"}
    assert follows["time@b"] == {"a", "b", "time@a"}
    assert not follows["a"] | follows["b"] | follows["table"]


def test_a_run_that_ends_does_not_wait_for_workers_and_sends_them_nothing_more() -> None:
    client = Mock()
    client.submit.return_value.done.return_value = False
    workers = dask_runner.Workers([], client, "tcp://127.0.0.1:1", None)
    with ThreadPoolExecutor() as pool:
        with stage_processes.reaping():
            waiting = pool.submit(workers._run, Mock(), print)
            until(lambda: client.submit.called)
        assert isinstance(waiting.exception(timeout=600), CommandFailed)
    with pytest.raises(CommandFailed):
        workers.execute(planned("next"), "", print)
    assert client.submit.call_count == client.submit.return_value.release.call_count == 1


class TestRefusals:
    @pytest.mark.parametrize("options", [{"scheduler": "tcp://127.0.0.1:1"}, {"task_runner": "dask"}])
    def test_a_scheduler_that_would_not_be_used_and_one_that_is_missing(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionsError):
            Options(**options)

    def test_a_scheduler_that_is_not_there(self, pair: tuple[Path, Path]) -> None:
        with (
            dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
            pytest.raises(dask_runner.ClusterError, match=r"tcp://127\.0\.0\.1:1\b.*`dask scheduler`"),
            dask_runner.workers([], "tcp://127.0.0.1:1", None),
        ):
            pass

    def test_a_worker_that_is_in_no_workspace(self, tmp_path: Path, enter: Enter) -> None:
        enter(tmp_path)
        done = CliRunner().invoke(app, ["worker", "tcp://127.0.0.1:1"])
        assert done.exit_code == 1
        assert done.output.startswith(f"{tmp_path} ")


TRIAL = """\
mkdir -p out && echo $2 > out/$2.jsonl && echo a line
case $2 in
a) test -e $1/hung || { echo $DVC_ROOT > $1/hung; sleep 300; } ;;
b) test -e $1/mended || { echo the cause; exit 1; } ;;
esac
"""


def drive(root: str, scheduler: str, tests: Connection) -> None:
    """Run the toy pipeline on the workers of a scheduler whenever the tests ask for it."""
    os.chdir(root)
    while tests.recv():
        planned = engine.plan()
        jobs: dict[str, Future[list[str]]] = {}

        def run(stage: Planned, jobs: dict[str, Future[list[str]]], workers: dask_runner.Workers) -> list[str]:
            if any(jobs[name].result()[0] == "Failed" for name in stage.upstream):
                return ["Failed", "waits"]
            try:
                outcome = engine.run(stage, partial(workers.execute, stage, log=print))
            except EckartError as error:
                return ["Failed", str(error)]
            return [outcome.status, outcome.place]

        running = dask_runner.workers(planned, scheduler, None)
        with stage_processes.reaping(), running as workers, ThreadPoolExecutor() as pool:
            tests.send("ready")
            tests.recv()
            for stage in sorted(planned, key=lambda stage: stage.alone):
                if stage.alone:
                    wait(jobs.values())
                jobs[stage.name] = pool.submit(run, stage, jobs, workers)
        tests.send({name: job.result() for name, job in jobs.items()})


class Driver:
    """A process in `drive`."""

    def __init__(self, root: Path, scheduler: str) -> None:
        self._there, theirs = multiprocessing.Pipe()
        self._process = forked.start(drive, str(root), scheduler, theirs)

    def ready(self) -> None:
        """Have it make its plan, and find the scheduler."""
        self._there.send("plan")
        assert self._there.recv() == "ready"

    def begin(self) -> None:
        self._there.send("begin")

    def states(self) -> dict[str, list[str]]:
        """Once it has run: stage → how that ended, and where or why."""
        states: dict[str, list[str]] = self._there.recv()
        return states

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def cluster(root: Path, folder: Path) -> Iterator[tuple[LocalCluster, dict[Path, Command]]]:
    """A scheduler and two workers in clones of `root`, clone → process."""
    clones = [clone(root, folder / f"worker-{number}") for number in range(2)]
    with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as scheduler:
        address = scheduler.scheduler_address
        workers = {clone: Command(clone, BARE | {"PYTHONPATH": str(ROOT)}, "worker", address) for clone in clones}
        try:
            until(lambda: len(scheduler.scheduler.workers) == 2)
            yield scheduler, workers
        finally:
            for worker in workers.values():
                with suppress(psutil.NoSuchProcess):  # a test has killed it
                    worker.process.terminate()
                worker.end()


def toy_repository(root: Path, pipeline: str) -> Path:
    """A toy workspace, committed, with a remote that its clones reach."""
    toy_workspace(root)
    (root / "dvc.yaml").write_text(pipeline)
    (root / ".gitignore").write_text("/out\nran.log\n")
    add_remote(root, root.parent / "storage")
    commit(root)
    return root


def test_a_killed_worker_and_a_failing_stage(tmp_path: Path) -> None:
    """Another worker takes over, siblings finish, and the rerun does the rest."""
    (tmp_path / "trial").write_text(TRIAL)
    pipeline = PIPELINE.replace("mkdir -p out", f"sh {tmp_path}/trial {tmp_path} ${{item.item}}")
    pipeline = pipeline.replace('["out/${item.item}"]', '["out/${item.item}", "out/${item.item}.jsonl"]')
    root = toy_repository(tmp_path / "toy", pipeline)
    with cluster(root, tmp_path) as (scheduler, workers):
        driver = Driver(root, scheduler.scheduler_address)
        try:
            driver.ready()
            for worker in workers.values():
                shows_nothing(worker.process)
            driver.begin()
            until((tmp_path / "hung").exists)
            until((root / "out/a.jsonl").exists)  # a curve grows here while it grows there
            folder = Path((tmp_path / "hung").read_text().strip())
            stage = workers[folder].process.children(recursive=True)
            workers[folder].kill()
            for process in stage:
                with suppress(psutil.NoSuchProcess):  # its supervisor was sooner
                    process.kill()
            first = driver.states()
            assert {name: state for name, (state, _) in first.items()} == {
                "source": "Executed",
                "work@a": "Executed",
                "work@b": "Failed",
                "total": "Failed",
            }
            assert first["work@b"][1].endswith("the cause")
            assert str(folder) not in first["work@a"][1]
            (tmp_path / "mended").touch()
            driver.ready()
            driver.begin()
            second = driver.states()
        finally:
            driver.end()
    assert {name: state for name, (state, _) in second.items()} == {
        "source": "Cached",
        "work@a": "Cached",
        "work@b": "Executed",
        "total": "Executed",
    }
    assert second["total"][1] == ""  # it ran here
    assert json.loads(call(root, "dvc", "status", "--json")) == {}
    call(alone := clone(root, tmp_path / "alone"), "dvc", "repro")
    assert outs(root) == outs(alone)


def shows_nothing(process: psutil.Process) -> None:
    """Check that it listens at loopback alone, and there without Dask's pages of its state."""
    places = [listening.laddr for listening in process.net_connections() if listening.status == psutil.CONN_LISTEN]
    assert {place.ip for place in places} == {"127.0.0.1"}
    for place, page in itertools.product(places, ("health", "metrics", "info/main/workers.html", "status")):
        with suppress(httpx.TransportError):
            assert httpx.get(f"http://127.0.0.1:{place.port}/{page}").status_code == 404


def test_two_flows_with_one_scheduler_send_no_stage_twice(tmp_path: Path) -> None:
    """Both have made their plan before either begins, and a stage takes longer than beginning.

    What gathers the results of others goes to no worker.
    """
    root = toy_repository(tmp_path / "toy", PIPELINE.replace("cp raw.txt", "sleep 2 && cp raw.txt"))
    with cluster(root, tmp_path) as (scheduler, workers):
        flows = [Driver(root, scheduler.scheduler_address) for _ in range(2)]
        try:
            for flow in flows:
                flow.ready()
            for flow in flows:
                flow.begin()
            both = [flow.states() for flow in flows]
        finally:
            for flow in flows:
                flow.end()
    assert ran(root) == ["total"]
    there = [ran(folder) for folder in workers]
    assert sorted(["total", *itertools.chain(*there)]) == sorted(both[0])
    for name in both[0]:
        assert sorted(states[name][0] for states in both) == ["Cached", "Executed"]


def test_a_scheduler_that_ends(tmp_path: Path) -> None:
    """The flow names it, and the workers fail, so that what has started them does so again."""
    root = toy_repository(
        tmp_path / "toy", PIPELINE.replace("cp raw.txt", f"touch {tmp_path}/begun; sleep 300; cp raw.txt")
    )
    with cluster(root, tmp_path) as (scheduler, workers):
        driver, address = Driver(root, scheduler.scheduler_address), scheduler.scheduler_address
        try:
            driver.ready()
            driver.begin()
            until((tmp_path / "begun").exists)
            scheduler.close()
            assert address in driver.states()["source"][1]
        finally:
            driver.end()
        until(lambda: all(worker.poll() is not None for worker in workers.values()))
        assert {worker.poll() for worker in workers.values()} == {1}


def clone(root: Path, folder: Path) -> Path:
    call(root, "git", "clone", "-q", str(root), str(folder))
    for name in filter(lambda name: (root / name).exists(), ("data/raw", "models/base")):
        shutil.copytree(root / name, folder / name, dirs_exist_ok=True)
    return folder


def outs(root: Path) -> dict[str, Any]:
    return {name: stage["outs"] for name, stage in stages(root).items()}


def test_a_study_on_two_workers(study: Study, prefect: dict[str, str], tmp_path: Path) -> None:
    """What is left is as after a run on one machine, also of a calibration that is divided.

    A stage that reads what many others write runs here.
    """
    root = study.copied(tmp_path / "study")
    shards = divided(root)
    elsewhere, here = {*shards, "finetune@svd-0.5", "evaluate@svd-0.5"}, {"importance", "compare"}
    expected = outs(root)
    add_remote(root, tmp_path / "remote")
    forget(root, elsewhere | here)
    commit(root)
    with cluster(root, tmp_path) as (scheduler, _):
        address = scheduler.scheduler_address
        code, printed = Command(
            root, BARE | prefect, "run", "--task-runner", "dask", "--scheduler", address, "--workers", "2"
        ).end()
    assert code == 0, printed
    assert stale(root) == []
    ended = [line for line in printed.splitlines() if "Finished in state Executed" in line]
    assert {line.split("'")[1] for line in ended if f"{tmp_path}/worker-" in line} == elsewhere
    assert {line.split("'")[1] for line in ended if f"{tmp_path}/worker-" not in line} == here
    assert "Task run 'finetune@svd-0.5' - step 2/2  loss" in printed
    assert {**outs(root), "compare": None} == {**expected, "compare": None}
    assert rows(root) == rows(study.root)
    see_mlflow(root, "svd-0.5")


def divided(root: Path) -> set[str]:
    """Divide the calibration of a study, in this process; return the names of the stages. Others stay as they are."""
    names = ("second", "first", "last")
    write_params(root, merged(read(root / "params.yaml"), {"importance": {"shards": dict.fromkeys(names)}}))
    with chdir(root):
        run_stage("resolve")
        for name in names:
            run_stage("importance_shard", shard=name)
        run_stage("importance")
    call(root, "dvc", "commit", "-q", "--force")
    return {f"importance_shard@{name}" for name in names}


def forget(root: Path, names: set[str]) -> None:
    """Have nothing recorded of these stages."""
    yaml = YAML()
    content = yaml.load(root / "dvc.lock")
    for name in names:
        del content["stages"][name]
    yaml.dump(content, root / "dvc.lock")
    for folder in ("runs", "computed"):
        shutil.rmtree(root / ".dvc/cache" / folder)


def see_mlflow(root: Path, candidate: str) -> None:
    """The candidate's run is there, with the curve that was made elsewhere."""
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = {run.info.run_name: run for run in client.search_runs(experiments)}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert "eckart.backfilled" not in runs[candidate].data.tags
    curve = [json.loads(line) for line in (root / f"reports/finetune/{candidate}.jsonl").read_text().splitlines()]
    logged = client.get_metric_history(runs[candidate].info.run_id, "loss")
    assert [(point.step, point.value) for point in logged] == [(point["step"], point["loss"]) for point in curve]


def rows(root: Path) -> list[dict[str, str]]:
    """The comparison, but for what is measured in seconds."""
    with (root / "reports/comparison.csv").open() as file:
        return [
            {name: value for name, value in row.items() if not name.startswith("speedup")}
            for row in csv.DictReader(file)
        ]
