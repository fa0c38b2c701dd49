"""The stages: each module reads inputs, calls eckart, writes outputs. Run as `python -m tasks.STAGE`."""

import os

# Before a stage imports torch, whose OpenMP reads it as it is loaded. A thread that waits for others would else spin on
# the time of the stage beside: a step of two threads took several times as long (docs/scaling.md). The user's own wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
