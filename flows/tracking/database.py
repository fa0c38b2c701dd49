"""MLflow's database in the workspace, and what becomes of a damaged one."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from contextlib import closing
from itertools import chain, count
from pathlib import Path

log = logging.getLogger(__name__)

FILE = Path("mlflow.db")
_LOCK = Path(".eckart/mlflow.lock")


def address() -> str:
    """Of the database of this workspace, which is the working directory."""
    return f"sqlite:///{FILE.resolve()}"


def set_aside_damaged() -> str:
    """Give a damaged database another name, so that MLflow begins a new one; what was done, in words, or nothing.

    Results are in DVC, and MLflow is told of them again. What DVC does not have is the registry: it is lost unless the
    damaged file can be repaired.
    """
    if os.environ.get("MLFLOW_TRACKING_URI") or not FILE.exists() or not (cause := _damage()):
        return ""
    _LOCK.parent.mkdir(exist_ok=True)
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FILE.exists() and _damage()):  # another process was first, and a new one may be there
            return ""
        aside = _unused(FILE.with_name(f"{FILE.name}.damaged"))
        for ending in ("-journal", "-wal", "-shm"):  # SQLite's own: it would put them into the new one
            if (journal := FILE.with_name(FILE.name + ending)).exists():
                journal.replace(aside.with_name(aside.name + ending))
        FILE.replace(aside)
    said = (
        f"{FILE} is damaged ({cause}) and is kept as {aside}. MLflow begins a new one and is told again what DVC has; "
        f"the model registry, with its champion, was in it: `sqlite3 {aside} .recover` may bring it back"
    )
    log.warning("%s", said)
    return said


def damaged() -> list[Path]:
    """Databases that were set aside."""
    return sorted(FILE.parent.glob(f"{FILE.name}.damaged*"))


def _damage() -> str:
    """What is wrong with the database, by SQLite's own check of all its pages; nothing if it is merely locked."""
    try:
        with closing(sqlite3.connect(f"{FILE.resolve().as_uri()}?mode=rw", uri=True)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # locked, or not readable: MLflow says so
        return ""
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if found == "ok" else " ".join(str(found).split())


def _unused(path: Path) -> Path:
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(one for one in chain([path], others) if not one.exists())
