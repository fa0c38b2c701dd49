"""Threads that wait do not spin, in every process that the project starts: OpenMP itself says what it was told."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.workspace import REPOSITORY

# Stages are forked from a warm server, which imports torch and more before them, or started by a shell.
FLOW = """
from flows.environment import settings
from flows.engine import stage_processes
settings.apply()
stage_processes._PRELOAD[:] = ["torch", "sklearn.metrics"]  # each brings an OpenMP; the rest takes seconds
with stage_processes.reaping():
    for command in ("python -m tasks.extract --help", "cd . && python -c 'import torch'"):
        stage_processes.run(command, ".", print, {})
"""


def spins(*arguments: str) -> list[int]:
    """Return how long each OpenMP of `python ARGUMENTS` and its children spins: GNU's in turns, LLVM's in ms."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(REPOSITORY)}
    command, out = [sys.executable, *arguments], subprocess.PIPE
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    durations = [int(turns) for turns in re.findall(r"(?:GOMP_SPINCOUNT|KMP_BLOCKTIME) *= *'(\d+)", done.stdout)]
    assert durations, done.stdout
    return durations


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import tasks, torch, sklearn.metrics"),  # as a stage that `dvc repro` starts; each has an OpenMP
        ("-c", FLOW),
    ],
    ids=["stage", "flow"],
)
def test_threads_that_wait_do_not_spin(arguments: tuple[str, ...]) -> None:
    assert set(spins(*arguments)) == {0}


def test_the_users_setting_wins() -> None:
    code = "import os, tasks; print(os.environ['OMP_WAIT_POLICY'])"
    environment = os.environ | {"OMP_WAIT_POLICY": "ACTIVE"}
    assert (
        subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, text=True) == "ACTIVE\n"
    )


def test_the_library_leaves_it_to_the_user() -> None:
    assert not [file for file in (REPOSITORY / "eckart").rglob("*.py") if "OMP_" in file.read_text()]
