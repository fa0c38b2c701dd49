"""The real thing goes wrong: flows killed in every stage, disks full, servers gone, files changed underneath."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from ruamel.yaml import YAML

from flows.engine import cache
from tests.flows.servers import mlflow_server, prefect_server, until
from tests.flows.toy import ENVIRONMENT, call, tiny_repository

CHAIN = ("extract", "teacher", "importance", "search", "factorize", "finetune", "evaluate", "benchmark", "compare")
STAGES = (*CHAIN, "dense")  # which runs beside the others


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server for all flows here, which then need none of their own; the environment that leads to it."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as (places, _):
        yield places


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One candidate. Every stage notes in ran.log that it began and that it ended."""
    root = tiny_repository(tmp_path_factory.mktemp("faults"), study={"recipes": ["svd"]})
    for stage in STAGES:
        noting(root / f"tasks/{stage}.py", stage)
    return root


def noting(file: Path, stage: str) -> None:
    """Make a stage say when it begins and ends, and wait in between for as long as there is a file `hold`."""
    head, _, tail = file.read_text().partition('if __name__ == "__main__":\n')
    file.write_text(
        f"{head}if __name__ == '__main__':\n    import pathlib, time\n"
        f"    log = pathlib.Path('ran.log').open('a', buffering=1)\n    log.write('{stage} begins\\n')\n"
        f"    while pathlib.Path('hold-{stage}').exists():\n        time.sleep(0.05)\n"
        f"{tail}    log.write('{stage} ended\\n')\n"
    )


def change(root: Path, learning_rate: float) -> None:
    """Of the recovery: finetune and what follows it becomes stale."""
    content = YAML(typ="safe").load((root / "params.yaml").read_text())
    content["recipes"]["svd"]["recovery"]["learning_rate"] = learning_rate
    with (root / "params.yaml").open("w") as file:
        YAML(typ="safe").dump(content, file)


def mountable() -> None:
    """Skip where no user may mount a file system of his own."""
    if subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("this machine lets no user mount a file system")


def start(root: Path, places: dict[str, str], *before: str) -> subprocess.Popen[str]:
    """`python -m flows run` in `root`."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", "flows", "run"],
        cwd=root,
        env={name: value for name, value in ENVIRONMENT.items() if not name.startswith("MLFLOW_")} | places,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(root: Path, places: dict[str, str], *before: str, code: int = 0) -> str:
    """What a run prints that ends with `code`."""
    process = start(root, places, *before)
    said = process.communicate(timeout=900)[0]
    assert process.returncode == code, said
    return said


def await_begin(root: Path, stage: str, flow: subprocess.Popen[str]) -> None:
    until(lambda: f"{stage} begins" in log(root) or flow.poll() is not None)
    assert flow.poll() is None, flow.communicate()[0]


def log(root: Path) -> list[str]:
    file = root / "ran.log"
    return file.read_text().splitlines() if file.exists() else []


def test_a_flow_killed_in_each_stage_loses_nothing_and_repeats_nothing(
    workspace: Path, prefect: dict[str, str]
) -> None:
    for stage in CHAIN:
        hold = workspace / f"hold-{stage}"
        hold.touch()
        flow = start(workspace, prefect)
        await_begin(workspace, stage, flow)
        flow.kill()
        flow.communicate()
        hold.unlink()
    said = run(workspace, prefect)
    assert "9 cached, 1 executed" in said
    begun = Counter(line.split()[0] for line in log(workspace) if line.endswith("begins"))
    ended = Counter(line.split()[0] for line in log(workspace) if line.endswith("ended"))
    assert ended == dict.fromkeys(STAGES, 1)
    assert begun == {**dict.fromkeys(CHAIN, 2), "dense": begun["dense"]}
    assert call(workspace, "dvc", "status", "--json").strip() == "{}"
    assert "RUNNING" not in {one.info.status for one in runs(workspace)}
    finished = [one for one in runs(workspace) if one.info.status == "FINISHED"]
    assert sorted(one.data.tags.get("eckart.candidate", "") for one in finished) == ["", "svd-0.5"]


class TestAfterAFinishedRun:
    """Each of these begins from the finished study and leaves it finished."""

    @pytest.fixture(autouse=True)
    def _finished(self, workspace: Path, prefect: dict[str, str]) -> None:
        if not (workspace / "dvc.lock").exists():
            run(workspace, prefect)
        (workspace / "ran.log").unlink(missing_ok=True)

    def test_a_disk_that_is_full_in_a_stage(self, workspace: Path, prefect: dict[str, str]) -> None:
        """A file system of 64 KiB takes the place of models/finetuned."""
        mountable()
        change(workspace, 2.0e-5)
        shutil.rmtree(workspace / "models/finetuned")
        (workspace / "models/finetuned").mkdir()
        small = 'mount -t tmpfs -o size=64k tmpfs models/finetuned && exec "$@"'
        said = run(workspace, prefect, "unshare", "-Urm", "sh", "-c", small, "sh", code=1)
        assert "finetune@svd-0.5: the disk is full" in said
        assert list((workspace / "models/finetuned").iterdir()) == []
        assert "6 cached, 4 executed" in run(workspace, prefect)

    def test_a_params_file_that_changes_during_the_run(self, workspace: Path, prefect: dict[str, str]) -> None:
        change(workspace, 3.0e-5)
        (workspace / "hold-finetune").touch()
        flow = start(workspace, prefect)
        await_begin(workspace, "finetune", flow)
        change(workspace, 4.0e-5)
        (workspace / "hold-finetune").unlink()
        said = flow.communicate()[0]
        assert flow.returncode == 1
        assert "finetune@svd-0.5: params.yaml changed while finetune@svd-0.5 ran; run again" in said
        assert "6 cached, 4 executed" in run(workspace, prefect)

    def test_a_corrupt_object_of_the_cache(self, workspace: Path, prefect: dict[str, str]) -> None:
        lock = YAML(typ="safe").load((workspace / "dvc.lock").read_text())["stages"]
        (out,) = lock["factorize@svd-0.5"]["outs"]
        files = cache.files(workspace / ".dvc/cache", out["md5"])
        weights = cache.object_path(workspace / ".dvc/cache", files["model.safetensors"])
        whole = weights.read_bytes()
        weights.chmod(0o644)
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        weights.chmod(0o444)
        shutil.rmtree(workspace / "models/factorized")
        said = run(workspace, prefect)
        assert "is corrupt; it is made again" in said
        assert "9 cached, 1 executed" in said
        assert weights.read_bytes() == whole

    def test_a_workspace_that_cannot_be_written(self, workspace: Path, prefect: dict[str, str]) -> None:
        mountable()
        fixed = 'mount --bind -o ro . . && cd "$PWD" && exec "$@"'
        said = run(workspace, prefect, "unshare", "-Urm", "sh", "-c", fixed, "sh", code=1)
        assert said.splitlines()[-1] == f"{workspace} cannot be written: a run needs a workspace of its own"
        assert "Traceback" not in said

    def test_prefect_gone_in_the_middle(self, workspace: Path, prefect: dict[str, str], tmp_path: Path) -> None:
        change(workspace, 7.0e-5)
        (workspace / "hold-finetune").touch()
        with prefect_server(tmp_path) as (places, server):
            flow = start(workspace, places | {"PREFECT_CLIENT_MAX_RETRIES": "0"})  # else it hopes for minutes
            await_begin(workspace, "finetune", flow)
            server.send_signal(signal.SIGKILL)
            server.wait()
            (workspace / "hold-finetune").unlink()
            said = flow.communicate(timeout=900)[0]
        assert flow.returncode == 1
        assert said.splitlines()[-1].startswith("Prefect's server is gone")
        assert "Nothing was recomputed" in run(workspace, prefect)

    def test_mlflow_gone_in_the_middle(self, workspace: Path, prefect: dict[str, str], tmp_path: Path) -> None:
        change(workspace, 6.0e-5)
        (workspace / "hold-finetune").touch()
        with mlflow_server(tmp_path) as (address, server):
            places = prefect | {"MLFLOW_TRACKING_URI": address}
            flow = start(workspace, places)
            await_begin(workspace, "finetune", flow)
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            (workspace / "hold-finetune").unlink()
            said = flow.communicate(timeout=900)[0]
        assert flow.returncode == 0, said
        assert "MLflow cannot be used" in said
        database = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
        assert "Nothing was recomputed" in run(workspace, prefect | database)
        statuses = {run.info.status for run in runs(tmp_path)}
        assert statuses == {"KILLED", "FINISHED"}
        (backfilled,) = [run for run in runs(tmp_path) if "dvc.key" in run.data.tags]
        assert backfilled.data.tags["eckart.backfilled"] == "true"
        assert backfilled.info.status == "FINISHED"


def runs(folder: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))
