"""The mask search: laws, cases solved by hand, and the traps on the way from masks to ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from eckart.factorization.weighted_svd import Decomposition, decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import low_rank_layers
from eckart.model.targets import Target, find_targets, weight_of
from eckart.ranks.budget import NoRank, allowance, largest_rank, total
from eckart.ranks.hypernetwork import Hypernetwork, HypernetworkSearch
from tests import tiny

NETWORKS = pytest.mark.parametrize("hypernetwork", [True, False], ids=["network", "gates"])
Shape = tuple[int, int]


def method(**changes: Any) -> Hypernetwork:
    return Hypernetwork(**{"alignment_values": "normalized", **changes})


def decomposed(model: nn.Module, targets: Sequence[Target]) -> dict[str, Decomposition]:
    return {some.name: decompose(weight_of(model.get_submodule(some.name)), ErrorNorm()) for some in targets}


def searching(
    model: nn.Module, targets: Sequence[Target] | None = None, keep: float = 0.5, seed: int = 0, **changes: Any
) -> HypernetworkSearch:
    """A search in `model`, of plain SVD."""
    targets = model.targets() if targets is None else targets
    return HypernetworkSearch(model, targets, decomposed(model, targets), method(**changes), keep, seed)


def with_gates(shapes: Sequence[Shape], *logits: Sequence[float], keep: float, **changes: Any) -> HypernetworkSearch:
    """A search whose confidences o_l + b are `logits`."""
    rule = searching(tiny.LinearLayers(*shapes), keep=keep, **{"hypernetwork": False, "offset": 0.0, **changes})
    with torch.no_grad():
        for gates, values in zip(rule.network.gates, logits, strict=True):
            gates.copy_(torch.tensor(values))
    return rule


def masked(rule: HypernetworkSearch, *masks: Sequence[float]) -> list[Tensor]:
    """Let `masks` be those of this step."""
    rule.masks = [torch.tensor(mask).requires_grad_() for mask in masks]
    return rule.masks


def extra(rule: HypernetworkSearch) -> Tensor:
    return rule.extra_loss(None, {}, None)


def train_by_hand(rule: HypernetworkSearch, loss: Callable[[], Tensor], steps: int) -> None:
    optimizer = torch.optim.AdamW(rule.parameter_groups())
    for number in range(steps):
        rule.before_forward(number)
        optimizer.zero_grad()
        (loss() + extra(rule)).backward()
        rule.after_backward(number)
        optimizer.step()
        rule.after_update(number)


def nothing() -> Tensor:
    return torch.zeros(())


def ones(rule: HypernetworkSearch) -> list[int]:
    return [int(mask.sum()) for mask in rule.masks]


def probe() -> dict[str, Tensor]:
    return tiny.collate(tiny.samples(6))


def bytes_of(model: nn.Module) -> bytes:
    return save({name: value.contiguous() for name, value in model.state_dict().items()})


# --- the masked model ------------------------------------------------------------------------------------------------


@NETWORKS
def test_masks_start_at_full_rank(hypernetwork):
    """And the masked model is the dense one."""
    model = tiny.gpt2().eval()
    targets = find_targets(model, probe()).targets
    expected = model(**probe()).logits
    rule = searching(model, targets, hypernetwork=hypernetwork)
    rule.before_forward(0)
    assert ones(rule) == [min(some.out_features, some.in_features) for some in targets]
    assert torch.allclose(model(**probe()).logits, expected, atol=1e-4)


def test_a_mask_leaves_out_its_components():
    rule = with_gates([(4, 6)], [40.0, -40.0, 40.0, -40.0], keep=0.9)
    model, parts = rule.model, rule.decompositions["a"]
    rule.before_forward(0)
    x = torch.randn(5, 6)
    kept = (parts.left[:, [0, 2]] @ parts.right[[0, 2]]).float()
    assert torch.allclose(model.a(x), x @ kept.T + rule.dense["a"].bias, atol=1e-5)


def test_a_mask_is_binary_with_the_gradient_of_the_sigmoid():
    """Eq. 9, with the noise drawn again from the generator."""
    rule = with_gates([(8, 8)], torch.linspace(-2, 2, 8).tolist(), keep=0.9, temperature=0.5, offset=0.3)
    generator = torch.Generator()
    generator.set_state(rule.state()["generator"])
    noise = -torch.empty(8).exponential_(generator=generator).log()
    rule.before_forward(0)
    weights = torch.randn(8)
    (rule.masks[0] * weights).sum().backward()

    gates = rule.network.gates[0]
    soft = torch.sigmoid((gates.detach() + noise + 0.3) / 0.5)
    assert torch.equal(rule.masks[0].detach(), (soft > 0.5).float())
    assert 0 < rule.masks[0].sum() < 8
    assert torch.allclose(gates.grad, weights * soft * (1 - soft) / 0.5)


@NETWORKS
def test_nothing_trains_but_the_masks(hypernetwork):
    model = tiny.bert()
    rule = searching(model, find_targets(model, probe()).targets, hypernetwork=hypernetwork, weight_decay=0.1)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    (group,) = rule.parameter_groups()
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.1)
    theirs = {id(parameter) for parameter in rule.network.parameters()}
    assert {id(parameter) for parameter in group["params"]} == theirs
    rule.before_forward(0)
    (model(**probe()).loss + extra(rule)).backward()
    assert all(parameter.grad is not None for parameter in rule.network.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_network_is_that_of_the_paper():
    """Table A1: z (L, 32), GRU(32, 64) both ways, LayerNorm, a map 128 → N_l for each target."""
    network = searching(tiny.LinearLayers((8, 5), (9, 12), (6, 6))).network
    assert network.z.shape == (3, 32)
    assert (network.gru.input_size, network.gru.hidden_size, network.gru.bidirectional) == (32, 64, True)
    assert [(head.in_features, head.out_features) for head in network.heads] == [(128, 5), (128, 9), (128, 6)]
    assert not network.z.requires_grad


# --- R and R_align ---------------------------------------------------------------------------------------------------

TWO = [(6, 6), (6, 6)]  # a rank costs 12, dense 36, rank 2 is the largest that is smaller


@pytest.mark.parametrize(
    ("ones", "counted"),
    [
        ((2, 2), 48),
        ((2, 4), 24 + 36),  # rank 4 counts as dense, not 48
        ((0, 3), 12 + 36),  # no target has rank 0 in the end
    ],
)
def test_r_solved_by_hand(ones, counted):
    """Of 72 parameters the budget is 36."""
    rule = with_gates(TWO, [0] * 6, [0] * 6, keep=0.5, alignment_weight=0.0)
    masked(rule, *([1.0] * count + [0.0] * (6 - count) for count in ones))
    assert extra(rule).item() == pytest.approx(16 * math.log(counted / 36))
    measures = rule.measures()
    assert measures["R"] == pytest.approx(math.log(counted / 36))
    assert measures["kept"] == pytest.approx(counted / 72)


@pytest.mark.parametrize("kept", [(1, 1), (2, 1)])
def test_r_has_no_gradient_at_and_below_the_budget(kept):
    """Which is why what is left of the budget is given back afterwards."""
    rule = with_gates(TWO, [0] * 6, [0] * 6, keep=0.5, alignment_weight=0.0)
    masks = masked(rule, *([1.0] * ranks + [0.0] * (6 - ranks) for ranks in kept))
    loss = extra(rule)
    loss.backward()
    assert loss.item() == 0
    assert all(not mask.grad.any() for mask in masks)


@NETWORKS
def test_r_pushes_every_target_down_from_full_rank(hypernetwork):
    """Past break-even min(dense, factorized) has no slope, and masks that start there must move all the same."""
    rule = searching(tiny.LinearLayers((6, 6), (12, 6), (6, 20)), alignment_weight=0.0, hypernetwork=hypernetwork)
    rule.before_forward(0)
    for mask in rule.masks:
        mask.retain_grad()
    extra(rule).backward()
    parameters = 36 + 72 + 120
    for mask, price in zip(rule.masks, (12, 18, 26), strict=True):
        assert torch.allclose(mask.grad, torch.full_like(mask, 16 * price / parameters))


def test_r_alone_brings_the_masks_below_the_budget():
    """And leaves them there, however far the optimizer's momentum went: the ranks go back up to it."""
    model = tiny.LinearLayers((16, 16), (24, 12))
    targets = model.targets()
    rule = searching(model, targets, 0.4, hypernetwork=False, learning_rate=0.02)
    train_by_hand(rule, nothing, 300)
    assert rule.measures()["R"] == 0
    assert rule.measures()["kept"] <= 0.4
    assert allowance(targets, 0.4) - max(some.step for some in targets) < total(targets, rule.ranks())


@pytest.mark.parametrize(("values", "norm"), [("normalized", 7 / 3), ("raw", 1)])
def test_the_alignment_solved_by_hand(values, norm):
    """s = (2, 1, 2/3) of norm 7/3. (0, 1, 0) should be (1, 0, 0); (1, 0, 1) should be (1, 1, 0); leading ones are."""
    rule = with_gates([(3, 9)] * 3, *[[0, 0, 0]] * 3, keep=0.9, budget_weight=1e-9, alignment_values=values)
    s = torch.tensor([2, 1, 2 / 3])
    rule.decompositions = {
        name: Decomposition(left=parts.left, right=parts.right, spectrum=s)
        for name, parts in rule.decompositions.items()
    }
    masks = masked(rule, [0.0, 1, 0], [1.0, 0, 1], [1.0, 1, 0])
    loss = extra(rule)
    gaps = (4 + 1) / norm**2, (1 + 4 / 9) / norm**2
    assert loss.item() == pytest.approx(10 * sum(gaps) / 3, rel=1e-5)
    assert rule.measures()["R_align"] == pytest.approx(sum(gaps) / 3, rel=1e-5)

    loss.backward()
    pushes = [[1 if value < -1e-6 else -1 if value > 1e-6 else 0 for value in mask.grad.tolist()] for mask in masks]
    assert pushes == [[1, -1, 0], [0, 1, -1], [0, 0, 0]]


# --- from masks to ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        # rank 1 each costs 24, whatever the confidence
        (24, {"a": 1, "b": 1}),
        (35, {"a": 1, "b": 1}),
        # then b's 4, …
        (36, {"a": 1, "b": 2}),
        # … and its 3, which makes it dense
        (48, {"a": 1, "b": None}),
        # the fourth and fifth of b cost nothing; a's second comes next
        (59, {"a": 1, "b": None}),
        (60, {"a": 2, "b": None}),
        (72, {"a": None, "b": None}),
    ],
)
def test_one_threshold_on_confidence_meets_the_budget(parameters, expected):
    rule = with_gates(TWO, [1, 0.5, -3, -4, -5, -6], [5, 4, 3, 2, 1.5, -7], keep=parameters / 72)
    assert rule.ranks() == expected


@pytest.mark.parametrize(
    ("shift", "added"),
    [
        (0, 1 - 3 / 3),  # the masks keep 1 of a and 2 of b, which are the ranks
        (-1.5, 1 - 1 / 3),  # they keep 1 of a alone: two of three ranks are the threshold's
        (9, 1 - (3 + 3) / 3),  # all is on, and from rank 3 on a target is dense
    ],
)
def test_what_the_threshold_adds_by_hand(shift, added):
    logits = [[2, -1, -2, -3, -4, -5], [1.2, 1, -6, -7, -8, -9]]
    rule = with_gates(TWO, *([value + shift for value in some] for some in logits), keep=0.5)
    assert rule.ranks() == {"a": 1, "b": 2}
    assert rule.measures()["added"] == pytest.approx(added)


@given(seed=st.integers(0, 2**20))
def test_masks_that_meet_the_budget_are_the_ranks(seed):
    """1ᵀm_l without noise, as the paper has it; the threshold adds nothing to them."""
    shapes = [(12, 12), (8, 30), (20, 16)]
    logits = [
        torch.randn(min(shape), generator=torch.Generator().manual_seed(seed + n)) for n, shape in enumerate(shapes)
    ]
    targets = tiny.LinearLayers(*shapes).targets()
    counts = {some.name: int((values > 0).sum()) for some, values in zip(targets, logits, strict=True)}
    assume(all(counts.values()))
    ranks = {some.name: counts[some.name] if counts[some.name] <= largest_rank(some) else None for some in targets}
    keep = total(targets, ranks) / sum(some.parameters for some in targets)
    rule = with_gates(shapes, *(values.tolist() for values in logits), keep=keep)
    assert rule.ranks() == ranks
    assert rule.measures()["added"] == 0


def test_equal_confidence_is_shared_out_among_targets():
    """An untrained network of free gates."""
    rule = with_gates([(10, 10)] * 3, *[[0.0] * 10] * 3, keep=0.6)
    assert rule.ranks() == {"a": 3, "b": 3, "c": 3}


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Shape], list[list[float]]]:
    size = st.integers(1, 14)
    shapes = draw(st.lists(st.tuples(size, size), min_size=1, max_size=4))
    values = st.floats(-8, 8, width=32)
    logits = [draw(st.lists(values, min_size=min(shape), max_size=min(shape))) for shape in shapes]
    return shapes, logits


def fewest(targets: Sequence[Target]) -> int:
    return sum(some.step if largest_rank(some) else some.parameters for some in targets)


@given(problem=problems(), keep=st.floats(0.05, 1))
def test_ranks_meet_the_budget_within_one_rank(problem, keep):
    shapes, logits = problem
    targets = tiny.LinearLayers(*shapes).targets()
    assume(any(map(largest_rank, targets)))
    assume(allowance(targets, keep) >= fewest(targets))
    logits = [values for target, values in zip(targets, logits, strict=True) if largest_rank(target)]
    ranks = with_gates(shapes, *logits, keep=keep).ranks()
    spent, budget = total(targets, ranks), allowance(targets, keep)
    assert spent <= budget
    assert all(
        rank is None or 1 <= rank <= largest_rank(some) for some, rank in zip(targets, ranks.values(), strict=True)
    )
    assert set(ranks.values()) == {None} or budget - spent < max(some.step for some in targets)


def test_a_target_that_no_rank_makes_smaller_is_not_masked():
    """One row: 1 + 7 parameters a rank are more than its 7."""
    model = tiny.LinearLayers((1, 7), (8, 8))
    row = model.a
    rule = searching(model, keep=0.5)
    assert model.a is row
    assert rule.ranks() == {"a": None, "b": 1}
    rule.before_forward(0)
    extra(rule)
    assert len(rule.masks) == 1
    assert rule.measures()["kept"] == 1


def test_keep_that_leaves_no_rank_is_an_error_before_the_search():
    model = tiny.LinearLayers(*TWO)
    before = bytes_of(model)
    with pytest.raises(NoRank, match=r"^keep=0\.3 .*\b12\b"):
        searching(model, keep=0.3)
    assert bytes_of(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


# --- what it finds ---------------------------------------------------------------------------------------------------


def test_the_only_useful_target_gets_the_ranks():
    """y = a(x) + 0 · b(x)."""
    model = tiny.LinearLayers((16, 16), (16, 16))
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    expected = model.a(x).detach()
    scale = 100 / expected.var()
    rule = searching(model, keep=0.5, learning_rate=3e-3)
    train_by_hand(rule, lambda: scale * (model.a(x) + 0 * model.b(x) - expected).square().mean(), 60)
    ranks = rule.ranks()
    # 256 parameters, 32 a rank: a takes all but rank 1 of b
    assert ranks == {"a": 7, "b": 1}


# --- elements --------------------------------------------------------------------------------------------------------


def test_elements_are_the_components_of_the_masks():
    """b is dense at rank 3: nothing is selected of it."""
    rule = with_gates(TWO, [-9, 1, -9, -9, 5, -9], [2, 3, 4, 5, 6, 7], keep=60 / 72, selection="elements")
    assert rule.ranks() == {"a": 2, "b": None}
    weights, parts = rule.selected_weights(), rule.decompositions["a"]
    assert set(weights) == {"a"}
    assert torch.allclose(
        weights["a"], sum(torch.outer(parts.left[:, index], parts.right[index]) for index in (1, 4)), atol=1e-12
    )


def test_a_shaped_weight_decomposes_into_the_selected_components():
    """Under the weighting of the search, so that factorizing it loses nothing."""
    model = tiny.LinearLayers((8, 10))
    generator = torch.Generator().manual_seed(0)
    metrics = ErrorNorm(left=torch.rand(8, generator=generator) + 0.1, right=torch.rand(10, generator=generator) + 0.1)
    parts = decompose(model.a.weight.detach(), metrics)
    rule = HypernetworkSearch(
        model, model.targets(), {"a": parts}, method(hypernetwork=False, selection="elements"), 0.7, 0
    )
    with torch.no_grad():
        rule.network.gates[0].copy_(torch.tensor([-1.0, 3, -1, 2, -1, 4, -1, -1]))
    weight, rank = rule.selected_weights()["a"], rule.ranks()["a"]
    again = decompose(weight, metrics)
    assert rank == 3
    assert torch.allclose(again.spectrum[:rank], parts.spectrum[[1, 3, 5]], rtol=1e-6)
    left, right = again.truncate(rank)
    assert torch.allclose(left @ right, weight, atol=1e-8)


# --- before, after, again --------------------------------------------------------------------------------------------


def test_the_model_comes_back_bit_identical():
    """With what was frozen before still frozen, and its mode that of the model."""
    model = tiny.gpt2().train()
    targets = find_targets(model, probe()).targets
    frozen = next(model.parameters()).requires_grad_(False)
    before = bytes_of(model)
    modules = dict(model.named_modules())
    rule = searching(model, targets)
    train_by_hand(rule, lambda: model(**probe()).loss, 3)
    model.eval()
    rule.finish()
    assert bytes_of(model) == before
    assert dict(model.named_modules()) == modules
    assert [parameter for parameter in model.parameters() if not parameter.requires_grad] == [frozen]
    assert not any(module.training for module in model.modules())
    assert not low_rank_layers(model)
    assert set(rule.ranks()) == {some.name for some in targets}


def test_a_search_draws_nothing_from_the_global_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train_by_hand(searching(tiny.LinearLayers(*TWO)), nothing, 2)
    assert torch.equal(torch.get_rng_state(), before)
