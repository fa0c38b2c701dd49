"""The mirror against a real MLflow database: what it logs, that it logs it once, and what a failing store costs."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.engine.stages import Outcome, Planned
from flows.tracking import database as database_file
from flows.tracking.mirror import Mirror, experiment
from tasks.artifacts.errors import EckartError
from tasks.report.choose_candidate import CHOICE, Chosen
from tests.flows import forked
from tests.flows.servers import until

CURVE = "reports/finetune/kfac-0.5.jsonl"
SEARCH = "reports/search/kfac-0.5.jsonl"
EVALUATION = "reports/evaluate/kfac-0.5.json"


def planned(name: str, upstream: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> Planned:
    return Planned(name, upstream, alone=False, reads=(), writes=writes, definition="d")


def outcome(name: str, status: str = "Executed", key: str = "k", outs: tuple[str, ...] = ()) -> Outcome:
    return Outcome(
        name, status, 1.0, f"{name}-{key}", {"data/splits/train.parquet": "0" * 32}, {}, dict.fromkeys(outs, "1")
    )


def write_curve(root: Path, *losses: float, file: str = CURVE) -> None:
    lines = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1))
    write(root, file, "".join(f"{line}\n" for line in lines))


def write(root: Path, file: str, text: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)


@pytest.fixture
def root(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")  # by a thread until a run is finished
    shutil.copy(database, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(root: Path) -> list[Planned]:
    return [
        planned("teacher"),
        planned("dense", ("teacher",)),
        planned("search@kfac-0.5", ("teacher",), (str(root / "models/ranks/kfac-0.5"), str(root / SEARCH))),
        planned("finetune@kfac-0.5", ("search@kfac-0.5",), (str(root / CURVE),)),
        planned("compare", ("dense", "finetune@kfac-0.5")),
    ]


def started(root: Path, plan: list[Planned]) -> Mirror:
    mirror = Mirror("s", plan, {"prefect.flow_run": "f"})
    mirror.start({"seed": 0, "data": {"metric": "perplexity"}})
    assert not mirror.down
    return mirror


def record_shared(mirror: Mirror) -> None:
    """Record the stages before the candidate's, and beside them."""
    for name in ("teacher", "dense"):
        mirror.record(outcome(name, "Cached"))


def parent_of(mirror: Mirror) -> Run:
    return mirror.client.get_run(mirror.parent)


def children(root: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("s")
    return [run for run in client.search_runs([experiment.experiment_id]) if "eckart.candidate" in run.data.tags]


def losses(root: Path, run: Run, metric: str = "loss") -> list[tuple[int, float]]:
    history = MlflowClient(f"sqlite:///{root / 'mlflow.db'}").get_metric_history(run.info.run_id, metric)
    return [(point.step, point.value) for point in history]


def test_curves_are_told_apart_while_they_grow(root: Path, plan: list[Planned]) -> None:
    """Those of search and recovery, of teacher and control, and of this run and an earlier one."""
    write_curve(root, 9.0, 8.0)
    mirror = started(root, plan)
    record_shared(mirror)
    with mirror.following(plan[2]):
        write_curve(root, 4.0, 3.0, 2.0, file=SEARCH)
    mirror.record(outcome("search@kfac-0.5", outs=("models/ranks/kfac-0.5", SEARCH)))
    (run,) = children(root)
    assert losses(root, run, "search.loss") == [(1, 4.0), (2, 3.0), (3, 2.0)]  # before the candidate is done
    with mirror.following(plan[3]):
        write_curve(root, 1.0, 0.5)
    mirror.record(outcome("finetune@kfac-0.5", outs=(CURVE,)))
    (run,) = children(root)
    assert losses(root, run) == [(1, 1.0), (2, 0.5)]
    assert losses(root, run, "search.loss") == [(1, 4.0), (2, 3.0), (3, 2.0)]  # and none of them twice
    assert set(run.data.metrics) == {"loss", "search.loss"}
    assert run.info.status == "FINISHED"  # as soon as its last stage is done, not when the study is
    assert run.data.tags["prefect.flow_run"] == "f"
    for name, loss in {"teacher": 2.0, "control": 1.0}.items():
        file = f"reports/{name}.jsonl"
        with mirror.following(planned(name, (), (str(root / file),))):
            write_curve(root, loss, file=file)
        mirror.record(outcome(name, outs=(file,)))
    mirror.finish(complete=True)
    assert losses(root, parent_of(mirror)) == [(1, 2.0)]
    assert losses(root, parent_of(mirror), "control.loss") == [(1, 1.0)]


def test_a_parent_has_the_curves_of_trainings_that_were_cached(root: Path, plan: list[Planned]) -> None:
    """After mlflow.db was deleted."""
    mirror = started(root, plan)
    for name, loss in {"teacher": 2.0, "control": 1.0}.items():
        write_curve(root, loss, file=(file := f"reports/{name}.jsonl"))
        mirror.record(outcome(name, "Cached", outs=(file,)))
    mirror.finish(complete=True)
    assert losses(root, parent_of(mirror)) == [(1, 2.0)]
    assert losses(root, parent_of(mirror), "control.loss") == [(1, 1.0)]


def test_what_was_not_measured_and_single_targets_are_no_metrics(root: Path, plan: list[Planned]) -> None:
    targets = {f"layer.{number}.query": {"rank": 3 if number else None, "rows": 0} for number in range(100)}
    evaluation = {"factorized": None, "recovered": {"metric": 0.8}, "targets": targets, "target_parameters": 90}
    write(root, EVALUATION, json.dumps(evaluation))
    write(root, "reports/dense.json", json.dumps({"score": {"metric": 0.9}}))
    mirror = started(root, plan)
    mirror.record(outcome("teacher", "Cached"))
    mirror.record(outcome("search@kfac-0.5", "Cached"))
    mirror.record(outcome("finetune@kfac-0.5", "Cached", outs=(EVALUATION,)))
    mirror.record(outcome("dense", outs=("reports/dense.json",)))  # which may be done after a candidate
    assert not mirror.down
    (run,) = children(root)
    numbers = {"recovered.metric": 0.8, "target_parameters": 90, "dense.score.metric": 0.9}
    assert run.data.metrics == numbers | {"perplexity": 0.8, "perplexity of original": 0.9}


def test_what_was_made_elsewhere_is_backfilled_once_and_claims_no_origin(root: Path, plan: list[Planned]) -> None:
    write_curve(root, 4.0, 3.0, file=SEARCH)
    write_curve(root, 1.0)
    curves = {"search@kfac-0.5": (SEARCH,), "finetune@kfac-0.5": (CURVE,)}
    for _ in range(2):
        mirror = started(root, plan)
        for stage in plan[:4]:
            mirror.record(outcome(stage.name, "Cached", outs=curves.get(stage.name, ())))
        mirror.finish(complete=True)
    (run,) = children(root)
    assert mirror.lineage == {"kfac-0.5": run.info.run_id}
    assert run.data.tags["eckart.backfilled"] == "true"
    assert "prefect.flow_run" not in run.data.tags
    assert {"mlflow.source.name", "mlflow.source.type"} < set(run.data.tags)
    parent = parent_of(mirror)
    for made in (run, parent):
        assert [entry.dataset.digest for entry in made.inputs.dataset_inputs] == ["0" * 32]
    assert parent.data.tags["mlflow.source.name"] != run.data.tags["mlflow.source.name"]
    assert losses(root, run) == [(1, 1.0)]
    assert losses(root, run, "search.loss") == [(1, 4.0), (2, 3.0)]
    for stage in plan[:4]:
        mirror.record(outcome(stage.name, "Cached", "another computation"))
    assert len(children(root)) == 2


def test_the_parent_says_what_was_done_and_which_candidate_was_chosen(root: Path) -> None:
    plan = [planned("dense"), *(planned(f"evaluate@svd-{keep}") for keep in ("0.2", "0.3", "0.5")), planned("compare")]
    mirror = started(root, plan)
    mirror.record(outcome("dense", "Cached"))
    for keep, validation, test in (("0.2", 30.0, 10.0), ("0.3", 20.0, 22.0), ("0.5", 20.0, 21.0)):
        file = f"reports/evaluate/svd-{keep}.json"
        scores = {"validation": {"metric": validation}, "recovered": {"metric": test}}
        write(root, file, json.dumps(scores | {"target_parameters": int(100 * float(keep))}))
        mirror.record(outcome(f"evaluate@svd-{keep}", outs=(file,)))
    chosen = Chosen(study="s", goals=(), candidate="svd-0.3", non_inferior=False, alternative=None)
    write(root, str(CHOICE), chosen.model_dump_json())
    mirror.record(outcome("compare", outs=(str(CHOICE),)))
    mirror.finish(complete=True)
    assert not mirror.down
    parent = parent_of(mirror)
    assert parent.data.tags["eckart.best"] == "svd-0.3"
    assert parent.data.metrics["best.validation.metric"] == 20
    assert parent.data.metrics["best.recovered.metric"] == 22
    name = str(parent.info.run_name)
    assert name.startswith("s: ")
    assert re.findall(r"\d+", name) == ["3", "4"]  # candidates, and stages that were executed


def test_a_run_that_ends_early_is_failed_and_says_how_busy_the_machine_was(
    root: Path, plan: list[Planned], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    before = set(threading.enumerate())
    mirror = started(root, plan)
    with mirror.following(plan[2]):
        pass
    until(lambda: "system/cpu_utilization_percentage" in parent_of(mirror).data.metrics)
    mirror.finish(complete=False)
    assert "SystemMetricsMonitor" not in {thread.name for thread in set(threading.enumerate()) - before}
    assert {run.info.status for run in (*children(root), parent_of(mirror))} == {"FAILED"}


def test_where_nothing_is_to_be_run_a_parent_is_made_only_for_what_mlflow_lacks(
    root: Path, plan: list[Planned]
) -> None:
    cached = [replace(item, cached=outcome(item.name, "Cached")) for item in plan]
    parents = []
    for lacking in (False, False, True, False):
        if lacking:
            MlflowClient(f"sqlite:///{root / 'mlflow.db'}").delete_run(children(root)[0].info.run_id)
        mirror = started(root, cached)
        for item in cached:
            assert item.cached
            mirror.record(item.cached)
        mirror.finish(complete=True)
        assert not mirror.down
        (run,) = children(root)
        assert mirror.lineage == {"kfac-0.5": run.info.run_id}
        assert len(run.outputs.model_outputs) == 1  # also of a run in the place of one that was deleted
        parents.append(mirror.parent)
    first, again, backfilled, last = parents
    assert first == again
    assert backfilled != first
    assert last in parents


def test_flows_side_by_side_leave_one_run_of_a_candidate(root: Path, plan: list[Planned]) -> None:
    ours, other = started(root, plan), started(root, plan)
    other.tags["eckart.process"] = "that of another"
    for mirror, ran in ((ours, plan[2]), (other, plan[3])):
        with mirror.following(ran):
            pass
    idle = started(root, plan)  # which finds all that they do
    idle.tags["eckart.process"] = "that of a third"
    for mirror in (idle, ours, other):
        for item in plan[:4]:
            mirror.record(outcome(item.name, "Cached"))
        mirror.finish(complete=True)
        assert not mirror.down
    runs = {run.info.run_id: run for run in children(root)}
    assert len(runs) == 2
    kept = ours.lineage["kfac-0.5"]
    assert other.lineage == {"kfac-0.5": kept}
    assert idle.lineage["kfac-0.5"] in runs  # not completed yet
    (superfluous,) = set(runs) - {kept}
    assert runs[kept].info.status == "FINISHED"
    assert runs[superfluous].info.status == "KILLED"
    assert runs[superfluous].data.tags["eckart.same_as"] == kept


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil reads other clocks")
def test_a_clock_that_is_put_right_ends_no_run_of_a_flow_that_goes_on(
    root: Path, plan: list[Planned], monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = started(root, plan)
    boot = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot - 3600)  # by which Linux says when a process began
    started(root, plan)
    assert mirror.client.get_run(mirror.parent).info.status == "RUNNING"


def test_models_are_ranked_by_what_the_test_rows_say(root: Path) -> None:
    scores = {"svd-0.2": 0.6, "svd-0.3": 0.8, "svd-0.5": 0.7}
    plan = [planned(f"{stage}@{name}") for name in scores for stage in ("finetune", "evaluate")]
    data = {f"data/splits/{split}.parquet": f"md5 of {split}" for split in ("validation", "test")}
    for _ in range(2):
        mirror = started(root, plan)
        for name, score in scores.items():
            file = f"reports/evaluate/{name}.json"
            content = {"recovered": {"metric": score}, "validation": {"metric": -score}, "target_parameters": 9}
            write(root, file, json.dumps(content))
            mirror.record(outcome(f"finetune@{name}", outs=(f"models/finetuned/{name}",)))
            mirror.record(replace(outcome(f"evaluate@{name}", outs=(file,)), deps=data))
        mirror.finish(complete=True)
        assert not mirror.down
    order = {"field_name": "metrics.recovered.metric", "ascending": False}
    order |= {"dataset_name": "data/splits/test.parquet", "dataset_digest": "md5 of test"}
    models = mirror.client.search_logged_models([mirror.experiment], order_by=[order])
    assert [model.tags["eckart.candidate"] for model in models] == ["svd-0.3", "svd-0.5", "svd-0.2"]
    best = models[0]
    assert best.status == "READY"
    assert (best.tags["dvc.path"], best.tags["dvc.md5"]) == ("models/finetuned/svd-0.3", "1")
    assert best.source_run_id == mirror.lineage["svd-0.3"]
    measured_on = {metric.key: metric.dataset_digest for metric in best.metrics}
    expected = {"recovered.metric": "md5 of test", "validation.metric": "md5 of validation", "target_parameters": None}
    assert measured_on == expected
    history = mirror.client.get_metric_history(best.source_run_id, "recovered.metric")
    assert [point.value for point in history] == [0.8]  # of the run and the model, but one point


@pytest.mark.parametrize("gone", ["at the start", "in the middle"])
def test_a_store_that_fails_is_said_once_and_stops_nothing(
    gone: str,
    root: Path,
    plan: list[Planned],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if gone == "at the start":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mirror = Mirror("s", plan, {})
    mirror.start({"seed": 0})
    with mirror.following(plan[3]):
        if gone == "in the middle":
            (root / "mlflow.db").write_bytes(b"no database any more")
        write_curve(root, 1.0)
    record_shared(mirror)
    mirror.record(outcome("finetune@kfac-0.5", outs=(CURVE,)))
    mirror.finish(complete=True)
    assert mirror.down
    assert sum("MLflow cannot be used" in record.message for record in caplog.records) == 1


def test_a_deleted_experiment_is_named_with_its_remedy(root: Path, plan: list[Planned]) -> None:
    client = MlflowClient(database_file.address())
    number = client.create_experiment("s")
    client.delete_experiment(number)
    with pytest.raises(EckartError, match=rf"mlflow experiments restore --experiment-id {number}"):
        experiment(client, "s")
    mirror = Mirror("s", plan, {})
    mirror.start({"seed": 0})
    assert mirror.down


def test_a_copied_or_moved_workspace_does_not_write_into_the_old_place(
    root: Path, plan: list[Planned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow stores absolute paths. For a moved workspace, the link that the message names is enough."""
    Mirror("s", plan, {}).start({"seed": 0})
    assert not database_file.check()
    moved = root.with_name("moved")
    root.rename(moved)
    monkeypatch.chdir(moved)
    with pytest.raises(EckartError, match=r"mlflow\.db .*ln -s") as caught:
        database_file.check()
    (command,) = re.findall(r"`([^`]*ln [^`]*)`", str(caught.value))
    subprocess.run(command, shell=True, check=True)
    assert not database_file.check()
    root.unlink()
    shutil.copytree(moved, root)
    monkeypatch.chdir(moved)
    with pytest.raises(EckartError, match=r"copy.*mlflow\.db"):
        database_file.check()


def test_each_spelling_of_the_workspaces_own_file_is_the_same_store(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    for path in ("mlflow.db", "./mlflow.db", f"{root}/mlflow.db", f"{root}/../{root.name}/mlflow.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
        assert database_file.address() == database_file.registry_address() == f"sqlite:///{root}/mlflow.db"
        assert database_file.is_local()
        assert database_file.all_is_local()
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "sqlite:///other.db")
    assert database_file.registry_address() == f"sqlite:///{root}/other.db"
    assert not database_file.all_is_local()


@pytest.mark.parametrize("name", ["a?b", "a%20b", "50% x"])
def test_a_folder_that_mlflow_cannot_write_to_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow takes its path for a URL: the rest is a query, or a space."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(EckartError, match="rename the folder") if name[0] == "a" else nullcontext():
        database_file.check()


def test_a_damaged_database_is_set_aside_with_its_journal(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite would put what stands in it into the database that comes next. A locked database is not damaged."""
    with closing(sqlite3.connect(root / "mlflow.db")) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("CREATE TABLE one (number)")
        writer.commit()
        writer.executemany("INSERT INTO one VALUES (?)", [(number,) for number in range(10_000)])
        journal = (root / "mlflow.db-journal").read_bytes()
        assert not database_file.check()
    (root / "mlflow.db-journal").write_bytes(journal)
    (root / "mlflow.db").write_bytes(b"no database" * 1000)
    assert "mlflow.db.damaged" in database_file.check()
    (root / "mlflow.db").write_text("nor this")
    assert "mlflow.db.damaged-2" in database_file.check()
    names = {"mlflow.db.damaged", "mlflow.db.damaged-journal", "mlflow.db.damaged-2"}
    assert {file.name for file in root.glob("mlflow.db*")} <= names
    assert (root / "mlflow.db.damaged-2").read_text() == "nor this"
    assert "mlflow.db.damaged-2" in caplog.text


def abandon(root: str) -> None:
    """Be killed while a stage runs."""
    os.chdir(root)
    mirror = Mirror("s", [planned("finetune@kfac-0.5")], {})
    mirror.start({})
    with mirror.following(planned("finetune@kfac-0.5")):
        os.kill(os.getpid(), signal.SIGKILL)


def test_runs_of_a_flow_that_was_killed_are_ended_and_those_of_others_go_on(root: Path, plan: list[Planned]) -> None:
    living = started(root, plan)
    killed = forked.start(abandon, str(root))
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    client = living.client
    assert sorted(run.info.status for run in client.search_runs([living.experiment])) == ["RUNNING"] * 3
    started(root, plan)
    statuses = [run.info.status for run in client.search_runs([living.experiment])]
    assert sorted(statuses) == ["KILLED", "KILLED", "RUNNING", "RUNNING"]
    assert client.get_run(living.parent).info.status == "RUNNING"
