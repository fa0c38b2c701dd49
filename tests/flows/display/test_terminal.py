"""A run in a real terminal: the display, and that the terminal is left clean however the run ends."""

from __future__ import annotations

import os
import pty
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.flows import forked
from tests.flows.servers import until
from tests.flows.toy import BARE, toy_study

_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """A pseudo-terminal in which `eckart run` runs."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.raw = ""
        self._ours, theirs = pty.openpty()
        environment = {**environment, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self.process = forked.start(_interruptible, ["flows", "run"], str(root), environment, os.ttyname(theirs))
        self._theirs = theirs
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while part := os.read(self._ours, 65536):
            self.raw += part.decode(errors="replace")
            if "\x04" in self.raw:
                return

    @property
    def shown(self) -> str:
        """The whole output, without colors and movements of the cursor."""
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.raw)

    def end(self) -> int | None:
        self.process.join(600)
        os.write(self._theirs, b"\x04")  # the last that is to be read
        self._reader.join(60)
        for file in (self._ours, self._theirs):
            os.close(file)
        return self.process.exitcode


def _interruptible(words: list[str], root: str, environment: dict[str, str], said: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    forked._become(words, root, environment, said)


def workspace(root: Path, last: str) -> Path:
    """Make a study whose first stage waits while there is a file `hold`, and whose second runs the command `last`."""
    training = "echo step 1/4 loss 0.75; while [ -e hold ]; do sleep 0.1; done; mkdir -p reports models/onnx/a"
    stages = {
        "train": {"cmd": [training, "echo > reports/a"], "outs": ["reports/a", "models/onnx/a"]},
        "compare": {"cmd": last, "deps": ["reports/a"], "outs": ["reports/comparison.txt"]},
    }
    toy_study(root, stages)
    (root / "hold").touch()
    return root


def task_runs(prefect: dict[str, str]) -> list[str]:
    """The names that Prefect's timeline shows, of all runs on the tests' server."""
    with temporary_settings({PREFECT_API_URL: prefect["PREFECT_API_URL"]}), get_client(sync_client=True) as client:
        return [run.name for run in client.read_task_runs()]


@pytest.mark.parametrize("end", ["done", "failed", "interrupted"])
def test_running_stages_are_drawn_and_the_terminal_is_left_clean(
    prefect: dict[str, str], tmp_path: Path, end: str
) -> None:
    text = f"the comparison\n{'candidate':80}speedup\n"
    last = "echo the cause; exit 3" if end == "failed" else f"printf '{text}' > reports/comparison.txt"
    root = workspace(tmp_path / "workspace", last)
    variables = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    terminal = Terminal(root, BARE | prefect | variables)
    until(lambda: re.search(r"train +\S+ +1/4 loss 0\.75 ", terminal.shown) or terminal.process.exitcode is not None)
    if end == "done":  # the second stage waits for the first
        until(lambda: any(name.startswith("compare-") for name in task_runs(prefect)))
    if end == "interrupted":
        assert terminal.process.pid
        os.kill(terminal.process.pid, signal.SIGINT)
    else:
        (root / "hold").unlink()
    code = terminal.end()
    assert bool(code) is (end != "done"), terminal.raw
    drawn, _, after = terminal.raw.rpartition(_SHOW)
    assert _HIDE in drawn
    assert _HIDE not in after
    assert "0/2" in drawn
    assert re.search(r"MLflow .*127\.0\.0\.1", drawn)  # a warning
    assert "| INFO " not in terminal.shown
    assert "Finished in state" not in terminal.shown
    assert "onnx/a" not in drawn  # which is empty, as DVC warns
    assert ("the comparison" in after) is ("candidate" in after) is (end == "done")
    assert "speedup" not in after  # of a table that is wider than the terminal
    assert ("compare: " in after) is (end == "failed")
