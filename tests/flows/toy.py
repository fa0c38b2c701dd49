"""Workspaces for tests. The toy one has stages that take no time and note in `ran.log` that they ran."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import Result
from dvc.repo import Repo
from ruamel.yaml import YAML

from tests.flows import forked
from tests.workspace import REPOSITORY, tiny_params, tiny_workspace, write_params

PARAMS = """\
gain: {a: 1, b: 2}
items: [a, b]
"""

PIPELINE = """\
vars: [params.yaml]
stages:
  source:
    cmd: echo source >> ran.log && cp raw.txt source.txt
    deps: [raw.txt]
    outs: [source.txt]
  work:
    matrix: {item: "${items}"}
    cmd:
      - echo work@${item.item} >> ran.log
      - mkdir -p out && cat source.txt > out/${item.item} && echo ${gain.${item.item}} >> out/${item.item}
    deps: [source.txt]
    params: ["gain.${item.item}"]
    outs: ["out/${item.item}"]
  total:
    cmd: echo total >> ran.log && cat out/* > total.txt
    deps: [out]
    metrics: [total.txt]
    meta: {alone: true}
"""
PIPELINE = PIPELINE.replace("echo ${gain.${item.item}} >>", "grep gain params.yaml >>")

ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "DVC_NO_ANALYTICS": "1",
    "SHELL": "/bin/sh",
}
BARE = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
"""The environment without settings of Prefect and MLflow."""


def toy_workspace(root: Path) -> Path:
    """Make a git and DVC repository with the toy pipeline."""
    shutil.copytree(_empty_repository(), root)
    (root / "params.yaml").write_text(PARAMS)
    (root / "dvc.yaml").write_text(PIPELINE)
    (root / "raw.txt").write_text("raw\n")
    (root / ".gitignore").write_text("/out\n")  # else DVC lists outputs in out/.gitignore, in the order they are made
    return root


@cache
def _empty_repository() -> Path:
    """Return a folder with the results of `git init` and `dvc init`, to be copied."""
    root = Path(tempfile.mkdtemp(prefix="eckart-tests-"))
    atexit.register(shutil.rmtree, root)
    call(root, "git", "init", "-q")
    call(root, "dvc", "init", "-q")
    return root


def stale(root: Path) -> list[str]:
    """Return the stages that `dvc status` names, sorted."""
    with chdir(root):
        return sorted(Repo().status())


def call(root: Path, *command: str) -> str:
    """Run a command in `root`, assert that it succeeds, and return its output."""
    if command[0] == "dvc":
        done = forked.dvc(root, ENVIRONMENT, *command[1:])
    else:
        done = subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def spoil(path: Path) -> bytes:
    """Change a byte of an object of DVC's cache, which DVC takes for whole if it is read-only; return its bytes."""
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    path.chmod(0o444)
    return whole


def commit(root: Path, message: str = "state") -> None:
    """Commit everything in `root`."""
    call(root, "git", "add", "-A")
    call(root, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", message)


def ran(root: Path) -> list[str]:
    """Return the stages that ran since the last call, sorted."""
    log = root / "ran.log"
    names = sorted(log.read_text().split()) if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def tiny_repository(root: Path, **changes: Any) -> Path:
    """Make a clone of the code with the tiny parameters; nothing has run in it."""
    for name in ("eckart", "tasks", "flows"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(_empty_repository(), root, dirs_exist_ok=True)
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(REPOSITORY / name, root / name)
    tiny_workspace(root, **changes)
    commit(root, "tiny")
    return root


def toy_study(root: Path, stages: dict[str, Any]) -> Path:
    """Make a workspace with the tiny parameters and these stages, the last of which is `compare`."""
    shutil.copytree(_empty_repository(), root)
    write_params(root, tiny_params())
    with (root / "dvc.yaml").open("w") as file:
        YAML().dump({"stages": stages}, file)
    (root / "reports").mkdir()
    columns = "recipe,keep,metric,dense,factorized,recovered,target_parameters,macs_per_token,speedup"
    (root / "reports/comparison.csv").write_text(f"{columns}\nsvd,0.5,accuracy,0.8,0.7,0.75,10,20,1.5\n")
    return root


def noting(file: Path, stage: str) -> None:
    """Make a stage say in ran.log when it begins and ends, and wait in between while there is a file `hold-STAGE`.

    Its process id is in `pid-STAGE`.
    """
    head, _, tail = file.read_text().partition('if __name__ == "__main__":\n')
    file.write_text(
        f"{head}if __name__ == '__main__':\n    import os, pathlib, time\n"
        f"    pathlib.Path('pid-{stage}').write_text(str(os.getpid()))\n"
        f"    log = pathlib.Path('ran.log').open('a', buffering=1)\n    log.write('{stage} begins\\n')\n"
        f"    while pathlib.Path('hold-{stage}').exists():\n        time.sleep(0.05)\n"
        f"{tail}    log.write('{stage} ended\\n')\n"
    )


def noted(root: Path) -> list[str]:
    """Return the lines that the stages have written which `noting` changed."""
    file = root / "ran.log"
    return file.read_text().splitlines() if file.exists() else []


def begun(root: Path, stage: str) -> bool:
    return f"{stage} begins" in noted(root)


MLFLOW = "mlflow.db"


@dataclass(frozen=True)
class Study:
    """A workspace after `eckart run`, and the output of that. Tests that change it work on a copy."""

    root: Path
    said: str
    database: Path
    """An empty one of MLflow."""

    def copied(self, root: Path) -> Path:
        """Copy the workspace with its cache, in which nothing is stale, and give it an empty MLflow database."""
        shutil.copytree(self.root, root, symlinks=True, ignore=shutil.ignore_patterns(MLFLOW, "mlruns"))
        shutil.copy(self.database, root)
        return root


Flows = Callable[..., Result]
"""`flows(root, "run")` runs `eckart run` in `root`, and returns its output and exit code."""
