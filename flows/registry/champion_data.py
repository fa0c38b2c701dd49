"""The training examples of the registry's champion, in data/reference: the check stage compares new data with them.

They are in DVC's cache under the digests that the champion's version names, so that nothing is stored twice. A run
fetches them before it is planned; a promotion does not, because it must make nothing stale.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient

from flows.engine import cached_objects, dvc_transport, stages
from flows.environment.redaction import shown
from flows.registry import last_champion
from flows.tracking import database
from tasks.artifacts.task_spec import REFERENCE, SPLITS
from tasks.artifacts.task_spec import REFERENCE_PARTS as PARTS

log = logging.getLogger(__name__)


def refresh(study: str, model: str) -> None:
    """Fill data/reference with the champion's training examples, or empty it if the champion is of another study.

    Where the registry fails, the folder stays as it is.
    """
    REFERENCE.mkdir(parents=True, exist_ok=True)
    try:
        digests = _digests(study, model)
    except Exception as error:  # a store may fail in any way; the study does without
        log.warning("the champion's data cannot be looked up (%s): %s stays as it is", shown(str(error)), REFERENCE)
        return
    cache = stages.cache_dir()
    if not dvc_transport.fetch_outputs(digests.values()):
        log.warning("neither the cache nor the remote has the champion's training examples: nothing is compared")
        digests = {}
    for part in PARTS:
        if part in digests:
            _put(cache, digests[part], REFERENCE / part)
        else:
            (REFERENCE / part).unlink(missing_ok=True)


def _digests(study: str, model: str) -> dict[str, str]:
    """Return DVC's digest of each part of the reference; none where the study has no champion."""
    if database.is_local() and not database.FILE.exists() and not last_champion.last(model):
        return {}  # the first run here: MLflow would need seconds to make a database
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


def _put(cache: Path, digest: str, target: Path) -> None:
    """Copy an object from the cache, unless the file is there: DVC would hash a new one again."""
    if not target.exists() or cached_objects.measured(target) != {"": digest}:
        cached_objects.copy(cache, digest, target)
