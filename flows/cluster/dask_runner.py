"""The study on Dask: a stage that must be executed goes to a worker, which has a workspace of its own.

It goes out as an order, the digests of what it reads, and comes back as its entry in dvc.lock; the bytes go through the
DVC remote. The engine decides and records here, and holds DVC's locks meanwhile, as for a stage that runs here.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flows.cluster import dask_worker
from flows.engine import dvc_transport, stages
from flows.engine.dvc_transport import Entry, Order
from flows.engine.stages import Outcome, Planned
from flows.workspace import worktrees
from tasks.artifacts.errors import EckartError
from tasks.artifacts.task_spec import REFERENCE
from tasks.config.schema import PARAMS

if TYPE_CHECKING:
    from distributed import Client, Future


log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between two looks at whether there are workers


class ClusterError(EckartError):
    """Stages cannot be run on workers; the message says what to do."""


def require() -> None:
    """Refuse where Dask is not installed.

    Raises:
        ClusterError: it is not.
    """
    if not find_spec("distributed"):
        raise ClusterError("the task runner dask needs more packages: pip install '.[cluster]'")


@contextmanager
def workers(planned: Sequence[Planned], scheduler: str | None, count: int, timeout: float | None) -> Iterator[Workers]:
    """Dask's workers, to run the stages on.

    Args:
        scheduler: address of a Dask scheduler; with None, `count` workers on this machine serve this run alone.
        timeout: seconds that a stage may take.

    Raises:
        ClusterError, WorkspaceError, TransportFailed: workers cannot be used.
    """
    require()
    dvc_transport.check_remote()
    with _elsewhere(scheduler) if scheduler else _local(count) as (client, check):
        yield Workers(planned, client, check, timeout)


class Workers:
    """Runs stages on Dask's workers; its methods are called from many threads, one for each stage."""

    def __init__(
        self, planned: Sequence[Planned], client: Client, check: Callable[[], None], timeout: float | None
    ) -> None:
        self._planned = {one.name: one for one in planned}
        self._client, self._check, self._timeout = client, check, timeout
        self._published: set[str] = set()
        """Stages whose results the remote has."""
        self._publishing = threading.Lock()
        self._heard: dict[str, SimpleQueue[tuple[str, dict[str, str]] | None]] = {}
        """Dask's key of a stage → what its worker tells, and None at the end."""
        client.subscribe_topic(dask_worker.TOPIC, self._hear)

    def execute(self, planned: Planned, command: str, log: Callable[[str], None]) -> Outcome | float:
        """Bring here what a worker writes when it runs all commands of a stage; some stages must run here.

        Raises:
            ClusterError: no worker could run it.
            EckartError, OSError: it failed there, or what it reads or wrote could not be carried.
        """
        if _gathers(planned, self._planned):
            return stages.execute_here(planned, command, log, self._timeout)
        self._publish(planned.upstream)
        order = dvc_transport.order(planned)
        outcome, entry = self._run(order, log)
        dvc_transport.fetch(order, entry)
        self._published.add(planned.name)
        return outcome

    def _publish(self, names: Sequence[str]) -> None:
        with self._publishing:
            if missing := [name for name in names if name not in self._published]:
                dvc_transport.publish(missing)
                self._published.update(missing)

    def _run(self, order: Order, log: Callable[[str], None]) -> tuple[Outcome, Entry]:
        """What a worker gives back; meanwhile its lines go to `log`, and training curves grow here as they do there."""
        key = f"{order.stage}-{uuid4()}"  # never that of another flow
        heard = self._heard[key] = SimpleQueue()
        future = self._client.submit(dask_worker.stage, order, self._timeout, key=key)
        future.add_done_callback(lambda ended: heard.put(None))
        try:
            while (message := self._next(heard, future)) is not None:
                line, curves = message
                for path, points in curves.items():
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    Path(path).write_text(points)
                log(line)
            return _given(future)
        finally:
            future.release()  # else Dask makes the result again when its worker ends
            del self._heard[key]

    def _next(self, heard: SimpleQueue[Any], future: Future) -> Any:
        while True:
            try:
                return heard.get(timeout=_POLL)
            except Empty:
                if future.done():  # as it is when the client was closed
                    return None
                self._check()

    def _hear(self, event: tuple[float, tuple[str, str, dict[str, str]]]) -> None:
        _, (key, line, curves) = event
        heard = self._heard.get(key)
        if heard is not None:  # else it is another flow's, or over
            heard.put((line, curves))


def _given(future: Future) -> tuple[Outcome, Entry]:
    try:
        given = future.result()
    except Exception as error:  # workers died in it, or cannot load what it is: Dask raises what it met
        raise ClusterError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if isinstance(given, Exception):
        raise given
    return given


def _gathers(one: Planned, planned: Mapping[str, Planned]) -> bool:
    """Whether it reads a folder that others write into, with all that is in there: no other workspace has the same.

    Such is the reference, too, which the flow writes here.
    """
    written = [Path(path) for name in one.upstream for path in planned[name].writes]
    folders = any(path != Path(read) and path.is_relative_to(read) for read in one.reads for path in written)
    return folders or Path.cwd() / REFERENCE in map(Path, one.reads)


@contextmanager
def _elsewhere(scheduler: str) -> Iterator[tuple[Client, Callable[[], None]]]:
    """The workers that a scheduler has or will get; the function warns, once, if there is none."""
    from distributed import Client

    try:
        client = Client(scheduler, set_as_default=False)
    except OSError as error:
        raise ClusterError(f"no Dask scheduler answers at {scheduler}: start one with `dask scheduler`") from error
    said = threading.Event()

    def check() -> None:
        if not said.is_set() and not client.nthreads():
            said.set()
            log.warning("no worker: in a clone on another machine, `eckart worker %s`", scheduler)

    with client:
        yield client, check


@contextmanager
def _local(count: int) -> Iterator[tuple[Client, Callable[[], None]]]:
    """Workers of this machine, each for one stage at a time; others on this machine cannot send them code.

    The function raises ClusterError when all have ended.
    """
    import dask
    from distributed import Client, LocalCluster
    from distributed.security import Security

    logging.getLogger("distributed").setLevel(logging.WARNING)
    worktrees.check_code()
    security = Security.temporary()
    keys = {"key": security.tls_worker_key, "cert": security.tls_worker_cert}
    tls = {"ca-file": security.tls_ca_file, "worker": keys}
    config = {"distributed": {"comm": {"require-encryption": True, "tls": tls}}}
    environment = {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(config)}
    with (
        dask.config.set({"distributed.scheduler.http.routes": []}),
        LocalCluster(
            n_workers=0,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # Dask listens in any case; there it answers nothing
            scheduler_kwargs={"dashboard": False},
            security=security,
        ) as scheduler,
        ExitStack() as stack,
    ):
        address = scheduler.scheduler_address
        processes = [stack.enter_context(_worker(number, address, environment)) for number in range(count)]

        def check() -> None:
            if all(process.poll() is not None for process in processes):
                raise ClusterError("all workers have ended; they said why above")

        with Client(address, security=security, set_as_default=False) as client:
            yield client, check


@contextmanager
def _worker(number: int, scheduler: str, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    folder = worktrees.WORKSPACES / f"worker-{number}"
    with worktrees.held(folder) as lock:
        _prepare(folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "flows", "worker", scheduler],
            cwd=folder,
            env={**os.environ, **environment},
            pass_fds=[lock.fileno()],  # held for as long as the worker lives, should this process be killed
            start_new_session=True,  # Ctrl-C is for this process, which ends its workers
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def _prepare(folder: Path) -> None:
    """A worker's workspace: this commit, these parameters and raw data; a cache of its own, as on another machine."""
    worktrees.follow(folder)
    dvc_transport.own_cache(folder)
    shutil.copy(PARAMS, folder / PARAMS)
