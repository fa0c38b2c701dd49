"""Run the stages of a study on Dask's workers, each of which has its own workspace.

A stage is sent to a worker as an `Order` with the digests of its inputs, and its result comes back as the stage's entry
in dvc.lock. The files themselves go through the DVC remote. The engine in this workspace decides which stages run,
records the results and holds DVC's locks, just as it does for a stage that runs here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flows.cluster import dask_worker
from flows.engine import dvc_transport, stage_processes, stages
from flows.engine.dvc_transport import Entry, Order
from flows.engine.stages import Outcome, Planned
from tasks.artifacts.errors import EckartError
from tasks.artifacts.task_spec import REFERENCE

if TYPE_CHECKING:
    from distributed import Client, Future


log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between two checks whether there are workers


class ClusterError(EckartError):
    """Stages cannot run on workers. The message says what to do."""


def require() -> None:
    """Raise a ClusterError if Dask is not installed."""
    if not find_spec("distributed"):
        raise ClusterError("the task runner dask needs more packages: pip install '.[cluster]'")


@contextmanager
def workers(planned: Sequence[Planned], scheduler: str, timeout: float | None) -> Iterator[Workers]:
    """Connect to the Dask scheduler at an address, and yield its workers, which can then run the planned stages."""
    require()
    dvc_transport.check_remote()
    from distributed import Client

    try:
        client = Client(scheduler, set_as_default=False)
    except OSError as error:
        raise ClusterError(f"no Dask scheduler answers at {scheduler}: start one with `dask scheduler`") from error
    with client:
        try:
            yield Workers(planned, client, scheduler, timeout)
        finally:
            stage_processes.end_all()  # before the client closes, which would look like the end of the scheduler


class Workers:
    """The workers of a Dask cluster, which run stages. Many threads call `execute`, one for each stage."""

    def __init__(self, planned: Sequence[Planned], client: Client, scheduler: str, timeout: float | None) -> None:
        self._planned = {stage.name: stage for stage in planned}
        self._client, self._scheduler, self._timeout = client, scheduler, timeout
        self._warned = threading.Event()
        self._published: set[str] = set()
        """Names of the stages whose outputs are in the DVC remote."""
        self._publishing = threading.Lock()
        self._heard: dict[str, SimpleQueue[tuple[str, dict[str, str]] | None]] = {}
        """Dask's key of a running stage → messages from its worker; None is the last."""
        client.subscribe_topic(dask_worker.TOPIC, self._hear)

    def execute(self, planned: Planned, command: str, log: Callable[[str], None]) -> Outcome | float:
        """Run a stage on a worker and fetch its outputs; if no other workspace can have its inputs, run it here.

        Returns:
            The outcome on the worker, or the seconds that the stage took here.

        Raises:
            CommandFailed: the run has ended. A stage that a worker has begun goes on there, for the next run.
        """
        stage_processes.check_goes_on()
        if _gathers(planned, self._planned):
            return stages.execute_here(planned, command, log, self._timeout)
        with self._publishing:
            if missing := [name for name in planned.upstream if name not in self._published]:
                dvc_transport.publish(missing)
                self._published.update(missing)
        order = dvc_transport.order(planned)
        outcome, entry = self._run(order, log)
        dvc_transport.fetch(order, entry)
        self._published.add(planned.name)
        return outcome

    def _run(self, order: Order, log: Callable[[str], None]) -> tuple[Outcome, Entry]:
        """Run an ordered stage on a worker, and return its result.

        While the stage runs, its printed lines are passed to `log`, and its training curves are written into this
        workspace.
        """
        key = f"{order.stage}-{uuid4()}"  # unique among all flows that use the scheduler
        heard = self._heard[key] = SimpleQueue()
        with self._explained():
            future = self._client.submit(dask_worker.stage, order, self._timeout, key=key)
        future.add_done_callback(lambda ended: heard.put(None))
        try:
            while (message := self._next(heard, future)) is not None:
                line, curves = message
                for path, points in curves.items():
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    Path(path).write_text(points)
                log(line)
            with self._explained():
                result = future.result()
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            future.release()  # else Dask would run the stage again when its worker ends
            del self._heard[key]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn any error of Dask into a ClusterError, or into CommandFailed if the run has ended."""
        try:
            yield
        except Exception as error:  # its workers died, or cannot load our code: Dask raises any kind of error
            stage_processes.check_goes_on()
            if isinstance(error, CancelledError) or self._client.status != "running":
                raise ClusterError(
                    f"the connection to the Dask scheduler {self._scheduler} was lost: start it and its workers, if "
                    "they have ended, and run again"
                ) from error
            raise ClusterError(f"{type(error).__name__}: {error}".splitlines()[0]) from error

    def _next(self, heard: SimpleQueue[Any], future: Future) -> Any:
        while True:
            try:
                return heard.get(timeout=_POLL)
            except Empty:
                stage_processes.check_goes_on()
                if future.done():  # also true after the client was closed, when no message comes any more
                    return None
                if self._warned.is_set():
                    continue
                with self._explained():
                    idle = not self._client.nthreads()
                if idle:
                    self._warned.set()
                    log.warning("no worker: in a clone on another machine, `eckart worker ADDRESS` starts one")

    def _hear(self, event: tuple[float, tuple[str, str, dict[str, str]]]) -> None:
        _, (key, line, curves) = event
        heard = self._heard.get(key)
        if heard is not None:  # else the stage belongs to another flow, or has ended
            heard.put((line, curves))


def _gathers(stage: Planned, planned: Mapping[str, Planned]) -> bool:
    """Whether a stage must run in this workspace, because no other one has the same input files.

    This is so if the stage reads a folder into which several other stages write, or the reference data, which the flow
    writes into this workspace only.
    """
    written = [Path(path) for name in stage.upstream for path in planned[name].writes]
    folders = any(path != Path(read) and path.is_relative_to(read) for read in stage.reads for path in written)
    return folders or Path.cwd() / REFERENCE in map(Path, stage.reads)
