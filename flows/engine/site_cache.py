"""A safe place for DVC's databases (its "site cache"), which hold digests of files by path, size and time.

The databases can hold pickles, and by default DVC puts them into a folder that every user of the machine can write.
Here they are in a folder that only this user can write. A lost database costs only time.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sqlite3
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from flows.environment.sqlite_check import damage

log = logging.getLogger(__name__)

VARIABLE = "DVC_SITE_CACHE_DIR"
FOLDER = Path(f"/var/tmp/eckart-dvc-{os.getuid()}")


def choose() -> None:
    """Choose the folder of DVC's databases for this process and its children, unless the user has set `VARIABLE`."""
    if os.environ.get(VARIABLE):
        return
    folder = FOLDER  # not in the home folder: on a network drive, databases are slow or fail
    if not _is_ours(folder):
        folder = Path(tempfile.mkdtemp(prefix="eckart-dvc-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        log.warning("%s cannot be used for DVC's databases: they are in %s", FOLDER, folder)
    os.environ[VARIABLE] = str(folder)


def _is_ours(folder: Path) -> bool:
    """Make the folder if it is missing, and return whether this user, and nobody else, can write it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    ours = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and ours and os.access(folder, os.W_OK | os.X_OK)


@cache  # check once in each process, though DVC opens the databases for each stage
def heal(folder: Path) -> None:
    """Rename the folder of a workspace's databases if one of them is damaged, so that DVC makes new ones."""
    if any(_is_damaged(file) for file in folder.rglob("*.db")):
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):  # another process was first
            folder.rename(aside)
        log.warning("DVC's databases in %s are damaged, and set aside: files are hashed once more", folder)


def _is_damaged(file: Path) -> bool:
    try:
        return bool(damage(file))
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN  # such as a folder; a lock is not damage
