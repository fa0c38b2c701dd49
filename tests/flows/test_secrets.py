"""No secret in anything that a run writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from ruamel.yaml import YAML

from flows.study import study as flow
from tasks.errors import EckartError
from tests.flows.forked import Command
from tests.flows.servers import until
from tests.flows.toy import BARE
from tests.test_safety import SECRET, URL
from tests.workspace import tiny_params, write_params


def test_a_run_with_an_unreachable_mlflow_writes_it_nowhere(prefect: dict[str, str], tmp_path: Path) -> None:
    """Not on the terminal, not in Prefect's database and logs, not in the workspace: of the flow or of a stage."""
    root, home = study(tmp_path / "workspace"), Path(prefect["PREFECT_HOME"])
    told = {"MLFLOW_TRACKING_URI": URL, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "HF_TOKEN": f"hf_{SECRET}"}
    code, said = Command(root, BARE | prefect | told, "run").end()
    assert code == 0, said
    assert re.search(r"MLflow .*127\.0\.0\.1.*\b9\b", said)  # what cannot be reached
    printed = "connected to http://127.0.0.1:9 with ***"  # by the stage
    assert printed in said
    assert SECRET not in said
    until(lambda: any(printed.encode() in file.read_bytes() for file in home.glob("prefect.db*")))
    written = [file for folder in (root, home) for file in folder.rglob("*") if file.is_file()]
    assert [file for file in written if SECRET.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("error", [EckartError, RuntimeError])
def test_the_state_of_a_run_that_failed_holds_none(
    error: type[Exception], prefect: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Prefect's server stores, and sends to whoever is told."""

    def fail(*_: object) -> None:
        raise error(f"{URL} does not answer")

    monkeypatch.setattr("flows.study._run", fail)
    with temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}):
        state = flow(str(tmp_path), return_state=True)
    assert state.is_failed()
    assert "127.0.0.1:9" in str(state.message)
    assert SECRET not in str(state.message)


def study(root: Path) -> Path:
    """A workspace whose only stage tells what it was told."""
    write_params(root, tiny_params())
    commands = [
        "echo connected to $MLFLOW_TRACKING_URI with $HF_TOKEN",
        "mkdir -p reports && echo done > reports/comparison.txt",
        "printf 'recipe,keep,metric,dense,factorized,recovered,target_parameters,macs_per_token,speedup\\n"
        "svd,0.5,accuracy,0.8,0.7,0.75,10,20,1.5\\n' > reports/comparison.csv",
    ]
    outs = ["reports/comparison.txt", "reports/comparison.csv"]
    with (root / "dvc.yaml").open("w") as file:
        YAML().dump({"stages": {"compare": {"cmd": commands, "outs": outs}}}, file)
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, cwd=root, check=True, env={**os.environ, "DVC_NO_ANALYTICS": "1"})
    return root
