"""Defaults of the tools around the pipeline are set when a process begins, never by an import."""

import os
import subprocess
import sys

import pytest
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_API_URL, temporary_settings

from flows.servers import prefect_server
from tests.flows.servers import one_answer
from tests.workspace import REPOSITORY

EVERY_MODULE = """
import gc, logging, os, pkgutil, sys, importlib
gc.disable()
import tasks  # which the modules import, too, as torch: only what they do themselves is looked at

def state():
    return dict(os.environ), sys.excepthook, logging.getLogRecordFactory(), getattr(sys.modules.get("torch"), "load", 0)

first = state()
import flows.study
begun, slow = state(), {"torch", "transformers", "mlflow"} & set(sys.modules)
import torch
second = state()
names = [module.name for module in pkgutil.walk_packages(flows.__path__, "flows.") if module.name != "flows.__main__"]
for name in names:
    importlib.import_module(name)
print(len(names), sorted(slow), begun == first, state() == second)
"""
SETTINGS_HOLD = """
import logging, sys
from flows import cli
hook, factory = sys.excepthook, logging.getLogRecordFactory()
cli.main()
cli.main()
import mlflow.telemetry.client, prefect.settings
assert sys.excepthook is not hook
assert logging.getLogRecordFactory().make is factory  # once, however often it is asked for
assert mlflow.telemetry.client._MLFLOW_TELEMETRY_CLIENT is None
assert not prefect.settings.get_current_settings().server.analytics_enabled
"""
PORTS = """
from flows.environment import settings
settings.apply()
import prefect
print(settings.PREFECT_ADDRESS, settings.MLFLOW_ADDRESS)
"""


def fresh(code: str, **variables: str) -> str:
    """Return the last line that a fresh interpreter prints, with no settings of the tools but these."""
    prefixes = ("PREFECT_", "MLFLOW_", "DVC_", "DO_NOT_TRACK", "TOKENIZERS_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)} | variables
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1] if done.stdout else ""


def test_an_import_changes_nothing_of_its_process() -> None:
    """The import of a scheduled flow waits neither for MLflow, which then reads its settings, nor for torch."""
    count, *rest = fresh(EVERY_MODULE).split()
    assert int(count) > 20
    assert rest == ["[]", "True", "True"]


def test_a_command_sets_the_defaults_before_the_tools_are_imported() -> None:
    fresh(SETTINGS_HOLD)


def test_an_empty_port_is_the_usual_one() -> None:
    assert fresh(PORTS, PREFECT_SERVER_API_PORT="", MLFLOW_PORT="") == "http://127.0.0.1:4200 http://127.0.0.1:5000"


def test_a_busy_server_gets_prefects_own_timeout() -> None:
    """A busy server once needed more than five seconds, and three runs failed before they began."""

    with one_answer(seconds=0.5) as server:
        address = f"{server}/api"
        with temporary_settings({PREFECT_API_URL: address}):
            assert prefect_server.require() == address
        with (
            temporary_settings({PREFECT_API_URL: address, PREFECT_API_REQUEST_TIMEOUT: 0.1}),
            pytest.raises(prefect_server.ServerError, match=address),
        ):
            prefect_server.require()
