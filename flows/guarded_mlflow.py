"""MLflow's page behind our guard: `mlflow server --app-name eckart` serves it, with the key from the environment."""

from __future__ import annotations

import os

from mlflow.server.fastapi_app import app as _mlflow

from flows.guard import Guard

app = Guard(_mlflow, os.environ["ECKART_SERVER_KEY"], os.environ.get("ECKART_AUTH_STRING"))
