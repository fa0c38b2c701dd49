"""One tiny study, end to end: the command line, Prefect, DVC and MLflow, all of them real."""

import csv
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import Result
from dvc.repo import Repo
from huggingface_hub import ModelCard
from mlflow import MlflowClient
from mlflow.entities import Run
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.cli import app
from flows.display import run_diff
from flows.engine import cached_objects
from flows.engine.stages import read_now
from flows.tracking.mirror import VIEW
from tasks.artifacts.results_schema import SECONDS
from tests.flows.hub import TOKEN, hub
from tests.flows.servers import pages
from tests.flows.toy import BARE, Flows, Study, call, stale
from tests.workspace import digests, tiny_params, write_params

CANDIDATE = ("search", "factorize", "finetune", "evaluate", "export")


@pytest.fixture(scope="module")
def workspace(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished study, which each test leaves as it was."""
    return study.copied(tmp_path_factory.mktemp("study") / "workspace")


def change(root: Path, **sections: dict[str, object]) -> None:
    """Update sections of params.yaml: `change(root, study={"keeps": [0.5]})`."""
    yaml = YAML(typ="safe")
    content = yaml.load((root / "params.yaml").read_text())
    for name, values in sections.items():
        content[name].update(values)
    with (root / "params.yaml").open("w") as file:
        yaml.dump(content, file)


def runs(root: Path) -> dict[str, list[Run]]:
    """MLflow's runs by candidate; parents under the empty name."""
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    result: dict[str, list[Run]] = {}
    for run in client.search_runs(experiments):
        result.setdefault(run.data.tags.get("eckart.candidate", ""), []).append(run)
    return result


class TestAfterTheFirstRun:
    def test_lines_of_stages_then_the_table_and_where_to_look_next_are_printed(self, study: Study) -> None:
        for text in ("finetune@kfac-0.5' - step 2/2  loss", "kfac-0.5", "reports/comparison.html", "19 executed"):
            assert text in study.said
        assert not (study.root / "reports/search/svd-0.5.jsonl").read_text()
        assert ".jsonl" not in study.said  # in a warning of DVC about that empty curve
        rows = list(csv.DictReader((study.root / "reports/comparison.csv").open()))
        assert [(row["recipe"], row["keep"]) for row in rows] == [
            ("dense + recovery", "1"),
            ("svd", "0.5"),
            ("kfac", "0.5"),
        ]
        assert (study.root / "reports/comparison.html").read_text().startswith("<!doctype html>")
        seconds = json.loads((study.root / SECONDS).read_text())
        assert {"teacher", "search@svd-0.5", "finetune@kfac-0.5", "compare"} < set(seconds)

    def test_a_script_reads_the_results_as_json(self, workspace: Path) -> None:
        with chdir(workspace):
            told = json.loads(CliRunner().invoke(app, ["table", "--json"]).stdout)
            quiet = CliRunner().invoke(app, ["table", "--quiet"])
        assert told["best"] == json.loads((workspace / "reports/choice.json").read_text())["candidate"]
        assert quiet.exit_code == (0 if told["best"] else 1)  # none may be fast enough here
        assert quiet.stdout.strip() == told["best"] or quiet.exit_code
        (kfac,) = (candidate for candidate in told["candidates"] if candidate["name"] == "kfac-0.5")
        evaluation = json.loads((workspace / "reports/evaluate/kfac-0.5.json").read_text())
        exports = json.loads((workspace / "reports/onnx/kfac-0.5.json").read_text())
        assert kfac["metric"] == evaluation["recovered"]["metric"]
        assert kfac["exports"]["int8"]["bytes"] == exports["int8"]["bytes"]
        benchmark = json.loads((workspace / "reports/benchmark.json").read_text())["kfac-0.5"]
        latency = next(iter(benchmark["latency"]["candidate"]["int8"].values()))
        assert kfac["exports"]["int8"]["speedup"] == latency["of_torch"]
        assert kfac["exports"]["int8"]["speedup_in_runtime"] == latency["of_same"]
        assert all((workspace / path).exists() for path in {**kfac["files"], **told["files"]}.values())

    def test_results_of_another_record_are_named(self, workspace: Path) -> None:
        """As after `git checkout`, which brings another dvc.lock beside the same reports."""
        with chdir(workspace):
            assert not CliRunner().invoke(app, ["table"]).stderr
            lock = Path("dvc.lock").read_text()
            for name in ("comparison.csv", "comparison.txt", "choice.json"):
                (digest,) = cached_objects.measured(Path("reports", name)).values()
                assert digest in lock
                Path("dvc.lock").write_text(lock.replace(digest, "0" * 32))
                assert "not the results that dvc.lock records" in CliRunner().invoke(app, ["table"]).stderr
            Path("dvc.lock").write_text(lock)

    def test_dvc_compares_a_dozen_metrics(self, study: Study) -> None:
        with chdir(study.root):
            shown = Repo().metrics.show()[""]["data"]
        assert shown == {
            "reports/metrics.json": {"data": json.loads((study.root / "reports/metrics.json").read_text())}
        }
        assert {type(value) for value in shown["reports/metrics.json"]["data"].values()} <= {str, int, float}

    def test_mlflow_mirrors_the_study(self, study: Study) -> None:
        result = runs(study.root)
        (parent,), (child,) = result[""], result["kfac-0.5"]
        assert set(result) == {"", "svd-0.5", "kfac-0.5"}
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert {parent.info.status, child.info.status} == {"FINISHED"}
        assert parent.data.metrics["stages.executed"] == 19

    def test_mlflow_lists_the_metric_of_candidates_and_of_the_best_one(self, study: Study) -> None:
        """In the columns of a view that MLflow's page opens, which shows none of its own."""
        client = MlflowClient(f"sqlite:///{study.root / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("tiny")
        assert experiment
        columns = json.loads(experiment.tags[f"mlflow.sharedViewState.{VIEW}"])["selectedColumns"]
        names = [column.removeprefix("metrics.").strip("`") for column in columns]
        for candidate, (run,) in runs(study.root).items():
            if candidate or "eckart.best" in run.data.tags:
                assert set(names) <= set(run.data.metrics)
        (kfac,) = runs(study.root)["kfac-0.5"]
        assert kfac.data.metrics["accuracy"] == kfac.data.metrics["recovered.metric"]

    def test_a_candidates_run_has_numbers_curve_data_and_lineage(self, study: Study) -> None:
        (child,) = runs(study.root)["kfac-0.5"]
        evaluation = json.loads((study.root / "reports/evaluate/kfac-0.5.json").read_text())
        assert child.data.metrics["recovered.metric"] == evaluation["recovered"]["metric"]
        dense = json.loads((study.root / "reports/dense.json").read_text())
        assert child.data.metrics["dense.score.metric"] == dense["score"]["metric"]
        for name, prefix in (("kfac-0.5", ""), ("dense", "dense.")):
            exports = json.loads((study.root / f"reports/onnx/{name}.json").read_text())
            assert child.data.metrics[f"{prefix}int8.bytes"] == exports["int8"]["bytes"]
        assert child.data.metrics["latency.dense.torch.2x8.of_torch.median"] == 1
        (parent,) = runs(study.root)[""]
        assert parent.data.metrics["dense.control.score.metric"] == dense["control"]["score"]["metric"]
        assert child.data.params["weighting.kind"] == "kfac"
        client = MlflowClient(f"sqlite:///{study.root / 'mlflow.db'}")
        curve = [json.loads(line) for line in (study.root / "reports/finetune/kfac-0.5.jsonl").read_text().splitlines()]
        logged = client.get_metric_history(child.info.run_id, "grad_norm")
        assert [(point.step, point.value) for point in logged] == [(p["step"], p["grad_norm"]) for p in curve]
        lock = YAML(typ="safe").load((study.root / "dvc.lock").read_text())["stages"]
        outs = {out["path"]: out["md5"] for stage in CANDIDATE for out in lock[f"{stage}@kfac-0.5"]["outs"]}
        assert json.loads(child.data.tags["dvc.outs"]) == outs
        digests = {entry.dataset.name: entry.dataset.digest for entry in child.inputs.dataset_inputs}
        train = next(d for d in lock["finetune@kfac-0.5"]["deps"] if d["path"] == "data/splits/train.parquet")
        assert digests["data/splits/train.parquet"] == train["md5"]
        assert "data/calibration.parquet" in digests
        assert child.data.tags["mlflow.source.git.commit"] == call(study.root, "git", "rev-parse", "HEAD").strip()
        assert child.data.tags["prefect.flow_run"]

    def test_a_failed_run_is_compared_with_the_last_complete_one(self, workspace: Path) -> None:
        """Both find the same files and parameters, though in different ways."""
        with chdir(workspace):
            kept, now = run_diff.load(), run_diff.current("failed", read_now(), complete=False)
        assert kept
        assert kept.data
        assert run_diff.changes(kept, now) == {}
        raw, gone = workspace / "data/raw", workspace / "data/gone"
        raw.rename(gone)
        try:
            with chdir(workspace):
                missing = run_diff.changes(kept, run_diff.current("failed", read_now(), complete=False))
        finally:
            gone.rename(raw)
        assert missing == {"data": [("data/raw", kept.data["data/raw"], None)]}

    def test_dvc_repro_makes_the_same_bytes(self, workspace: Path) -> None:
        """A fresh interpreter gives the same weights as the warm server."""
        before = (workspace / "dvc.lock").read_text()
        outs = digests(workspace / "models")
        call(workspace, "dvc", "repro", "--force", "--single-item", "finetune@kfac-0.5")
        assert YAML(typ="safe").load((workspace / "dvc.lock").read_text()) == YAML(typ="safe").load(before)
        assert digests(workspace / "models") == outs


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The modules that a process imported which ran with PYTHONPROFILEIMPORTTIME."""
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def published(root: Path, address: str, *arguments: str, token: str = TOKEN) -> Result:
    """Run `eckart publish` in this process, which has already read HF_ENDPOINT."""
    with chdir(root), pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.ENDPOINT", address)
        patch.setenv("HF_TOKEN", token)
        return CliRunner().invoke(app, ["publish", *arguments])


class TestPublishing:
    def test_a_candidate_goes_to_the_hub_with_its_card_and_comes_back(self, workspace: Path, tmp_path: Path) -> None:
        with hub() as there:
            shown = published(workspace, there.address, "kfac-0.5", "someone/small", "--dry-run")
            assert shown.exit_code == 0, shown.output
            assert not there.repositories
            sent = published(workspace, there.address, "kfac-0.5", "someone/small", "--private")
            assert sent.exit_code == 0, sent.output
        (files,) = there.repositories.values()
        assert there.private == {"someone/small"}
        for path, content in files.items():
            assert f"{path}  {len(content):,} bytes" in shown.output
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(content)
        assert {"config.json", "tokenizer.json", "onnx/model.onnx", "onnx/int8.onnx"} < set(files)
        evaluation = json.loads((workspace / "reports/evaluate/kfac-0.5.json").read_text())
        (result,) = ModelCard.load(tmp_path / "README.md").data.eval_results
        assert result.metric_value == evaluation["recovered"]["metric"]
        assert digests(workspace / "models/finetuned/kfac-0.5").items() <= digests(tmp_path).items()

    def test_a_mistake_sends_nothing(self, workspace: Path) -> None:
        with hub() as there:
            for named, arguments, token in (
                ("kfac-0.5", ("kfca-0.5", "someone/small"), TOKEN),
                ("USER/NAME", ("kfac-0.5", "some one/small"), TOKEN),
                ("hf auth login", ("kfac-0.5", "someone/small"), "hf_of_nobody"),
                ("does not take someone/small", ("kfac-0.5", "someone/small"), TOKEN),
            ):
                address = "http://127.0.0.1:9" if "take" in named else there.address  # where nobody is
                done = published(workspace, address, *arguments, token=token)
                assert done.exit_code == 1
                assert named in done.output
                assert isinstance(done.exception, SystemExit)  # no traceback
            assert not there.repositories


def test_later_runs(study: Study, flows: Flows, prefect: dict[str, str], tmp_path: Path) -> None:
    """No stage runs twice, MLflow is backfilled, a failure spares its siblings, and the next run resumes."""
    root = study.copied(tmp_path / "workspace")
    environment = BARE | {"PREFECT_HOME": str(tmp_path), "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "flows", "run"]
    second = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert not list(tmp_path.glob("*.db"))  # no server was started
    assert "flows.engine.nothing_to_do" in imported(second)
    assert not {"torch", "transformers", "flows.study"} & imported(second)
    assert re.search(r"^20 stages in \d+ s: Nothing was recomputed", second.stdout, re.MULTILINE)
    assert counts(root) == {"": 1, "svd-0.5": 1, "kfac-0.5": 1}
    assert len(backfilled(root)) == 2

    recipes = YAML(typ="safe").load((root / "params.yaml").read_text())["recipes"]
    recipes["kfac"]["recovery"] |= {"learning_rate": 1.0e30, "steps": 4}
    recipes["svd"]["recovery"]["steps"] = 1
    change(root, recipes=recipes, study={"control": "svd"}, export={"recipes": []}, check={"fewest_examples": 7})
    third = flows(root, "run")
    assert third.exit_code == 1
    # resolve, check, control, dense, and finetune and evaluate of svd: another limit of check trains nothing again
    assert runs(root)[""][0].data.metrics["stages.executed"] == 6
    assert re.search(r"finetune@kfac-0\.5: .*\bstep 3\b", third.output)
    assert "finetune@kfac-0.5" in stale(root)
    assert not any("svd" in name for name in stale(root))
    assert {run.info.status for run in runs(root)["kfac-0.5"]} == {"FINISHED", "FAILED"}
    (page,) = pages(prefect, "failure-tiny", "finetune@kfac-0.5")
    cause, printed = page.split("~~~~", 1)
    assert re.search(r"\bstep 3\b", cause)
    assert "step 2/4  loss" in printed  # in the last lines
    (failed,) = pages(prefect, "changes-tiny", "| recipes.kfac.recovery.learning_rate ")
    assert "### metrics" not in failed

    recipes["kfac"]["recovery"] |= {"learning_rate": 1.0e-3, "steps": 2}
    change(root, recipes=recipes)
    fourth = flows(root, "run")
    assert fourth.exit_code == 0, fourth.output
    assert "4 executed" in fourth.stdout  # finetune and what follows of kfac-0.5, benchmark and compare
    (page,) = (item for item in pages(prefect, "changes-tiny", "| study.control ") if item != failed)
    rows = {cells[0]: cells[1:] for cells in (re.split(r" *\| *", line.strip("| ")) for line in page.splitlines())}
    assert rows["recipes.svd.recovery.steps"][:2] == ["2", "1"]
    assert not {"data/raw", "recipes.kfac.recovery.steps"} & set(rows)
    assert counts(root) == {"": 3, "svd-0.5": 2, "kfac-0.5": 3}
    assert len(backfilled(root)) == 2
    for run in (runs(root)["svd-0.5"][0], runs(root)["kfac-0.5"][0]):  # also of the one that was done before
        assert run.data.metrics["speedup.median"] > 0


def test_data_that_break_a_limit_stop_the_run_before_anything_is_trained(
    study: Study, flows: Flows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is named, even if the changes since the last run cannot be read."""
    unreadable = Mock(side_effect=sqlite3.OperationalError("disk I/O error"))
    monkeypatch.setattr("flows.engine.stages.read_now", unreadable)
    root = study.copied(tmp_path / "workspace")
    before = digests(root / "models")
    change(root, teacher={"learning_rate": 2.0e-3}, check={"fewest_examples": 30})
    done = flows(root, "run")
    assert done.exit_code == 1
    assert re.search(r"^1 stage failed, .*\n  check: .*check\.fewest_examples", done.output, re.MULTILINE)
    assert unreadable.called
    assert ">broken<" in (root / "reports/check.html").read_text()
    assert not (root / "data/checked.json").exists()
    assert digests(root / "models") == before


def counts(root: Path) -> dict[str, int]:
    return {name: len(result) for name, result in runs(root).items()}


def backfilled(root: Path) -> list[Run]:
    return [run for result in runs(root).values() for run in result if "eckart.backfilled" in run.data.tags]


def test_mistakes_in_params_stop_everything_before_it_starts(flows: Flows, tmp_path: Path) -> None:
    write_params(tmp_path, tiny_params(study={"keeps": [1.5], "recipes": ["svd", "kfca"]}, teacher={"epoch": 3}))
    done = flows(tmp_path, "run")
    assert done.exit_code == 1
    for mistake in ("study.keeps.0: ", "study.recipes: ", "teacher.epoch: "):
        assert mistake in done.output
