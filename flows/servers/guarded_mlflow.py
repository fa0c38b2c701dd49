"""MLflow's page behind our guard, as `mlflow server --app-name eckart` serves it. The environment has the key."""

from __future__ import annotations

import os

from flows.servers.access_guard import Guard


def app() -> Guard:
    from mlflow.server.fastapi_app import app as page  # reads the settings of a server when imported

    key, serves = os.environ["ECKART_SERVER_KEY"], os.environ["ECKART_SERVES"]
    return Guard(page, key, os.environ.get("ECKART_AUTH_STRING"), serves)
