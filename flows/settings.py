"""Defaults of the tools around the pipeline, which the user's environment overrides, and how secrets stay hidden.

Applied where a process begins, never by an import: by each command, before it imports prefect, mlflow and dvc, which
read some of their settings as they are imported; what the command starts inherits them. Where Prefect begins, which
runs a deployment in a process of its own, the flow applies the rest.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

LOOPBACK = "127.0.0.1"
PREFECT_ADDRESS = f"http://{LOOPBACK}:{os.environ.get('PREFECT_SERVER_API_PORT', '4200')}"
MLFLOW_ADDRESS = f"http://{LOOPBACK}:{os.environ.get('MLFLOW_PORT', '5000')}"

_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",  # the versions of the registry are code and safetensors
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Whose turn it is must survive a restart: otherwise a run that a power cut ended blocks all that follow.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # Two first starts at once build the database in turn; the default of 20 s is too short for the second.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    # A temporary server is to store the last states soon, before the run ends; below 1 it would spin.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    # A tracking server that is gone must not hold up the study for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait do not spin: tasks/__init__.py says why
}
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "AUTH_STRING")
"""How the name of an environment variable ends that holds a secret: AWS_SECRET_ACCESS_KEY, HF_TOKEN."""
_LEAST = 8  # characters of a secret; what is shorter would hide innocent words


def apply() -> None:
    """Set the defaults, and keep secrets out of all that is logged and of the traceback that ends the process."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not isinstance(make := logging.getLogRecordFactory(), _Discreet):
        logging.setLogRecordFactory(_Discreet(make))
    sys.excepthook = _say_end


def use_local_server() -> None:
    """Use the Prefect server of `python -m flows ui` where one answers and no environment or profile names another."""
    if "PREFECT_API_URL" in os.environ or not answers(f"{PREFECT_ADDRESS}/api/health"):
        return
    from prefect.context import refresh_global_settings_context  # slow
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        os.environ["PREFECT_API_URL"] = f"{PREFECT_ADDRESS}/api"
        refresh_global_settings_context()


def shown(text: str) -> str:
    """An address, or any text, without the user names, passwords and tokens that it may hold."""
    text = re.sub(r'://[^\s/"<>]*@', "://", text)
    for name, value in os.environ.items():
        if name.endswith(_SECRETS) and len(value) >= _LEAST:
            text = text.replace(value, "***")
    return text


class _Discreet:
    """Makes log records that hold no secret, whichever library writes them and whatever handles them."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.make(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit, in whatever way: the handler says so
            return record
        if (said := shown(message)) != message:
            record.msg, record.args = said, None
        if record.exc_info and record.exc_info[1]:
            trace = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            if (said := shown(trace)) != trace:
                record.exc_text, record.exc_info = said, None
        return record


def _say_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(shown("".join(traceback.format_exception(kind, error, trace))))


def answers(url: str) -> bool:
    """Whether a server answers; one that asks for a password does, too."""
    try:
        with urlopen(shown(url), timeout=5) as response:
            return response.status == 200
    except HTTPError as error:
        return error.code in (401, 403)
    except (URLError, TimeoutError, ConnectionError):
        return False
