"""How long stages took when they were executed: DVC forgets it, so it is kept beside its cache, and shared like it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress

from flows.engine.stages import Outcome, cache_dir
from tasks.records import SECONDS


def record(outcomes: Iterable[Outcome]) -> None:
    """Write for a finished study what each stage took, wherever with this cache it was executed."""
    folder = cache_dir() / "seconds"
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, float] = {}
    for outcome in outcomes:
        kept = folder / outcome.key
        if outcome.status == "Executed":
            kept.write_text(repr(outcome.seconds))
        with suppress(FileNotFoundError, ValueError):  # made before this was kept, or cut off
            known[outcome.stage] = float(kept.read_text())
    SECONDS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
