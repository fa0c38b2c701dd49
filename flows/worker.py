"""A worker: runs the stages that a study elsewhere hands out, in its working directory, a clone of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from socket import gethostname

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed, State

from flows import engine
from flows.engine import Outcome, processes, remote
from flows.engine.remote import Entry, Order

_POLL = 0.5  # seconds between two looks at whether the scheduler is still there


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{order.stage}")
def stage(order: Order, timeout: float | None) -> State[tuple[Outcome, Entry]]:
    """Run a stage in this worker's workspace and push what it wrote. The state's name is DVC's verdict here."""
    log = get_run_logger()
    root = Path.cwd()

    def execute(command: str) -> None:
        processes.run(command, root, log.info, {"DVC_ROOT": str(root), "DVC_STAGE": order.stage}, timeout)

    try:
        outcome = engine.run(remote.accept(order), execute)
        entry = remote.publish([order.stage])[order.stage]
    except (processes.CommandFailed, engine.StageChanged, remote.NotTheSame, remote.TransportFailed) as error:
        return Failed(message=str(error))
    message = f"DVC: {outcome.status}, in {root} on {gethostname()}"
    return Completed(name=outcome.status, message=message, data=(outcome, entry))


def work(scheduler: str, stages: int) -> None:
    """Run stages, as many side by side, until the scheduler at this address ends or a signal ends this process.

    Raises:
        WorkspaceUnusable: the working directory is none, or cannot be written.
    """
    engine.check_workspace()
    print(f"Stages run in {Path.cwd()}, once {scheduler} answers and hands them out; Ctrl-C ends this.", flush=True)
    with processes.reaping():
        asyncio.run(_work(scheduler, stages))
    os._exit(0)  # the thread of a stage that was just killed would report it as failed


async def _work(scheduler: str, stages: int) -> None:
    from distributed import Status, Worker  # slow, and an optional extra
    from distributed.comm.addressing import get_address_host
    from distributed.utils import get_ip

    logging.getLogger("distributed").setLevel(logging.WARNING)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host = get_ip(get_address_host(scheduler))  # not on every network of this machine
    worker = Worker(scheduler, nthreads=stages, name=f"{gethostname()}:{Path.cwd()}", host=host)
    started, asked_to_end = asyncio.ensure_future(worker), asyncio.create_task(stopped.wait())
    await asyncio.wait([started, asked_to_end], return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        started.result()
    while not stopped.is_set() and worker.status in (Status.running, Status.paused):
        await asyncio.sleep(_POLL)
    # Before its stages are killed: the scheduler is to give them to other workers.
    await worker.close(timeout=_POLL, executor_wait=False)
