"""MLflow's page behind our guard, as `mlflow server --app-name eckart` serves it; the environment has the key."""

from __future__ import annotations

import os

from flows.servers.access_guard import Guard


def app() -> Guard:
    from mlflow.server.fastapi_app import app as page  # which reads settings of a server as it is imported

    told = os.environ
    return Guard(page, told["ECKART_SERVER_KEY"], told.get("ECKART_AUTH_STRING"), told["ECKART_SERVES"])
