"""The real thing goes wrong: flows killed in a stage, disks full, servers gone, files changed underneath."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from ruamel.yaml import YAML

from flows.engine import cached_objects, stages
from flows.environment import canceled_runs
from tests.flows.forked import Command
from tests.flows.servers import mlflow_server, prefect_server, until
from tests.flows.toy import BARE, Flows, Study, begun, call, noted, noting, spoil
from tests.workspace import tiny_params, write_params

KILLED = ("finetune", "evaluate", "compare")
"""The stages in which a flow is killed."""


@pytest.fixture(scope="module")
def workspace(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One candidate of a finished study; `KILLED` are stale, for they take notes."""
    root = study.copied(tmp_path_factory.mktemp("faults") / "workspace")
    write_params(root, tiny_params(study={"recipes": ["svd"]}))
    for stage in KILLED:
        noting(root / f"tasks/{stage}.py", stage)
    return root


def change(root: Path, learning_rate: float) -> None:
    """Of the recovery: finetune and what follows it becomes stale."""
    content = YAML(typ="safe").load((root / "params.yaml").read_text())
    content["recipes"]["svd"]["recovery"]["learning_rate"] = learning_rate
    with (root / "params.yaml").open("w") as file:
        YAML(typ="safe").dump(content, file)


def mountable() -> bool:
    """Whether a user may mount a file system of his own."""
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return not subprocess.run(command, capture_output=True).returncode


def mounted(root: Path, places: dict[str, str], script: str) -> str:
    """What `eckart run` in `root` prints, which ends with code 1, among mounts of its own."""
    command = ["unshare", "-Urm", "sh", "-c", f'{script} && exec "$@"', "sh", sys.executable, "-m", "flows", "run"]
    done = subprocess.run(command, cwd=root, env=BARE | places, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def meanwhile(root: Path, stage: str, act: Callable[[], object]) -> Iterator[None]:
    """Within this, `act` as soon as a stage has begun, and while it has not ended."""
    hold = root / f"hold-{stage}"
    hold.touch()

    over = threading.Event()

    def wait_and_act() -> None:
        until(lambda: begun(root, stage) or over.is_set())
        try:
            act()
        finally:
            hold.unlink()

    with ThreadPoolExecutor() as pool:
        acting = pool.submit(wait_and_act)
        try:
            yield
        finally:
            over.set()
        acting.result()


def await_begin(root: Path, stage: str, flow: Command) -> None:
    until(lambda: begun(root, stage) or flow.poll() is not None)
    assert flow.poll() is None, flow.end()[1]


def kill(root: Path, stage: str, environment: dict[str, str]) -> None:
    flow = Command(root, environment, "run")
    await_begin(root, stage, flow)
    flow.kill()
    flow.end()


def terminate(root: Path, stage: str, environment: dict[str, str]) -> None:
    """End a flow that has a temporary server, which ends with it; a forked process would not do what an exit does."""
    flow = subprocess.Popen(
        [sys.executable, "-m", "flows", "run"], cwd=root, env=environment, stderr=subprocess.PIPE, text=True
    )
    until(lambda: begun(root, stage) or flow.poll() is not None)
    threads = Path(f"/proc/{flow.pid}/task").glob("*/children")
    children = [Path("/proc", pid) for children in threads for pid in children.read_text().split()]
    servers = [child for child in children if b"guarded_prefect" in (child / "cmdline").read_bytes()]
    assert servers
    flow.terminate()
    _, said = flow.communicate(timeout=600)
    assert flow.returncode
    assert "Finished stages are kept" in said
    assert not any(server.exists() for server in servers)


def cancel(flows: Flows, root: Path, stage: str, places: dict[str, str]) -> None:
    """Do what Prefect's page does; the server tells no process of it."""

    def act() -> None:
        (run,) = (UUID(file.name) for file in (root / ".eckart/runs").iterdir())
        with temporary_settings({PREFECT_API_URL: places["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
            client.set_flow_run_state(run, Cancelling(), force=True)
            until(lambda: client.read_flow_run(run).state_type not in (StateType.RUNNING, StateType.CANCELLING))
            assert client.read_flow_run(run).state_type == StateType.CANCELLED

    with meanwhile(root, stage, act):
        assert flows(root, "run").exit_code == 1


def test_a_full_disk(workspace: Path, prefect: dict[str, str]) -> None:
    """A file system of 64 KiB takes the place of models/finetuned, and the stage leaves no record."""
    if not mountable():
        pytest.skip("this machine lets no user mount a file system")
    shutil.rmtree(workspace / "models/finetuned")
    (workspace / "models/finetuned").mkdir()
    said = mounted(workspace, prefect, "mount -t tmpfs -o size=64k tmpfs models/finetuned")
    assert "finetune@svd-0.5: the disk is full" in said
    assert list((workspace / "models/finetuned").iterdir()) == []
    assert "finetune@svd-0.5" in stale_now(workspace)
    (workspace / "ran.log").unlink()


def test_a_flow_that_is_ended_in_a_stage_loses_nothing_and_repeats_nothing(
    workspace: Path,
    prefect: dict[str, str],
    prefect_home: Callable[[Path], Path],
    flows: Flows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canceled_runs, "_POLL", 0.1)
    alone = {"PREFECT_HOME": str(prefect_home(tmp_path))}
    ends = (terminate, partial(cancel, flows), kill)
    for stage, end, places in zip(KILLED, ends, (alone, prefect, prefect), strict=True):
        hold = workspace / f"hold-{stage}"
        hold.touch()
        end(workspace, stage, BARE | places)
        hold.unlink(missing_ok=True)
    done = flows(workspace, "run")
    assert "14 cached, 1 executed" in done.output
    begun = Counter(line.split()[0] for line in noted(workspace) if line.endswith("begins"))
    ended = Counter(line.split()[0] for line in noted(workspace) if line.endswith("ended"))
    assert ended == dict.fromkeys(KILLED, 1)
    assert begun == dict.fromkeys(KILLED, 2)
    assert call(workspace, "dvc", "status", "--json").strip() == "{}"
    assert "RUNNING" not in {run.info.status for run in runs(workspace)}
    finished = [run for run in runs(workspace) if run.info.status == "FINISHED"]
    assert sorted(run.data.tags.get("eckart.candidate", "") for run in finished) == ["", "svd-0.5"]
    killed = {run.data.tags["prefect.flow_run"] for run in runs(workspace) if run.info.status == "KILLED"}
    with temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
        pages = [client.read_flow_run(UUID(run)) for run in killed]
    assert [page.state_type for page in pages] == [StateType.CRASHED]


class TestAfterAFinishedRun:
    """Each of these begins from the finished study and leaves it finished."""

    @pytest.fixture(autouse=True)
    def _finished(self, workspace: Path, flows: Flows) -> None:
        if not (workspace / "ran.log").exists():  # the test above was not run
            assert flows(workspace, "run").exit_code == 0
        (workspace / "ran.log").write_text("")

    def test_a_pipeline_that_was_cut_off(self, workspace: Path, flows: Flows) -> None:
        """What stands before the cut is up to date, and the comparison that is there is an earlier run's."""
        file = workspace / "dvc.yaml"
        whole = file.read_text()
        file.write_text(whole[: whole.index("  compare:")])
        try:
            done = flows(workspace, "run")
        finally:
            file.write_text(whole)
        assert done.exit_code == 1
        assert any(line.startswith("dvc.yaml ") for line in done.output.splitlines())

    def test_a_corrupt_object_of_the_cache_and_a_report_that_is_gone(
        self, workspace: Path, flows: Flows, caplog: pytest.LogCaptureFixture
    ) -> None:
        lock = YAML(typ="safe").load((workspace / "dvc.lock").read_text())["stages"]
        (out,) = (out for out in lock["factorize@svd-0.5"]["outs"] if out["path"].startswith("models/"))
        files = cached_objects.files(workspace / ".dvc/cache", out["md5"])
        weights = cached_objects.object_path(workspace / ".dvc/cache", files["model.safetensors"])
        whole = spoil(weights)
        shutil.rmtree(workspace / "models/factorized")
        (workspace / "reports/comparison.csv").unlink()
        output = flows(workspace, "run").output
        for count in ("13 cached", "1 executed", "1 restored"):
            assert count in output
        assert files["model.safetensors"] in " ".join(record.getMessage() for record in caplog.records)
        assert weights.read_bytes() == whole
        assert (workspace / "reports/comparison.csv").exists()

    def test_a_workspace_that_cannot_be_written(self, workspace: Path, prefect: dict[str, str]) -> None:
        if not mountable():
            pytest.skip("this machine lets no user mount a file system")
        said = mounted(workspace, prefect, 'mount --bind -o ro . . && cd "$PWD"')
        # not always the last line: Prefect may say after it that it still delivers what it has
        assert any(line.startswith(f"{workspace} ") for line in said.splitlines())
        assert "Traceback" not in said

    def test_prefect_and_mlflow_gone_and_parameters_edited_in_the_middle(
        self, workspace: Path, flows: Flows, prefect_home: Callable[[Path], Path], database: Path, tmp_path: Path
    ) -> None:
        """All stages end all the same, with the parameters that the run began with.

        MLflow is told of them by the next run, and the new parameters are for the next one.
        """
        shutil.copy(database, tmp_path)
        change(workspace, 7.0e-5)
        with prefect_server(prefect_home(tmp_path)) as (places, prefect), mlflow_server(tmp_path) as (address, mlflow):

            def act() -> None:
                change(workspace, 4.0e-5)
                prefect.kill()
                os.killpg(mlflow.pid, signal.SIGKILL)

            # More, and Prefect hopes for minutes; none, and a server that is busy once ends the flow.
            told = places | {"PREFECT_CLIENT_MAX_RETRIES": "1", "MLFLOW_TRACKING_URI": address}
            with meanwhile(workspace, "finetune", act):
                code, said = Command(workspace, BARE | told, "run").end()
        assert code == 1
        assert said.splitlines()[-1].startswith("Prefect's server is gone")
        assert re.search(rf"MLflow .*\b{address.rpartition(':')[2]}\b", said)
        entry = YAML(typ="safe").load((workspace / "dvc.lock").read_text())["stages"]["finetune@svd-0.5"]
        assert entry["params"]["resolved.yaml"]["recipes.svd.recovery"]["learning_rate"] == 7.0e-5
        assert "finetune@svd-0.5" in stale_now(workspace)
        change(workspace, 7.0e-5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
            assert "Nothing was recomputed" in flows(workspace, "run").output
        backfilled = [run.info.status for run in runs(tmp_path) if "eckart.backfilled" in run.data.tags]
        assert backfilled == ["FINISHED"]


def stale_now(root: Path) -> list[str]:
    with chdir(root):
        return [stage.name for stage in stages.plan() if not stage.cached]


def runs(folder: Path) -> list[Run]:
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))
