"""One tiny study, end to end: the command line, Prefect, DVC and MLflow, all of them real."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from ruamel.yaml import YAML

from tests.flows.toy import ENVIRONMENT, call, tiny_repository
from tests.workspace import tiny_workspace

ROOT = Path(__file__).parents[2]
CANDIDATE = ("search", "factorize", "finetune", "evaluate", "benchmark")
COLUMNS = [
    "recipe",
    "keep",
    "metric",
    "dense",
    "factorized",
    "recovered",
    "target_parameters",
    "model_parameters",
    "macs_per_token",
    "bytes",
    "speedup",
    "search_steps",
    "average_rank",
]

Flow = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the code with tiny parameters, before anything ran."""
    return tiny_repository(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def flow(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Flow:
    """`python -m flows run` in the workspace, with a Prefect home of its own."""
    home = tmp_path_factory.mktemp("prefect")
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows", "run"],
            cwd=workspace,
            env={**environment, "PREFECT_HOME": str(home), **variables},
            capture_output=True,
            text=True,
            timeout=900,
        )

    return run


@pytest.fixture(scope="module")
def first(flow: Flow) -> subprocess.CompletedProcess[str]:
    done = flow()
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def change(root: Path, **sections: dict[str, object]) -> None:
    """Update sections of params.yaml: `change(root, study={"keeps": [0.5]})`."""
    yaml = YAML(typ="safe")
    content = yaml.load((root / "params.yaml").read_text())
    for name, values in sections.items():
        content[name].update(values)
    with (root / "params.yaml").open("w") as file:
        yaml.dump(content, file)


def stale(root: Path) -> set[str]:
    return set(json.loads(call(root, "dvc", "status", "--json")))


def runs(root: Path, database: str = "mlflow.db") -> dict[str, list[Run]]:
    """MLflow's runs by candidate; parents under the empty name."""
    client = MlflowClient(f"sqlite:///{root / database}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found: dict[str, list[Run]] = {}
    for run in client.search_runs(experiments):
        found.setdefault(run.data.tags.get("eckart.candidate", ""), []).append(run)
    return found


@pytest.mark.usefixtures("first")
class TestAfterTheFirstRun:
    def test_the_comparison_has_a_row_per_candidate(self, workspace: Path) -> None:
        rows = list(csv.DictReader((workspace / "reports/comparison.csv").open()))
        assert list(rows[0]) == COLUMNS
        assert [(row["recipe"], row["keep"]) for row in rows] == [("svd", "0.5"), ("kfac", "0.5")]
        assert (workspace / "reports/comparison.html").read_text().startswith("<!doctype html>")

    def test_the_table_is_printed_with_where_to_look_next(self, first: subprocess.CompletedProcess[str]) -> None:
        assert "kfac-0.5" in first.stdout
        assert "reports/comparison.html" in first.stdout
        assert "15 executed" in first.stdout

    def test_what_stages_print_is_streamed(self, first: subprocess.CompletedProcess[str]) -> None:
        assert "finetune@kfac-0.5' - step 2/2  loss" in first.stdout + first.stderr

    def test_dvc_has_nothing_to_do(self, workspace: Path) -> None:
        assert stale(workspace) == set()

    def test_a_candidate_is_a_hugging_face_folder(self, workspace: Path) -> None:
        folder = workspace / "models/finetuned/kfac-0.5"
        assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors", ".txt"}
        script = (
            "import sys, eckart; from transformers import AutoModelForSequenceClassification as Auto\n"
            "print(type(Auto.from_pretrained(sys.argv[1]).bert.encoder.layer[0].intermediate.dense).__name__)"
        )
        assert "LowRankLinear" in call(ROOT, sys.executable, "-c", script, str(folder))

    def test_mlflow_mirrors_the_study(self, workspace: Path) -> None:
        found = runs(workspace)
        (parent,), (child,) = found[""], found["kfac-0.5"]
        assert set(found) == {"", "svd-0.5", "kfac-0.5"}
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert {parent.info.status, child.info.status} == {"FINISHED"}
        assert parent.data.metrics["stages.executed"] == 15

    def test_a_candidates_run_has_numbers_curve_data_and_lineage(self, workspace: Path) -> None:
        (child,) = runs(workspace)["kfac-0.5"]
        evaluation = json.loads((workspace / "reports/evaluate/kfac-0.5.json").read_text())
        assert child.data.metrics["recovered.metric"] == evaluation["recovered"]["metric"]
        dense = json.loads((workspace / "reports/dense.json").read_text())
        assert child.data.metrics["dense.score.metric"] == dense["score"]["metric"]
        assert child.data.params["weighting.kind"] == "kfac"
        client = MlflowClient(f"sqlite:///{workspace / 'mlflow.db'}")
        curve = [json.loads(line) for line in (workspace / "reports/finetune/kfac-0.5.jsonl").read_text().splitlines()]
        logged = client.get_metric_history(child.info.run_id, "grad_norm")
        assert [(point.step, point.value) for point in logged] == [(p["step"], p["grad_norm"]) for p in curve]
        lock = YAML(typ="safe").load((workspace / "dvc.lock").read_text())["stages"]
        outs = {out["path"]: out["md5"] for stage in CANDIDATE for out in lock[f"{stage}@kfac-0.5"]["outs"]}
        assert json.loads(child.data.tags["dvc.outs"]) == outs
        digests = {entry.dataset.name: entry.dataset.digest for entry in child.inputs.dataset_inputs}
        train = next(d for d in lock["finetune@kfac-0.5"]["deps"] if d["path"] == "data/splits/train.parquet")
        assert digests["data/splits/train.parquet"] == train["md5"]
        assert "data/splits/calibration.parquet" in digests
        assert child.data.tags["mlflow.source.git.commit"] == call(workspace, "git", "rev-parse", "HEAD").strip()
        assert child.data.tags["prefect.flow_run"]

    def test_one_recipes_parameter_makes_only_its_own_stages_stale(self, workspace: Path) -> None:
        before = (workspace / "params.yaml").read_text()
        recipes = YAML(typ="safe").load(before)["recipes"]
        recipes["svd"]["recovery"]["learning_rate"] = 1.0e-3
        change(workspace, recipes=recipes)
        assert stale(workspace) == {"finetune@svd-0.5", "compare"}  # whose page states the recipes
        (workspace / "params.yaml").write_text(before)

    def test_another_way_to_score_trains_nothing_again(self, workspace: Path) -> None:
        before = (workspace / "params.yaml").read_text()
        change(workspace, evaluate={"batch_size": 4})
        assert {name.partition("@")[0] for name in stale(workspace)} == {"dense", "evaluate"}
        (workspace / "params.yaml").write_text(before)

    def test_editing_code_makes_stale_what_can_run_it(self, workspace: Path) -> None:
        for file, stages in {
            "eckart/ranks/waterfill.py": {"search"},
            "eckart/svd.py": {"search", "factorize"},
            "tasks/training.py": {"teacher", "search", "finetune"},
            "flows/engine/stages.py": set(),
        }.items():
            path = workspace / file
            before = path.read_text()
            path.write_text(before + "# edited\n")
            assert {name.partition("@")[0] for name in stale(workspace)} == stages, file
            path.write_text(before)

    def test_dvc_repro_makes_the_same_bytes(self, workspace: Path, tmp_path: Path) -> None:
        other = tmp_path / "by-hand"
        call(tmp_path, "git", "clone", "-q", str(workspace), str(other))
        tiny_workspace(other)  # data and base model are not in git
        lock = YAML(typ="safe").load((workspace / "dvc.lock").read_text())["stages"]
        call(other, "dvc", "repro", "factorize@kfac-0.5")
        again = YAML(typ="safe").load((other / "dvc.lock").read_text())["stages"]
        assert set(again) == {"extract", "teacher", "importance", "search@kfac-0.5", "factorize@kfac-0.5"}
        assert again == {name: lock[name] for name in again}


def test_later_runs(workspace: Path, flow: Flow, first: subprocess.CompletedProcess[str]) -> None:
    """Nothing is run twice, a failure spares its siblings, the rerun resumes, and a new database is backfilled."""
    second = flow()
    assert second.returncode == 0
    assert "Nothing was recomputed" in second.stdout
    assert re.search(r"^15 stages in \d+ s: Nothing", second.stdout, re.MULTILINE)
    assert {name: len(found) for name, found in runs(workspace).items()} == {"": 2, "svd-0.5": 1, "kfac-0.5": 1}

    recipes = YAML(typ="safe").load((workspace / "params.yaml").read_text())["recipes"]
    recipes["kfac"]["recovery"] |= {"learning_rate": 1.0e30, "steps": 4}
    recipes["svd"]["recovery"]["steps"] = 1
    change(workspace, recipes=recipes)
    third = flow()
    assert third.returncode == 1
    assert "finetune@kfac-0.5: the loss is not finite at step 3: lower the learning rate" in third.stderr
    assert stale(workspace) >= {"finetune@kfac-0.5"}
    assert not any("svd" in name for name in stale(workspace))
    assert {run.info.status for run in runs(workspace)["kfac-0.5"]} == {"FINISHED", "FAILED"}

    recipes["kfac"]["recovery"] |= {"learning_rate": 1.0e-3, "steps": 2}
    change(workspace, recipes=recipes)
    # Not the old one deleted: this process keeps a connection to it, and would go on reading what is gone.
    fourth = flow(MLFLOW_TRACKING_URI=f"sqlite:///{workspace / 'new.db'}")
    assert fourth.returncode == 0, fourth.stderr
    assert "4 executed" in fourth.stdout  # finetune, evaluate and benchmark of kfac-0.5, and compare
    (backfilled,), (made,) = runs(workspace, "new.db")["svd-0.5"], runs(workspace, "new.db")["kfac-0.5"]
    assert backfilled.data.tags["eckart.backfilled"] == "true"
    assert "eckart.backfilled" not in made.data.tags


def test_mistakes_in_params_stop_everything_before_it_starts(workspace: Path, flow: Flow) -> None:
    before = (workspace / "params.yaml").read_text()
    change(workspace, study={"keeps": [1.5], "recipes": ["svd", "kfca"]}, teacher={"epoch": 3})
    done = flow()
    assert done.returncode == 1
    for mistake in ("study.keeps.0: is 1.5", "study.recipes: there is no recipe kfca", "teacher.epoch: is unknown"):
        assert mistake in done.stderr
    (workspace / "params.yaml").write_text(before)
