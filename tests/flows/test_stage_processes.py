"""Stage processes: what they print arrives, and nothing of them outlives its time."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.engine import stage_processes
from tests.flows import forked
from tests.workspace import REPOSITORY

HOW = {"warm": "python -m tasks.act", "shell": "cd . && python -m tasks.act"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with one stage module that does what its argument says."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").touch()
    (tmp_path / "tasks" / "act.py").write_text(
        "import os, subprocess, sys, time\n"
        "what = sys.argv[1]\n"
        "print('begin', __name__, os.getcwd(), os.environ.get('DVC_STAGE'), flush=True)\n"
        "print('to stderr', file=sys.stderr, flush=True)\n"
        "if what == 'fail': sys.exit('the cause')\n"
        "if what == 'crash': raise KeyError('lost')\n"
        "if what == 'hang':\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "    time.sleep(600)\n"
    )
    return tmp_path


LONG = """
import sys, tempfile
from pathlib import Path
from flows.engine import stage_processes
stage_processes._PRELOAD.clear()
stage_processes.run("python -m tasks.act pass", Path(sys.argv[1]), print, {})
print(tempfile.gettempdir())
"""


def test_a_long_name_of_the_folder_for_temporary_files(root: Path) -> None:
    """The path of a socket has at most 107 bytes; all else is where the user wants it."""
    folder = root / ("long-" * 20)
    folder.mkdir()
    command = [sys.executable, "-c", LONG, str(root)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == str(folder), done.stderr


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def gone(pids: list[int]) -> bool:
    """Whether all of `pids` end within a few seconds."""
    for _ in range(100):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("command", HOW.values(), ids=HOW)
def test_a_stage_runs_as_a_module_in_its_workspace_and_both_streams_arrive(root: Path, command: str) -> None:
    lines: list[str] = []
    stage_processes.run(f"{command} go", root, lines.append, {"DVC_STAGE": "act"})
    assert sorted(lines) == [f"begin __main__ {root} act", "to stderr"]


def test_a_failure_says_the_last_words(root: Path) -> None:
    with pytest.raises(stage_processes.CommandFailed, match=r"^the cause$"):
        stage_processes.run("python -m tasks.act fail", root, print, {})
    with pytest.raises(stage_processes.CommandFailed, match="lost"):
        stage_processes.run("python -m tasks.act crash", root, print, {})
    with pytest.raises(stage_processes.CommandFailed, match=r"^exit 3: .*\b3\b"):
        stage_processes.run("exit 3", root, print, {})


@pytest.mark.parametrize("command", HOW.values(), ids=HOW)
def test_a_timeout_leaves_no_orphan(root: Path, command: str) -> None:
    with pytest.raises(stage_processes.CommandFailed, match=r"\b3 s\b"):
        stage_processes.run(f"{command} hang", root, print, {}, timeout=3)
    assert gone([int(pid) for pid in (root / "pids").read_text().split()])


def hang(root: Path) -> None:
    stage_processes.run("python -m tasks.act hang", root, print, {})


def test_a_killed_parent_takes_its_stage_along(root: Path) -> None:
    parent = forked.start(hang, root)
    while not (root / "pids").exists() or not (root / "pids").read_text():
        assert parent.is_alive()
        time.sleep(0.1)
    pids = [int(pid) for pid in (root / "pids").read_text().split()]
    assert all(map(alive, pids))
    parent.kill()
    parent.join()
    assert gone(pids)


def test_when_the_flow_ends_no_stage_goes_on_and_none_begins(root: Path) -> None:
    """Two stages wait for the one slot; when the first is killed they must not take it."""
    slot = threading.Semaphore(1)

    def stage() -> None:
        with slot:
            stage_processes.run("echo begun >> begun; sleep 600; echo ended >> begun", root, print, {})

    with ThreadPoolExecutor() as pool:
        with stage_processes.reaping():
            jobs = [pool.submit(stage) for _ in range(3)]
            while not (root / "begun").exists():
                time.sleep(0.1)
        assert all(isinstance(job.exception(timeout=600), stage_processes.CommandFailed) for job in jobs)
    assert (root / "begun").read_text() == "begun\n"


def test_a_child_that_holds_the_output_open_does_not_hold_up_the_stage(root: Path) -> None:
    lines: list[str] = []
    with stage_processes.reaping():
        stage_processes.run("sleep 600 & echo done", root, lines.append, {})
    assert lines == ["done"]
