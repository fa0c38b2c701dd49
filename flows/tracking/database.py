"""URL of MLflow's store: the server that the environment names, else a database file in the main workspace.

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
from flows.environment.workspaces import main_workspace
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

SQLITE = "sqlite:///"  # beginning of the URL of an SQLite file
_REFUSED = {
    "UNAUTHENTICATED": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    "PERMISSION_DENIED": "this user needs EDIT on the study's experiment and, for promotions, MANAGE on the model",
}
"""Code of an error by which a server with users refuses one → what to do."""


def file() -> Path:
    """Return the path of the database file, relative to the working directory."""
    return Path(os.path.relpath(main_workspace() / "mlflow.db"))


def artifacts() -> Path:
    """Return the path of the folder for the artifacts of the database file, relative to the working directory."""
    return Path(os.path.relpath(main_workspace() / "mlruns"))


def address() -> str:
    """Return the URL of the tracking store: MLFLOW_TRACKING_URI, or the database file in the main workspace."""
    return _absolute(os.environ.get("MLFLOW_TRACKING_URI") or _own())


def registry_address() -> str:
    """Return the URL of the model registry: MLFLOW_REGISTRY_URI, or the URL of the tracking store."""
    return _absolute(os.environ.get("MLFLOW_REGISTRY_URI") or address())


def is_local() -> bool:
    """Whether the tracking store is the database file in the main workspace."""
    return address() == _own()


def all_is_local() -> bool:
    """Whether tracking store and model registry are both the database file in the main workspace."""
    return {address(), registry_address()} == {_own()}


def _own() -> str:
    return f"{SQLITE}{file().resolve()}"


def _absolute(url: str) -> str:
    """Return the URL of a store; that of an SQLite file gets an absolute path. It is relative to the main workspace.

    All spellings of one file must give the same URL, in each folder: locks are named after it.
    """
    return f"{SQLITE}{(main_workspace() / url.removeprefix(SQLITE)).resolve()}" if url.startswith(SQLITE) else url


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
    path = file()
    if not is_local() or not path.exists() or not (cause := _damage()):
        return ""
    lock_file = path.with_name(".eckart") / "mlflow.lock"
    lock_file.parent.mkdir(exist_ok=True)
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path.exists() and _damage()):  # another process has renamed it, and there may be a new file
            return ""
        names = chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{number}" for number in count(2)))
        aside = next(found for found in map(path.with_name, names) if not found.exists())
        for ending in ("-journal", "-wal", "-shm"):  # SQLite's journals, which it would apply to the new file
            if (journal := path.with_name(path.name + ending)).exists():
                journal.replace(aside.with_name(aside.name + ending))
        path.replace(aside)
    message = (
        f"{path} is damaged ({cause}) and is kept as {aside}. MLflow begins a new one and is filled again from DVC; "
        f"the model registry, with its champion, was in it: `sqlite3 {aside} .recover` may bring it back"
    )
    log.warning("%s", message)
    return message


def damaged() -> list[Path]:
    """Return the damaged database files that were renamed."""
    return sorted(file().parent.glob(f"{file().name}.damaged*"))


def _refuse_other_places() -> None:
    """Raise an EckartError if MLflow would write outside of the main workspace: its URLs and stored paths are absolute.

    A copy of a workspace would write into the original and remove files there, and a moved one would lose its files.
    """
    if not is_local():
        return
    path = file()
    if wrong := re.search(r"\?|%[0-9A-Fa-f]{2}", str(path.resolve())):  # MLflow decodes a URL twice
        raise EckartError(f"MLflow cannot use {path.resolve()}: rename the folder, so that it has no {wrong[0]}")
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            places = database.execute("select artifact_location from experiments").fetchall()
    except sqlite3.Error:  # damaged or locked, which others report, or without tables so far
        return
    for place in (urlparse(place) for (place,) in places):
        folder = Path(url2pathname(place.path))
        if place.scheme != "file" or folder.name != artifacts().name or folder.resolve() == artifacts().resolve():
            continue
        old, here = folder.parent, shlex.quote(str(main_workspace()))
        remedy = (
            f"This workspace is a copy: remove {path} and {artifacts()}, with their registered models. The next run "
            "fills MLflow again from DVC"
            if old.exists()
            else "This workspace was moved: "
            f"`mkdir -p {shlex.quote(str(old.parent))} && ln -s {here} {shlex.quote(str(old))}`"
        )
        raise EckartError(f"{path} keeps its files in {folder}. {remedy}")


def _damage() -> str:
    """Return the fault that SQLite finds in the database file; empty if the file is sound, locked or not readable."""
    try:
        return damage(file())
    except sqlite3.OperationalError:  # locked or not readable: MLflow reports that
        return ""
