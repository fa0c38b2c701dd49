"""Runs the stages of a study on Dask's workers, each of which has a workspace of its own.

A stage goes to a worker as an order, the digests of its inputs, and comes back as its entry in dvc.lock; the bytes go
through the DVC remote. The engine here decides what runs, records results and holds DVC's locks, as for a stage that
runs here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flows.cluster import dask_worker
from flows.engine import dvc_transport, stages
from flows.engine.dvc_transport import Entry, Order
from flows.engine.stages import Outcome, Planned
from tasks.artifacts.errors import EckartError
from tasks.artifacts.task_spec import REFERENCE

if TYPE_CHECKING:
    from distributed import Client, Future


log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between two looks at whether there are workers


class ClusterError(EckartError):
    """Stages cannot be run on workers; the message says what to do."""


def require() -> None:
    """Check that Dask is installed."""
    if not find_spec("distributed"):
        raise ClusterError("the task runner dask needs more packages: pip install '.[cluster]'")


@contextmanager
def workers(planned: Sequence[Planned], scheduler: str, timeout: float | None) -> Iterator[Workers]:
    """Yield the workers of the Dask scheduler at this address, to run the stages on, for `timeout` seconds each."""
    require()
    dvc_transport.check_remote()
    from distributed import Client

    try:
        client = Client(scheduler, set_as_default=False)
    except OSError as error:
        raise ClusterError(f"no Dask scheduler answers at {scheduler}: start one with `dask scheduler`") from error
    with client:
        yield Workers(planned, client, timeout)


class Workers:
    """Runs stages on Dask's workers. Its methods are called from many threads, one for each stage."""

    def __init__(self, planned: Sequence[Planned], client: Client, timeout: float | None) -> None:
        self._planned = {stage.name: stage for stage in planned}
        self._client, self._timeout = client, timeout
        self._warned = threading.Event()
        self._published: set[str] = set()
        """Stages whose results the remote has."""
        self._publishing = threading.Lock()
        self._heard: dict[str, SimpleQueue[tuple[str, dict[str, str]] | None]] = {}
        """Dask's key of a stage → messages of its worker, and None at the end."""
        client.subscribe_topic(dask_worker.TOPIC, self._hear)

    def execute(self, planned: Planned, command: str, log: Callable[[str], None]) -> Outcome | float:
        """Run a stage on a worker and bring its outputs here; run it here if no other workspace has its inputs.

        Raises:
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
        """Return a worker's result; meanwhile, hand its lines to `log` and write its training curves as they grow."""
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
            return _result(future)
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
                if not self._warned.is_set() and not self._client.nthreads():
                    self._warned.set()
                    log.warning("no worker: in a clone on another machine, `eckart worker ADDRESS` starts one")

    def _hear(self, event: tuple[float, tuple[str, str, dict[str, str]]]) -> None:
        _, (key, line, curves) = event
        heard = self._heard.get(key)
        if heard is not None:  # else it is another flow's, or over
            heard.put((line, curves))


def _result(future: Future) -> tuple[Outcome, Entry]:
    try:
        result = future.result()
    except Exception as error:  # workers died in it, or cannot load what it is: Dask raises what it met
        raise ClusterError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if isinstance(result, Exception):
        raise result
    return result


def _gathers(stage: Planned, planned: Mapping[str, Planned]) -> bool:
    """Whether a stage reads a folder that several others write into, or the reference, which the flow writes here.

    No other workspace has the same files there.
    """
    written = [Path(path) for name in stage.upstream for path in planned[name].writes]
    folders = any(path != Path(read) and path.is_relative_to(read) for read in stage.reads for path in written)
    return folders or Path.cwd() / REFERENCE in map(Path, stage.reads)
