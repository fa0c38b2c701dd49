"""The stages of dvc.yaml, one module each.

`python -m tasks.STAGE` runs a stage: it reads files, calls the package eckart, and writes files.
"""

import os

# OpenMP reads this variable when torch is loaded, so it is set before a stage imports torch. By default, a thread that
# waits for other threads keeps its core busy and slows down stages that run at the same time: beside such threads, a
# training step took several times longer (docs/notes/where-the-seconds-go.md). A value that the user has set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
