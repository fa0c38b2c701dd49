"""Defaults of the tools around the pipeline, which the user's environment overrides.

Applied where a process begins, never by an import: by each command, before it imports prefect, mlflow and dvc, which
read some of their settings as they are imported; what the command starts inherits them. Where Prefect begins, which
runs a deployment in a process of its own, the flow applies the rest; its module keeps secrets out of the logs before.
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

_ENOUGH = 1000  # bytes of an answer

_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",  # the versions of the registry are code and safetensors
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # how it makes a database is of no use to a study
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true",  # how busy the machine was, in the study's run
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # which has the password of MLFLOW_TRACKING_URI
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Whose turn it is must survive a restart: otherwise a run that a power cut ended blocks all that follow.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # no guard, no key: flows/servers/prefect_server.py starts ours
    # A temporary server is to store the last states soon, before the run ends; below 1 it would spin.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # A tracking server that is gone must not hold up the study for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait do not spin: tasks/__init__.py says why
}


def apply() -> None:
    """Set the defaults, and keep secrets out of all that this process says."""
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
    """No proxy of the environment stands before this machine's own servers."""
    if not {"http_proxy", "https_proxy", "all_proxy"} & {name.lower() for name in os.environ}:
        return
    told = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    others = [one for one in map(str.strip, told.split(",")) if one not in ("", LOOPBACK, "localhost")]
    if "*" not in others:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*others, LOOPBACK, "localhost"])


def _is_no_empty_curve(record: logging.LogRecord) -> bool:
    """DVC warns of an empty output, which the curve of a stage that trains nothing is."""
    return not (record.msg == "'%s' is empty." and str(record.args).endswith(".jsonl',)"))


def _is_no_echo_of_a_failure(record: logging.LogRecord) -> bool:
    """Prefect says of a stage that failed two things, with an empty traceback, and one of each that waits for it."""
    if record.exc_info == (None, None, None):
        record.exc_info = None
    said = record.getMessage()
    return not said.startswith(("Finished in state NotReady", "Task run failed with state"))


def importable() -> dict[str, str]:
    """The environment by which a server's process, wherever it is started, can import these modules."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def use_local_server() -> None:
    """Use the Prefect server of `eckart ui` or `serve` where it answers and no environment or profile names another."""
    if "PREFECT_API_URL" not in os.environ and asked(f"{PREFECT_ADDRESS}/api/health")[0]:
        from flows.servers import prefect_server  # slow

        prefect_server.use_local()


def answers(url: str, seconds: float = 5) -> bool:
    """Whether a server answers in time, one that asks for a password, too; False at once if it refuses connections."""
    return asked(url, seconds)[0] in (200, 401, 403)


def asked(url: str, seconds: float = 5) -> tuple[int, bytes]:
    """The status of an answer, and how it begins; 0 if none comes in time, at once where connections are refused."""
    try:
        with urlopen(redaction.shown(url), timeout=seconds) as response:
            return response.status, response.read(_ENOUGH)
    except HTTPError as error:
        return error.code, b""
    except (OSError, HTTPException, ValueError):  # a URLError, too, what does not speak HTTP, and what is no address
        return 0, b""
