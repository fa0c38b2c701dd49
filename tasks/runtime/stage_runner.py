"""Functions that run a stage: command-line arguments, threads, checks, error messages and atomic outputs."""

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

from tasks.artifacts import stage_inputs
from tasks.artifacts.errors import EckartError, StageError
from tasks.artifacts.names import candidate_name, stage_name
from tasks.config.params_file import section
from tasks.config.schema import Threads, Trainer
from tasks.runtime.code_digests import check_stage


def run(
    name: str,
    work: Callable[[], None],
    trains: bool = False,
    threads: Literal["shared", "candidate"] = "shared",
) -> None:
    """Run a stage that has no arguments.

    Args:
        work: the stage's function; its docstring becomes the help text.
        trains: whether the stage runs in `trainer.processes` processes.
        threads: key of `threads` in params.yaml with the number of threads for this stage.
    """
    argparse.ArgumentParser(prog=f"python -m tasks.{name}", description=work.__doc__).parse_args()
    _guard(name, threads, partial(_spread, name, work) if trains else work)


def run_candidate(
    name: str, work: Callable[[str, str], None], trains: Callable[[str], bool] = lambda recipe: False
) -> None:
    """Run a stage for the candidate that the options `--recipe` and `--keep` name.

    Args:
        work: the stage's function of recipe and keep; its docstring becomes the help text.
        trains: function that returns, for a recipe, whether the stage runs in `trainer.processes` processes.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tasks.{name}", description=work.__doc__)
    parser.add_argument("--recipe", required=True, help="name of the recipe, built-in or of params.yaml")
    parser.add_argument(
        "--keep", required=True, help="share of the target layers' parameters to keep, above 0 and up to 1"
    )
    arguments = parser.parse_args()
    stage = stage_name(name, candidate_name(arguments.recipe, arguments.keep))

    def of_candidate() -> None:
        work_on_it = partial(work, arguments.recipe, arguments.keep)
        _spread(name, work_on_it) if trains(arguments.recipe) else work_on_it()

    _guard(stage, "candidate", of_candidate)


def run_item(name: str, option: str, among: str, work: Callable[[str], None]) -> None:
    """Run a stage for the item that `--OPTION` names. Items run side by side, like candidates.

    Args:
        among: help text of the option, such as `one of importance.shards`.
        work: the stage's function of the item's name; its docstring becomes the help text.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tasks.{name}", description=work.__doc__)
    parser.add_argument(f"--{option}", required=True, help=among)
    item = getattr(parser.parse_args(), option)
    _guard(stage_name(name, item), "candidate", partial(work, item))


def leads() -> bool:
    """Whether this process writes the results. Among processes that train together, only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def _spread(name: str, work: Callable[[], None]) -> None:
    """Run a stage in `trainer.processes` processes. Each runs the whole stage; the Trainer averages the gradients."""
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
            last = line if line.startswith((f"{name}: ", stage_name(name, ""))) else last  # an error message
    if group.returncode:
        sys.exit(last.strip() or f"{name}: one of its processes ended with code {group.returncode}")


@contextmanager
def explained() -> Iterator[None]:
    """Turn a ValueError of eckart into a StageError, because it means that the user's input has a mistake."""
    try:
        yield
    except ValueError as error:
        raise StageError(str(error)) from error


def say(message: str) -> None:
    """Print a line of progress, in the leading process only."""
    if leads():
        print(message, flush=True)


def warn(message: str | None) -> None:
    """Print a warning in the leading process, unless it is None or empty."""
    if message:
        say(f"WARNING: {message}")


@contextmanager
def output(path: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `path` if the block ends without an error, so `path` is never partial.

    In processes that do not lead, the folder is temporary and is deleted.
    """
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


# Parts of the messages of errors: libraries wrap the system's error, torch.save only reports a wrong file position, and
# onnxruntime writes a file that is cut off.
_DISK_FULL = (os.strerror(errno.ENOSPC), "unexpected pos", "iostream error", "Error parsing message with type")
_NO_MEMORY = ("can't allocate memory", "out of memory")  # torch's, on a CPU and on a GPU


def _guard(stage: str, threads: str, work: Callable[[], None]) -> None:
    """Set the number of threads and deterministic algorithms, then run `work`.

    A foreseen error ends the process with exit code 1 and a message that begins with the stage.
    """
    try:
        set_up_torch(getattr(section("threads", Threads), threads))
        inputs = stage_inputs.load(stage)
        check_stage(stage)
        work()
        check_stage(stage)  # again, since `work` may have imported more modules
        if inputs and leads():
            stage_inputs.write(stage, inputs)
    except Exception as error:
        message = " ".join(str(error).split())  # one line, since the flow reports the last line
        if any(sign in message for sign in _DISK_FULL):
            sys.exit(f"{stage}: the disk is full: make room and run again ({message})")
        if isinstance(error, EckartError):
            sys.exit(f"{stage}: {message}")
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY):
            sys.exit(
                f"{stage}: no memory is left: take smaller batches, or fewer stages at a time, --workers ({message})"
            )
        raise


def set_up_torch(threads: int) -> None:
    """Let torch compute with this number of threads, and the same bits each time."""
    import torch

    # The number of threads decides the order of float sums, and so the last bits of every result.
    torch.set_num_threads(threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS may sum in any order
    torch.use_deterministic_algorithms(True, warn_only=True)
    # cuDNN's gradient of attention is not deterministic, and some are NaN (pytorch/pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    quiet()


def quiet() -> None:
    """Switch off transformers' progress bars and notices, which would hide the stages' own lines."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
