"""Laws of refinement: the reported errors are those of the final model, none rises, and a killed run loses nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics, collect
from eckart.factorization.factorize import InOrder, factorize_in_order
from eckart.factorization.layerwise_forward import BlockCall, hidden_states
from eckart.factorization.refinement import Block, BlockStore, Refine, RefinedBlock, gradient_moments, refine
from eckart.factorization.weightings import Inputs, Kfac
from eckart.model.attention_products import find_products
from eckart.model.batches import Batch
from eckart.model.experts import unfuse
from eckart.model.layers import factorized
from eckart.model.module_context import frozen
from eckart.model.targets import Target, find_targets
from eckart.ranks.budget import Ranks
from eckart.training.learning_rate import share_of_peak
from tests import tiny
from tests.eckart.factorization.test_error_compensation import case, double, draw

INPUTS = Inputs()
SETTINGS = Refine(passes=3, batch_size=2, learning_rate=1e-3, held_out=0.4)
HELD = range(2, 6)
"""Held-out examples, if the batches of a `case` are given twice, so that the other copies of these are learned."""


class Killed(Exception):
    pass


class Memory(BlockStore):
    """Keeps blocks in memory, and dies after a number of them."""

    def __init__(self, last: int | None = None) -> None:
        self.saved: list[tuple[RefinedBlock, Mapping[str, Tensor]]] = []
        self.last = last

    def load(self) -> Sequence[tuple[RefinedBlock, Mapping[str, Tensor]]]:
        return list(self.saved)

    def save(self, block: RefinedBlock, tensors: Mapping[str, Tensor]) -> None:
        self.saved.append((block, {name: values.clone() for name, values in tensors.items()}))
        if len(self.saved) == self.last:
            raise Killed


def refined(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batches: Sequence[Batch],
    ranks: Ranks | None = None,
    settings: Refine | None = SETTINGS,
    *,
    anchor: float = 0.5,
    store: BlockStore | None = None,
    statistics: Statistics | None = None,
) -> list[RefinedBlock]:
    """Factorize at rank 2, or `ranks`, and refine in place."""
    chosen = ranks or {target.name: 2 for target in targets}
    order = InOrder(anchor=anchor, ridge=0.1, refine=settings)
    weighting = INPUTS if statistics is None else Kfac()
    return factorize_in_order(
        model, targets, chosen, weighting, statistics or {}, batches, order, store=store or BlockStore()
    )


def returned(model: PreTrainedModel, block: str, batch: Batch) -> Tensor:
    """Return the hidden states that the module `block` returns for a batch."""
    seen: list[Tensor] = []
    hook = model.get_submodule(block).register_forward_hook(lambda _, __, output: seen.append(hidden_states(output)))
    with torch.no_grad(), frozen(model):
        model(**batch)
    hook.remove()
    return seen[0]


def error(model: PreTrainedModel, dense: PreTrainedModel, block: str, kind: tiny.Kind) -> float:
    """Return Σ ‖f − f*‖² ÷ Σ ‖f*‖² on the held-out examples, each without padding."""
    examples = double(tiny.unpadded(kind))
    pairs = [
        (returned(model, block, tiny.padded([examples[place]])), returned(dense, block, tiny.padded([examples[place]])))
        for place in HELD
    ]
    return float(sum((own - wanted).square().sum() for own, wanted in pairs)) / float(
        sum(wanted.square().sum() for _, wanted in pairs)
    )


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_errors_are_those_of_the_final_model_and_never_rise(family):
    """Each example alone and without padding: a block reads what the refined blocks before it return."""
    model, targets, batches, _ = case(family)
    kind = tiny.ARCHITECTURES[family].kind
    dense, unrefined = copy.deepcopy(model), copy.deepcopy(model)
    refined(unrefined, targets, batches * 2, settings=None)
    blocks = refined(model, targets, batches * 2)
    assert len(blocks) == (4 if family == "t5" else 2)
    assert any(block.passes for block in blocks)
    for block in blocks:
        assert block.after <= block.before
        assert (block.after < block.before) == bool(block.passes)
        assert error(model, dense, block.name, kind) == pytest.approx(block.after, rel=1e-5)
    assert error(unrefined, dense, blocks[0].name, kind) == pytest.approx(blocks[0].before, rel=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_padding_changes_nothing():
    examples = double(tiny.unpadded("classification"))
    models = []
    for more in (0, 3):
        model, targets, _, _ = case("bert")
        refined(model, targets, [tiny.padded(examples, more)])
        models.append(model.state_dict())
    for name, values in models[0].items():
        torch.testing.assert_close(values, models[1][name], rtol=1e-6, atol=1e-9)


def test_a_linear_block_learns_the_least_squares_solution():
    """The held-out examples are those that are learned, so that no pass is better than the last."""
    x, weight, noise, start = draw(5, (8, 10, 4), (3, 4), (8, 10, 3), (3, 4))
    wanted = x @ weight.T + noise
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3, bias=False).double()))
    model[0][0].weight.data.copy_(start)
    calls = [BlockCall((x,), {}, wanted, {"x": x})] * 2
    settings = Refine(passes=200, learning_rate=0.2, held_out=0.5)
    result = refine(model, Block("0", None), calls, settings)
    flat, outputs = x.flatten(0, 1), wanted.flatten(0, 1)
    best = torch.linalg.lstsq(flat, outputs).solution
    least = float((flat @ best - outputs).square().sum() / outputs.square().sum())
    assert result.after == pytest.approx(least, rel=1e-3)
    torch.testing.assert_close(model[0][0].weight.data, best.T, rtol=0, atol=0.01)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_moments_of_gradients_are_those_of_single_examples(family):
    """Padded batches against one example at a time."""
    model, _, batches, loss = case(family)
    block = "encoder.block.1" if family == "t5" else "bert.encoder.layer.1"
    (moment,) = gradient_moments(model, [block], batches, loss).values()
    gradients: list[Tensor] = []
    for example in double(tiny.unpadded(tiny.ARCHITECTURES[family].kind)):
        seen: list[Tensor] = []
        module = model.get_submodule(block)
        hook = module.register_forward_hook(lambda _, __, output, seen=seen: seen.append(hidden_states(output)))
        value = loss(model, tiny.padded([example]))
        hook.remove()
        gradients += torch.autograd.grad(value, seen[0])
    expected = sum(gradient.square().sum((0, 1)) for gradient in gradients)
    torch.testing.assert_close(moment, expected / expected.mean(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["relative", "gradients"])
def test_other_errors_weigh_tokens_and_outputs(kind):
    """A token whose outputs are a thousand times as large counts as others; an output without gradient counts 0."""
    outputs, noise = draw(6, (2, 5, 3), (2, 5, 3))
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3, bias=False).double()))
    model[0][0].weight.data = torch.eye(3, dtype=torch.float64)
    sizes = torch.tensor([1000.0, 1, 1, 1, 1]).double()[:, None]
    wanted, moment = outputs * sizes, torch.tensor([4.0, 1.0, 0.0]).double()
    read = wanted + noise * sizes
    calls = [BlockCall((read,), {}, wanted, {"x": read})] * 2
    settings = Refine(passes=1, learning_rate=1e-9, held_out=0.5, error=kind)
    result = refine(model, Block("0", None), calls, settings, moment if kind == "gradients" else None)
    lost, whole = (read - wanted).square(), wanted.square()
    expected = (lost.sum(-1) / whole.sum(-1)).mean()
    if kind == "gradients":
        expected = (lost * moment).sum() / (whole * moment).sum()
    assert result.before == pytest.approx(float(expected))


def test_factors_of_full_rank_and_unchanged_blocks_stay():
    model, targets, batches, _ = case("llama")
    expected = copy.deepcopy(model.state_dict())
    full = {target.name: min(target.out_features, target.in_features) for target in targets}
    unchanged = {name: None if "layers.0" in name else rank for name, rank in full.items()}
    blocks = refined(model, targets, batches, unchanged, anchor=0.0)
    assert blocks[0].before == 0
    assert blocks[1].before < 1e-10
    assert not any(block.passes for block in blocks)
    assert all(torch.equal(values, expected[name]) for name, values in model.state_dict().items() if name in expected)


@pytest.mark.parametrize(("family", "products", "last"), [("t5", False, 3), ("bert", True, 1)])
def test_a_killed_refinement_goes_on_to_the_same_bits(family, products, last):
    """T5's cross-attention layers of all blocks read one tensor; products are factorized before all blocks."""
    model, targets, batches, loss = case(family, products)
    if products:
        targets = find_products(model, batches[0], find_targets(model, batches[0])).targets
    statistics = collect(model, batches, targets, Kfac().statistics, loss)
    killed, resumed, store = copy.deepcopy(model), copy.deepcopy(model), Memory(last)
    options = {"settings": SETTINGS.model_copy(update={"passes": 1}), "statistics": statistics}
    blocks = refined(model, targets, batches, **options)
    with pytest.raises(Killed):
        refined(killed, targets, batches, **options, store=store)
    store.last = None
    assert [block for block, _ in store.saved] == blocks[:last]
    assert refined(resumed, targets, batches, **options, store=store) == blocks
    assert factorized(resumed) == factorized(model)
    own = resumed.state_dict()
    assert all(torch.equal(values, own[name]) for name, values in model.state_dict().items())


def test_weights_in_bfloat16_stay_in_bfloat16():
    model, targets, _, _ = case("llama")
    batches = [tiny.padded(tiny.unpadded("causal"))]
    blocks = refined(
        model.to(torch.bfloat16), targets, batches, settings=SETTINGS.model_copy(update={"learning_rate": 1e-3})
    )
    assert any(block.after < block.before for block in blocks)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(layer_norm(x, x.shape[-1:]))


def test_gradients_in_float16_do_not_underflow():
    """An outlier in one token makes the mean square large, in units of which the error counts."""
    x, weight, noise = (values.half() for values in draw(2, (8, 64, 16), (16, 16), (16, 16)))
    x[:, 0, 0] = 10_000
    model = nn.Sequential(Residual(16, 16, bias=False)).half()
    model[0].weight.data = weight / 4
    wanted = model(x).detach()
    model[0].weight.data += noise / 10
    calls = [BlockCall((x,), {}, wanted, {"x": x})] * 2
    result = refine(model, Block("0", None), calls, Refine(passes=100, learning_rate=1e-2, held_out=0.5))
    assert result.after < 0.1 * result.before


def test_a_model_whose_blocks_all_run_several_times_is_refused():
    model, targets, batches, loss = case("albert")
    statistics = collect(model, batches, targets, Kfac().statistics, loss)
    with pytest.raises(ValueError, match="refine: null"):
        refined(model, targets, batches, statistics=statistics)


def test_a_block_is_refined_if_only_a_layer_of_it_runs_twice():
    """As the router of modalities in Gemma 3n."""
    model, _, batches, loss = case("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * (mlp.up_proj(x) + mlp.up_proj(2 * x)))
    targets = find_targets(model, batches[0]).targets
    assert [target.name for target in targets if target.repeated] == ["model.layers.0.mlp.up_proj"]
    statistics = collect(model, batches, targets, Kfac().statistics, loss)
    blocks = refined(model, targets, batches, statistics=statistics)
    assert [block.name for block in blocks] == ["model.layers.0", "model.layers.1"]


def test_routers_stay_as_they_are():
    (model, _), batch = tiny.mixtral(), tiny.following(tiny.text(16))
    unfuse(model)
    targets, gates = find_targets(model, batch).targets, [layer.mlp.gate.weight.clone() for layer in model.model.layers]
    statistics, settings = collect(model, [batch], targets, ["inputs"]), Refine(passes=2, batch_size=4, held_out=0.25)
    order, ranks = InOrder(anchor=0.0, refine=settings), {target.name: 2 for target in targets}
    blocks = factorize_in_order(model, targets, ranks, INPUTS, statistics, [batch], order)
    assert all(block.passes for block in blocks)
    assert all(torch.equal(layer.mlp.gate.weight, gate) for layer, gate in zip(model.model.layers, gates, strict=True))


def test_no_part_of_a_frozen_model_fills_a_cache():
    """A block that runs again would find its own keys there."""
    model, batch = tiny.llava()
    assert model(**batch).past_key_values
    with frozen(model):
        assert not model(**batch).past_key_values
    assert model(**batch).past_key_values


def test_one_part_is_too_little():
    model, targets, batches, _ = case("bert")
    with pytest.raises(ValueError, match=r"sequential\.refine.*batch_size"):
        refined(model, targets, batches[:1], settings=Refine(batch_size=4))


def linear(start: Tensor) -> nn.Sequential:
    """A block that is one linear layer of the weight `start`."""
    model = nn.Sequential(nn.Sequential(nn.Linear(start.shape[1], start.shape[0], bias=False).double()))
    weight_of(model).copy_(start)
    return model


def weight_of(model: nn.Sequential) -> Tensor:
    return next(model.parameters()).data


def test_held_out_examples_are_not_learned() -> None:
    x, other, weight = draw(5, (8, 10, 4), (8, 10, 4), (3, 4))
    found = []
    for held in (x, other):
        model = linear(torch.zeros(3, 4))
        calls = [BlockCall((read,), {}, read @ weight.T, {"x": read}) for read in (x, held)]
        assert refine(model, Block("0", None), calls, Refine(passes=1, learning_rate=0.1, held_out=0.5)).passes == 1
        found.append(weight_of(model))
    assert torch.equal(*found)


def test_steps_are_those_of_adamw_with_the_constants_of_aa_svd() -> None:
    """A decay of 0.01, gradients of norm 1 at most, a tenth of the steps as warm-up, and a cosine to a tenth."""
    x, weight, start = draw(5, (8, 10, 4), (3, 4), (3, 4))
    wanted, model = x @ weight.T, linear(10 * start)
    calls = [BlockCall((x,), {}, wanted, {"x": x})] * 10
    assert refine(model, Block("0", None), calls, Refine(passes=3, learning_rate=0.1, held_out=0.1)).passes == 3
    values, steps = (10 * start).requires_grad_(), 27
    optimizer = torch.optim.AdamW([values], weight_decay=0.01)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        ((x @ values.T - wanted).square().sum() / wanted.square().sum()).backward()
        nn.utils.clip_grad_norm_([values], 1.0)
        optimizer.param_groups[0]["lr"] = 0.1 * share_of_peak("cosine", step, steps, 3, 0.1)
        optimizer.step()
    torch.testing.assert_close(weight_of(model), values.detach(), rtol=1e-9, atol=1e-12)
