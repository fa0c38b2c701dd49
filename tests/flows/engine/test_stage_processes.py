"""Stage processes: what they print arrives, and nothing of them outlives its time."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from flows.engine import stage_processes, supervisor
from tests.flows import forked
from tests.flows.forked import alive, gone
from tests.flows.servers import until
from tests.workspace import REPOSITORY

HOW = {"warm": "python -m tasks.act", "shell": "cd . && python -m tasks.act"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with one stage module that does what its argument says."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").touch()
    (tmp_path / "tasks" / "act.py").write_text(
        "import gc, os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "what = sys.argv[1]\n"
        "print('begin', __name__, os.getcwd(), os.environ.get('DVC_STAGE'), flush=True)\n"
        "print('to stderr', file=sys.stderr, flush=True)\n"
        "if what == 'fail': sys.exit('the cause')\n"
        "if what == 'collect':\n"
        "    print(gc.isenabled(), gc.get_freeze_count() > 1e5, {'torch', 'eckart_warm_server'} < {*sys.modules})\n"
        "if what == 'crash': raise KeyError('lost')\n"
        "def start():\n"
        "    return subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "if what == 'orphan':\n"
        "    print(start().pid)\n"
        "if what in ('leave', 'hang'):\n"
        "    orphan = [sys.executable, '-m', 'tasks.act', 'orphan']\n"
        "    said = subprocess.Popen(orphan, stdout=subprocess.PIPE, text=True).stdout\n"
        "    pids = os.getpid(), start().pid, int([said.readline(), said.readline()][1])\n"
        "    open('writing', 'w').write(' '.join(map(str, pids)))\n"
        "    os.rename('writing', 'pids')\n"
        "if what == 'hang': time.sleep(600)\n"
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
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == str(folder), done.stderr


@pytest.mark.parametrize("command", HOW.values(), ids=HOW)
def test_a_stage_runs_as_a_module_in_its_workspace_and_both_streams_arrive(root: Path, command: str) -> None:
    lines: list[str] = []
    stage_processes.run(f"{command} go", root, lines.append, {"DVC_STAGE": "act"})
    assert sorted(lines) == [f"begin __main__ {root} act", "to stderr"]


def test_a_stage_collects_its_own_garbage_alone(root: Path) -> None:
    """The server, which turned collection off, has imported torch; its objects are looked at no more."""
    lines: list[str] = []
    stage_processes.run("python -m tasks.act collect", root, lines.append, {})
    assert lines[-1] == "True True True"


def test_a_failure_names_the_last_line(root: Path) -> None:
    with pytest.raises(stage_processes.CommandFailed, match=r"^the cause$"):
        stage_processes.run("python -m tasks.act fail", root, print, {})
    with pytest.raises(stage_processes.CommandFailed, match="lost"):
        stage_processes.run("python -m tasks.act crash", root, print, {})
    with pytest.raises(stage_processes.CommandFailed, match=r"\b3\b"):
        stage_processes.run("exit 3", root, print, {})
    with pytest.raises(stage_processes.CommandFailed, match="SIGKILL"):
        stage_processes.run("kill -9 $$", root, print, {})


def pids(root: Path) -> list[int]:
    """Wait for the ids of a stage, of its child in another session, and of an orphan there, and return them."""
    until((root / "pids").exists)
    return [int(pid) for pid in (root / "pids").read_text().split()]


def supervisor_of(pid: int) -> int:
    return next(process.pid for process in psutil.Process(pid).parents() if supervisor.__file__ in process.cmdline())


@pytest.mark.parametrize("command", HOW.values(), ids=HOW)
def test_a_stage_that_ends_or_takes_too_long_leaves_nothing(root: Path, command: str) -> None:
    stage_processes.run(f"{command} leave", root, print, {}, timeout=60)
    processes = pids(root)
    (root / "pids").unlink()
    with pytest.raises(stage_processes.CommandFailed, match=r"\b5 s\b"):
        stage_processes.run(f"{command} hang", root, print, {}, timeout=5)
    assert gone([*processes, *pids(root)])


def hang(command: str, root: Path) -> None:
    stage_processes.run(f"{command} hang", root, print, {"DVC_ROOT": str(root), "DVC_STAGE": "act"})


@pytest.mark.parametrize("command", HOW.values(), ids=HOW)
def test_a_killed_flow_ends_all_of_its_stage(root: Path, command: str) -> None:
    flow = forked.start(hang, command, root)
    assert all(map(alive, pids(root)))
    flow.kill()
    flow.join()
    assert gone(pids(root))


@pytest.mark.skipif(sys.platform != "linux", reason="no other system gives orphans to a supervisor")
def test_a_supervisor_that_is_ended_twice_ends_all_of_its_stage(root: Path) -> None:
    """By a signal, and by the end of the flow, as a worker's that is stopped."""
    flow, ours = os.pipe()
    os.set_inheritable(flow, True)
    stage = shlex.join([sys.executable, "-m", "tasks.act", "hang"])
    command = [sys.executable, "-P", supervisor.__file__, str(flow), stage]
    with subprocess.Popen(command, cwd=root, pass_fds=[flow], stdout=subprocess.DEVNULL) as process:
        os.close(flow)
        processes = pids(root)
        process.terminate()
        time.sleep(0.02)
        os.close(ours)
        process.wait(60)
    assert gone(processes)


def train(root: Path) -> None:
    (root / "tasks" / "rank.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('rank-' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    launch = "python -m torch.distributed.run --standalone --nproc-per-node 2 -m tasks.rank"
    stage_processes.run(launch, root, print, {})


def test_a_killed_flow_ends_the_processes_of_a_distributed_training(root: Path) -> None:
    """Torch's own launcher starts each in a session of its own."""
    flow = forked.start(train, root)
    ranks = [root / "rank-0", root / "rank-1"]
    until(lambda: all(file.exists() and file.read_text() for file in ranks))
    processes = [int(file.read_text()) for file in ranks]
    assert all(map(alive, processes))
    flow.kill()
    flow.join()
    assert gone(processes)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a child of its parent's end")
@pytest.mark.parametrize("command", HOW.values(), ids=HOW)
def test_a_killed_supervisor_ends_all_of_its_stage(root: Path, command: str) -> None:
    with ThreadPoolExecutor() as pool:
        flow = pool.submit(hang, command, root)
        stage, *others = pids(root)
        os.kill(supervisor_of(stage), signal.SIGKILL)
        assert isinstance(flow.exception(timeout=600), stage_processes.CommandFailed)
    assert gone([stage, *others])


def test_when_the_flow_ends_no_stage_goes_on_and_none_begins(root: Path) -> None:
    """Two stages wait for the one slot; when the first is killed they must not take it."""
    slot = threading.Semaphore(1)

    def stage() -> None:
        with slot:
            stage_processes.run("echo begun >> begun; sleep 600; echo ended >> begun", root, print, {})

    with ThreadPoolExecutor() as pool:
        with stage_processes.reaping():
            jobs = [pool.submit(stage) for _ in range(3)]
            until((root / "begun").exists)
        assert all(isinstance(job.exception(timeout=600), stage_processes.CommandFailed) for job in jobs)
    assert (root / "begun").read_text() == "begun\n"


def test_a_child_that_holds_the_output_open_does_not_hold_up_the_stage(root: Path) -> None:
    lines: list[str] = []
    with stage_processes.reaping():
        stage_processes.run("sleep 600 & echo done", root, lines.append, {})
    assert lines == ["done"]
