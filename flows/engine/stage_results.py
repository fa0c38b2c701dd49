"""Storage for the results and times of executed stages, in DVC's cache folder.

A result is found again even if its recipe was renamed. DVC's run cache cannot do this: it finds a stage by its command,
which contains the recipe's name. It does not store times either.
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
    """Result of a stage that was executed.

    seconds: time that its command took; None if unknown, as after `dvc repro`.
    outs: for each output, in the order of the stage's outputs: its digest and its metadata, such as the size, both as
        DVC's dictionaries.
    """

    seconds: float | None
    outs: list[tuple[Annotated[dict[str, str], Field(min_length=1, max_length=1)], dict[str, Any]]]


_COMPUTED = TypeAdapter(Computed)
_SECONDS = TypeAdapter(dict[str, float])


def keep(cache_dir: Path, computation: str, computed: Computed) -> None:
    """Store the result of the computation with this digest; ignore errors such as a full disk."""
    path = _path(cache_dir, computation)
    with suppress(OSError):  # the stage itself has succeeded
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_COMPUTED.dump_json(computed))


def load(cache_dir: Path, computation: str) -> Computed | None:
    """Load the result of the computation with this digest; None if there is none or it is unreadable."""
    try:
        return _COMPUTED.validate_json(_path(cache_dir, computation).read_bytes())
    except (OSError, ValueError):
        return None


def write_seconds(outcomes: Iterable[Outcome]) -> None:
    """Write the known times of a study's stages to the file `SECONDS`, for the study's table."""
    seconds = {outcome.stage: outcome.seconds for outcome in outcomes if outcome.seconds is not None}
    try:
        SECONDS.parent.mkdir(exist_ok=True)
        SECONDS.write_bytes(_SECONDS.dump_json(dict(sorted(seconds.items())), indent=1) + b"\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", SECONDS, error)


def _path(cache_dir: Path, computation: str) -> Path:
    return cache_dir / "computed" / f"{computation}.json"
