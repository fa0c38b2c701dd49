"""The data that the check stage compares with: the training rows of the registry's champion, in data/reference.

They are in DVC's cache under the digests that the champion's version names, so that nothing is stored twice. A run
brings them before it is planned, and not the promotion, which makes nothing stale; a rollback needs nothing of its own.
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
from tasks.artifacts.errors import EckartError
from tasks.artifacts.task_spec import REFERENCE, SPLITS
from tasks.artifacts.task_spec import REFERENCE_PARTS as PARTS

log = logging.getLogger(__name__)


def refresh(study: str, model: str) -> None:
    """Make data/reference the rows that the champion of `model` learned from, or empty if it is not of this `study`.

    Where the registry fails it stays as it is.
    """
    REFERENCE.mkdir(parents=True, exist_ok=True)
    try:
        digests = _digests(study, model)
    except Exception as error:  # a store may fail in any way; the study does without
        log.warning("the champion's data are not looked up (%s): %s stays as it is", shown(str(error)), REFERENCE)
        return
    cache = stages.cache_dir()
    if not _had(cache, digests):
        log.warning("neither the cache nor the remote has the rows that the champion learned from: nothing compared")
        digests = {}
    for part in PARTS:
        if part in digests:
            _put(cache, digests[part], REFERENCE / part)
        else:
            (REFERENCE / part).unlink(missing_ok=True)


def _digests(study: str, model: str) -> dict[str, str]:
    """Part of the reference → DVC's digest of it; none where the study has no champion."""
    if database.is_local() and not database.FILE.exists() and not last_champion.last(model):
        return {}  # the first run here: MLflow would need seconds to make a database
    client = MlflowClient(database.address())
    found = [one.aliases.get("champion") for one in client.search_registered_models(f"name = '{model}'")]
    if not any(found):
        if last_champion.last(model):
            raise LookupError("the registry knows no champion, and this workspace has had one")
        return {}
    champion = client.get_model_version(model, str(found[0]))
    if champion.tags.get("eckart.study") != study:
        return {}
    inputs: Mapping[str, str] = json.loads(champion.tags.get("dvc.inputs", "{}"))
    parts = {part: inputs.get(str(SPLITS / part)) for part in PARTS}
    return {part: digest for part, digest in parts.items() if digest}


def _had(cache: Path, digests: Mapping[str, str]) -> bool:
    """Whether the cache has these, after the remote was asked for what it lacks."""
    cached_objects.discard_corrupt(cache, digests.values())
    lacking = [digest for digest in digests.values() if cached_objects.missing(cache, digest)]
    if lacking:
        try:
            dvc_transport.fetch_objects(lacking)
        except EckartError as error:
            log.warning("%s", error)
    return not any(cached_objects.missing(cache, digest) for digest in lacking)


def _put(cache: Path, digest: str, target: Path) -> None:
    """Leave a file that is as it should be: DVC would read it again."""
    if not target.exists() or cached_objects.measured(target) != {"": digest}:
        cached_objects.copy(cache, digest, target)
