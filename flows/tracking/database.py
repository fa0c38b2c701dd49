"""Where MLflow is: the server of the environment or else a database in the workspace, set aside once it is damaged."""

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
    """Return the tracking store's address: MLFLOW_TRACKING_URI, or the database in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or _own()


def registry_address() -> str:
    """Return the model registry's address: MLFLOW_REGISTRY_URI, or that of the tracking store."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or address()


def is_local() -> bool:
    """Whether the tracking store is the workspace's own database."""
    return address() == _own()


def _own() -> str:
    return f"sqlite:///{FILE.resolve()}"


def set_aside_damaged() -> str:
    """Rename a damaged database so that MLflow begins a new one; return a message, empty if nothing was done.

    Results are in DVC, from where MLflow is filled again. The registry is not: it is lost unless the damaged file can
    be repaired.
    """
    if not is_local() or not FILE.exists() or not (cause := _damage()):
        return ""
    _LOCK.parent.mkdir(exist_ok=True)
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FILE.exists() and _damage()):  # another process was first, and a new one may be there
            return ""
        names = chain([f"{FILE.name}.damaged"], (f"{FILE.name}.damaged-{number}" for number in count(2)))
        aside = next(path for path in map(FILE.with_name, names) if not path.exists())
        for ending in ("-journal", "-wal", "-shm"):  # SQLite's own: it would put them into the new one
            if (journal := FILE.with_name(FILE.name + ending)).exists():
                journal.replace(aside.with_name(aside.name + ending))
        FILE.replace(aside)
    message = (
        f"{FILE} is damaged ({cause}) and is kept as {aside}. MLflow begins a new one and is filled again from DVC; "
        f"the model registry, with its champion, was in it: `sqlite3 {aside} .recover` may bring it back"
    )
    log.warning("%s", message)
    return message


def damaged() -> list[Path]:
    """Return the databases that were set aside."""
    return sorted(FILE.parent.glob(f"{FILE.name}.damaged*"))


def _damage() -> str:
    """Return what SQLite's check of all pages finds wrong; empty if the file is sound or merely locked."""
    try:
        with closing(sqlite3.connect(f"{FILE.resolve().as_uri()}?mode=rw", uri=True)) as connection:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # locked, or not readable: MLflow says so
        return ""
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if verdict == "ok" else " ".join(str(verdict).split())
