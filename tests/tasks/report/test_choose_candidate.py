"""The limits of a promotion: passing values, the allowance for chance, and the choice within them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.artifacts.metrics import METRICS, MetricName
from tasks.config.schema import Limits
from tasks.report.choose_candidate import Gate, Measured, choose, gates, short

WANTED = Limits(largest_drop=0.01, keep=0.5, least_speedup=1.2, standard_errors=0.0)
CANDIDATE = Measured(metric=0.84, dense=0.842, standard_error=0.012, parameters=5, keep=0.5, speedup=1.5)
PERPLEXITY = dataclasses.replace(CANDIDATE, metric=20.0, dense=20.1)


def wanting(**changes: Any) -> Limits:
    return WANTED.model_copy(update=changes)


def refused(results: Sequence[Gate]) -> list[tuple[str, ...]]:
    """The gates that do not pass, each with the numbers that its refusal says."""
    return [(gate.name, *said(gate.refusal)) for gate in results if not gate.passed]


def said(words: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", words)


def refusals(wanted: Limits = WANTED, metric: MetricName = "accuracy", **changes: Any) -> list[tuple[str, ...]]:
    measured = CANDIDATE if metric == "accuracy" else PERPLEXITY
    return refused(gates(dataclasses.replace(measured, **changes), metric, wanted))


class TestGates:
    def test_a_candidate_within_all_limits_passes_each(self) -> None:
        results = gates(CANDIDATE, "accuracy", WANTED)
        assert [gate.name for gate in results] == ["drop from the original", "keep", "speedup"]
        assert all(gate.passed for gate in results)

    def test_a_limit_itself_passes_however_it_was_rounded(self) -> None:
        assert 0.842 - 0.832 > 0.01
        assert not refusals(metric="accuracy", speedup=1.2)
        assert not refused(gates(dataclasses.replace(CANDIDATE, metric=0.832), "accuracy", WANTED))

    def test_a_refusal_says_which_number_failed_by_how_much_and_the_standard_error(self) -> None:
        (drop, *_) = gates(dataclasses.replace(CANDIDATE, metric=0.801), "accuracy", WANTED)
        assert said(drop.refusal) == ["0.801", "0.041", "0.842", "0.01", "0", "0.031"]

    @pytest.mark.parametrize(
        ("changes", "refusal"),
        [({"keep": 0.62}, ("keep", "0.62", "0.5", "0.12")), ({"speedup": 1.1}, ("speedup", "1.1", "1.2", "0.1"))],
    )
    def test_what_is_no_metric_knows_no_chance(self, changes: dict[str, float], refusal: tuple[str, ...]) -> None:
        assert refusals(wanting(standard_errors=5.0), **changes) == [refusal]

    def test_what_is_null_is_not_asked_for(self) -> None:
        assert not refusals(wanting(keep=None, least_speedup=None), keep=0.9, speedup=0.5)

    @pytest.mark.parametrize(
        ("errors", "drop", "passes"),
        [(0.0, 0.011, False), (0.5, 0.016, True), (0.5, 0.017, False), (1.0, 0.02, True), (1.0, 0.021, False)],
    )
    def test_a_drop_closes_the_gate_where_its_excess_is_beyond_chance(
        self, errors: float, drop: float, passes: bool
    ) -> None:
        """The limit of 0.01 and the standard error of 0.012, so many times, and no more than the limit once more."""
        measured = dataclasses.replace(CANDIDATE, metric=0.842 - drop)
        gate = gates(measured, "accuracy", wanting(standard_errors=errors))[0]
        assert gate.passed is passes
        assert gate.plain["standard_error"] == 0.012
        assert gate.plain["passed"] is passes
        assert short(min(0.012 * errors, 0.01)) in said(gate.words)
        assert bool(gate.by_chance) is passes
        assert not passes or said(gate.by_chance)[-1] == short(gate.chance)
        assert passes or said(gate.refusal)[-1] == short(drop - 0.01 - gate.chance)

    def test_a_higher_perplexity_than_the_original_model_s_is_a_drop(self) -> None:
        wanted = wanting(largest_drop=1.0, standard_errors=1.0)
        over = dataclasses.replace(PERPLEXITY, metric=21.3, dense=20.1, standard_error=0.1)
        assert [name for name, *_ in refused(gates(over, "perplexity", wanted))] == ["drop from the original"]
        assert not refused(gates(dataclasses.replace(over, metric=21.1), "perplexity", wanted))
        assert not refused(gates(dataclasses.replace(over, standard_error=0.2), "perplexity", wanted))
        assert not refused(gates(dataclasses.replace(over, metric=18.1), "perplexity", wanting(largest_drop=0.0)))

    def test_a_gate_as_a_row_of_a_table(self) -> None:
        assert Gate("keep", 0.4853, 0.5, True, "", "too large").row == ("keep", "0.4853", "at most 0.5", "passed")
        slow = Gate("speedup", 1.1, 1.2, False, "", "too slow")
        assert slow.row == ("speedup", "1.1", "at least 1.2", "too slow by 0.1")
        drop = Gate("drop", 0.02, 0.01, True, "", "too much", 0.012, 0.012)
        assert drop.row[:3] == ("drop", "0.02 ± 0.012", "at most 0.01")
        assert drop.row[3].startswith("passed")
        assert drop.row[3] != "passed"  # it says that chance was needed

    def test_what_is_nothing_but_rounding_is_said_to_be_0(self) -> None:
        assert short(0.3 - 0.1 * 3) == "0"
        assert short(-1e-3) == "-0.001"


CANDIDATES = st.lists(
    st.builds(
        Measured,
        metric=st.floats(0.5, 0.9),
        dense=st.just(0.8),
        standard_error=st.floats(0, 0.05),
        parameters=st.integers(1, 9),
        keep=st.floats(0.1, 1),
        speedup=st.floats(0.5, 3),
    ),
    min_size=1,
    max_size=6,
)


class TestChoice:
    @given(CANDIDATES, st.sampled_from(["accuracy", "perplexity"]), st.floats(0, 2))
    def test_no_other_within_the_limits_is_better_or_as_good_and_smaller(
        self, models: list[Measured], metric: MetricName, errors: float
    ) -> None:
        wanted, goodness = wanting(standard_errors=errors), METRICS[metric].goodness
        candidates = {str(place): measured for place, measured in enumerate(models)}
        choice = choose(candidates, metric, wanted)
        within = {name for name, measured in candidates.items() if not refused(gates(measured, metric, wanted))}
        assert set(choice.closed) == set(candidates) - within
        assert (choice.chosen is None) == (not within)
        if choice.chosen:
            assert choice.nearest == choice.chosen
            best = candidates[choice.chosen]
            for measured in map(candidates.__getitem__, within):
                assert (goodness(measured.metric), -measured.parameters) <= (goodness(best.metric), -best.parameters)

    @pytest.mark.parametrize(("metric", "wanted"), [("accuracy", "high"), ("perplexity", "low and small")])
    def test_of_equal_ones_the_smallest(self, metric: MetricName, wanted: str) -> None:
        low = dataclasses.replace(CANDIDATE, metric=0.5, dense=0.5, parameters=9)
        models = {"low": low, "low and small": dataclasses.replace(low, parameters=5)}
        models["high"] = dataclasses.replace(low, metric=0.6)
        assert choose(models, metric, wanting(largest_drop=1.0)).chosen == wanted

    def test_the_nearest_is_beyond_the_fewest_limits_and_then_the_least_far(self) -> None:
        """Two limits are more than one; a keep of 0.6 for 0.5 is nearer than a speedup of 0.6 for 1.2."""
        models = {
            "two": dataclasses.replace(CANDIDATE, keep=0.51, speedup=1.19),
            "slow": dataclasses.replace(CANDIDATE, speedup=0.6),
            "large": dataclasses.replace(CANDIDATE, keep=0.6),
        }
        choice = choose(models, "accuracy", WANTED)
        assert (choice.chosen, choice.nearest) == (None, "large")
        assert {name: [gate.name for gate in closed] for name, closed in choice.closed.items()} == {
            "two": ["keep", "speedup"],
            "slow": ["speedup"],
            "large": ["keep"],
        }
