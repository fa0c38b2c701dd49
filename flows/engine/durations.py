"""How long stages took when they were executed: DVC forgets it, so it is kept beside its cache, and shared like it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.records import SECONDS

if TYPE_CHECKING:
    from flows.engine.stages import Outcome

log = logging.getLogger(__name__)


def keep(cache_dir: Path, key: str, seconds: float | None) -> None:
    """Keep what the computation `key` took; nothing if that is not known, or the disk is full.

    Args:
        cache_dir: as `dvc cache dir` names it.
    """
    if seconds is None:
        return
    path = _path(cache_dir, key)
    with suppress(OSError):  # the stage has succeeded all the same
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(repr(seconds))


def known(cache_dir: Path, key: str) -> float | None:
    """The seconds that were kept of a computation; None if there are none, or a full disk cut them off."""
    try:
        return float(_path(cache_dir, key).read_text())
    except (FileNotFoundError, ValueError):
        return None


def write(outcomes: Iterable[Outcome]) -> None:
    """Write what is known of the stages of a study to where its table looks for it."""
    seconds = {outcome.stage: outcome.seconds for outcome in outcomes if outcome.seconds is not None}
    try:
        SECONDS.parent.mkdir(exist_ok=True)
        SECONDS.write_text(json.dumps(seconds, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", SECONDS, error)


def _path(cache_dir: Path, key: str) -> Path:
    return cache_dir / "seconds" / key
