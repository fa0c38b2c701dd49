"""What was computed and how long it took, to be found again under any recipe's name.

DVC's run cache knows a stage by its command, in which the recipe's name stands, and forgets the time. So this lies
beside its cache, and is shared like it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.records import SECONDS

if TYPE_CHECKING:
    from flows.engine.stages import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Computed:
    """A computation that was executed.

    seconds: None if another workspace did it and did not know.
    outs: digest and size of each output, as DVC writes them, in the order of the stage.
    """

    seconds: float | None
    outs: list[tuple[dict[str, Any], dict[str, Any]]]


def keep(cache_dir: Path, computation: str, computed: Computed) -> None:
    """Keep what became of `computation`, its digest; nothing if the disk is full.

    Args:
        cache_dir: as `dvc cache dir` names it.
    """
    path = _path(cache_dir, computation)
    with suppress(OSError):  # the stage has succeeded all the same
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(computed)))


def known(cache_dir: Path, computation: str) -> Computed | None:
    """What was kept; None if nothing was, or a full disk cut it off."""
    try:
        return Computed(**json.loads(_path(cache_dir, computation).read_text()))
    except (FileNotFoundError, ValueError):
        return None


def write_seconds(outcomes: Iterable[Outcome]) -> None:
    """Write what is known of the stages of a study to where its table looks for it."""
    seconds = {outcome.stage: outcome.seconds for outcome in outcomes if outcome.seconds is not None}
    try:
        SECONDS.parent.mkdir(exist_ok=True)
        SECONDS.write_text(json.dumps(seconds, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", SECONDS, error)


def seconds_before() -> dict[str, float]:
    """Stage → seconds, of the run of this workspace before; empty where there was none."""
    try:
        return dict(json.loads(SECONDS.read_text()))
    except (OSError, ValueError):
        return {}


def _path(cache_dir: Path, computation: str) -> Path:
    return cache_dir / "computed" / f"{computation}.json"
