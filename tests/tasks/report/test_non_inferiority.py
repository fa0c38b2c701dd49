"""Non-inferiority: what rows show, what they do not, and how many would."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tasks.report.non_inferiority import Difference, _weight, against_both, difference, examples_wanted, non_inferior
from tasks.report.result_files import load_results
from tasks.report.results import CONTROL, DENSE
from tests.tasks.report.test_compare import edit, make_candidate, make_perplexities, make_study, write_dense

MARGIN = st.floats(0.001, 0.1)


def test_603_examples_that_see_no_loss_show_no_absence_of_one() -> None:
    """0.862 for 0.877, -0.035 to +0.005: 0 is within, and so is a loss of three points."""
    found = Difference(gain=0.862 - 0.877, low=-0.035, margin=0.02, examples=603, weight=1.0)
    assert not found.holds
    # A half-width of 0.020 is to become 0.005: four times narrower, sixteen times the examples.
    assert found.wanted == pytest.approx(603 * 16, abs=1)
    assert Difference(0.862 - 0.877, -0.035, 0.01, 603, 1.0).wanted is None  # the loss itself is beyond the margin


@given(gain=st.floats(-0.1, 0.1), width=st.floats(1e-4, 0.2), margin=MARGIN, examples=st.integers(30, 10_000))
def test_with_the_examples_that_are_wanted_it_holds_and_with_one_less_it_does_not(
    gain: float, width: float, margin: float, examples: int
) -> None:
    found = Difference(gain, gain - width, margin, examples, weight=0.0)
    if found.wanted is None:
        assert gain <= -margin + 1e-9
        return
    assume(gain + margin > 1e-4)

    def with_examples(count: int) -> Difference:
        return Difference(gain, gain - width * math.sqrt(examples / count), margin, count, weight=0.0)

    assert with_examples(found.wanted).holds
    assert found.wanted <= examples or not with_examples(int(0.999 * found.wanted) - 1).holds


@given(
    margin=MARGIN,
    more=st.floats(0, 0.1),
    gain=st.floats(-0.1, 0.1),
    width=st.floats(0, 0.1),
    weight=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_what_holds_for_a_margin_holds_for_a_wider_one(
    margin: float, more: float, gain: float, width: float, weight: float
) -> None:
    if Difference(gain, gain - width, margin, 100, weight).holds:
        assert Difference(gain, gain - width, margin + more, 100, weight).holds


def test_few_examples_without_any_difference_show_little() -> None:
    """None of 12 examples may differ by chance where a quarter of all do, and none of 368 where 1 % do."""
    assert not Difference(0.0, 0.0, 0.25, 12, weight=1.0).holds
    assert Difference(0.0, 0.0, 0.27, 12, weight=1.0).holds
    assert 0.99**368 < 0.025 < 0.99**367
    assert Difference(0.0, 0.0, 0.01, 12, weight=1.0).wanted == 368
    assert Difference(0.0, 0.0, 0.01, 368, weight=1.0).holds
    assert not Difference(0.0, 0.0, 0.01, 366, weight=1.0).holds


@pytest.mark.parametrize(("metric", "needed"), [("accuracy", 368), ("f1", 368), ("matthews", 736), ("perplexity", 30)])
def test_equal_answers_to_few_examples_show_little_with_any_metric_of_answers(metric: str, needed: int) -> None:
    """A Matthews correlation of two equal classes loses two points with each percent of the answers."""
    for examples in (needed - 1, needed):
        assert Difference(0.0, 0.0, 0.01, examples, _weight(metric)).holds == (examples == needed)


def test_few_blocks_of_a_perplexity_show_nothing() -> None:
    """Every resample of one block is the same, and the intervals of few are too narrow."""
    for examples in (1, 5, 29):
        found = Difference(0.0, 0.0, 0.01, examples, weight=0.0)
        assert not found.holds
        assert found.wanted == 30
    assert Difference(0.0, 0.0, 0.01, 30, weight=0.0).holds


def test_numbers_of_examples_are_said_to_two_digits_and_not_below() -> None:
    def of(examples: int) -> str:  # which is what a half-width that is to halve wants of a quarter of them
        return examples_wanted([Difference(0.0, -0.02, 0.01, examples // 4, 0.0)])

    assert "2,900" in of(2804)
    assert " 96 " in of(96)
    assert "10,000,000" in of(10**9)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def limit(largest_drop: float) -> None:
    own = json.loads(Path("params.yaml").read_text())["promotion"]
    edit("params.yaml", promotion=own | {"largest_drop": largest_drop})


def test_the_margin_is_held_against_the_worse_end_for_dense_and_control(workspace: Path) -> None:
    make_study(["svd"], [0.5], ["map"])
    write_dense(0.8, 0.85)
    make_candidate("svd", 0.5, ["map"], 0.79)
    found = load_results()
    (one,) = found.candidates
    ends = {reference: found.difference(one.after, reference).low for reference in (DENSE, CONTROL)}
    assert ends[CONTROL] < ends[DENSE] < 0
    for largest, shown in ((-ends[DENSE] + 1e-6, False), (-ends[CONTROL] + 1e-6, True), (-ends[CONTROL] - 1e-6, False)):
        limit(largest)
        assert non_inferior(load_results(), one.after) is shown
    limit(0.0)
    gains = {reference: each.gain for reference, each in against_both(load_results(), one.after).items()}
    assert gains == pytest.approx({DENSE: -0.01, CONTROL: -0.06})


def test_of_a_perplexity_the_worse_end_is_the_higher(workspace: Path) -> None:
    make_perplexities(20.0, better=(90.0, 19.0), worse=(90.0, 21.0))
    found = load_results()
    better, worse = (difference(found, one.after, DENSE, 1.5) for one in found.candidates)
    assert (better.gain, worse.gain) == pytest.approx((1.0, -1.0))
    assert worse.low == pytest.approx(-found.difference(("worse-0.5", "recovered"), DENSE).high)
    assert better.low <= better.gain
    for beyond, holds in ((1e-6, True), (-1e-6, False)):
        assert difference(found, found.candidates[1].after, DENSE, -worse.low + beyond).interval_holds is holds
