"""MLflow's runs and models: which stay, and what they and the registered versions name of DVC's cache."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run, RunStatus, ViewType
from mlflow.entities.model_registry import ModelVersion
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from flows.gc import referenced_digests
from flows.gc.kind import CannotCollect, Kind, Size, size_of
from flows.registry import last_champion, versions
from flows.tracking import candidate_models, database, mirror
from tasks.artifacts.names import candidate_of
from tasks.config import validation

_DELETED = "deleted"  # MLflow's word for what was thrown away and is still there
_MODEL = "models:/"  # where a version's files are, before the id of the model


@dataclass(frozen=True)
class Tracked:
    """What MLflow and its registry know.

    digests: what registered versions and the runs that stay name in DVC's cache.
    """

    digests: set[str]
    kinds: list[Kind]


@contextmanager
def look(recent: int) -> Iterator[Tracked]:
    """What MLflow says, as long as nobody promotes; runs and models of a server of the user's all stay.

    Args:
        recent: how many finished runs of each study stay; besides those that made a registered version.

    Raises:
        RegistryError: it fails.
        CannotCollect: a registered version has no files, or a damaged database may name some.
    """
    model = validation.typed_section("promotion").model
    database.set_aside_damaged()
    if damaged := database.damaged():
        raise CannotCollect(f"what the versions in {damaged[0]} name is not known: repair it, or move it elsewhere")
    own = database.is_local() and not os.environ.get("MLFLOW_REGISTRY_URI")
    if own and not database.FILE.exists() and not last_champion.last(model):
        yield Tracked(set(), [_registered(0)])
        return
    with versions.connected(model) as registry:
        yield _tracked(registry.client, recent, local=database.is_local())


def _tracked(client: MlflowClient, recent: int, local: bool) -> Tracked:
    registered = list(_all(client.search_model_versions))
    experiments = [one.experiment_id for one in _all(partial(client.search_experiments, view_type=ViewType.ALL))]
    ours = "" if local else "tags.`eckart.study` LIKE '%'"  # of a server that others use, too
    search = partial(client.search_runs, experiments, ours, run_view_type=ViewType.ALL)
    found = list(_all(search)) if experiments else []
    runs = {one.info.run_id: one for one in found}
    latest = _latest(_studies(runs.values()), recent)
    lineages = {run: _lineage(client, run) for run in latest}
    children = [one for one in runs.values() if one.data.tags.get(MLFLOW_PARENT_RUN_ID) in latest]
    digests = referenced_digests.in_text(json.dumps(list(lineages.values())))
    digests |= referenced_digests.in_text(json.dumps([dict(one.data.tags) for one in children]))
    for version in registered:
        digests |= referenced_digests.in_text(json.dumps(dict(version.tags))) | _behind(client, runs, version)
    stay = latest | {one.info.run_id for one in children} | {str(one.run_id) for one in registered}
    stay |= {str(run) for lineage in lineages.values() for run in lineage.get("candidates", {}).values()}
    stay |= {str(runs[run].data.tags.get(MLFLOW_PARENT_RUN_ID)) for run in stay & runs.keys()}
    own = _kinds(client, experiments, runs, stay, registered) if local else []
    return Tracked(digests, [_registered(len(registered)), *own])


def _registered(count: int) -> Kind:
    """All stay: shown, so that one sees whether the right registry was asked."""
    return Kind("registered versions", Size(count, None), Size(0, None), lambda: None)


def _all(search: Callable[..., Any]) -> Iterator[Any]:
    """What a search of MLflow's finds, page by page."""
    token = None
    while True:
        page = search(page_token=token)
        yield from page
        if not (token := page.token):
            return


def _studies(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Experiment → the runs of its study, the latest first, without those that were deleted."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: -run.info.start_time):
        tags = run.data.tags
        if "eckart.study" in tags and MLFLOW_PARENT_RUN_ID not in tags and run.info.lifecycle_stage != _DELETED:
            found.setdefault(run.info.experiment_id, []).append(run)
    return found


def _latest(studies: Mapping[str, list[Run]], recent: int) -> set[str]:
    """The last runs that finished, of each study, and all that began since."""
    found: set[str] = set()
    for runs in studies.values():
        finished = 0
        for run in runs:
            if finished == recent:
                break
            finished += run.info.status == RunStatus.to_string(RunStatus.FINISHED)
            found.add(run.info.run_id)
    return found


def _lineage(client: MlflowClient, run: str) -> dict[str, Any]:
    """What a study's run wrote of its stages when it ended."""
    if not any(file.path == mirror.LINEAGE for file in client.list_artifacts(run)):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        content: dict[str, Any] = json.loads(Path(client.download_artifacts(run, mirror.LINEAGE, folder)).read_text())
    return content


def _behind(client: MlflowClient, runs: Mapping[str, Run], version: ModelVersion) -> set[str]:
    """Digests of all that the stages of a version's candidate, and those that all candidates share, wrote."""
    made = runs.get(version.run_id or "")
    parent = made.data.tags.get(MLFLOW_PARENT_RUN_ID) if made else None
    if not parent or parent not in runs:
        return set()
    stages = _lineage(client, parent).get("stages", {})
    own = {"", version.tags.get("eckart.candidate", "")}
    return referenced_digests.in_text(
        json.dumps({name: stage for name, stage in stages.items() if candidate_of(name) in own})
    )


def _kinds(
    client: MlflowClient,
    experiments: list[str],
    runs: Mapping[str, Run],
    stay: set[str],
    registered: Iterable[ModelVersion],
) -> list[Kind]:
    """The runs and models of the workspace's own store."""
    used = {(one.source or "").removeprefix(_MODEL): one for one in registered if (one.source or "").startswith(_MODEL)}
    found: list[LoggedModel] = list(_all(partial(client.search_logged_models, experiments))) if experiments else []
    models = {one.model_id: one for one in found}
    for name, version in used.items():
        if name not in models:  # MLflow's own gc would remove its files
            raise CannotCollect(
                f"{name}, the model of version {version.version} of {version.name}, was deleted in MLflow: "
                "delete that version, too"
            )
    ending = {name for name, run in runs.items() if _ends(run, name in stay)}
    unused = {name for name, model in models.items() if name not in used and _is_unused(model, runs.keys() - ending)}
    end_runs = partial(_remove, client, [runs[name] for name in ending], [])
    return [
        _kind("runs in MLflow", {name: run.info.artifact_uri for name, run in runs.items()}, ending, end_runs),
        _kind(
            "models in MLflow",
            {name: model.artifact_location for name, model in models.items()},
            unused,
            partial(_remove, client, [], unused),
        ),
    ]


def _ends(run: Run, stays: bool) -> bool:
    """What was deleted in MLflow goes in any case: its own gc makes an end of all that."""
    return run.info.lifecycle_stage == _DELETED or ("eckart.study" in run.data.tags and not stays)


def _is_unused(model: LoggedModel, staying: set[str]) -> bool:
    """Of one without a version: a candidate's goes with its run, a version's had one."""
    return model.source_run_id not in staying if candidate_models.KEY in model.tags else versions.CONTENT in model.tags


def _kind(name: str, places: Mapping[str, str], go: set[str], remove: Callable[[], None]) -> Kind:
    """Of runs or models, by where their files are."""
    stay_in, go_from = (
        [_folder(place) for one, place in places.items() if (one in go) == goes] for goes in (False, True)
    )
    return Kind(name, size_of(stay_in), size_of(go_from), remove)


def _folder(address: str) -> Path:
    return Path(local_file_uri_to_path(address))


def _remove(client: MlflowClient, runs: Iterable[Run], models: Iterable[str]) -> None:
    """Delete runs and models, as in MLflow's pages, and then for good."""
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
