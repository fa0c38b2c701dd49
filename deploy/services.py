"""Start on loopback the services that a team shares: PostgreSQL, an object store, Prefect, MLflow, Dask.

    python -m deploy.services    # start them, print the environment for clients, stop them on Ctrl-C

The services keep their files in a folder that is removed at the end. For real machines see docs/how-to/cluster.md.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

LOOPBACK = "127.0.0.1"
KEYS = {
    "AWS_ACCESS_KEY_ID": "rehearsal",
    "AWS_SECRET_ACCESS_KEY": "rehearsal-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_KEY = "eckart:rehearsal-key"
_PATIENCE = 180  # seconds until a started service must answer
_GRACE = 20  # seconds to end after a signal, before SIGKILL
_PYTHON = Path(sys.executable)
_START = Path(__file__).with_name("start")


class NotThere(RuntimeError):
    """A service does not start. The message says why."""


@dataclass
class Service:
    """A process, with its children, that serves a port until it is stopped."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path = Path(os.devnull)
    stop_signal: int = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=os.environ | dict(self.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only this script, which then stops the services
            )

    def wait_until(self, answers: Callable[[], object]) -> None:
        """Wait until `answers` returns True.

        Raises:
            NotThere: the process has ended, or the service does not answer in time.
        """
        end = time.monotonic() + _PATIENCE
        while not answers():
            if not self.process or self.process.poll() is not None or time.monotonic() > end:
                output = self.log.read_text()[-2000:] if self.log.is_file() else ""
                raise NotThere(f"{self.name} does not answer:\n{output}")
            time.sleep(0.1)

    def send(self, number: int) -> None:
        """Send a signal to the process and all its children."""
        if self.process:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if not self.process:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(self.stop_signal)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        self.send(signal.SIGKILL)  # ends remaining children
        self.process.wait()


@dataclass
class Postgres(Service):
    """A PostgreSQL server that trusts all connections from this machine."""

    programs: Path = Path()

    def address(self, database: str, driver: str = "postgresql") -> str:
        return f"{driver}://eckart@{LOOPBACK}:{self.port}/{database}"

    def start(self) -> None:
        super().start()
        self.wait_until(lambda: not self._call("pg_isready").returncode)

    def create(self, database: str) -> str:
        """Create a database, and return its URL."""
        if failed := self._call("createdb", "-U", "eckart", database).stderr:
            raise NotThere(failed)
        return self.address(database)

    def restart(self) -> None:
        """Stop the server, which ends all connections, and start it again."""
        self.stop()
        self.start()

    def _call(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.programs / program), "-h", LOOPBACK, "-p", str(self.port), *words]
        return subprocess.run(command, capture_output=True, text=True)


def postgres_programs() -> Path | None:
    """Return the folder of PostgreSQL's programs: of the newest Debian package, else the one on PATH, else None."""
    if debians := sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3])):
        return debians[-1].parent
    program = shutil.which("postgres")
    return Path(program).resolve().parent if program else None


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a new PostgreSQL server while the block runs; it has no databases of ours yet.

    Raises:
        NotThere: PostgreSQL is not installed, or does not start.
    """
    if not (programs := postgres_programs()):
        raise NotThere("PostgreSQL is not installed: apt-get install postgresql")
    # In /tmp, not in TMPDIR: PostgreSQL refuses to run as root, and another user must have access to the folder.
    folder = Path(tempfile.mkdtemp(prefix="eckart-postgres-", dir="/tmp"))
    as_other: list[str] = []
    try:
        if os.getuid() == 0:
            user = _unprivileged()
            os.chown(folder, user.pw_uid, user.pw_gid)
            as_other = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        data = folder / "data"
        words = [str(programs / "initdb"), "-D", str(data), "-U", "eckart", "--auth=trust", "--no-sync", "-E", "UTF8"]
        process = subprocess.run([*as_other, *words], capture_output=True, text=True, cwd=folder)
        if process.returncode:
            raise NotThere(process.stderr)
        port = free_port()
        # -F: no fsync, because the data are deleted at the end.
        options = ["-h", LOOPBACK, "-p", str(port), "-c", "unix_socket_directories=", "-c", "max_connections=200", "-F"]
        server = Postgres(
            "PostgreSQL",
            [*as_other, str(programs / "postgres"), "-D", str(data), *options],
            port,
            log=folder / "log",
            stop_signal=signal.SIGINT,  # PostgreSQL then closes open connections
            programs=programs,
        )
        with _running(server):
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise NotThere("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody")


@contextmanager
def object_store(folder: Path, *buckets: str) -> Iterator[tuple[Service, dict[str, str]]]:
    """Run moto's S3 server, in memory, with these buckets; yield the server and its clients' environment variables."""
    port = free_port()
    store = Service(
        "the object store",
        [str(_PYTHON), "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)],
        port,
        log=folder / "store.log",
    )
    with _running(store):
        store.wait_until(lambda: answers(f"http://{LOOPBACK}:{port}/moto-api/"))
        for bucket in buckets:
            urlopen(Request(f"http://{LOOPBACK}:{port}/{bucket}", method="PUT"), timeout=10).close()
        address = f"http://{LOOPBACK}:{port}"
        yield store, {**KEYS, "AWS_ENDPOINT_URL": address, "MLFLOW_S3_ENDPOINT_URL": address}


@contextmanager
def prefect(folder: Path, database: str) -> Iterator[dict[str, str]]:
    """Run Prefect's server and yield its clients' environment variables. `database`: URL with the driver asyncpg."""
    settings = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_API_HOST": LOOPBACK,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_API_AUTH_STRING": _KEY,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    }
    with _started("prefect", folder, "PREFECT_SERVER_API_PORT", settings) as server:
        address = f"http://{LOOPBACK}:{server.port}/api"
        server.wait_until(lambda: answers(f"{address}/health"))
        yield {"PREFECT_API_URL": address, "PREFECT_API_AUTH_STRING": _KEY}


@contextmanager
def mlflow(folder: Path, database: str, artifacts: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Run MLflow's server; yield its URL. `keys` are environment variables for access to the artifacts."""
    settings = {
        **keys,
        "MLFLOW_HOST": LOOPBACK,
        "MLFLOW_BACKEND_STORE_URI": database,
        "MLFLOW_ARTIFACTS_DESTINATION": artifacts,
        "MLFLOW_WORKERS": "2",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with _started("mlflow", folder, "MLFLOW_PORT", settings) as server:
        address = f"http://{LOOPBACK}:{server.port}"
        server.wait_until(lambda: answers(f"{address}/health"))
        yield address


@contextmanager
def dask(folder: Path) -> Iterator[str]:
    """Run Dask's scheduler; yield its URL."""
    with _started("dask", folder, "DASK_PORT", {"DASK_HOST": LOOPBACK}) as scheduler:
        scheduler.wait_until(lambda: listens(scheduler.port))
        yield f"tcp://{LOOPBACK}:{scheduler.port}"


def _started(
    word: str, folder: Path, port_variable: str, settings: Mapping[str, str]
) -> AbstractContextManager[Service]:
    """Run `deploy/start WORD` while the block runs. All settings are environment variables, as on real machines."""
    port = free_port()
    path = f"{_PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**settings, port_variable: str(port), "PATH": path}
    return _running(Service(word, [str(_START), word], port, environment, folder / f"{word}.log"))


@contextmanager
def _running(service: Service) -> Iterator[Service]:
    try:
        service.start()
        yield service
    finally:
        service.stop()


@dataclass(frozen=True)
class Team:
    """All services of a team, and the environment variables for their clients."""

    database: Postgres
    store: Service
    scheduler: str
    environment: dict[str, str]


@contextmanager
def team(folder: Path) -> Iterator[Team]:
    """Run all services while the block runs; write their logs into `folder`."""
    with ExitStack() as stack:
        database = stack.enter_context(postgres())
        store, keys = stack.enter_context(object_store(folder, "eckart", "mlflow"))
        database.create("prefect")
        runs = database.create("mlflow")
        places = stack.enter_context(prefect(folder, database.address("prefect", "postgresql+asyncpg")))
        address = stack.enter_context(mlflow(folder, runs, "s3://mlflow", keys))
        scheduler = stack.enter_context(dask(folder))
        # Clients use the registry's database directly, because promotions take turns with locks in it.
        registry = {"MLFLOW_TRACKING_URI": address, "MLFLOW_REGISTRY_URI": runs}
        yield Team(database, store, scheduler, {**keys, **places, **registry})


def free_port() -> int:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        return int(free.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex((LOOPBACK, port))


def answers(url: str) -> bool:
    """Whether a server answers, with any status."""
    try:
        urlopen(url, timeout=5).close()
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (
        tempfile.TemporaryDirectory(prefix="eckart-team-") as folder,
        suppress(KeyboardInterrupt),
        team(Path(folder)) as services,
    ):
        for name, value in services.environment.items():
            print(f"export {name}={value}")
        print(f"# dvc remote modify storage url s3://eckart/dvc; eckart worker {services.scheduler}")
        print("# Ctrl-C stops all.", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
