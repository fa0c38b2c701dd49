"""Ranks from an allowed increase of the loss: shares and bounds solved by hand, and laws of the walk on tiny models."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import nn

from eckart.calibration.robust_gradients import RobustGradients
from eckart.calibration.statistics import collect, mean_loss_times_batch
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import Weighting, weigh
from eckart.model.layers import set_weight
from eckart.model.targets import Target, Tied, find_targets, weight_of
from eckart.ranks import tolerance
from eckart.ranks.budget import NoRank, allowance, cost, largest_rank, total
from eckart.ranks.tolerance import (
    Tolerance,
    allowed_increases,
    grid_ranks,
    module_macs,
    module_seconds,
)
from tests import tiny

WEIGHTING: TypeAdapter[Weighting] = TypeAdapter(Weighting)
INPUTS, NONE = (WEIGHTING.validate_python({"kind": kind}) for kind in ("inputs", "none"))
KFAC = WEIGHTING.validate_python({"kind": "kfac", "shrinkage": 0.0})
BATCHES = tiny.batches(tiny.samples(12), 6)


def method(increase=None, grid=3, times="macs") -> Tolerance:
    return Tolerance(kind="tolerance", increase=increase, grid=grid, examples=12, times=times)


def loss_of(model, batches) -> float:
    """Mean over samples in eval mode, as a reference."""
    modes = model.training
    model.eval()
    with torch.no_grad():
        summed = sum(float(mean_loss_times_batch(model, batch)) for batch in batches)
    model.train(modes)
    return summed / sum(len(next(iter(batch.values()))) for batch in batches)


def state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- a model whose loss is solved by hand ----------------------------------------------------------------------------


class Additive(nn.Module):
    """loss = 1 + Σ over maps of the energy that their weight has lost, for inputs that take every direction once.

    Each map is diagonal of size 8, where ranks 1 to 3 are smaller than the dense weight.
    """

    def __init__(self, **energies: list[float]) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(8, 8, dtype=torch.float64) for name in energies})
        self.wanted = {}
        for name, values in energies.items():
            weight = torch.tensor(values, dtype=torch.float64).mul(8).sqrt().diag()
            set_weight(self.maps[name], weight)
            self.wanted[name] = weight

    def forward(self, x):
        errors = (x @ self.wanted[name].T + map.bias - map(x) for name, map in self.maps.items())
        return SimpleNamespace(loss=1 + sum(error.square().sum(1).mean() for error in errors))

    def targets(self) -> list[Target]:
        names = [f"maps.{name}" for name in self.maps]
        return [Target(name=name, out_features=8, in_features=8, input_of=names[0]) for name in names]


EYE = [{"x": torch.eye(8, dtype=torch.float64)}]


def losing(first: float, second: float, third: float) -> list[float]:
    """Energies of a map that loses these at ranks 1, 2 and 3."""
    return [first + 1, first - second, second - third, *[third / 5] * 5]


def solve(model: Additive, increase, keep=1.0, times="macs", weighting=INPUTS) -> list[int | None]:
    problem = tiny.search_problem(model, model.targets(), weighting, EYE, keep)
    ranks = method(increase, 3, times).search(problem).ranks
    assert list(ranks) == [target.name for target in model.targets()]
    return list(ranks.values())


# --- shares of the increase ------------------------------------------------------------------------------------------


def test_shares_solved_by_hand():
    """1 + r = 16 over times 1, 2, 1: E_b = 2, so 2 · 4 · 2."""
    assert allowed_increases({"a": 3.0, "b": 6.0, "c": 3.0}, 15) == pytest.approx({"a": 1, "b": 3, "c": 1})


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), st.floats(1e-6, 100))
def test_shares_multiply_to_the_whole_increase(times, increase):
    shares = allowed_increases({str(k): value for k, value in enumerate(times)}, increase)
    assert math.prod(1 + share for share in shares.values()) == pytest.approx(1 + increase, rel=1e-9)


# --- the grid --------------------------------------------------------------------------------------------------------


def square(size: int, columns: int | None = None) -> Target:
    return Target(name="a", out_features=size, in_features=columns or size, input_of="a")


def test_the_grid_of_a_square_weight_is_the_listings():
    """Appendix H: 96, 192, 288, 384, then full. 384 is break-even exactly, so the largest that saves is 383."""
    assert grid_ranks(square(768), 4) == [96, 192, 288, 383]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12))
def test_no_rank_of_the_grid_enlarges_its_target(rows, columns, count):
    some = square(rows, columns)
    grid = grid_ranks(some, count)
    assert grid == sorted(set(grid))
    assert len(grid) == min(count, largest_rank(some))
    assert all(rank >= 1 and cost(some, rank) < some.parameters for rank in grid)
    assert max(grid, default=0) == largest_rank(some)


# --- bounds solved by hand -------------------------------------------------------------------------------------------


def test_each_target_takes_the_smallest_rank_within_its_bound():
    """Bounds 3.5 and 3.5²: the first loses 4, 2 or 1 of them, so rank 2; the second's 3 + 4 is within."""
    assert solve(Additive(a=losing(4, 2, 1), b=losing(4, 2, 1)), increase=3.5**2 - 1) == [2, 1]


def test_what_one_target_leaves_unused_passes_on():
    """Bounds 2.5 and 6.25: the first takes 0.1, so the second may take 4; held to 1.1 · 2.5 it could take but 1."""
    assert solve(Additive(a=losing(0.1, 0.05, 0.01), b=losing(4, 2, 1)), increase=5.25) == [1, 1]


def test_a_target_that_no_rank_suits_stays_dense_and_leaves_its_share():
    """Bounds 1.5 and 2.25: the first loses 1 at best; the second's 1.2 is too much for 1.5 and right for 2.25."""
    model = Additive(a=losing(4, 2, 1), b=losing(1.2, 0.3, 0.1))
    before = state(model)
    assert solve(model, increase=1.25) == [None, 1]
    assert torch.equal(model.maps["a"].weight, before["maps.a.weight"])


def test_a_loss_of_just_the_bound_is_too_much():
    """Bounds 2 and 4; rank 3 of the first reaches 2 exactly, if rounding does not take it below."""
    assert solve(Additive(a=losing(4, 2, 1 + 1e-9), b=losing(9, 9, 9)), increase=3) == [None, None]
    assert solve(Additive(a=losing(4, 2, 1 - 1e-9), b=losing(9, 9, 9)), increase=3) == [3, None]


@pytest.mark.parametrize(("seconds", "ranks"), [((3.0, 1.0), [2, 2]), ((1.0, 3.0), [None, 1])])
def test_a_slower_module_gets_a_smaller_rank(seconds, ranks, monkeypatch):
    """1 + r = 6. Times 3 to 1: bounds 3.83 and 6. Times 1 to 3: bounds 1.57 and 6."""
    monkeypatch.setattr(tolerance, "module_seconds", lambda *_: dict(zip(("maps.a", "maps.b"), seconds, strict=True)))
    assert solve(Additive(a=losing(4, 2, 1), b=losing(4, 2, 1)), 5, times="measured") == ranks


def test_an_increase_that_suits_nothing_leaves_the_model_bit_identical():
    model = Additive(a=losing(4, 2, 1), b=losing(1.2, 0.3, 0.1))
    before = state(model)
    assert solve(model, 0.09) == [None, None]
    assert same(state(model), before)


@given(st.lists(st.floats(0.01, 10), min_size=16, max_size=16), st.floats(1e-3, 100))
@settings(max_examples=15)
def test_the_loss_stays_within_the_increase(energies, increase):
    model = Additive(a=energies[:8], b=energies[8:])
    solve(model, increase)
    assert loss_of(model, EYE) <= (1 + increase) * (1 + 1e-12)


def test_a_larger_increase_keeps_no_more_parameters():
    kept = []
    for increase in (0.01, 0.1, 0.5, 1, 2, 4, 8, 16, 64):
        model = Additive(a=losing(0.3, 0.2, 0.1), b=losing(4, 2, 1), c=losing(2, 1, 0.5))
        kept.append(sum(64 if rank is None else 16 * rank for rank in solve(model, increase)))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == 3 * 64
    assert kept[-1] == 3 * 16


# --- keep ------------------------------------------------------------------------------------------------------------


def test_the_smallest_increase_that_meets_keep():
    """Keep 0.5 of 128 pays for 64: rank 1 and a rank of up to 3.

    The least r is where the second map's rank 3 loses as little as can be: 1 + 0.1 + 1 < 1 + r.
    """
    model = Additive(a=losing(0.1, 0.05, 0.01), b=losing(4, 2, 1))
    assert solve(model, None, keep=0.5) == [1, 3]
    assert loss_of(model, EYE) == pytest.approx(2.1)


def test_the_smallest_increase_counts_what_a_target_uses_of_its_share():
    """The first target uses its whole share; that of the second has to do for its largest loss alone."""
    assert solve(Additive(a=losing(4, 2, 1), b=losing(0.1, 0.05, 0.01)), None, keep=0.375) == [2, 1]


def test_losses_are_of_the_examples_that_the_recipe_names():
    model, asked = Additive(a=losing(4, 2, 1)), []
    case = tiny.search_problem(model, model.targets(), INPUTS, [], 1.0)
    case = dataclasses.replace(case, calibration=lambda count, skip=0: asked.append(count) or EYE)
    recipe = method(0.5)
    recipe.search(case)
    assert asked == [recipe.examples]


def test_a_dense_model_that_meets_keep_is_not_even_run():
    model = Additive(a=losing(4, 2, 1))
    result = method().search(tiny.search_problem(model, model.targets(), INPUTS, [], 1.0))
    assert (result.ranks, result.changed) == ({"maps.a": None}, False)


@given(
    st.lists(st.floats(0.01, 10), min_size=16, max_size=16),
    st.floats(0.25, 1),
    st.sampled_from([INPUTS, KFAC, NONE]),
)
@settings(max_examples=10)
def test_keep_is_met(energies, keep, weighting):
    model = Additive(a=energies[:8], b=energies[8:])
    before = state(model)
    ranks = dict(
        zip([some.name for some in model.targets()], solve(model, None, keep, weighting=weighting), strict=True)
    )
    assert total(model.targets(), ranks) <= allowance(model.targets(), keep)
    for name, rank in ranks.items():
        weight = model.get_submodule(name).weight
        if rank is None:
            assert torch.equal(weight, before[f"{name}.weight"])
        else:
            assert torch.linalg.matrix_rank(weight, rtol=1e-9) == rank


def test_ranks_that_do_not_raise_the_loss_are_taken_though_keep_allows_more():
    """The maps are of rank 1 and 3, so 64 of 128 parameters lose nothing; keep 0.9 does not make that worse."""
    model = Additive(a=[3, *[0] * 7], b=[3, 2, 1, *[0] * 5])
    assert solve(model, None, keep=0.9) == [1, 3]


def test_an_increase_that_keeps_too_much_is_an_error_that_says_what_to_do():
    model = Additive(a=losing(4, 2, 1), b=losing(4, 2, 1))
    before = state(model)
    with pytest.raises(NoRank, match=r"^keep=0\.5 is too small for .*increase=1\.5 .*\b112\b.*\b64\b.*ranks\.increase"):
        solve(model, 1.5, keep=0.5)
    assert same(state(model), before)


@pytest.mark.parametrize("increase", [None, 1000.0])
def test_keep_below_the_smallest_ranks_is_an_error_that_says_what_to_do(increase):
    model = Additive(a=losing(4, 2, 1), b=losing(4, 2, 1))
    before = state(model)
    with pytest.raises(ValueError, match=r"^keep=0\.2 .*\b32\b.*\b25\b.*ranks\.grid"):
        solve(model, increase, keep=0.2)
    assert same(state(model), before)


# --- the walk over real architectures --------------------------------------------------------------------------------


def start(family):
    model = family()
    return model, find_targets(model, BATCHES[0]).targets


@pytest.mark.parametrize(("family", "weighting"), [(tiny.gpt2, INPUTS), (tiny.albert, KFAC)], ids=["gpt2", "albert"])
def test_each_weight_is_the_best_under_the_statistics_of_the_model_before_it(family, weighting):
    """Walked again by hand: the statistics are gathered on the model whose earlier targets are approximated already."""
    model, targets = start(family)
    again, stale = copy.deepcopy(model), collect(model, BATCHES, targets, weighting.statistics)
    ranks = method(0.5).search(tiny.search_problem(model, targets, weighting, BATCHES, 1.0)).ranks
    moved = 0
    for target in targets:
        rank, module = ranks[target.name], again.get_submodule(target.name)
        if rank is None:
            assert torch.equal(weight_of(model.get_submodule(target.name)), weight_of(module))
            continue
        fresh = collect(again, BATCHES, targets, weighting.statistics)
        left, right = decompose(weight_of(module), weigh(weighting, target, fresh)).truncate(rank)
        other, another = decompose(weight_of(module), weigh(weighting, target, stale)).truncate(rank)
        set_weight(module, left @ right)
        torch.testing.assert_close(weight_of(model.get_submodule(target.name)), weight_of(module), rtol=0, atol=1e-6)
        moved += not torch.allclose(left @ right, other @ another, rtol=0, atol=1e-3)
    assert sum(rank is not None for rank in ranks.values()) > 2
    assert moved > 0


@pytest.mark.parametrize(("weighting", "passes"), [(INPUTS, 1), (KFAC, 2), (NONE, 0)], ids=["inputs", "kfac", "none"])
def test_inputs_are_gathered_once_for_all_that_read_them(weighting, passes, monkeypatch):
    gathered = []
    monkeypatch.setattr(
        tolerance,
        "collect",
        lambda *args, robust: gathered.append(robust) or collect(*args, robust=robust),
    )
    model, robust = Additive(a=losing(4, 2, 1), b=losing(4, 2, 1)), RobustGradients((0, 10))
    method(0.5).search(tiny.search_problem(model, model.targets(), weighting, EYE, 1.0, robust=robust))
    assert gathered == [robust] * passes


def test_nothing_but_the_weights_of_factorized_targets_changes():
    """Biases, heads, embeddings and norms stay, and so do modes, gradients' flags and hooks."""
    model, targets = start(tiny.bert)
    model.train()
    model.get_submodule("bert.encoder.layer.0").eval()
    modes = [module.training for module in model.modules()]
    before = state(model)
    ranks = method(0.5, grid=2).search(tiny.search_problem(model, targets, KFAC, BATCHES, 1.0)).ranks
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"{name}.weight" for name, rank in ranks.items() if rank is not None}
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# --- times -----------------------------------------------------------------------------------------------------------


def test_macs_of_a_shared_layer_are_those_of_all_its_calls():
    model, targets = start(tiny.albert)
    macs = module_macs(model, targets, BATCHES[0])
    for some in targets:
        rows = len(BATCHES[0]["input_ids"]) if "pooler" in some.name else BATCHES[0]["input_ids"].numel()
        assert macs[some.name] == (3 if some.repeated else 1) * rows * some.parameters


def test_macs_of_a_tied_pair_count_a_head_with_an_output_for_each_word():
    model, batch = tiny.causal_llama(), {"input_ids": torch.ones(2, 7, dtype=torch.long)}
    targets = find_targets(model, batch, tied=True).targets
    (tied,) = (target for target in targets if isinstance(target, Tied))
    words, hidden = model.get_input_embeddings().weight.shape
    assert module_macs(model, targets, batch)[tied.name] == 2 * 7 * (hidden + hidden * words)


class Clocked(nn.Linear):
    """A map whose forwards take the seconds that are written."""

    def __init__(self, clock, seconds) -> None:
        super().__init__(8, 8, dtype=torch.float64)
        self.clock, self.seconds = clock, iter(seconds)

    def forward(self, x):
        self.clock.now += next(self.seconds)
        return super().forward(x)


def test_seconds_are_the_median_of_each_module_alone(monkeypatch):
    """The first forward does not count, nor does time outside of the module."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tolerance.time, "perf_counter", lambda: clock.now)
    model = Additive(a=losing(4, 2, 1), b=losing(4, 2, 1))
    model.maps["a"] = Clocked(clock, [50, 1, 9, 2])
    model.maps["b"] = Clocked(clock, [70, 5, 5, 4])
    model.train()
    seconds = module_seconds(model, model.targets(), EYE[0], 3)
    assert seconds == pytest.approx({"maps.a": 2, "maps.b": 5})
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_seconds_of_a_module_that_runs_again_are_those_of_all_its_calls(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tolerance.time, "perf_counter", lambda: clock.now)
    model = Additive(a=losing(4, 2, 1))
    module = model.maps["a"] = Clocked(clock, [50, 50, 1, 2, 3, 4])
    model.forward = lambda x: module(module(x))
    assert module_seconds(model, model.targets(), EYE[0], 2) == pytest.approx({"maps.a": 5})
