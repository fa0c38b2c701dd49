"""A lock for one promotion or rollback of a model at a time, across machines where the registry is PostgreSQL."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

log = logging.getLogger(__name__)

# A machine that disappears loses the lock after two minutes; the system's default is two hours.
_KEEPALIVE = "SET tcp_keepalives_idle = 60; SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 6"


@contextmanager
def turn(address: str, name: str) -> Iterator[Callable[[], None]]:
    """Hold the lock on a model of a registry; wait for it first.

    In PostgreSQL it is an advisory lock of the database, which holds on all machines that connect to it. With any other
    registry it is a lock on a file, which holds for this user on this machine.

    Args:
        address: of the registry, in one spelling.

    Yields:
        A function that raises `sqlalchemy.exc.SQLAlchemyError` if the database has ended the lock.
    """
    with _in_database(address, name) if address.startswith("postgresql") else _on_machine(address, name) as check:
        yield check


@contextmanager
def _in_database(address: str, name: str) -> Iterator[Callable[[], None]]:
    key = {"key": int.from_bytes(hashlib.sha256(f"eckart {name}".encode()).digest()[:8], signed=True)}
    engine = create_engine(address, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as session:  # the lock ends with the session, also after a kill or a restart

        def check() -> None:
            session.execute(text("SELECT 1"))

        session.execute(text(_KEEPALIVE))
        if not session.execute(text("SELECT pg_try_advisory_lock(:key)"), key).scalar_one():
            _say(name)
            session.execute(text("SELECT pg_advisory_lock(:key)"), key)
        yield check


@contextmanager
def _on_machine(address: str, name: str) -> Iterator[Callable[[], None]]:
    digest = hashlib.sha256(f"{address} {name}".encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"eckart-{os.getuid()}-{digest}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: None


def _say(name: str) -> None:
    log.warning("waiting for another promotion of %s", name)
