"""The schedules' ends and middles by hand, and that they only fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eckart.training.schedules import cubic, linear, steps_in

shares = st.floats(0, 1)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (2, 1.0),
        (3, 0.2 + 0.8 * (5 / 6) ** 3),
        (5, 0.3),  # halfway: 0.2 + 0.8 / 8
        (7, 0.2 + 0.8 / 216),
        (8, 0.2),
        (10, 0.2),
    ],
)
def test_cubic_by_hand(step, share):
    """Ten steps, two at either end, down to a fifth."""
    assert cubic(step, 10, 2, 2, 0.2) == pytest.approx(share)


@given(steps=st.integers(1, 60), start=shares, end=shares, final=shares)
def test_cubic_falls_from_one_to_its_final_share(steps, start, end, final):
    """Also where start and end overlap."""
    first, last = steps_in(start, steps), steps_in(end, steps)
    values = [cubic(step, steps, first, last, final) for step in range(steps + 1)]
    assert all(value == 1 for value in values[:first])
    assert values == sorted(values, reverse=True)
    assert values[-1] == final
    assert all(value == final for value in values[max(first, steps - last) :])


@pytest.mark.parametrize(("step", "p"), [(0, 0.6), (3, 0.15), (4, 0), (100, 0)])
def test_linear_by_hand(step, p):
    assert linear(step, 4, 0.6) == pytest.approx(p)


def test_linear_ends_at_exactly_zero_and_may_never_start():
    assert linear(7, 7, 0.3) == 0
    assert linear(0, 0, 0.3) == 0
    assert linear(0, 7, 1.0) == 1


@pytest.mark.parametrize(
    ("share", "steps", "count"), [(0, 9, 0), (1, 9, 9), (0.5, 9, 5), (0.07, 100, 7), (0.1, 60, 6), (0.001, 9, 1)]
)
def test_a_share_of_the_steps_is_rounded_up_but_not_by_rounding_errors(share, steps, count):
    assert steps_in(share, steps) == count
