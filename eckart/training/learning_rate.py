"""Schedules of the learning rate, as a multiple of its peak."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def share_of_peak(schedule: Schedule, step: int, steps: int, warmup: int, last: float = 0.0) -> float:
    """Return the learning rate after `step` of `steps` steps, as a share of the peak.

    It rises linearly from 0 in the first `warmup` steps. Then it stays at 1 (constant), or falls to `last`, linearly or
    along half a period of a cosine.
    """
    if step < warmup:
        return step / warmup
    if schedule == "constant" or step == warmup:
        return 1.0
    if schedule == "linear":
        left = (steps - step) / (steps - warmup)
    else:
        left = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    return last + (1 - last) * left
