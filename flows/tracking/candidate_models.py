"""A candidate in MLflow's list of models, with scores and the data they were measured on, by which MLflow ranks it.

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
"""Tag of a candidate's model, and of no version's: what its stages computed."""
_SPLITS = {
    "validation.": "validation",
    **dict.fromkeys(("shaped.", "factorized.", "recovered.", "onnx.score.", "int8.score."), "test"),
}
"""How the name of a metric begins → the split that it was measured on; others are of no data set here."""


def find(client: MlflowClient, experiment: str, key: str) -> LoggedModel | None:
    """The model of the candidate whose stages have this key; one that is not READY was cut off."""
    found = client.search_logged_models([experiment], f"tags.`{KEY}` = '{key}'", max_results=1)
    return found[0] if found else None


def log(
    client: MlflowClient, run: str, model: LoggedModel, outcomes: Sequence[Outcome], metrics: Sequence[Metric]
) -> None:
    """Tell MLflow what was measured of the model, in the stages with these outcomes and in its `run`."""
    client.log_batch(run, metrics=list(_linked(model.model_id, outcomes, metrics)))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run, [LoggedModelOutput(model.model_id, step=0)])


def create(
    client: MlflowClient, run: RunInfo, candidate: str, outcomes: Sequence[Outcome], tags: Mapping[str, str]
) -> LoggedModel:
    """A model of the candidate that the `run` made, without its metrics."""
    recipe, keep = recipe_and_keep(candidate)
    path = str(FINETUNED / candidate)
    content = next((one.outs[path] for one in outcomes if path in one.outs), "")
    return client.create_logged_model(
        run.experiment_id,
        candidate.replace(".", "_"),  # names of models have no dots
        run.run_id,
        tags={**tags, "dvc.path": path, "dvc.md5": content, MLFLOW_MODEL_IS_EXTERNAL: "true"},
        params={"recipe": recipe, "keep": keep},
    )


def _linked(model: str, outcomes: Sequence[Outcome], metrics: Sequence[Metric]) -> Iterator[Metric]:
    """The metrics as those of the model and, where they were measured on a split, of that data set."""
    read = {
        Path(path).stem: (path, md5) for one in outcomes for path, md5 in one.deps.items() if path.endswith(".parquet")
    }
    for one in metrics:
        split = next((split for beginning, split in _SPLITS.items() if one.key.startswith(beginning)), "")
        name, digest = read.get(split, (None, None))
        yield Metric(one.key, one.value, one.timestamp, one.step, model, name, digest)
