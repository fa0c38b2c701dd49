"""Entries of candidates in MLflow's list of models, with their scores and the data sets on which they were scored.

The entries are external models in the sense of MLflow: the weights stay in DVC, and tags say where. MLflow stores
weights only for the versions that a promotion registers.
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
"""Tag of a candidate's entry: result of `mirror.key_of` for its stages. Models that a promotion uploads lack it."""
_SPLITS = {
    "validation.": "validation",
    **dict.fromkeys(("shaped.", "factorized.", "recovered.", "onnx.score.", "int8.score."), "test"),
}
"""Beginning of a metric's name → the split on which it was measured. Other metrics belong to no data set."""


def find(client: MlflowClient, experiment: str, key: str) -> LoggedModel | None:
    """Return the entry whose tag `KEY` is `key`, if any. If its status is not READY, `log` was interrupted."""
    models = client.search_logged_models([experiment], f"tags.`{KEY}` = '{key}'", max_results=1)
    return models[0] if models else None


def log(
    client: MlflowClient, run: str, model: LoggedModel, outcomes: Sequence[Outcome], metrics: Sequence[Metric]
) -> None:
    """Log in the candidate's run the metrics that its stages measured, linked to its entry; mark the entry as READY."""
    client.log_batch(run, metrics=list(_linked(model.model_id, outcomes, metrics)))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run, [LoggedModelOutput(model.model_id, step=0)])


def create(
    client: MlflowClient, run: RunInfo, candidate: str, outcomes: Sequence[Outcome], tags: Mapping[str, str]
) -> LoggedModel:
    """Create the entry of a candidate. Then `log` adds its metrics, and makes it an output of the run."""
    recipe, keep = recipe_and_keep(candidate)
    path = str(FINETUNED / candidate)
    content = next((outcome.outs[path] for outcome in outcomes if path in outcome.outs), "")
    return client.create_logged_model(
        run.experiment_id,
        candidate.replace(".", "_"),  # MLflow allows no dots in the names of models
        run.run_id,
        tags={**tags, "dvc.path": path, "dvc.md5": content, MLFLOW_MODEL_IS_EXTERNAL: "true"},
        params={"recipe": recipe, "keep": keep},
    )


def _linked(model: str, outcomes: Sequence[Outcome], metrics: Sequence[Metric]) -> Iterator[Metric]:
    """Yield the metrics with links to the entry and, if they were measured on a split, to the data set of the split."""
    read = [item for outcome in outcomes for item in outcome.deps.items()]
    data = {Path(path).stem: (path, md5) for path, md5 in read if path.endswith(".parquet")}
    for metric in metrics:
        split = next((split for beginning, split in _SPLITS.items() if metric.key.startswith(beginning)), "")
        name, digest = data.get(split, (None, None))
        yield Metric(metric.key, metric.value, metric.timestamp, metric.step, model, name, digest)
