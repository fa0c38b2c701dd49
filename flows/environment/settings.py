"""Defaults for Prefect, MLflow and DVC, which the user's environment overrides.

No import applies them. Each command does at its start, before it imports prefect, mlflow and dvc, which read some
settings when imported; processes that it starts inherit them. Where Prefect itself starts the process, for a run of a
deployment, the flow applies them.
"""

from __future__ import annotations

import logging
import os
import warnings
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from flows.engine import site_cache
from flows.environment import redaction

LOOPBACK = "127.0.0.1"
PREFECT_ADDRESS = f"http://{LOOPBACK}:{os.environ.get('PREFECT_SERVER_API_PORT', '4200')}"
MLFLOW_ADDRESS = f"http://{LOOPBACK}:{os.environ.get('MLFLOW_PORT', '5000')}"

_LONGEST = 1000  # bytes read of an answer

_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",  # the registry's versions are code and safetensors
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # silences how it makes a database
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true",  # records in the study's run how busy the machine was
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the URL may hold a password
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Concurrency leases on disk survive a restart: otherwise a run that a power cut ended blocks all later ones.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # has no guard and no key: prefect_server.py starts ours
    # A temporary server must store the last states before the run ends. Below 1 it would spin.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",  # else a year of nights fills the disk
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "2592000",  # 30 days, in seconds
    # A tracking server that is gone must not delay the study for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads do not spin; tasks/__init__.py says why
}


def apply() -> None:
    """Set the defaults, and keep secrets out of all that this process prints and logs."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    _pass_proxies_by()
    site_cache.choose()
    redaction.keep_out()
    warnings.filterwarnings(
        "ignore", "Failed to create the Prefect home directory"
    )  # flows/servers/access_key.py says it
    logging.getLogger("dvc.output").addFilter(_is_no_empty_curve)
    logging.getLogger("prefect.task_runs").addFilter(_is_no_echo_of_a_failure)


def _pass_proxies_by() -> None:
    """Exclude this machine from the proxies of the environment."""
    if not {"http_proxy", "https_proxy", "all_proxy"} & {name.lower() for name in os.environ}:
        return
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    others = [host for host in map(str.strip, excluded.split(",")) if host not in ("", LOOPBACK, "localhost")]
    if "*" not in others:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*others, LOOPBACK, "localhost"])


def _is_no_empty_curve(record: logging.LogRecord) -> bool:
    """Drop DVC's warning about an empty output that is the curve of a stage without training."""
    return not (record.msg == "'%s' is empty." and str(record.args).endswith(".jsonl',)"))


def _is_no_echo_of_a_failure(record: logging.LogRecord) -> bool:
    """Drop what Prefect repeats about a failed stage and about those that wait for it, and empty tracebacks."""
    if record.exc_info == (None, None, None):
        record.exc_info = None
    return not record.getMessage().startswith(("Finished in state NotReady", "Task run failed with state"))


def importable() -> dict[str, str]:
    """Return the environment variable that lets a server's process import these modules from any folder."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def use_local_server() -> None:
    """Use the Prefect server of `eckart ui` or `serve` if it answers and no environment or profile names another."""
    if "PREFECT_API_URL" not in os.environ and asked(f"{PREFECT_ADDRESS}/api/health")[0]:
        from flows.servers import prefect_server  # slow

        prefect_server.use_local()


def answers(url: str, seconds: float = 5) -> bool:
    """Whether a server answers in time, be it by asking for a password; False at once if it refuses connections."""
    return asked(url, seconds)[0] in (200, 401, 403)


def asked(url: str, seconds: float = 5) -> tuple[int, bytes]:
    """Return the status of an answer and its first bytes; status 0 if none comes in time or connections are refused."""
    try:
        with urlopen(redaction.shown(url), timeout=seconds) as response:
            return response.status, response.read(_LONGEST)
    except HTTPError as error:
        return error.code, b""
    except (OSError, HTTPException, ValueError):  # no server, no HTTP, or no address
        return 0, b""
