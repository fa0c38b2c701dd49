"""Check of SQLite's files for damage."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def damage(file: Path, seconds: float = 5) -> str:
    """Return the damage that SQLite's quick check finds in a database file; empty if the file is sound.

    Raises:
        sqlite3.OperationalError: the file cannot be opened, or is still locked after `seconds`. That is not damage.
    """
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=rw", seconds, uri=True)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if verdict == "ok" else " ".join(str(verdict).split())
