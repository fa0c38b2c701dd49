"""Detect a dvc.lock that was cut off, and rename it so that DVC does not read it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from dvc.rwlock import RWLOCK_FILE
from dvc.rwlock import SCHEMA as RWLOCK_SCHEMA
from dvc.schema import COMPILED_LOCKFILE_SCHEMA
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from voluptuous import Invalid

log = logging.getLogger(__name__)

_LOCK = Path("dvc.lock")


def heal(repo: Repo) -> None:
    """Rename dvc.lock and DVC's file of locks to *.damaged if a full disk or a kill left them half-written.

    The results that dvc.lock named are found again with the run cache.
    """
    rwlock = Path(repo.tmp_dir) / RWLOCK_FILE
    checks = {_LOCK: _check, rwlock: lambda text: RWLOCK_SCHEMA(json.loads(text))}
    for path, check in checks.items():
        if _fails(path, check):
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            log.warning("%s was cut off; it is now %s, and results are taken from the cache", path.name, aside.name)


def is_damaged() -> bool:
    """Whether dvc.lock was cut off: DVC cannot read it, or its last line is incomplete (`hash: m` is valid YAML).

    A file that was cut off between two lines is not damaged: the stages that it lacks are just not up to date.
    """
    return _fails(_LOCK, _check)


def _check(text: str) -> None:
    COMPILED_LOCKFILE_SCHEMA(YAML(typ="safe").load(text) or {})
    if not text.endswith("\n"):
        raise ValueError("half a line")


def _fails(path: Path, check: Callable[[str], Any]) -> bool:
    """Whether the file exists and fails the check."""
    try:
        check(path.read_text("utf-8"))
    except FileNotFoundError:
        pass
    except (YAMLError, ValueError, Invalid):
        return True
    return False
