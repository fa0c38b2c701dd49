"""Results of executed stages with their times, stored beside DVC's cache and found under any recipe's name.

DVC's run cache finds a stage by its command, which has the recipe's name in it, and does not keep the time.
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
    """The result of a computation that was executed.

    seconds: None if another workspace did it and did not know.
    outs: digest and size of each output, as DVC writes them, in the order of the stage.
    """

    seconds: float | None
    outs: list[tuple[Annotated[dict[str, str], Field(min_length=1, max_length=1)], dict[str, Any]]]


_COMPUTED = TypeAdapter(Computed)
_SECONDS = TypeAdapter(dict[str, float])


def keep(cache_dir: Path, computation: str, computed: Computed) -> None:
    """Store the result of the computation with this digest, unless the disk is full."""
    path = _path(cache_dir, computation)
    with suppress(OSError):  # the stage has succeeded all the same
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_COMPUTED.dump_json(computed))


def known(cache_dir: Path, computation: str) -> Computed | None:
    """Load the stored result; None without one that can be read. Fields of another version are ignored."""
    try:
        return _COMPUTED.validate_json(_path(cache_dir, computation).read_bytes())
    except (OSError, ValueError):
        return None


def write_seconds(outcomes: Iterable[Outcome]) -> None:
    """Write the known times of a study's stages to the file that its table reads."""
    seconds = {outcome.stage: outcome.seconds for outcome in outcomes if outcome.seconds is not None}
    try:
        SECONDS.parent.mkdir(exist_ok=True)
        SECONDS.write_bytes(_SECONDS.dump_json(dict(sorted(seconds.items())), indent=1) + b"\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", SECONDS, error)


def seconds_before() -> dict[str, float]:
    """Load stage → seconds of this workspace's last run; empty without a file that can be read."""
    try:
        return _SECONDS.validate_json(SECONDS.read_bytes())
    except (OSError, ValueError):
        return {}


def _path(cache_dir: Path, computation: str) -> Path:
    return cache_dir / "computed" / f"{computation}.json"
