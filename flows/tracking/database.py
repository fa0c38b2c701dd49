"""URL of MLflow's store: the server that the environment names, else a database file in the workspace.

If the file is damaged, it is renamed, and MLflow starts a new one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shlex
import sqlite3
from contextlib import closing
from itertools import chain, count
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from flows.environment.redaction import redact
from flows.environment.sqlite_check import damage
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

FILE = Path("mlflow.db")
ARTIFACTS = Path("mlruns")
SQLITE = "sqlite:///"  # beginning of the URL of an SQLite file
_LOCK = Path(".eckart/mlflow.lock")
_REFUSED = {
    "UNAUTHENTICATED": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    "PERMISSION_DENIED": "this user needs EDIT on the study's experiment and, for promotions, MANAGE on the model",
}
"""Code of an error by which a server with users refuses one → what to do."""


def address() -> str:
    """Return the URL of the tracking store: MLFLOW_TRACKING_URI, or the database file in the working directory."""
    return _absolute(os.environ.get("MLFLOW_TRACKING_URI") or _own())


def registry_address() -> str:
    """Return the URL of the model registry: MLFLOW_REGISTRY_URI, or the URL of the tracking store."""
    return _absolute(os.environ.get("MLFLOW_REGISTRY_URI") or address())


def is_local() -> bool:
    """Whether the tracking store is the database file in the working directory."""
    return address() == _own()


def all_is_local() -> bool:
    """Whether tracking store and model registry are both the database file in the working directory."""
    return {address(), registry_address()} == {_own()}


def _own() -> str:
    return f"{SQLITE}{FILE.resolve()}"


def _absolute(url: str) -> str:
    """Return the URL of a store; that of an SQLite file gets an absolute path.

    All spellings of one file must give the same URL, in each folder: locks are named after it, and seeds inherit it.
    """
    return f"{SQLITE}{Path(url.removeprefix(SQLITE)).resolve()}" if url.startswith(SQLITE) else url


def message_of(error: Exception) -> str:
    """Return the message of an error of MLflow as one line without passwords, and what to do if a user was refused."""
    message = " ".join(redact(str(error)).split())
    remedy = _REFUSED.get(getattr(error, "error_code", ""))  # of an MlflowException, whose import is slow
    return f"{message}; {remedy}" if remedy else message


def check() -> str:
    """Rename the database file if it is damaged, so that MLflow starts a new one.

    The next run logs all results again from DVC. The model registry is not in DVC: it is lost unless the damaged file
    can be repaired.

    Returns:
        A message for the user; empty if the file was not damaged.

    Raises:
        EckartError: the database cannot be used in this folder.
    """
    _refuse_other_places()
    if not is_local() or not FILE.exists() or not (cause := _damage()):
        return ""
    _LOCK.parent.mkdir(exist_ok=True)
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FILE.exists() and _damage()):  # another process has renamed it, and there may be a new file
            return ""
        names = chain([f"{FILE.name}.damaged"], (f"{FILE.name}.damaged-{number}" for number in count(2)))
        aside = next(path for path in map(FILE.with_name, names) if not path.exists())
        for ending in ("-journal", "-wal", "-shm"):  # SQLite's journals, which it would apply to the new file
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
    """Return the damaged database files that were renamed."""
    return sorted(FILE.parent.glob(f"{FILE.name}.damaged*"))


def _refuse_other_places() -> None:
    """Raise an EckartError if MLflow would write outside of this workspace: its URLs and stored paths are absolute.

    A copy of a workspace would write into the original and remove files there, and a moved one would lose its files.
    """
    if is_local() and (wrong := re.search(r"\?|%[0-9A-Fa-f]{2}", str(FILE.resolve()))):  # MLflow decodes a URL twice
        raise EckartError(f"MLflow cannot use {FILE.resolve()}: rename the folder, so that it has no {wrong[0]}")
    if not is_local() or not FILE.exists():
        return
    try:
        with closing(sqlite3.connect(f"{FILE.resolve().as_uri()}?mode=ro", uri=True)) as database:
            places = database.execute("select artifact_location from experiments").fetchall()
    except sqlite3.Error:  # damaged or locked, which others report, or without tables so far
        return
    for place in (urlparse(place) for (place,) in places):
        folder = Path(url2pathname(place.path))
        if place.scheme != "file" or folder.name != ARTIFACTS.name or folder.resolve() == ARTIFACTS.resolve():
            continue
        old, here = folder.parent, shlex.quote(str(Path.cwd()))
        remedy = (
            f"This workspace is a copy: remove {FILE} and {ARTIFACTS} here, with their registered models. The next run "
            "fills MLflow again from DVC"
            if old.exists()
            else "This workspace was moved: "
            f"`mkdir -p {shlex.quote(str(old.parent))} && ln -s {here} {shlex.quote(str(old))}`"
        )
        raise EckartError(f"{FILE} keeps its files in {folder}. {remedy}")


def _damage() -> str:
    """Return the fault that SQLite finds in the database file; empty if the file is sound, locked or not readable."""
    try:
        return damage(FILE)
    except sqlite3.OperationalError:  # locked or not readable: MLflow reports that
        return ""
