"""How long stages took when they were executed: DVC forgets it, so it is kept beside its cache, and shared like it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress

from flows.engine.stages import Outcome, Planned, cache_dir
from tasks.records import SECONDS


def record(planned: Iterable[Planned], finished: Mapping[str, Outcome]) -> None:
    """Write what each finished stage took, wherever with this cache it, or its twin, was executed."""
    folder = cache_dir() / "seconds"
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, float] = {}
    for outcome in finished.values():
        kept = folder / outcome.key
        if outcome.status == "Executed":
            kept.write_text(repr(outcome.seconds))
        with suppress(FileNotFoundError, ValueError):  # made before this was kept, or cut off
            known[outcome.stage] = float(kept.read_text())
    for one in planned:
        if one.name in finished and one.twin in known:
            known.setdefault(one.name, known[one.twin])
    SECONDS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
