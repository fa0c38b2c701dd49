"""A worker: runs stages of a study elsewhere in its working directory, a clone of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname

from flows.engine import dvc_transport, stage_processes, stages
from flows.engine.dvc_transport import Entry, Order
from flows.engine.stages import Outcome
from tasks.artifacts.errors import EckartError

TOPIC = "eckart"
"""Topic of Dask's events with a stage's key, a line that it prints, and its training curves so far (path → text)."""

_POLL = 0.5  # seconds between two looks at whether the scheduler is still there
_GOODBYE = 5.0  # seconds for a usual end


def stage(order: Order, timeout: float | None) -> tuple[Outcome, Entry] | Exception:
    """Run a stage in this worker's workspace, push its outputs, and return its outcome and its entry in dvc.lock.

    A failure is returned, not raised: Dask would print its traceback.
    """
    from distributed import get_worker  # slow, and an optional extra

    worker, root = get_worker(), Path.cwd()
    key, place = worker.get_current_task(), f"{root} on {gethostname()}"
    try:
        planned = dvc_transport.accept(order)
        curves = [Path(path).relative_to(root) for path in planned.writes if path.endswith(".jsonl")]

        def say(line: str) -> None:
            points = {str(path): path.read_text() for path in curves if path.exists()}
            worker.log_event(TOPIC, (key, line, points))

        say(f"runs in {place}")
        outcome = stages.run(planned, partial(stages.execute_here, planned, log=say, timeout=timeout))
        entry = dvc_transport.publish([order.stage])[order.stage]
    except (EckartError, OSError) as error:
        return error
    return replace(outcome, place=place), entry


def work(scheduler: str, side_by_side: int) -> None:
    """Run stages, `side_by_side` at a time, until the scheduler at this address or this process ends."""
    stages.check_workspace()
    print(f"Stages run in {Path.cwd()}, once {scheduler} answers and hands them out; Ctrl-C ends this.", flush=True)
    asyncio.run(_work_and_end(scheduler, side_by_side))


async def _work_and_end(scheduler: str, side_by_side: int) -> None:
    with stage_processes.reaping():
        await _work(scheduler, side_by_side)
    # Not by a return: what Dask has not finished could hold the process open for ever, and the thread of a stage that
    # was just killed would report it as failed.
    os._exit(0)


async def _work(scheduler: str, side_by_side: int) -> None:
    import dask
    from distributed import Status, Worker  # slow, and an optional extra
    from distributed.comm.addressing import get_address_host
    from distributed.utils import get_ip

    logging.getLogger("distributed").setLevel(logging.WARNING)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host = get_ip(get_address_host(scheduler))  # not on every network of this machine
    dask.config.set({"distributed.worker.http.routes": []})
    name, nowhere = f"{gethostname()}:{Path.cwd()}", "127.0.0.1:0"  # Dask listens for pages in any case
    worker = Worker(scheduler, nthreads=side_by_side, name=name, host=host, dashboard_address=nowhere)
    started, asked_to_end = asyncio.ensure_future(worker), asyncio.create_task(stopped.wait())
    await asyncio.wait([started, asked_to_end], return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        started.result()
    while not stopped.is_set() and worker.status in (Status.running, Status.paused):
        await asyncio.sleep(_POLL)
    # Before its stages are killed: the scheduler is to give them to other workers. Where it is gone, Dask has begun to
    # end the worker by itself, and waits for stages, which end when they are killed.
    await asyncio.wait([asyncio.ensure_future(worker.close(timeout=_POLL, executor_wait=False))], timeout=_GOODBYE)
