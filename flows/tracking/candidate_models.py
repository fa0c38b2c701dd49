"""A candidate in MLflow's list of models, with its scores and the data they were measured on.

The model is external: its weights stay in DVC, and tags say where. Only a registered version has its weights in MLflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, LoggedModelStatus, Metric, RunInfo
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from flows.engine.stages import Outcome
from tasks.artifacts.names import recipe_and_keep
from tasks.artifacts.paths import FINETUNED

KEY = "dvc.key"
"""Tag of a candidate's model, but not of a version: the digest of what its stages computed."""
_SPLITS = {
    "validation.": "validation",
    **dict.fromkeys(("shaped.", "factorized.", "recovered.", "onnx.score.", "int8.score."), "test"),
}
"""Beginning of a metric's name → the split it was measured on; other metrics belong to no data set."""


def find(client: MlflowClient, experiment: str, key: str) -> LoggedModel | None:
    """Return the model of the candidate whose stages have this key; one that is not READY was cut off."""
    models = client.search_logged_models([experiment], f"tags.`{KEY}` = '{key}'", max_results=1)
    return models[0] if models else None


def log(
    client: MlflowClient, run: str, model: LoggedModel, outcomes: Sequence[Outcome], metrics: Sequence[Metric]
) -> None:
    """Log the metrics of the model, measured by the stages with these outcomes, in its `run`."""
    client.log_batch(run, metrics=list(_linked(model.model_id, outcomes, metrics)))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run, [LoggedModelOutput(model.model_id, step=0)])


def create(
    client: MlflowClient, run: RunInfo, candidate: str, outcomes: Sequence[Outcome], tags: Mapping[str, str]
) -> LoggedModel:
    """Create the model of the candidate that the `run` made, without its metrics."""
    recipe, keep = recipe_and_keep(candidate)
    path = str(FINETUNED / candidate)
    content = next((outcome.outs[path] for outcome in outcomes if path in outcome.outs), "")
    return client.create_logged_model(
        run.experiment_id,
        candidate.replace(".", "_"),  # names of models have no dots
        run.run_id,
        tags={**tags, "dvc.path": path, "dvc.md5": content, MLFLOW_MODEL_IS_EXTERNAL: "true"},
        params={"recipe": recipe, "keep": keep},
    )


def _linked(model: str, outcomes: Sequence[Outcome], metrics: Sequence[Metric]) -> Iterator[Metric]:
    """Yield the metrics, linked to the model and, where they were measured on a split, to that data set."""
    read = [item for outcome in outcomes for item in outcome.deps.items()]
    data = {Path(path).stem: (path, md5) for path, md5 in read if path.endswith(".parquet")}
    for metric in metrics:
        split = next((split for beginning, split in _SPLITS.items() if metric.key.startswith(beginning)), "")
        name, digest = data.get(split, (None, None))
        yield Metric(metric.key, metric.value, metric.timestamp, metric.step, model, name, digest)
