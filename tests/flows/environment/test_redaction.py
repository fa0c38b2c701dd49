"""Nothing that a run writes holds a secret."""

from __future__ import annotations

import base64
import logging
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.environment import redaction
from flows.servers import notifications
from flows.study import study as flow
from tasks.artifacts.errors import EckartError
from tests.flows import forked
from tests.flows.forked import Command
from tests.flows.servers import mlflow_server, until
from tests.flows.toy import BARE, Study, toy_study, toy_workspace
from tests.test_safety import SECRET, URL
from tests.workspace import tiny_params, write_params


def test_a_run_with_an_unreachable_mlflow_writes_no_password(prefect: dict[str, str], tmp_path: Path) -> None:
    """No password of the flow or a stage is on the terminal, in Prefect's database and logs, or in the workspace."""
    commands = [
        "echo connected to $MLFLOW_TRACKING_URI with $HF_TOKEN",
        "mkdir -p reports && echo done > reports/comparison.txt",
    ]
    stages = {"compare": {"cmd": commands, "outs": ["reports/comparison.txt"]}}
    root, home = toy_study(tmp_path / "workspace", stages), Path(prefect["PREFECT_HOME"])
    variables = {"MLFLOW_TRACKING_URI": URL, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "HF_TOKEN": f"hf_{SECRET}"}
    code, said = Command(root, BARE | prefect | variables, "run").end()
    assert code == 0, said
    assert re.search(r"MLflow .*127\.0\.0\.1.*\b9\b", said)  # what cannot be reached
    printed = "connected to http://127.0.0.1:9 with ***"  # by the stage
    assert printed in said
    assert SECRET not in said
    until(lambda: any(printed.encode() in file.read_bytes() for file in home.glob("prefect.db*")))
    assert places_of(SECRET, root, home) == []


@pytest.mark.parametrize("error", [EckartError, RuntimeError])
def test_the_state_of_a_failed_run_holds_no_password(
    error: type[Exception], prefect: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's server stores the state, and sends it in notifications."""

    def fail(*_: object) -> None:
        raise error(f"{URL} does not answer")

    monkeypatch.setattr("flows.study._run", fail)
    root = toy_workspace(tmp_path / "toy")
    with temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}):
        monkeypatch.chdir(root)
        state = flow(return_state=True)
    assert state.is_failed()
    assert "127.0.0.1:9" in str(state.message)
    assert SECRET not in str(state.message)


def test_a_promotion_writes_no_password(study: Study, prefect: dict[str, str], tmp_path: Path) -> None:
    """No password of MLflow, Prefect, the DVC remote or a webhook; all servers but the remote's are there."""
    root = study.copied(tmp_path / "workspace")
    promotion = {"largest_drop": 0.99, "keep": None, "least_speedup": None}
    write_params(root, tiny_params(study={"recipes": ["svd"]}, promotion=promotion))
    users = root / ".dvc/config.local"
    users.write_text(f"[core]\n    remote = theirs\n['remote \"theirs\"']\n    url = {URL}/store\n")
    said = tmp_path / "said"
    said.touch()
    with mlflow_server(tmp_path) as (address, _), temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}):
        variables = {"MLFLOW_TRACKING_URI": behind(address), "PREFECT_API_URL": behind(prefect["PREFECT_API_URL"])}
        variables |= {"PREFECT_API_AUTH_STRING": f"user:{SECRET}", "DVC_SITE_CACHE_DIR": str(tmp_path / "site")}
        environment = BARE | prefect | variables
        with get_client(sync_client=True) as client:
            block = {"url": "http://127.0.0.1:9/{{token}}", "secrets": {"token": SECRET}, "json_data": {}}
            CustomWebhookNotificationBlock(name="secret", **block).save("secret")
            notifications.set_up("secret", ["custom-webhook/secret"], timedelta(hours=26))
            deployment = client.create_deployment(client.create_flow_from_name("study"), "secret")
            run = client.create_flow_run_from_deployment(deployment, parameters={"promote": True}).id
            forked.start(forked.run_promoting, str(root), environment, run, str(said)).join()
            state = client.read_flow_run(run).state
        assert state.name == "Promoted", said.read_text()
        code, pushed = Command(root, environment, "push").end()
    assert code == 1
    assert "127.0.0.1:9" in pushed
    assert SECRET not in pushed
    assert places_of(SECRET, tmp_path, Path(prefect["PREFECT_HOME"])) == [users]


@pytest.mark.parametrize("logger", ["apprise", "prefect.server.events.actions", "prefect.server.events"])
def test_the_address_of_a_notification_is_not_logged(logger: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is a secret if it is that of a webhook; the host says which one failed."""
    make, hook = logging.getLogRecordFactory(), sys.excepthook
    try:
        redaction.keep_out()
        address = f"https://hooks.example.org:99/services/{SECRET}?key={SECRET}"
        logging.getLogger(logger).error("Server error '500' for url '%s'", address)
        try:
            raise ValueError(f"{address} does not answer")
        except ValueError:
            logging.getLogger(logger).exception("failed")
        assert SECRET not in caplog.text
        assert caplog.text.count("https://hooks.example.org:99/***") == 2
    finally:
        logging.setLogRecordFactory(make)
        sys.excepthook = hook


def behind(address: str) -> str:
    """Return an address with user and password."""
    return address.replace("://", f"://user:{SECRET}@")


def places_of(secret: str, *folders: Path) -> list[Path]:
    """Return the files that hold a password, plain or in base64."""
    ways = [secret.encode(), base64.b64encode(f"user:{secret}".encode())]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return [file for file in files if any(way in file.read_bytes() for way in ways)]
