"""What every stage does around its work: arguments, seeds, threads, errors, atomic outputs."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from tasks.params import ParamsError, Threads, section


class StageError(RuntimeError):
    """A mistake of the input, said in words that tell what to do; shown without a traceback."""


def run(name: str, work: Callable[[], None]) -> None:
    """Run a stage that has no arguments."""
    argparse.ArgumentParser(prog=f"python -m tasks.{name}", description=work.__doc__).parse_args()
    _guard(name, "shared", work)


def run_candidate(name: str, work: Callable[[str, str], None]) -> None:
    """Run a stage for one candidate, named by `--recipe` and `--keep`."""
    parser = argparse.ArgumentParser(prog=f"python -m tasks.{name}", description=work.__doc__)
    parser.add_argument("--recipe", required=True, help="a key of recipes in params.yaml")
    parser.add_argument("--keep", required=True, help="share of the targets' parameters to keep, in (0, 1]")
    arguments = parser.parse_args()
    stage = f"{name}@{arguments.recipe}-{arguments.keep}"
    _guard(stage, "candidate", lambda: work(arguments.recipe, arguments.keep))


@contextmanager
def explained() -> Iterator[None]:
    """A ValueError of eckart is a mistake of the input: its message says what to do."""
    try:
        yield
    except ValueError as error:
        raise StageError(str(error)) from error


def candidate(recipe: str, keep: str) -> str:
    """The name of a candidate, such as `kfac-0.33`."""
    return f"{recipe}-{keep}"


def say(message: str) -> None:
    """A line of progress."""
    print(message, flush=True)


@contextmanager
def output(path: Path) -> Iterator[Path]:
    """A fresh folder to fill, which becomes `path` only when it is complete."""
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


def _guard(stage: str, threads: str, work: Callable[[], None]) -> None:
    """Fix what a result may depend on, then work; an error names the stage and ends the process with 1."""
    try:
        # The number of threads decides the order of float sums, and so the last bits of every result.
        torch.set_num_threads(getattr(section("threads", Threads), threads))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS may sum in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        quiet()
        work()
    except (StageError, ParamsError) as error:
        sys.exit(f"{stage}: {' '.join(str(error).split())}")  # one line: the flow reports the last one
    except Exception as error:
        if os.strerror(errno.ENOSPC) in str(error):  # libraries wrap it in errors of their own
            sys.exit(f"{stage}: the disk is full: make room and run again ({' '.join(str(error).split())})")
        raise


def quiet() -> None:
    """Progress is said by the stages; transformers' own bars and notices would drown it."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
