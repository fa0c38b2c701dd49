"""Quick check that a rollback is possible. It does not import MLflow and torch, which would take many seconds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from flows.registry import last_champion
from flows.tracking import database
from tasks.artifacts.errors import EckartError

_SQLITE = "sqlite:///"
_CHAMPION = "SELECT count(*) FROM registered_model_aliases WHERE name = :model AND alias = 'champion'"
_EARLIER = """
SELECT count(*) FROM model_version_tags AS promoted WHERE name = :model AND key = 'eckart.promoted_at'
AND version NOT IN (SELECT version FROM registered_model_aliases WHERE name = :model AND alias = 'champion')
AND version NOT IN (SELECT version FROM model_version_tags WHERE name = :model AND key = 'eckart.rolled_back')
"""
"""Query for the number of earlier champions that a rollback could return to, as `Registry.before` selects them.

It also counts some versions that were deleted.
"""


class NothingBefore(EckartError):
    """A rollback is impossible: there is no champion, or no version before it."""


def refuse(model: str) -> None:
    """Raise if the registry is an SQLite file that has no version to go back to; do nothing for other registries.

    Raises:
        NothingBefore: the registry has no champion of the model, or no version before it.
    """
    if database.damaged() or not (counts := _counts(model)):
        return
    champion, earlier = counts
    if not champion and not last_champion.last(model):  # if one was noted, the registry was lost: another error
        raise NothingBefore(f"{model} has no champion: there is nothing to go back from")
    if champion and not earlier:
        raise NothingBefore(f"the champion of {model} replaced none: there is nothing to go back to")


def _counts(model: str) -> tuple[int, int] | None:
    """Return the numbers of present and of earlier champions in the registry's file; None if this cannot be read."""
    address = database.registry_address()
    if not address.startswith(_SQLITE) or "?" in address:
        return None
    if not (file := Path(address.removeprefix(_SQLITE))).exists():
        return 0, 0
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as opened:
            queries = (opened.execute(query, {"model": model}) for query in (_CHAMPION, _EARLIER))
            champion, earlier = (query.fetchone()[0] for query in queries)
    except sqlite3.Error:  # locked, damaged, or without these tables
        return None
    return champion, earlier
