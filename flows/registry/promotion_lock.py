"""A lock with which promotions and rollbacks of a model take turns, across machines if the registry is PostgreSQL."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from flows.tracking.database import SQLITE

log = logging.getLogger(__name__)

# If a machine disappears, its lock is released after two minutes; with the system's default it would be two hours.
_KEEPALIVE = "SET tcp_keepalives_idle = 60; SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 6"


def turn(address: str, name: str) -> AbstractContextManager[Callable[[], None]]:
    """Wait for the lock on a model of a registry, and hold it while the block runs.

    If the registry is PostgreSQL, the lock is an advisory lock of the database, which excludes processes on all
    machines. Otherwise it is a lock on a file: beside an SQLite database, which excludes all that use this database on
    this machine; else in the folder for temporary files, which excludes processes of this user that have the same one.

    Args:
        address: URL of the registry. It must have the same spelling in all processes.
        name: name of the model.

    Returns:
        A context manager. Its value is a function that raises `sqlalchemy.exc.SQLAlchemyError` if the lock was lost
        with the database's connection.
    """
    return _in_database(address, name) if address.startswith("postgresql") else _on_machine(address, name)


@contextmanager
def _in_database(address: str, name: str) -> Iterator[Callable[[], None]]:
    key = {"key": int.from_bytes(hashlib.sha256(f"eckart {name}".encode()).digest()[:8], signed=True)}
    engine = create_engine(address, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as session:  # the lock ends with the session, even if a process is killed

        def check() -> None:
            session.execute(text("SELECT 1"))

        session.execute(text(_KEEPALIVE))
        if not session.execute(text("SELECT pg_try_advisory_lock(:key)"), key).scalar_one():
            _say(name)
            session.execute(text("SELECT pg_advisory_lock(:key)"), key)
        yield check


@contextmanager
def _on_machine(address: str, name: str) -> Iterator[Callable[[], None]]:
    database = Path(address.removeprefix(SQLITE))
    if address.startswith(SQLITE) and os.access(database.parent, os.W_OK):  # SQLite itself writes into this folder
        path = database.with_name(f"{database.name}-{_digest(name)}.lock")
    else:
        path = Path(tempfile.gettempdir()) / f"eckart-{os.getuid()}-{_digest(f'{address} {name}')}.lock"
    with open(path, opener=_opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: None


def _opener(path: str, _: int) -> int:
    """Open a lock file, but no link. It is made if it does not exist, and another user may have made it."""
    try:  # on NFS, the lock needs a file that can be written
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _say(name: str) -> None:
    log.warning("waiting for another promotion of %s", name)
