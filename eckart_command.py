"""The command `eckart`: the pipeline's command line, for use in any workspace or in a clone of the repository.

This file is not part of the package `eckart`, because importing that package takes seconds and loads torch before the
settings of a run apply. pip installs `tasks` and `flows` into the folder eckart_pipeline/, because top-level packages
with such names would collide with packages of other projects in the same environment. Only this command, and processes
that it starts, import from there.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

_HERE = Path(__file__).resolve().parent


def run_with(words: Sequence[str]) -> NoReturn:
    """Replace this process by a program whose Python processes import eckart when they import transformers."""
    if not words:
        sys.exit("eckart with: name a program, such as: eckart with lm_eval --help")
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which(words[0], path=folders)
    if program is None:
        sys.exit(
            f"eckart with: there is no program {words[0]}: install it, or, for a module, write python -m {words[0]}"
        )
    startup = _HERE / "eckart/startup"
    path = os.pathsep.join(filter(None, [str(startup), os.environ.get("PYTHONPATH")]))
    # its path also as its name, by which Python finds its virtual environment
    os.execve(program, [program, *words[1:]], {**os.environ, "PYTHONPATH": path})


def main() -> None:
    """Run a command of the pipeline. `eckart stage NAME …`, which a workspace's dvc.yaml calls, runs a single stage.

    `eckart with PROGRAM …` needs no pipeline.
    """
    if sys.argv[1:2] == ["with"] and sys.argv[2:3] not in (["--help"], []):
        run_with(sys.argv[2:])
    if not find_spec("prefect"):
        sys.exit(
            "eckart: the pipeline needs more packages: run pip install 'eckart[pipeline]', or `make test` in a clone"
        )
    # in this order: a clone, the installed pipeline, an editable install
    folders = (Path.cwd(), _HERE / "eckart_pipeline", _HERE)
    home = next(folder for folder in folders if (folder / "flows/engine/stages.py").is_file())
    sys.path.insert(0, str(home))
    if home != Path.cwd():
        # Child processes must find the pipeline, too. PYTHONSAFEPATH keeps them from importing a folder `tasks` of the
        # user in place of the pipeline's.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
        os.environ["PYTHONSAFEPATH"] = "1"
    module = "flows"
    if sys.argv[1:2] == ["stage"] and sys.argv[2:]:
        module = f"tasks.{sys.argv[2]}"
        sys.argv[1:3] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
