"""The study on Dask: what must be executed goes to workers, each with a workspace of its own; all is recorded here.

A stage goes out as an order, the digests of what it reads, and comes back as its entry in dvc.lock; the bytes go
through the DVC remote. Decided and recorded is it here, by the engine, as if it had run here.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import RunInput, TaskRunResult
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture, PrefectWrappedFuture
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.states import Crashed, Failed, State

from flows import engine, worker, workspaces
from flows.engine import Outcome, Planned, remote
from flows.engine.remote import Entry, Order
from tasks.errors import EckartError
from tasks.params import PARAMS

if TYPE_CHECKING:
    from prefect_dask import DaskTaskRunner

    from flows.tracking.mirror import Mirror

log = logging.getLogger(__name__)

Here = Callable[..., PrefectFuture[Outcome]]

_POLL = 1.0  # seconds between two looks at the local workers


class ClusterError(EckartError):
    """Stages cannot be run on workers; the message says what to do."""


class _MustRun(Exception):
    """DVC's verdict: neither up to date nor in the run cache."""


def require() -> None:
    """See to it that Dask is installed.

    Raises:
        ClusterError: it is not.
    """
    if not find_spec("prefect_dask"):
        raise ClusterError("the task runner dask needs more packages: pip install '.[cluster]'")


def run(
    planned: Sequence[Planned],
    here: Here,
    mirror: Mirror,
    scheduler: str | None,
    workers: int,
    timeout: float | None,
) -> dict[str, State[Outcome]]:
    """Bring the stages up to date that can be; name → state of each that was begun.

    Args:
        here: submits a stage to this process, for those that need no worker, with what it has waited for.
        scheduler: address of a Dask scheduler; with None, that many `workers` on this machine serve this run alone.
        timeout: seconds that a stage may take.

    Raises:
        ClusterError, WorkspaceError, TransportFailed: workers cannot be used; nothing was run.
    """
    require()
    remote.check_remote()
    with _elsewhere(scheduler) if scheduler else _local(workers) as (runner, alive), runner:
        return _Coordinator(planned, here, mirror, runner, alive, timeout).run()


@dataclass(frozen=True)
class _Sent:
    """A stage that a worker runs, or will."""

    order: Order
    task_run: UUID
    following: ExitStack


class _Coordinator:
    """Sends stages out as they become ready, and takes in what comes back, one at a time."""

    def __init__(
        self,
        planned: Sequence[Planned],
        here: Here,
        mirror: Mirror,
        runner: DaskTaskRunner,
        alive: Callable[[], bool],
        timeout: float | None,
    ) -> None:
        self.here, self.mirror, self.runner, self.alive, self.timeout = here, mirror, runner, alive, timeout
        self.planned = {one.name: one for one in planned}
        self.waiting = list(planned)
        self.running: dict[str, Planned] = {}
        self.sent: dict[str, _Sent] = {}
        self.states: dict[str, State[Outcome]] = {}
        self.published: set[str] = set()
        """Stages of which the remote has what they wrote."""
        self.ended: SimpleQueue[tuple[str, PrefectWrappedFuture[Any, Any]]] = SimpleQueue()

    def run(self) -> dict[str, State[Outcome]]:
        """Name → final state, of all stages but those that wait for one that failed."""
        try:
            while True:
                while ready := _ready(self.waiting, list(self.running.values()), self.states):
                    for one in ready:
                        self.waiting.remove(one)
                        self._begin(one)
                if not self.running:
                    return self.states
                name, state = self._next()
                one = self.running.pop(name)
                self.states[name] = self._receive(one, state) if name in self.sent else state
        finally:
            for sent in self.sent.values():
                sent.following.close()

    def _begin(self, one: Planned) -> None:
        try:
            decided = one if one.cached or _gathers(one, self.planned) else _decided(one)
            upstream = [self.states[name] for name in one.upstream]
            future: Any = self.here(decided, wait_for=upstream) if decided else self._send(one)
        except Exception as error:  # DVC and remotes fail in many ways; the other stages go on
            self.states[one.name] = Failed(message=str(error))
            return
        self.running[one.name] = one
        future.add_done_callback(lambda ended: self.ended.put((one.name, ended)))

    def _send(self, one: Planned) -> PrefectFuture[tuple[Outcome, Entry]]:
        if missing := [name for name in one.upstream if name not in self.published]:
            remote.publish(missing)
            self.published.update(missing)
        order = remote.order(one)
        upstream: set[RunInput] = {
            TaskRunResult(id=run) for name in one.upstream if (run := self.states[name].state_details.task_run_id)
        }
        with self._place(one.alone), _reachable_server():
            future: PrefectFuture[tuple[Outcome, Entry]] = self.runner.submit(
                worker.stage,  # type: ignore[arg-type]  # it returns a state of what is expected there
                {"order": order, "timeout": self.timeout},
                dependencies={"order": upstream},
            )
        self.sent[one.name] = _Sent(order, future.task_run_id, following := ExitStack())
        following.enter_context(self.mirror.following(one))
        return future

    def _place(self, alone: bool) -> AbstractContextManager[object]:
        """Stages that measure go to one worker, the first by name, for as long as it lives."""
        import dask

        workers = self.runner.client.scheduler_info()["workers"] if alone else {}
        if not workers:
            return nullcontext()
        first = min(workers, key=lambda address: str(workers[address]["name"]))
        return dask.annotate(workers=[first], allow_other_workers=True)

    def _next(self) -> tuple[str, State[Any]]:
        """The next stage to end; one that was sent ends, too, when the last worker of this machine has."""
        while True:
            try:
                name, future = self.ended.get(timeout=_POLL)
                if name in self.running:  # else its worker was found dead meanwhile
                    return name, self._state(name, future)
            except Empty:
                if self.sent and not self.alive():
                    name = next(iter(self.sent))
                    return name, _crashed(self.sent[name].task_run, "all workers have ended; they said why above")

    def _state(self, name: str, future: PrefectWrappedFuture[Any, Any]) -> State[Any]:
        try:
            return future.wrapped_future.result()
        except Exception as error:  # workers died in it, or cannot load what it is: Dask raises what it met
            return _crashed(future.task_run_id, f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            if name in self.sent:
                future.wrapped_future.release()  # else Dask makes the result again when its worker ends

    def _receive(self, one: Planned, state: State[Any]) -> State[Outcome]:
        """Record a stage as if it had run here."""
        sent = self.sent.pop(one.name)
        with sent.following:  # until its curve is here
            if not state.is_completed():
                return state
            there, entry = state.result()
            fetch = cache(lambda: remote.fetch(sent.order, entry))  # once, whatever the number of commands
            try:
                recorded = engine.run(replace(one, alone=False), lambda command: fetch())
            except Exception as error:  # as above
                return Failed(message=str(error))
        self.published.add(one.name)
        outcome = replace(recorded, seconds=there.seconds)
        if there.status != "Executed":  # the worker had it, from a run that was cut off
            outcome = replace(outcome, status="Restored")
        self.mirror.record(outcome)
        return state.model_copy(update={"name": outcome.status, "data": outcome})


def _ready(
    waiting: Sequence[Planned], running: Sequence[Planned], states: Mapping[str, State[Outcome]]
) -> list[Planned]:
    """What can begin now. What must have a machine to itself begins when nothing else could, and nothing beside it."""
    if any(_alone(one) for one in running):
        return []
    done = {name for name, state in states.items() if state.is_completed()}
    ready = [one for one in waiting if done.issuperset(one.upstream)]
    return [one for one in ready if not _alone(one)] or ([] if running else ready[:1])


def _alone(one: Planned) -> bool:
    return one.alone and not one.cached


def _gathers(one: Planned, planned: Mapping[str, Planned]) -> bool:
    """Whether it reads a folder that others write into, with all that is in there: no other workspace has the same."""
    written = [Path(path) for name in one.upstream for path in planned[name].writes]
    return any(path != Path(read) and path.is_relative_to(read) for read in one.reads for path in written)


def _decided(one: Planned) -> Planned | None:
    """The stage with its outcome, if DVC finds it up to date here or in the run cache."""

    def execute(command: str) -> None:
        raise _MustRun

    try:
        return replace(one, cached=engine.run(replace(one, alone=False), execute))
    except _MustRun:
        return None


def _crashed(task_run: UUID, message: str) -> State[Any]:
    """Tell Prefect's server, too: the worker cannot any more."""
    state: State[Any] = Crashed(message=message)
    with get_client(sync_client=True) as client, suppress(ObjectNotFound, httpx.TransportError):
        # it may not have begun, and the server may be gone, which the end of the run says
        client.set_task_run_state(task_run, state, force=True)
    return state


def _reachable_server() -> AbstractContextManager[object]:
    """Tell workers of the server that this run uses, be it a temporary one."""
    with get_client(sync_client=True) as client:
        return temporary_settings({PREFECT_API_URL: str(client.api_url)})


@contextmanager
def _elsewhere(scheduler: str) -> Iterator[tuple[DaskTaskRunner, Callable[[], bool]]]:
    """The workers that a scheduler has, and may get."""
    from prefect_dask import DaskTaskRunner

    if not get_current_settings().api.url:
        raise ClusterError("workers report to Prefect's server: set PREFECT_API_URL to one that all of them reach")
    runner = DaskTaskRunner(address=scheduler)
    try:
        threads = runner.client.nthreads
    except OSError as error:
        raise ClusterError(f"no Dask scheduler answers at {scheduler}: start one with `dask scheduler`") from error
    said = False

    def alive() -> bool:
        nonlocal said
        if not said and not threads():
            log.warning("no worker: in a clone on another machine, `python -m flows worker %s`", scheduler)
            said = True
        return True

    yield runner, alive


@contextmanager
def _local(count: int) -> Iterator[tuple[DaskTaskRunner, Callable[[], bool]]]:
    """Workers of this machine, each for one stage at a time; others on this machine cannot send them code."""
    import dask
    from distributed import LocalCluster
    from distributed.security import Security
    from prefect_dask import DaskTaskRunner

    logging.getLogger("distributed").setLevel(logging.WARNING)
    workspaces.check_code()
    security = Security.temporary()
    keys = {"key": security.tls_worker_key, "cert": security.tls_worker_cert}
    tls = {"ca-file": security.tls_ca_file, "worker": keys}
    config = {"distributed": {"comm": {"require-encryption": True, "tls": tls}}}
    environment = {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(config)}
    with (
        LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0", security=security) as scheduler,
        ExitStack() as stack,
    ):
        address = scheduler.scheduler_address
        processes = [stack.enter_context(_worker(number, address, environment)) for number in range(count)]
        runner = DaskTaskRunner(address=address, client_kwargs={"security": security})
        yield runner, lambda: any(process.poll() is None for process in processes)


@contextmanager
def _worker(number: int, scheduler: str, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    folder = workspaces.WORKSPACES / f"worker-{number}"
    with workspaces.held(folder) as lock:
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
    workspaces.follow(folder)
    remote.own_cache(folder)
    shutil.copy(PARAMS, folder / PARAMS)
