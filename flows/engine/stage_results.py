"""What was computed and how long it took, to be found again under any recipe's name.

DVC's run cache knows a stage by its command, in which the recipe's name stands, and forgets the time. So this lies
beside its cache, and is shared like it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from tasks.artifacts.results_schema import SECONDS

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
    outs: list[tuple[Annotated[dict[str, str], Field(min_length=1, max_length=1)], dict[str, Any]]]


_COMPUTED = TypeAdapter(Computed)
_SECONDS = TypeAdapter(dict[str, float])


def keep(cache_dir: Path, computation: str, computed: Computed) -> None:
    """Keep what became of `computation`, its digest; nothing if the disk is full.

    Args:
        cache_dir: as `dvc cache dir` names it.
    """
    path = _path(cache_dir, computation)
    with suppress(OSError):  # the stage has succeeded all the same
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_COMPUTED.dump_json(computed))


def known(cache_dir: Path, computation: str) -> Computed | None:
    """What was kept; None if nothing was that can be read. What another version added is ignored."""
    try:
        return _COMPUTED.validate_json(_path(cache_dir, computation).read_bytes())
    except (OSError, ValueError):
        return None


def write_seconds(outcomes: Iterable[Outcome]) -> None:
    """Write what is known of the stages of a study to where its table looks for it."""
    seconds = {outcome.stage: outcome.seconds for outcome in outcomes if outcome.seconds is not None}
    try:
        SECONDS.parent.mkdir(exist_ok=True)
        SECONDS.write_bytes(_SECONDS.dump_json(dict(sorted(seconds.items())), indent=1) + b"\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", SECONDS, error)


def seconds_before() -> dict[str, float]:
    """Stage → seconds, of the run of this workspace before; empty where there is none that can be read."""
    try:
        return _SECONDS.validate_json(SECONDS.read_bytes())
    except (OSError, ValueError):
        return {}


def _path(cache_dir: Path, computation: str) -> Path:
    return cache_dir / "computed" / f"{computation}.json"
