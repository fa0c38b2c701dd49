"""Our servers: access control, and messages if they do not start."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import prefect as prefect_package
import psutil
import pytest
import uvicorn
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from rich.console import Console
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from flows.environment import settings
from flows.servers import access_key as key
from flows.servers import prefect_server, ui
from flows.servers.access_guard import PROOF, SERVES, Guard
from flows.servers.access_key import ServerError
from flows.servers.ui import show_pages
from tests.flows.servers import free_port, sink, until
from tests.flows.toy import BARE
from tests.workspace import REPOSITORY

DATABASE = f"eckart-{prefect_package.__version__}.db"
SECRET = "topsecret"
OWN = "eckart:of-this-server"
BEGIN_AND_BE_KILLED = """
import os, signal
from flows.servers import prefect_server

def await_(server, *_):
    print(server.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

prefect_server._await = await_
with prefect_server.started(0, pages=False, auth=None):
    pass
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new home of Prefect's, for this process."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    refresh_global_settings_context()
    yield tmp_path / "home"
    monkeypatch.undo()
    refresh_global_settings_context()


@dataclass(frozen=True)
class Door:
    """A server, a POST that it takes and a GET that it answers, and its key."""

    address: str
    path: str
    body: object
    reads: str
    key: str

    def ask(self, auth: str | None = None, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.address}{self.path}", json=self.body, auth=basic(auth), headers=headers, timeout=60)

    def get(self, auth: str | None, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.address}{self.reads}", auth=basic(auth), headers=headers, timeout=60)


def basic(auth: str | None) -> httpx.BasicAuth | None:
    return httpx.BasicAuth(*auth.split(":")) if auth else None


@dataclass(frozen=True)
class Pages:
    prefect: Door
    mlflow: Door
    process: psutil.Process
    workspace: Path
    home: Path
    said: str


@pytest.fixture(scope="module")
def pages(prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """`eckart ui`, with a password in the address of another server, that nobody is to be told."""
    folder = tmp_path_factory.mktemp("pages")
    home, ports = prefect_home(folder), (free_port(), free_port())
    variables = {"PREFECT_HOME": str(home), "PREFECT_SERVER_API_PORT": str(ports[0]), "MLFLOW_PORT": str(ports[1])}
    variables |= {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONPATH": str(REPOSITORY)}
    variables |= {"PREFECT_API_URL": f"http://user:{SECRET}@127.0.0.1:9/api"}
    with (folder / "said").open("w+") as said:
        command = [sys.executable, "-m", "flows", "ui"]
        process = subprocess.Popen(command, cwd=folder, env=BARE | variables, stdout=said, stderr=said)
        try:
            prefect, mlflow = (f"http://127.0.0.1:{port}" for port in ports)

            def up() -> bool:
                assert process.poll() is None, (folder / "said").read_text()
                return "Ctrl-C" in (folder / "said").read_text() and settings.answers(f"{mlflow}/health")

            until(up)
            own = (home / "eckart.key").read_text().strip()
            yield Pages(
                Door(prefect, "/api/flows/filter", {}, "/api/admin/version", own),
                Door(mlflow, "/ajax-api/2.0/mlflow/experiments/create", {"name": "theirs"}, "/", own),
                psutil.Process(process.pid),
                folder,
                home,
                (folder / "said").read_text(),
            )
        finally:
            process.terminate()
            process.wait(60)


async def asked(kind: str, path: str, headers: dict[str, str]) -> str:
    """Return what a request reaches: the application, the proof, or nobody."""
    reached: list[str] = []

    async def app(*_: object) -> None:
        reached.append("the application")

    async def send(message: dict[str, Any]) -> None:
        if message.get("status") == 200:
            reached.append("the proof")
        elif message.get("status", 403) == 403 and message["type"] in ("http.response.start", "websocket.close"):
            reached.append("nobody")

    raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "path": path, "headers": raw_headers, "server": ("127.0.0.1", 1), "query_string": b"1"}
    await Guard(app, "key")(scope | ({"method": "GET"} if kind == "http" else {}), None, send)
    (request_reached,) = reached
    return request_reached


SITES = [
    ({"host": "127.0.0.1:4200"}, True),
    ({"host": "[::1]:1"}, True),
    ({}, False),
    ({"host": "evil.example:4200"}, False),
    ({"host": "127.0.0.1."}, False),
    ({"host": "localhost", "origin": "http://localhost"}, True),
    ({"host": "localhost", "origin": "null"}, False),
    ({"host": "localhost", "origin": "http://localhost:1"}, False),
    ({"host": "localhost", "sec-fetch-site": "same-origin", "sec-fetch-mode": "no-cors"}, True),
    ({"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, False),
]
"""Headers, and whether the request is of this machine's own."""


class TestGuard:
    @pytest.mark.parametrize(("headers", "own"), SITES)
    @pytest.mark.parametrize("kind", ["http", "websocket"])
    def test_foreign_requests_are_refused(self, kind: str, headers: dict[str, str], own: bool) -> None:
        assert asyncio.run(asked(kind, "/any", headers)) == ("the application" if own else "nobody")

    def test_a_link_may_lead_to_a_page(self) -> None:
        link = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert asyncio.run(asked("http", "/any", link)) == "the application"

    @pytest.mark.parametrize("kind", ["http", "websocket"])
    def test_only_http_gets_the_proof(self, kind: str) -> None:
        answer = asyncio.run(asked(kind, PROOF, {"host": "localhost"}))
        assert answer == ("the proof" if kind == "http" else "the application")
        assert asyncio.run(asked(kind, PROOF, {"host": "evil.example"})) == "nobody"


class TestPages:
    def test_they_listen_only_on_loopback_and_nothing_shows_the_key(self, pages: Pages) -> None:
        family = [pages.process, *pages.process.children(recursive=True)]
        addresses: set[str] = set()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                addresses |= {
                    place.laddr.ip for place in process.net_connections(kind="inet") if place.status == "LISTEN"
                }
                words = " ".join(process.cmdline())
                assert SECRET not in words
                assert pages.prefect.key.partition(":")[2] not in words
        assert addresses == {"127.0.0.1"}
        assert pages.prefect.key.partition(":")[2] not in pages.said
        assert SECRET not in pages.said + httpx.get(f"{pages.prefect.address}/ui-settings").text
        assert {f"Prefect: {pages.prefect.address}", f"MLflow:  {pages.mlflow.address}"} <= set(pages.said.splitlines())

    def test_only_the_owner_can_read_the_key_and_the_printed_command_shows_it(self, pages: Pages) -> None:
        assert stat.S_IMODE((pages.home / "eckart.key").stat().st_mode) == 0o600
        (command,) = re.findall(r"(echo .*)$", pages.said, re.MULTILINE)
        assert subprocess.check_output(command, shell=True, text=True).strip() == pages.prefect.key

    def test_a_holder_of_the_key_learns_what_each_server_shows(self, pages: Pages) -> None:
        for door, database in ((pages.prefect, pages.home / DATABASE), (pages.mlflow, pages.workspace / "mlflow.db")):
            answer = httpx.get(f"{door.address}{SERVES}", auth=basic(door.key))
            assert answer.text.endswith(f"///{database}")
            for wrong in (None, "eckart:another"):
                assert httpx.get(f"{door.address}{SERVES}", auth=basic(wrong)).status_code == 401
            assert door.get(door.key, Origin="http://evil.example").status_code == 403

    def test_a_second_ui_uses_running_servers_but_not_the_store_of_another_workspace(
        self, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        ports = [int(door.address.rpartition(":")[2]) for door in (pages.prefect, pages.mlflow)]
        with prefect_settings({"PREFECT_HOME": str(pages.home), "PREFECT_API_URL": None}):
            monkeypatch.chdir(pages.workspace)
            show_pages(Console(), *ports)
            with monkeypatch.context() as apart:
                apart.setenv("MLFLOW_REGISTRY_URI", registry := f"sqlite:///{tmp_path / 'registry.db'}")
                assert ui._environment("sqlite:///runs.db", "", "")["MLFLOW_REGISTRY_STORE_URI"] == registry
                with pytest.raises(ServerError, match="another database"):
                    show_pages(Console(), *ports)
            monkeypatch.chdir(tmp_path)
            with pytest.raises(ServerError, match=str(pages.workspace / "mlflow.db")):
                show_pages(Console(), *ports)
        printed = capsys.readouterr().out
        assert {f"Prefect: {pages.prefect.address}", f"MLflow:  {pages.mlflow.address}"} <= set(printed.splitlines())
        assert str(pages.workspace / "mlflow.db") in printed
        assert pages.mlflow.get(pages.mlflow.key).status_code == pages.prefect.get(pages.prefect.key).status_code == 200

    @pytest.mark.parametrize("which", ["prefect", "mlflow"])
    def test_foreign_pages_and_users_without_the_key_are_refused(self, pages: Pages, which: str) -> None:
        """Pages of another origin or name are refused even with the key; other users lack it."""
        door: Door = getattr(pages, which)
        port = door.address.rpartition(":")[2]
        assert door.get(door.key).status_code == 200
        for origin in ("http://evil.example", f"http://127.0.0.1:{free_port()}", "null", f"https://127.0.0.1:{port}"):
            for answer in (door.ask(door.key, Origin=origin), door.get(door.key, Origin=origin)):
                assert answer.status_code == 403
                assert "access-control-allow-origin" not in answer.headers
        for host in (f"evil.example:{port}", "evil.example", f"127.0.0.1.evil.example:{port}", f"192.168.0.1:{port}"):
            for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
                assert door.ask(door.key, **headers).status_code == door.get(door.key, **headers).status_code == 403
        for wrong in (None, f"{door.key}x", "eckart:"):
            assert door.ask(wrong).status_code == (403 if which == "prefect" else 401)  # which asks for a token first
            assert door.get(wrong).status_code == 401
        page = httpx.get(door.address, auth=basic(door.key))
        assert "frame-ancestors 'self'" in page.headers["content-security-policy"]

    def test_the_pages_own_requests_are_answered(self, pages: Pages) -> None:
        """Also through a tunnel with another port. Prefect's page first asks for a token."""
        assert pages.mlflow.ask(pages.mlflow.key, Host="localhost:1", Origin="http://localhost:1").status_code == 200
        door = pages.prefect
        assert door.ask(door.key).status_code == 403
        token = httpx.get(f"{door.address}/api/csrf-token?client=page", auth=basic(door.key)).json()
        given = {"Prefect-Csrf-Token": token["token"], "Prefect-Csrf-Client": "page"}
        assert door.ask(door.key, Origin=door.address, **given).status_code == 200

    def test_a_page_of_another_origin_opens_no_websocket(self, pages: Pages) -> None:
        address = f"{pages.prefect.address.replace('http', 'ws')}/api/events/in"
        ours: Any = {"subprotocols": ["prefect"], "origin": pages.prefect.address}
        with connect(address, **ours) as opened:
            opened.send('{"type": "auth"}')  # without the key
            with pytest.raises(ConnectionClosed):
                opened.recv(timeout=60)
        with pytest.raises(InvalidStatus), connect(address, **ours | {"origin": "http://evil.example"}):
            pass

    def test_the_key_is_not_sent_to_servers_that_do_not_have_it(
        self, pages: Pages, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another program on the port, or one that relays our server's answers, proves nothing."""
        monkeypatch.setenv("PREFECT_HOME", str(pages.home))
        monkeypatch.delenv("PREFECT_API_URL", raising=False)
        refresh_global_settings_context()
        assert prefect_server.is_ours(pages.prefect.address)
        assert prefect_server.serves(pages.prefect.address).startswith("Prefect ")
        assert not prefect_server.is_ours(pages.mlflow.address.replace("127.0.0.1", "192.168.0.1"))
        with passing_on(pages.prefect.address) as address:
            assert httpx.get(f"{address}/api/health").json() is True
            assert not prefect_server.is_ours(address)
            assert not prefect_server.serves(address)
            given = {"PREFECT_API_URL": f"{address}/api", "PREFECT_API_AUTH_STRING": pages.prefect.key}
            with prefect_settings(given), pytest.raises(ServerError, match="not sent"):
                prefect_server.require()
        monkeypatch.undo()
        refresh_global_settings_context()

    @pytest.mark.parametrize("given", ["eckart:another", None])
    def test_another_key_is_an_error(self, pages: Pages, home: Path, given: str | None) -> None:
        address = {"PREFECT_API_URL": f"{pages.prefect.address}/api", "PREFECT_API_AUTH_STRING": given}
        with prefect_settings(address), pytest.raises(ServerError, match=r"another key.*PREFECT_API_AUTH_STRING"):
            prefect_server.require()


@contextmanager
def prefect_settings(variables: dict[str, str | None]) -> Iterator[None]:
    """Prefect's settings by the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.delenv(name, raising=False)
            if value:
                patch.setenv(name, value)
        refresh_global_settings_context()
        yield
    refresh_global_settings_context()


@contextmanager
def passing_on(address: str) -> Iterator[str]:
    """Run a program that relays the answers of another, and yield its address."""

    async def app(scope: dict[str, object], receive: object, send: Callable[..., object]) -> None:
        query = bytes(scope["query_string"]).decode()  # type: ignore[arg-type]
        answer = httpx.get(f"{address}{scope['path']}?{query}")
        await send({"type": "http.response.start", "status": answer.status_code, "headers": []})  # type: ignore[misc]
        await send({"type": "http.response.body", "body": answer.content})  # type: ignore[misc]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


class TestKey:
    def test_concurrent_first_uses_agree_on_a_key(self, home: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _: key.read_or_create(), range(8)))
        assert set(made) == {key.known()}
        assert [file.name for file in home.iterdir()] == ["eckart.key"]

    def test_a_key_that_others_can_read_is_refused(self, home: Path) -> None:
        key.read_or_create()
        key.path().chmod(0o640)
        with pytest.raises(ServerError, match=str(key.path())):
            key.read_or_create()

    def test_the_users_own_key_wins_and_an_empty_one_means_none(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for own, wanted in (("me:secret", "me:secret"), ("", None)):
            monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", own)
            refresh_global_settings_context()
            assert key.auth_string() == wanted
            environment = prefect_server._environment(pages=False, auth=key.auth_string())
            assert environment.get("PREFECT_SERVER_API_AUTH_STRING") == wanted


@pytest.fixture
def copied(home: Path, prefect_home: Callable[[Path], Path], tmp_path: Path) -> Path:
    """A home of Prefect's with a database."""
    prefect_home(tmp_path).rename(home)
    return home


class TestTemporaryServer:
    def test_it_has_the_same_guard_and_survives_ctrl_c(self, copied: Path) -> None:
        """A terminal sends Ctrl-C to its foreground processes, but the server must hear how the run ended."""
        with prefect_server.started(0, pages=False, auth=OWN) as address:
            (process,) = [
                process
                for process in psutil.Process().children()
                if "flows.servers.guarded_prefect" in process.cmdline()
            ]
            assert os.getsid(process.pid) == process.pid
            door = Door(address, "/api/flows/filter", {}, "/api/admin/version", OWN)
            for foreign in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                assert door.ask(OWN, **foreign).status_code == door.get(OWN, **foreign).status_code == 403
            assert door.get(OWN).status_code == 200
            assert door.get(None).status_code == door.get(key.read_or_create()).status_code == 401
            assert "PREFECT_API_URL" not in os.environ
            with prefect_server._used(address, OWN), get_client(sync_client=True) as client:
                assert client.count_flow_runs() == 0
                client.create_flow_from_name("study")
            assert "PREFECT_API_URL" not in os.environ
        assert not settings.answers(f"{address}/api/health")

    def test_it_ends_with_a_killed_run(self, home: Path) -> None:
        code = [sys.executable, "-c", BEGIN_AND_BE_KILLED]
        run = subprocess.run(code, env=BARE | {"PREFECT_HOME": str(home)}, cwd=REPOSITORY, stdout=subprocess.PIPE)
        assert run.returncode == -signal.SIGKILL
        left = int(run.stdout)
        until(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE, seconds=60)


def damaged(database: Path) -> None:
    """Damage the middle of the file, which a server does not read at its start."""
    whole = database.read_bytes()
    middle = len(whole) // 2
    database.write_bytes(whole[:middle] + b"\xff" * 8192 + whole[middle + 8192 :])


def newer(database: Path) -> None:
    with closing(sqlite3.connect(database)) as opened, opened:
        opened.execute("UPDATE alembic_version SET version_num = 'of_tomorrow'")


class TestMessages:
    @pytest.mark.parametrize("act", [damaged, newer])
    def test_a_database_that_cannot_be_used(
        self, copied: Path, act: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
    ) -> None:
        database = copied / DATABASE
        act(database)
        was = database.read_bytes()
        with pytest.raises(ServerError) as caught, prefect_server.started(0, pages=False, auth=OWN):
            pass
        (line,) = str(caught.value).splitlines()
        assert str(database) in line
        assert "PREFECT_HOME" in line
        assert "Traceback" not in capfd.readouterr().err
        assert database.read_bytes() == was

    @pytest.mark.filterwarnings("ignore:Failed to create the Prefect home")
    def test_a_home_that_cannot_be_made(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = home / "file"
        file.touch()
        monkeypatch.setenv("PREFECT_HOME", str(file / "home"))
        refresh_global_settings_context()
        with (
            pytest.raises(ServerError, match=f"^.*{file}/home.*PREFECT_HOME.*$"),
            prefect_server.started(0, False, OWN),
        ):
            pass

    def test_a_home_that_others_can_write_to(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        home.chmod(0o770)
        with pytest.raises(ServerError, match=f"chmod go-w {home}"), prefect_server.started(0, False, OWN):
            pass

    def test_a_disk_that_is_full(self, home: Path) -> None:
        if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
            pytest.skip("this machine lets no user mount a file system")
        environment = prefect_server._environment(pages=False, auth=OWN)
        mount = f"mount -t tmpfs -o size=64k,mode=700 tmpfs {home}"
        command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-P"]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command += ["-m", "flows.servers.guarded_prefect", str(listener.fileno()), str(os.getpid())]
            passed = [listener.fileno()]
            message = subprocess.run(
                command, env=environment, pass_fds=passed, stdout=subprocess.PIPE, text=True
            ).stdout
        assert str(home / DATABASE) in message
        assert "full" in message

    def test_a_schedule_that_joined_the_server_of_the_pages_starts_its_own_when_that_is_gone(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running = True
        monkeypatch.setattr(prefect_server, "is_ours", lambda _: running)
        monkeypatch.setattr(prefect_server, "started", lambda *_, **__: nullcontext("http://127.0.0.1:9"))
        for expected in (settings.PREFECT_ADDRESS, "http://127.0.0.1:9"):
            with prefect_server.prefect_server() as address:
                assert address == os.environ["PREFECT_API_URL"] == f"{expected}/api"
            assert "PREFECT_API_URL" not in os.environ
            running = False

    def test_the_two_pages_have_ports_of_their_own(self) -> None:
        with pytest.raises(ServerError, match=r"\b4201\b"):
            show_pages(Console(), 4201, 4201)

    def test_another_program_on_the_port_is_no_prefect(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with sink() as (address, _):
            monkeypatch.setattr(settings, "PREFECT_ADDRESS", address)
            port = int(address.rpartition(":")[2])
            with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port}\b.* no Prefect"):
                prefect_server.started(port, True, OWN).__enter__()
            settings.use_local_server()
            assert "PREFECT_API_URL" not in os.environ
            with pytest.MonkeyPatch.context() as patch:  # a run goes on without it
                patch.setattr(prefect_server, "started", lambda *_, **__: nullcontext("http://127.0.0.1:9"))
                ended: list[Callable[[], None]] = []
                patch.setattr(prefect_server.atexit, "register", ended.append)
                prefect_server.use_temporary()
                assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
                ended[0]()
            assert f"127.0.0.1:{port}" in caplog.text
            monkeypatch.setenv("PREFECT_API_URL", f"{address}/api")
            refresh_global_settings_context()
            with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port}\b.* no Prefect"):
                prefect_server.require()
