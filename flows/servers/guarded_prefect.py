"""Serve Prefect's pages behind our guard: `python -P -m flows.servers.guarded_prefect SOCKET PARENT`.

SOCKET is the file descriptor of a socket that already listens. PARENT is the id of the process that started this one;
when the parent ends, the server ends. The server polls for that: Linux has a signal for it (PR_SET_PDEATHSIG), but
sends it already when the thread that started the server ends, and macOS has no such signal. If the server cannot start,
it prints the cause, and nothing else, to stdout.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from flows.environment.redaction import redact
from flows.environment.sqlite_check import damage
from flows.servers.access_guard import Guard

_LONGEST = 200  # characters of a library's message that are printed
_GRACE = 10.0  # seconds to end after SIGTERM, before SIGKILL
_ROOM = 2**20  # a disk with fewer free bytes counts as full


def main() -> None:
    os.umask(0o077)
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    database = str(settings.server.database.connection_url.get_secret_value())  # type: ignore[union-attr]
    # None for PostgreSQL or a database in memory
    file = Path(database.partition(":///")[2]) if database.startswith("sqlite") and "?" not in database else None
    try:
        if file:
            _check_database(file, settings.server.memo_store_path)
        asyncio.run(_serve(listener, f"Prefect {redact(database)}"))
    except Exception as error:
        print(_message(error, file), flush=True)
        os._exit(1)  # threads of the server's services may still run


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _check_database(file: Path, memory: Path) -> None:
    """Raise if the database is damaged. If it is new, delete Prefect's memo of blocks in an older database."""
    if not file.exists() or not file.stat().st_size:
        memory.unlink(missing_ok=True)
        return
    if cause := damage(file, 60):
        raise sqlite3.DatabaseError(cause)


async def _serve(listener: socket.socket, serves: str) -> None:
    gc.disable()  # meanwhile: a fifth of the time of these imports, which a run waits for
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    gc.freeze()
    gc.enable()
    guard = Guard(app, os.environ["ECKART_SERVER_KEY"], serves=serves)
    config = uvicorn.Config(guard, lifespan="off", log_level="error")
    async with app.router.lifespan_context(app):  # not left to uvicorn, which would log a traceback if it failed
        # uvicorn sets its own handler of SIGTERM. At its end it raises the signal again, which must then do nothing.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await uvicorn.Server(config).serve(sockets=[listener])


def _message(error: Exception, file: Path | None) -> str:
    """Return one line for the user: what failed, with which database, and what to do."""
    causes = [" ".join(str(cause).split())[:_LONGEST] for cause in _causes(error)]
    cause = next(filter(None, reversed(causes)), type(error).__name__)
    if not file:
        return f"Prefect's server cannot use the database that PREFECT_SERVER_DATABASE_CONNECTION_URL names ({cause})"
    full = file.parent.exists() and shutil.disk_usage(file.parent).free < _ROOM
    if full:
        return f"Prefect's server does not start: the disk of its database {file} is full ({cause}). Make room"
    return (
        f"Prefect's server does not start, with the database {file} ({cause}). If another process uses the file, wait "
        "until it ends; if the file is damaged or of another version of Prefect, move it away; if it cannot be "
        "written, set PREFECT_HOME to another folder. It holds the pages of earlier runs, no results of studies"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


if __name__ == "__main__":
    main()
