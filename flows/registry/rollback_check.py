"""Refuse a rollback that has no earlier champion, before MLflow and torch are imported, which takes many seconds."""

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
"""Versions that were the champion, as `Registry.before` finds them; of those that were deleted, some are counted."""


class NothingBefore(EckartError):
    """There is no version to go back to, or none to go back from."""


def refuse(model: str) -> None:
    """Raise if the registry's SQLite file has no version to go back to; MLflow asks registries elsewhere.

    Raises:
        NothingBefore: the registry knows no champion of the model, or none before it.
    """
    if database.damaged() or not (counts := _counts(model)):
        return
    champion, earlier = counts
    if not champion and not last_champion.last(model):  # one that was noted and is gone is another matter
        raise NothingBefore(f"{model} has no champion: there is nothing to go back from")
    if champion and not earlier:
        raise NothingBefore(f"the champion of {model} replaced none: there is nothing to go back to")


def _counts(model: str) -> tuple[int, int] | None:
    """Return the numbers of champions and of earlier ones in the registry's file, or None if it cannot be read."""
    address = database.registry_address()
    if not address.startswith(_SQLITE) or "?" in address:
        return None
    if not (file := Path(address.removeprefix(_SQLITE))).exists():
        return 0, 0
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as opened:
            champion, earlier = (
                opened.execute(query, {"model": model}).fetchone()[0] for query in (_CHAMPION, _EARLIER)
            )
    except sqlite3.Error:  # locked, damaged, or without these tables
        return None
    return champion, earlier
