"""MLflow's page behind our guard, as the application of `mlflow server --app-name eckart`."""

from __future__ import annotations

import os

from flows.servers.access_guard import Guard


def app() -> Guard:
    # Imported here, because MLflow reads the server's settings when this module is imported.
    from mlflow.server.fastapi_app import app as page

    key, serves = os.environ["ECKART_SERVER_KEY"], os.environ["ECKART_SERVES"]
    return Guard(page, key, os.environ.get("ECKART_AUTH_STRING"), serves)
