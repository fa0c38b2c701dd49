"""A run in a terminal, a real one: what is drawn, and that it is left clean however the run ends."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.flows import forked
from tests.flows.servers import until
from tests.flows.toy import BARE
from tests.workspace import tiny_params, write_params

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
        """All that was ever shown, without colours and movements of the cursor."""
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
    """Its first stage tells its steps and waits while there is a file `hold`; the `last` command is the second's."""
    write_params(root, tiny_params())
    training = "echo step 1/4 loss 0.75; while [ -e hold ]; do sleep 0.1; done; mkdir -p reports; echo > reports/a"
    stages = {
        "train": {"cmd": training, "outs": ["reports/a"]},
        "compare": {"cmd": last, "deps": ["reports/a"], "outs": ["reports/comparison.txt"]},
    }
    with (root / "dvc.yaml").open("w") as file:
        YAML().dump({"stages": stages}, file)
    (root / "reports").mkdir()
    columns = "recipe,keep,metric,dense,factorized,recovered,target_parameters,macs_per_token,speedup"
    (root / "reports/comparison.csv").write_text(f"{columns}\nsvd,0.5,accuracy,0.8,0.7,0.75,10,20,1.5\n")
    (root / "hold").touch()
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, cwd=root, check=True, env={**os.environ, "DVC_NO_ANALYTICS": "1"})
    return root


@pytest.mark.parametrize("end", ["done", "failed", "interrupted"])
def test_running_stages_are_drawn_and_the_terminal_is_left_clean(
    prefect: dict[str, str], tmp_path: Path, end: str
) -> None:
    text = f"the comparison\n{'candidate':80}speedup\n"
    last = "echo the cause; exit 3" if end == "failed" else f"printf '{text}' > reports/comparison.txt"
    root = workspace(tmp_path / "workspace", last)
    told = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    terminal = Terminal(root, BARE | prefect | told)
    until(lambda: re.search(r"train +\S+ +1/4 loss 0\.75 ", terminal.shown) or terminal.process.exitcode is not None)
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
    assert ("the comparison" in after) is ("candidate" in after) is (end == "done")
    assert "speedup" not in after  # of a table that is wider than the terminal
    assert ("compare: " in after) is (end == "failed")
