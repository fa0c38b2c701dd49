"""Schedules of a share that falls while a model trains."""

from __future__ import annotations

import math
from collections.abc import Iterator

from eckart.recipe_parts import Contradiction


def steps_in(share: float, steps: int) -> int:
    """Return the number of steps that `share` of `steps` is, rounded up."""
    return math.ceil(round(share * steps, 6))  # rounded first, so that 0.07 of 100 is 7, not 8


def cubic(step: int, steps: int, start: int, end: int, final: float) -> float:
    """Return 1 for `start` steps, `final` for the last `end` steps, and between them a cubic decay.

    It is `final` at `step` = `steps` always, and at no step before that if `end` is 0.

    Source: LPAF, sparsity scheduler with v_i = 1; LoSparse, section 3.2. LoSparse prints 1 − (t − t_i − t_f)/(T − t_i −
    t_f), which exceeds 1 at t = t_i and misses p_T at t = T − t_f: LPAF's form is meant.
    """
    if step < start:
        return 1.0
    if step >= steps - end:
        return final
    return final + (1 - final) * ((steps - end - step) / (steps - end - start)) ** 3


def linear(step: int, until: int, first: float) -> float:
    """Return `first` at step 0, falling linearly to 0 at step `until` and after (LPAF, mixed-rank fine-tuning)."""
    return max(0.0, first * (1 - step / until)) if until else 0.0


def exceeding(part: str, start: float, end: float) -> Iterator[Contradiction]:
    """Yield the mistake of shares of the steps before and after a `cubic` that leave it no step."""
    if start + end > 1:
        yield part, f"start and end are shares of the steps and sum to {start + end:g}; write at most 1"
