"""The command `eckart`: what `python -m flows` does, in the working directory.

It stands outside the package, whose import takes seconds and loads torch before the settings of a run are made.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the command line of the pipeline that lies in the working directory."""
    if not Path("flows/cli.py").is_file():
        sys.exit(
            "eckart: there is no pipeline here: go to a clone of Eckart's repository, whose folder flows/ holds it"
        )
    if not find_spec("prefect"):
        sys.exit("eckart: the pipeline needs more packages: run `make test` here, or pip install 'eckart[pipeline]'")
    sys.path.insert(0, os.getcwd())
    runpy.run_module("flows", run_name="__main__", alter_sys=True)
