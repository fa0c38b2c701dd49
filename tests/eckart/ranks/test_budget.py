"""keep ↔ ranks ↔ parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eckart.model.targets import Product, Storage, Target
from eckart.ranks.budget import allowance, cost, largest_rank, stored, total

sizes = st.integers(1, 5000)
storages = st.sampled_from(["factors", "pivoted"])


def target(rows: int, columns: int, name: str = "map", storage: Storage = "factors") -> Target:
    return Target(name=name, out_features=rows, in_features=columns, input_of=name, storage=storage)


@given(sizes, sizes, storages)
def test_the_largest_rank_is_the_last_that_makes_a_target_smaller(rows, columns, storage):
    some = target(rows, columns, storage=storage)
    rank = largest_rank(some)
    assert cost(some, rank) < some.parameters
    assert cost(some, rank + 1) >= some.parameters


@given(sizes, sizes, st.integers(0, 100))
def test_parameters_are_those_of_the_two_factors(rows, columns, rank):
    some = target(rows, columns)
    assert cost(some, rank) == rows * rank + rank * columns
    assert cost(some, rank + 1) - cost(some, rank) == some.step
    assert cost(some, None) == rows * columns


@given(sizes, sizes, st.data())
def test_pivoted_a_rank_costs_its_rows_and_what_the_others_are_of_these(rows, columns, data):
    some = target(rows, columns, storage="pivoted")
    rank = data.draw(st.integers(0, min(rows, columns)))
    assert cost(some, rank) == rank * columns + (rows - rank) * rank <= some.parameters
    assert cost(some, rank) == cost(target(columns, rows, storage="pivoted"), rank)
    assert cost(some, rank) == cost(target(rows, columns), rank) - rank**2


def test_a_product_costs_the_rows_that_its_maps_keep_whatever_the_storage():
    other = target(8, 6, "key")
    product = Product(**target(8, 6, "query").model_dump(), heads=2, other=other)
    assert [cost(some, 3) for some in stored([product, other], "pivoted")] == [2 * 3 * (6 + 6), 3 * (8 + 6 - 3)]


def test_the_total_counts_dense_targets_in_full():
    some = [target(4, 6, "a"), target(3, 5, "b"), target(2, 2, "c")]
    assert total(some, {"a": 2, "b": 1, "c": None}) == 2 * 10 + 8 + 4


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5), st.floats(0.001, 1))
def test_the_allowance_is_the_last_whole_number_within_keep(shapes, keep):
    some = [target(*shape) for shape in shapes]
    parameters = sum(t.parameters for t in some)
    allowed = allowance(some, keep)
    assert allowed <= keep * parameters + 1e-6
    assert allowed + 1 > keep * parameters


@pytest.mark.parametrize(("keep", "allowed"), [(0.29, 29), (0.57, 57), (0.58, 58), (0.999, 99), (0.01, 1), (1.0, 100)])
def test_a_hundred_parameters_are_shared_out_as_on_paper(keep, allowed):
    """0.29 · 100 is 28.999999999999996 to the machine."""
    assert allowance([target(10, 10)], keep) == allowed
