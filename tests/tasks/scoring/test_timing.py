"""Timing of forward passes: what the speedup of one model over another is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from tasks.artifacts.results_schema import Times
from tasks.scoring import timing


def test_a_speedup_is_the_median_of_the_pairs_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median ratio of 1/1, 2/1 twice, 4/1 twice and 8/8 twice is 2, not the 4/1 of the two medians.

    The interval of the median of seven values is all of them (0.5⁷ < 0.025 < 8 × 0.5⁷).
    """
    pairs = [(9.0, 1.0)] * timing._WARMUP + [(1.0, 1.0), *2 * [(2.0, 1.0)], *2 * [(4.0, 1.0)], *2 * [(8.0, 8.0)]]
    ends = itertools.accumulate(itertools.chain.from_iterable(pairs), initial=0.0)
    clock = itertools.chain.from_iterable(itertools.pairwise(ends))  # is read before and after each forward
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seconds = timing.in_rounds(dict.fromkeys(("dense", "candidate"), lambda _: None), {}, 7)
    assert timing.ratio(seconds["dense"], seconds["candidate"]) == Times(median=2.0, low=1.0, high=4.0)
