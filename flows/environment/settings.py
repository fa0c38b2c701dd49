"""Default settings of Prefect, MLflow and DVC. Variables in the user's environment take precedence.

Each command calls `apply` at its start, before it imports prefect, mlflow and dvc, because these read some settings
when imported. Child processes inherit the settings. If Prefect itself starts the process, for a run of a deployment,
the flow calls `apply`.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from flows.engine import site_cache
from flows.environment import redaction
from tasks.artifacts.paths import ONNX

LOOPBACK = "127.0.0.1"
PREFECT_ADDRESS = f"http://{LOOPBACK}:{os.environ.get('PREFECT_SERVER_API_PORT') or 4200}"
MLFLOW_ADDRESS = f"http://{LOOPBACK}:{os.environ.get('MLFLOW_PORT') or 5000}"

_LONGEST = 1000  # bytes of a server's response that are read

_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",  # the registry's versions are code and safetensors
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # otherwise it reports each step of creating a database
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true",  # records in the study's run how busy the machine was
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the URL may hold a password
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Leases of running flows must survive a restart: otherwise a run that a power cut ended would block all later runs.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # Prefect's own lacks guard and key; prefect_server.py starts ours
    # Seconds. A temporary server must store the last states before the run ends. With less than 1 the service would
    # never sleep.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",  # otherwise nightly runs fill the disk in time
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "2592000",  # 30 days, in seconds
    # A tracking server that does not answer must not delay the study for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep; see tasks/__init__.py
}


def apply() -> None:
    """Set the default settings in the environment, and remove secrets from everything that this process logs."""
    for name in ("PREFECT_SERVER_API_PORT", "MLFLOW_PORT"):
        if not os.environ.get(name):
            os.environ.pop(name, None)  # Prefect would take an empty port for an error
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    _bypass_proxies()
    site_cache.choose()
    redaction.keep_out()
    # flows/servers/access_key.py reports this as an error.
    warnings.filterwarnings("ignore", "Failed to create the Prefect home directory")
    logging.getLogger("dvc.output").addFilter(_is_no_empty_output)
    logging.getLogger("prefect.task_runs").addFilter(_is_no_echo)


def _bypass_proxies() -> None:
    """Make connections to this machine bypass the proxies that the environment names."""
    if not {"http_proxy", "https_proxy", "all_proxy"} & {name.lower() for name in os.environ}:
        return
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    others = [host for host in map(str.strip, excluded.split(",")) if host not in ("", LOOPBACK, "localhost")]
    if "*" not in others:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*others, LOOPBACK, "localhost"])


def _is_no_empty_output(record: logging.LogRecord) -> bool:
    """Whether to keep a log record: drop DVC's warning about empty outputs of stages that train or export nothing."""
    return not re.fullmatch(rf"'({ONNX}/.*|.*\.jsonl)' is empty\.", record.getMessage())


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Whether to keep a log record: drop what Prefect repeats about stages that failed or did not begin.

    Stages do not begin downstream of a failed one, or if the run is paused. An empty traceback is removed.
    """
    if record.exc_info == (None, None, None):
        record.exc_info = None
    echoes = ("Finished in state NotReady", "Finished in state Pending(", "Task run failed with state")
    return not record.getMessage().startswith(echoes)


def importable() -> dict[str, str]:
    """Return the environment variable with which a server's process can import our modules from any folder."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def use_local_server() -> None:
    """Use the Prefect server of `eckart ui` or `serve` if it runs, unless environment or profile name another."""
    if "PREFECT_API_URL" not in os.environ and http_get(f"{PREFECT_ADDRESS}/api/health")[0]:
        from flows.servers import prefect_server  # slow

        prefect_server.use_local()


def answers(url: str) -> bool:
    """Whether a server answers in time. A request for a password counts as an answer."""
    return http_get(url)[0] in (200, 401, 403)


def http_get(url: str, seconds: float = 5) -> tuple[int, bytes]:
    """Send a GET request, and return the HTTP status and the first bytes of the answer.

    The status is 0 if no answer comes within `seconds` or if the connection is refused.
    """
    try:
        with urlopen(redaction.redact(url), timeout=seconds) as response:
            return response.status, response.read(_LONGEST)
    except HTTPError as error:
        return error.code, b""
    except (OSError, HTTPException, ValueError):  # no server, no HTTP, or no address
        return 0, b""
