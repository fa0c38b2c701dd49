"""The frame around the work of every stage: arguments, threads, checks, errors, atomic outputs."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import transformers

from tasks.artifacts import stage_inputs
from tasks.artifacts.errors import EckartError as EckartError
from tasks.artifacts.errors import StageError as StageError
from tasks.artifacts.names import candidate_name, stage_name
from tasks.config.schema import Threads, Trainer, section
from tasks.runtime.code_digests import check_stage


def run(
    name: str, work: Callable[[], None], trains: bool = False, threads: Literal["shared", "candidate"] = "shared"
) -> None:
    """Run a stage that has no arguments.

    Args:
        trains: whether it runs in as many processes as `trainer.processes` says.
        threads: the entry of `threads` that it takes: `candidate` if it runs beside stages of candidates.
    """
    argparse.ArgumentParser(prog=f"python -m tasks.{name}", description=work.__doc__).parse_args()
    _guard(name, threads, partial(_spread, name, work) if trains else work)


def run_candidate(
    name: str, work: Callable[[str, str], None], trains: Callable[[str], bool] = lambda recipe: False
) -> None:
    """Run a stage for one candidate, named by `--recipe` and `--keep`.

    Args:
        trains: recipe → whether this recipe trains here and may use several processes; see `run`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tasks.{name}", description=work.__doc__)
    parser.add_argument("--recipe", required=True, help="a key of recipes in params.yaml")
    parser.add_argument("--keep", required=True, help="share of the targets' parameters to keep, in (0, 1]")
    arguments = parser.parse_args()
    stage = stage_name(name, candidate_name(arguments.recipe, arguments.keep))

    def of_candidate() -> None:
        work_on_it = partial(work, arguments.recipe, arguments.keep)
        _spread(name, work_on_it) if trains(arguments.recipe) else work_on_it()

    _guard(stage, "candidate", of_candidate)


def leads() -> bool:
    """Whether this process writes the results: the first one of several that train together."""
    return os.environ.get("RANK", "0") == "0"


def _spread(name: str, work: Callable[[], None]) -> None:
    """Work in as many processes as params.yaml says: each runs the whole stage, Trainer averages the gradients."""
    processes = section("trainer", Trainer).processes
    if processes == 1 or "RANK" in os.environ:
        work()
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    last, command = "", [*launch, "-m", f"tasks.{name}", *sys.argv[1:]]
    code = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    with subprocess.Popen(command, env=code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as group:
        assert group.stdout
        for line in group.stdout:
            say(line.rstrip())
            last = line if line.startswith((f"{name}: ", stage_name(name, ""))) else last  # what ended one of them
    if group.returncode:
        sys.exit(last.strip() or f"{name}: one of its processes ended with code {group.returncode}")


@contextmanager
def explained() -> Iterator[None]:
    """Turn a ValueError of eckart, which is a mistake in the input, into a StageError."""
    try:
        yield
    except ValueError as error:
        raise StageError(str(error)) from error


def say(message: str) -> None:
    """Print a line of progress, in the process that leads."""
    if leads():
        print(message, flush=True)


def warn(message: str | None) -> None:
    """Print a line that a reader of the log must not miss, if there is one."""
    if message:
        say(f"WARNING: {message}")


@contextmanager
def output(path: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `path` when it is complete, in the process that leads."""
    if not leads():
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    partial.replace(path)


# Libraries wrap it in errors of their own; torch.save only says that it stands where it did not expect to.
_DISK_FULL = (os.strerror(errno.ENOSPC), "unexpected pos", "iostream error")
_NO_MEMORY = ("can't allocate memory", "out of memory")  # torch's, on a CPU and on a GPU


def _guard(stage: str, threads: str, work: Callable[[], None]) -> None:
    """Fix the threads and determinism of a result, then work; an error names the stage and ends the process with 1."""
    try:
        # The number of threads decides the order of float sums, and so the last bits of every result.
        torch.set_num_threads(getattr(section("threads", Threads), threads))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS may sum in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        quiet()
        inputs = stage_inputs.load(stage)
        check_stage(stage)
        work()
        check_stage(stage)  # it may have imported modules late
        if inputs and leads():
            stage_inputs.write(stage, inputs)
    except EckartError as error:
        sys.exit(f"{stage}: {' '.join(str(error).split())}")  # one line: the flow reports the last one
    except Exception as error:
        message = " ".join(str(error).split())
        if any(sign in str(error) for sign in _DISK_FULL):
            sys.exit(f"{stage}: the disk is full: make room and run again ({message})")
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY):
            sys.exit(
                f"{stage}: no memory is left: take smaller batches, or fewer stages at a time, --workers ({message})"
            )
        raise


def quiet() -> None:
    """Switch off transformers' progress bars and notices, which would drown the stages' own lines."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
