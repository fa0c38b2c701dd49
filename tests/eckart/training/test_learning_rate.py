"""The multiple of the peak learning rate, at points solved by hand."""

from __future__ import annotations

import pytest

from eckart.training.learning_rate import Schedule, share_of_peak


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_schedule_rises_from_zero_to_its_peak(schedule: Schedule) -> None:
    rates = [share_of_peak(schedule, step, steps=20, warmup=4) for step in range(5)]
    assert rates == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize(
    ("schedule", "last", "quarters"),
    [
        ("constant", 0.0, [1, 1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.75, 0.5, 0.25, 0]),
        ("linear", 0.2, [1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", 0.0, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0]),
        ("cosine", 0.1, [1, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5), 0.1]),
    ],
)
def test_after_the_warmup_it_stays_or_falls_to_the_last_rate(
    schedule: Schedule, last: float, quarters: list[float]
) -> None:
    """4 steps of 20 warm up; the quarters of the others are steps 4, 8, 12, 16 and 20."""
    rates = [share_of_peak(schedule, step, steps=20, warmup=4, last=last) for step in range(4, 21, 4)]
    assert rates == pytest.approx(quarters, abs=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_training_may_be_all_warmup(schedule: Schedule) -> None:
    assert [share_of_peak(schedule, step, steps=1, warmup=1) for step in (0, 1)] == [0, 1]
