"""The command `eckart`: the pipeline's command line, in a workspace anywhere or in a clone of the repository.

It stands outside the package, whose import takes seconds and loads torch before the settings of a run are made.
Installed by pip, `tasks` and `flows` lie in a folder of their own, so that no other project's environment has packages
of such names; only this command, and what it starts, looks there.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run a command of the pipeline, or, as dvc.yaml of a workspace asks for it, a stage: `eckart stage NAME …`."""
    if not find_spec("prefect"):
        sys.exit(
            "eckart: the pipeline needs more packages: pip install 'eckart[pipeline]', or, in a clone, `make test`"
        )
    home = _home()
    sys.path.insert(0, str(home))
    if home != Path.cwd():
        # The same for what this process starts; and a user's own folder `tasks` is not to be taken for ours.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
        os.environ["PYTHONSAFEPATH"] = "1"
    module = "flows"
    if sys.argv[1:2] == ["stage"] and sys.argv[2:]:
        module = f"tasks.{sys.argv[2]}"
        sys.argv[1:3] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _home() -> Path:
    """The folder of `tasks` and `flows`: a clone's own, so that edits of its code count; else the installed one."""
    here, installed = Path.cwd(), _HERE / "eckart_pipeline"
    return next(folder for folder in (here, installed, _HERE) if (folder / "flows/engine/stages.py").is_file())


if __name__ == "__main__":
    main()
