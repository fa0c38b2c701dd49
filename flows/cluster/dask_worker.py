"""A Dask worker that runs stages for a study of another workspace. Its working directory is its own workspace."""

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
"""Topic of the Dask events that a worker sends: (key of a stage, printed line, training curves so far).

The training curves are path → content of the file.
"""

_POLL = 0.5  # seconds between two checks whether the scheduler is still there
_GOODBYE = 5.0  # seconds that the worker has to end in the normal way


def stage(order: Order, timeout: float | None) -> tuple[Outcome, Entry] | Exception:
    """Run an ordered stage in this worker's workspace, push its outputs, and return (outcome, entry in dvc.lock).

    If the stage fails, the error is returned and not raised, since Dask would print its traceback.
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
    """Run stages for the scheduler at an address until this process is told to end, or fail when the scheduler ends."""
    stages.check_workspace()
    print(f"Stages run in {Path.cwd()}, once {scheduler} answers and hands them out; Ctrl-C ends this.", flush=True)

    async def work_and_end() -> None:
        with stage_processes.reaping():
            asked_to_end = await _work(scheduler, side_by_side)
        if not asked_to_end:
            print(f"The scheduler {scheduler} has ended or let this worker go: start both again.", flush=True)
        # Exit at once instead of returning: unfinished work of Dask could keep the process alive for ever, and the
        # thread of a stage that was just killed would report the stage as failed.
        os._exit(0 if asked_to_end else 1)

    asyncio.run(work_and_end())


async def _work(scheduler: str, side_by_side: int) -> bool:
    """Return whether this process was told to end; else the scheduler has ended, or let the worker go."""
    import dask
    from distributed import Status, Worker  # slow, and an optional extra
    from distributed.comm.addressing import get_address_host
    from distributed.utils import get_ip

    logging.getLogger("distributed").setLevel(logging.WARNING)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    host = get_ip(get_address_host(scheduler))  # listen only on the network that leads to the scheduler
    dask.config.set({"distributed.worker.http.routes": []})
    name, nowhere = f"{gethostname()}:{Path.cwd()}", "127.0.0.1:0"  # Dask's web server cannot be turned off
    worker = Worker(scheduler, nthreads=side_by_side, name=name, host=host, dashboard_address=nowhere)
    started, asked_to_end = asyncio.ensure_future(worker), asyncio.create_task(stopped.wait())
    await asyncio.wait([started, asked_to_end], return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        started.result()
    while not stopped.is_set() and worker.status in (Status.running, Status.paused):
        await asyncio.sleep(_POLL)
    # Close the worker before its stages are killed, so that the scheduler gives them to other workers. If the scheduler
    # is gone, Dask has begun to close the worker by itself and waits for its stages, which end when they are killed.
    await asyncio.wait([asyncio.ensure_future(worker.close(timeout=_POLL, executor_wait=False))], timeout=_GOODBYE)
    return stopped.is_set()
