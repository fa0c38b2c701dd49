"""Set-up of all tests: settings of a command, one thread, files in memory, and the same examples in every run."""

import tasks as tasks  # before torch, whose threads are to wait without spinning

# isort: split
import fcntl
import gc
import itertools
import multiprocessing.util
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import flows.environment.settings
from tasks.runtime.hardware import cores

if "DVC_SITE_CACHE_DIR" not in os.environ:  # of all processes of one run
    os.environ["DVC_SITE_CACHE_DIR"] = tempfile.mkdtemp(prefix="eckart-tests-")
    multiprocessing.util.Finalize(None, shutil.rmtree, (os.environ["DVC_SITE_CACHE_DIR"], True), exitpriority=-300)
flows.environment.settings.apply()  # before a test imports prefect, mlflow or dvc
gc.disable()  # while the tests are imported, for which it takes a fifth of the time
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores: tests of flows wait for servers, and each process imports for twenty seconds."""
    return cores() + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests: in one of xdist's processes first, which writes the bytecode that a new environment lacks.

    Else each of them compiles the thousands of modules that the tests import.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with Path(os.environ["DVC_SITE_CACHE_DIR"], "imported").open("a") as imported:
        fcntl.flock(imported, fcntl.LOCK_EX)
        if os.fstat(imported.fileno()).st_size:
            fcntl.flock(imported, fcntl.LOCK_UN)
        collected = yield
        imported.write("all")
    return collected


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have each of xdist's processes begin with a share of the files of flows, the slowest; idle ones take others.

    The first begins with a file that needs the finished study, and makes it; the others with files that do not.
    """
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes == 1:
        return
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    slow = [tests for tests in files if "flows" in tests[0].path.parts]
    slow.sort(key=lambda tests: "study" in getattr(tests[0], "fixturenames", ()))  # those that need it at once last
    quick = itertools.chain(*(tests for tests in files if tests not in slow))
    shares = [slow[::processes][::-1], *(slow[number::processes] for number in range(1, processes))]
    ordered: list[pytest.Item] = []
    for number, share in enumerate(shares, start=1):
        ordered.extend(itertools.chain(*share))
        ordered.extend(itertools.islice(quick, max(0, number * len(items) // processes - len(ordered))))
    items[:] = ordered
    items.extend(quick)


def pytest_collection_finish() -> None:
    """Take one thread, and spare the objects of libraries from garbage collection, which Trainer starts often."""
    import torch  # not above: the process that starts xdist's runs no tests, and they would wait for its import

    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List at the end what was skipped; each reason says how to get it."""
    reports = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason}")
