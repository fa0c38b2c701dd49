"""What the tools around the pipeline are told by default; the environment of the user wins.

Applied by flows/__init__.py, before prefect, mlflow and dvc are imported and read their settings.
"""

from __future__ import annotations

import os
from urllib.error import URLError
from urllib.request import urlopen

PREFECT_ADDRESS = "http://127.0.0.1:4200"
MLFLOW_ADDRESS = "http://127.0.0.1:5000"

_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Two first starts at once build the database in turn; the default of 20 s is too short for the second.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    # A temporary server is to store the last states soon, before the run ends; below 1 it would spin.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # A tracking server that is gone must not hold up the study for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "TOKENIZERS_PARALLELISM": "false",
}


def apply() -> None:
    """Set the defaults."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def use_local_server() -> None:
    """Use the Prefect server of `python -m flows ui` where one answers."""
    if "PREFECT_API_URL" not in os.environ and _answers(f"{PREFECT_ADDRESS}/api/health"):
        os.environ["PREFECT_API_URL"] = f"{PREFECT_ADDRESS}/api"


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=1) as response:
            return response.status == 200
    except (URLError, TimeoutError, ConnectionError):
        return False
