"""Fetch the training examples of the registry's champion into data/reference, where the stage `check` reads them.

The stage compares new data with these examples. DVC's cache or remote has them, and a tag of the champion's version has
their digests. A run of the study fetches them before it plans the stages. A promotion does not fetch them, because it
must not make stages stale.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from mlflow import MlflowClient

from flows.engine import cached_objects, dvc_transport, stages
from flows.environment.redaction import redact
from flows.registry import last_champion
from flows.tracking import database
from tasks.artifacts.task_spec import REFERENCE, SPLITS
from tasks.artifacts.task_spec import REFERENCE_PARTS as PARTS

log = logging.getLogger(__name__)


def refresh(study: str, model: str) -> None:
    """Fill data/reference with the champion's training examples; empty the folder if this study has no champion.

    If the registry fails, the folder does not change.
    """
    REFERENCE.mkdir(parents=True, exist_ok=True)
    try:
        digests = _digests(study, model)
    except Exception as error:  # a store may raise any error, and none may stop the study
        log.warning("the champion's data cannot be looked up (%s): %s stays as it is", redact(str(error)), REFERENCE)
        return
    # Right files stay: the cache may have lost their objects since, and DVC hashes each new copy again.
    wrong = [part for part in PARTS if cached_objects.measured(REFERENCE / part) != {"": digests.get(part)}]
    wanted = {part: digests[part] for part in wrong if part in digests}
    if wanted and not dvc_transport.fetch_outputs(wanted.values()):
        log.warning("neither the cache nor the remote has the champion's training examples: nothing is compared")
        wanted = {}
    for part in wrong:
        if part in wanted:
            cached_objects.copy(stages.cache_dir(), wanted[part], REFERENCE / part)
        else:
            (REFERENCE / part).unlink(missing_ok=True)


def _digests(study: str, model: str) -> dict[str, str]:
    """Return DVC's digests of the champion's files: name (of `PARTS`) → digest; empty if this study has no champion."""
    if last_champion.is_first(model):
        return {}  # the first run: do not wait seconds for MLflow to create a database
    client = MlflowClient(database.address())
    registered = client.search_registered_models(f"name = '{model}'")
    version = next((entry.aliases.get("champion") for entry in registered), None)
    if not version:
        if last_champion.last(model):
            raise LookupError("the registry has no champion, but this workspace has had one")
        return {}
    champion = client.get_model_version(model, str(version))
    if champion.tags.get("eckart.study") != study:
        return {}
    inputs: Mapping[str, str] = json.loads(champion.tags.get("dvc.inputs", "{}"))
    parts = {part: inputs.get(str(SPLITS / part)) for part in PARTS}
    return {part: digest for part, digest in parts.items() if digest}
