"""The process of Prefect's server behind our guard: `python -P -m flows.servers.guarded_prefect SOCKET PARENT`.

SOCKET is the number of a socket that listens already, PARENT of the process that started this one and takes it along
when it ends. It polls, since what Linux offers instead (PR_SET_PDEATHSIG) is sent when the thread ends that started the
process, and macOS has nothing alike. Where the server does not start, the cause is all that stdout gets.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from flows.environment.redaction import shown
from flows.servers.access_guard import Guard

_SAID = 200  # characters of what a library says
_GRACE = 10.0  # seconds for a usual end
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    os.umask(0o077)
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    database = str(settings.server.database.connection_url.get_secret_value())  # type: ignore[union-attr]
    # PostgreSQL, or in memory: no file
    file = Path(database.partition(":///")[2]) if database.startswith("sqlite") and "?" not in database else None
    try:
        if file:
            _look_at(file, settings.server.memo_store_path)
        asyncio.run(_serve(listener, f"Prefect {shown(database)}"))
    except Exception as error:
        print(_words(error, file), flush=True)
        os._exit(1)  # services may have begun


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _look_at(file: Path, memory: Path) -> None:
    """Find damage before requests fail of it; a new file gets all that Prefect remembers to have given before."""
    if not file.exists() or not file.stat().st_size:
        memory.unlink(missing_ok=True)
        return
    with closing(sqlite3.connect(file, timeout=60)) as opened:
        ((found,),) = opened.execute("PRAGMA quick_check(1)")
    if found != "ok":
        raise sqlite3.DatabaseError(found)


async def _serve(listener: socket.socket, serves: str) -> None:
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    guard = Guard(app, os.environ["ECKART_SERVER_KEY"], serves=serves)
    config = uvicorn.Config(guard, lifespan="off", log_level="error")
    async with app.router.lifespan_context(app):  # not by uvicorn, which would log a traceback where it fails
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn heeds it, and sends it again after that
        await uvicorn.Server(config).serve(sockets=[listener])


def _words(error: Exception, file: Path | None) -> str:
    """What is wrong, where, and what to do, in a line."""
    place = f"Prefect's database {file}" if file else "Prefect's database"
    for cause in _causes(error):
        said = " ".join(str(cause).split())[:_SAID]
        name = getattr(cause, "sqlite_errorname", "")
        vague = isinstance(cause, sqlite3.OperationalError) and _is_full(file)
        if name == "SQLITE_FULL" or getattr(cause, "errno", None) in _FULL or vague:
            return f"{place}: the disk is full: make room and run again"
        if "database is locked" in said:
            return f"{place} is in use by another process: wait for its end and run again"
        if "Can't locate revision" in str(cause):
            return f"{place} is of another version of Prefect ({said}): {_ADVICE}"
        if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")) or isinstance(cause, PermissionError):
            return f"{place} cannot be written ({said}): {_ADVICE}"
        if isinstance(cause, sqlite3.DatabaseError) and not isinstance(cause, sqlite3.OperationalError):
            return f"{place} is corrupt ({said}): {_ADVICE}"
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:_SAID]}"
    if not file:
        return f"{place}, which PREFECT_SERVER_DATABASE_CONNECTION_URL names, cannot be used ({what})"
    return f"Prefect's server does not start ({what}); its database is {file}"


_ADVICE = (
    "move it away, or set PREFECT_HOME to another folder. It holds the pages of earlier runs; "
    "the results of studies are elsewhere and stay"
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _is_full(file: Path | None) -> bool:
    """Where SQLite says no more than that it cannot write."""
    if not file or not file.parent.exists():
        return False
    there = os.statvfs(file.parent)
    return there.f_bavail * there.f_frsize < 2**20


if __name__ == "__main__":
    main()
