"""What all tests share: settings of a command, one thread, files in memory, and the same examples in every run."""

import tasks as tasks  # before torch, whose threads are to wait without spinning

# isort: split
import gc
import itertools
import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import flows.settings

flows.settings.apply()  # before a test imports prefect, mlflow or dvc
torch.set_num_threads(1)
settings.register_profile(
    "laws", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("laws")

_MEMORY = Path("/dev/shm")
_ENOUGH = 4e9  # bytes for what the tests of one run write

if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ENOUGH:
    # Databases wait for a disk at each commit.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

if "PYTEST_XDIST_WORKER" in os.environ:
    # Measurements of one process do not wait for the stages of another: the lock of the machine is in this folder.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="eckart-tests-")
    # After multiprocessing has removed its own folder in there, at -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-200)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every second file first: xdist's processes begin far apart, and those of flows, the slowest, are neighbours."""
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    items[:] = itertools.chain(*files[::2], *files[1::2])


def pytest_collection_finish() -> None:
    """What is there by now stays: Trainer collects garbage at each training, in a heap full of libraries for long."""
    gc.freeze()
