"""Sort MLflow's runs and models into those that stay and those that go; find the DVC digests in those that stay."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Experiment, LoggedModel, Run, RunStatus, ViewType
from mlflow.entities.model_registry import ModelVersion
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from flows.gc import referenced_digests
from flows.gc.kind import CannotCollect, Kind, Size, kind
from flows.registry import last_champion, versions
from flows.tracking import candidate_models, database, mirror
from tasks.artifacts.names import candidate_of
from tasks.config import validation

_DELETED = "deleted"  # MLflow's word for runs in its trash
_MODEL = "models:/"  # beginning of a version's source, before the id of the model


@contextmanager
def look(recent: int) -> Iterator[tuple[set[str], list[Kind]]]:
    """Yield the digests of the objects in DVC's cache that MLflow's records name, and the kinds of things in MLflow.

    While the block runs, nobody can promote a model. Only runs and models in the workspace's own store can be removed.
    On a tracking server that the user has configured, all stay.

    Args:
        recent: number of finished runs of each study to keep, in addition to those that made a registered version.

    Raises:
        CannotCollect: MLflow's database is damaged, or what a registered version needs is in MLflow's trash.
    """
    model = validation.typed_section("promotion").model
    database.check()
    if damaged := database.damaged():
        raise CannotCollect(
            f"{damaged[0]} is damaged, and its versions may need any object: repair it, or move it elsewhere"
        )
    if last_champion.is_first(model):
        yield set(), [_registered(0)]
        return
    with versions.connected(model) as registry:
        yield _tracked(registry.client, recent, local=database.is_local())


def _tracked(client: MlflowClient, recent: int, local: bool) -> tuple[set[str], list[Kind]]:
    # These functions of `mlflow` search all pages; those of the client only one.
    registered = mlflow.search_model_versions()
    experiments = {found.experiment_id: found for found in mlflow.search_experiments(view_type=ViewType.ALL)}
    ours = "" if local else "tags.`eckart.study` LIKE '%'"  # other projects may use the server, too
    found = mlflow.search_runs(
        list(experiments), ours, run_view_type=ViewType.ALL, max_results=10**9, output_format="list"
    )
    runs = {run.info.run_id: run for run in found}
    latest = _latest(runs.values(), recent)
    lineages = {run: _lineage(client, run) for run in latest}
    children = [run for run in runs.values() if run.data.tags.get(MLFLOW_PARENT_RUN_ID) in latest]
    naming = [*lineages.values(), *(dict(tagged.data.tags) for tagged in children)]
    for version in registered:
        naming += [dict(version.tags), _stages_of(client, runs, version)]
    digests = referenced_digests.in_text(json.dumps(naming))
    stay = latest | {run.info.run_id for run in children} | {str(version.run_id) for version in registered}
    stay |= {str(run) for lineage in lineages.values() for run in lineage.get("candidates", {}).values()}
    stay |= {str(runs[run].data.tags.get(MLFLOW_PARENT_RUN_ID)) for run in stay & runs.keys()}
    own = _kinds(client, experiments, runs, stay, registered) if local else []
    return digests, [_registered(len(registered)), *own]


def _registered(count: int) -> Kind:
    """Return the `Kind` of registered versions. All stay; their number lets a user see that the registry is right."""
    return Kind("registered versions", Size(count, None), Size(0, None), lambda: None)


def _latest(runs: Iterable[Run], recent: int) -> set[str]:
    """Return the ids of the `recent` latest finished runs of each study, and of all runs that started after them."""
    latest: set[str] = set()
    finished: Counter[str] = Counter()  # experiment of a study → how many of its finished runs are among the latest
    for run in sorted(runs, key=lambda run: -run.info.start_time):
        tags, study = run.data.tags, run.info.experiment_id
        is_parent = "eckart.study" in tags and MLFLOW_PARENT_RUN_ID not in tags
        if is_parent and run.info.lifecycle_stage != _DELETED and finished[study] < recent:
            finished[study] += run.info.status == RunStatus.to_string(RunStatus.FINISHED)
            latest.add(run.info.run_id)
    return latest


def _lineage(client: MlflowClient, run: str) -> dict[str, Any]:
    """Load the record of stages and candidates that a study's run stored in MLflow at its end; {} if there is none."""
    if not any(file.path == mirror.LINEAGE for file in client.list_artifacts(run)):
        return {}
    return mlflow.artifacts.load_dict(f"runs:/{run}/{mirror.LINEAGE}")


def _runs_of(version: ModelVersion, runs: Mapping[str, Run]) -> list[str]:
    """Return the ids of the run that made a version and of that run's parent, without those that are not in `runs`."""
    made = runs.get(version.run_id or "")
    parent = made.data.tags.get(MLFLOW_PARENT_RUN_ID) if made else None
    return [name for name in (version.run_id, parent) if name and name in runs]


def _stages_of(client: MlflowClient, runs: Mapping[str, Run], version: ModelVersion) -> dict[str, Any]:
    """Return stage → its record, for the stages of a version's candidate and those that all candidates share."""
    parent = _runs_of(version, runs)[1:]
    stages = _lineage(client, parent[0]).get("stages", {}) if parent else {}
    own = {"", version.tags.get("eckart.candidate", "")}
    return {name: stage for name, stage in stages.items() if candidate_of(name) in own}


def _kinds(
    client: MlflowClient,
    experiments: Mapping[str, Experiment],
    runs: Mapping[str, Run],
    stay: set[str],
    registered: Iterable[ModelVersion],
) -> list[Kind]:
    """Return the kinds of things in the workspace's own store, runs and models; `stay`: ids of the runs that stay."""
    models = {model.model_id: model for model in mlflow.search_logged_models(list(experiments), output_format="list")}
    for version in registered:
        _check_trash(version, experiments, runs, models)
    used = {_model_of(version) for version in registered}
    ending = {
        name
        for name, run in runs.items()
        # MLflow's trash is emptied.
        if run.info.lifecycle_stage == _DELETED or ("eckart.study" in run.data.tags and name not in stay)
    }
    unused = {name for name, model in models.items() if name not in used and _is_unused(model, runs.keys() - ending)}
    run_folders = {name: _folder(run.info.artifact_uri) for name, run in runs.items()}
    model_folders = {name: _folder(model.artifact_location) for name, model in models.items()}
    remove_runs = partial(_remove, client, [runs[name] for name in ending], [])
    remove_models = partial(_remove, client, [], unused)
    return [
        kind("runs in MLflow", run_folders.values(), [run_folders[name] for name in ending], remove_runs),
        kind("models in MLflow", model_folders.values(), [model_folders[name] for name in unused], remove_models),
    ]


def _model_of(version: ModelVersion) -> str:
    """Return the id of a version's model; empty if its files are elsewhere."""
    source = version.source or ""
    return source.removeprefix(_MODEL) if source.startswith(_MODEL) else ""


def _check_trash(
    version: ModelVersion,
    experiments: Mapping[str, Experiment],
    runs: Mapping[str, Run],
    models: Mapping[str, LoggedModel],
) -> None:
    """Raise CannotCollect if MLflow's trash, which is emptied, has what a registered version needs."""
    name = _model_of(version)
    needed = [runs[run] for run in _runs_of(version, runs)]
    places = [run.info.experiment_id for run in needed] + ([models[name].experiment_id] if name in models else [])
    deleted = next((place for place in places if experiments[place].lifecycle_stage == _DELETED), None)
    if deleted:
        what, remedy = f"experiment {experiments[deleted].name}", f"experiments restore --experiment-id {deleted}"
    elif run := next((run.info.run_id for run in needed if run.info.lifecycle_stage == _DELETED), None):
        what, remedy = f"run {run}", f"runs restore --run-id {run}"
    elif name and name not in models and (needed or database.all_is_local()):  # others register theirs elsewhere, too
        what, remedy = f"model {name}", ""
    else:
        return
    restore = f"restore it (`mlflow {remedy}`), or " if remedy else ""
    raise CannotCollect(
        f"version {version.version} of {version.name} needs {what}, which was deleted in MLflow: {restore}delete the "
        "version, too"
    )


def _is_unused(model: LoggedModel, staying_runs: set[str]) -> bool:
    """Whether to remove a model that no registered version uses.

    A candidate's model is removed with its run. The model of a deleted version is removed. Other models stay.
    """
    if candidate_models.KEY in model.tags:
        return model.source_run_id not in staying_runs
    return versions.CONTENT in model.tags


def _folder(address: str) -> Path:
    return Path(local_file_uri_to_path(address))


def _remove(client: MlflowClient, runs: Iterable[Run], models: Iterable[str]) -> None:
    """Move runs and models into MLflow's trash, and then empty the trash with MLflow's gc."""
    for run in runs:
        if run.info.lifecycle_stage != _DELETED:
            client.delete_run(run.info.run_id)
    for model in models:
        client.delete_logged_model(model)
    if runs or models:
        from mlflow.cli import gc  # slow imports

        store = database.address()
        with contextlib.redirect_stdout(io.StringIO()):
            gc.main(["--backend-store-uri", store, "--tracking-uri", store], standalone_mode=False)
