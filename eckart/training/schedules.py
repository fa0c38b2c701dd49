"""Schedules of a share that falls while a model trains."""

from __future__ import annotations

import math
from collections.abc import Iterator

from eckart.recipe_parts import Contradiction


def steps_in(share: float, steps: int) -> int:
    """Return the number of steps in this `share` of `steps`, rounded up."""
    return math.ceil(round(share * steps, 6))  # rounded first, so that 0.07 of 100 is 7, not 8


def cubic(step: int, steps: int, start: int, end: int, final: float) -> float:
    """Return the share at `step`: 1 in the first `start` steps, `final` in the last `end` steps, a cubic decay between.

    At `step` = `steps` the share is always `final`. If `end` is 0, it is not `final` at any earlier step.

    Source: LPAF, sparsity scheduler with v_i = 1; LoSparse, section 3.2. LoSparse prints 1 − (t − t_i − t_f)/(T − t_i −
    t_f), which exceeds 1 at t = t_i and misses p_T at t = T − t_f, so LPAF's form must be meant.
    """
    if step < start:
        return 1.0
    if step >= steps - end:
        return final
    return final + (1 - final) * ((steps - end - step) / (steps - end - start)) ** 3


def linear(step: int, until: int, first: float) -> float:
    """Return a value that falls linearly from `first` at step 0 to 0 at step `until` (LPAF, mixed-rank fine-tuning)."""
    return max(0.0, first * (1 - step / until)) if until else 0.0


def exceeding(part: str, start: float, end: float) -> Iterator[Contradiction]:
    """Yield a contradiction if `start` and `end`, shares of the steps around a `cubic` decay, sum to more than 1."""
    if start + end > 1:
        yield part, f"start and end are shares of the steps and sum to {start + end:g}; write at most 1"
