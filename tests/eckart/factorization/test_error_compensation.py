"""Laws of error compensation: least squares at full rank, the optimum at lower ranks, no change if nothing was lost."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics, collect
from eckart.factorization.error_compensation import DenseModules, anchor_targets, anchored
from eckart.factorization.factorize import InOrder, factorize_at_once, factorize_in_order
from eckart.factorization.layerwise_forward import layerwise_forward
from eckart.factorization.residual_sums import first_input, residual_readers
from eckart.factorization.weighted_svd import weighted_loss
from eckart.factorization.weightings import ErrorNorm, Inputs, Kfac, Plain, weigh
from eckart.model.attention_products import find_products
from eckart.model.batches import Batch
from eckart.model.layers import factorized
from eckart.model.probing import is_embedding
from eckart.model.targets import Target, find_targets, weight_of
from tests import tiny
from tests.eckart.factorization.test_factorize import BATCHES, Chain, targets_of

INPUTS, KFAC, PLAIN = Inputs(), Kfac(), Plain()
NONE = 1e-12
"""With a negligible ridge."""


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def order(anchor: float, ridge: float = 1e-9, sums: bool = False) -> InOrder:
    return InOrder(anchor=anchor, ridge=ridge, sums=sums)


# --- the corrected weight --------------------------------------------------------------------------------------------


def test_a_ridge_acts_as_additional_unchanged_inputs():
    """With √λ I appended to both inputs, W* = (B + λ W) (C + λ I)⁻¹."""
    weight, x, lost = draw(1, (5, 6), (40, 6), (40, 6))
    ridge = 0.3
    more = (ridge * (lost.T @ lost).diagonal().mean()).sqrt() * torch.eye(6, dtype=torch.float64)
    best = torch.linalg.lstsq(torch.cat([lost, more]), torch.cat([x, more]) @ weight.T).solution.T
    torch.testing.assert_close(anchored(weight, lost.T @ lost, weight @ x.T @ lost, 1.0, ridge), best)


def test_the_anchor_interpolates_between_the_dense_weight_and_the_solution():
    weight, x, lost = draw(2, (5, 6), (40, 6), (40, 6))
    c, b = lost.T @ lost, weight @ x.T @ lost
    whole = anchored(weight, c, b, 1.0, 0.01)
    torch.testing.assert_close(anchored(weight, c, b, 0.25, 0.01), 0.75 * weight + 0.25 * whole)
    assert torch.equal(anchored(weight, c, b, 0.0, 0.01), weight)
    torch.testing.assert_close(anchored(weight, c, b, 1.0, 1e12), weight)


@pytest.mark.parametrize("samples", [0, 40])
def test_unchanged_inputs_leave_the_weight_as_it_is(samples):
    """Also if all inputs are zero."""
    weight, x = draw(3, (5, 6), (samples, 6))
    torch.testing.assert_close(anchored(weight, x.T @ x, weight @ (x.T @ x), 1.0, NONE), weight)


def test_dead_inputs_and_few_tokens_give_a_finite_solution():
    weight, x, lost = draw(4, (5, 6), (4, 6), (4, 6))
    lost[:, 2] = 0
    found = anchored(weight, lost.T @ lost, weight @ x.T @ lost, 1.0, 1e-9)
    torch.testing.assert_close(lost @ found.T, x @ weight.T, rtol=1e-4, atol=1e-4)  # four equations, five unknowns


# --- a chain ---------------------------------------------------------------------------------------------------------


def chain(seed: int = 0) -> tuple[Chain, Tensor, list[Target]]:
    """Three linear layers, a tanh after the first, and seven examples of three tokens.

    Without the tanh there would be nothing to correct: the error of a weighted SVD on its inputs is orthogonal to what
    it keeps.
    """
    *weights, x = draw(seed, (6, 5), (7, 6), (4, 7), (7, 3, 5))
    model = Chain(weights)
    model.layers.insert(1, nn.Tanh())
    names = ["layers.0", "layers.2", "layers.3"]
    shapes = [{"out_features": len(weight), "in_features": len(weight.T)} for weight in weights]
    return model, x, [Target(name=name, input_of=name, **shape) for name, shape in zip(names, shapes, strict=True)]


def gathered(model: Chain, x: Tensor, targets: Sequence[Target]) -> Statistics:
    return collect(model, [{"x": x}], targets, ["inputs", "output_gradients"])


def read(model: Chain, x: Tensor, position: int) -> Tensor:
    """Return the inputs of a layer, `(tokens, in)`."""
    with torch.no_grad():
        return model.layers[:position](x).flatten(0, 1)


@pytest.mark.parametrize("rank", [None, 6])
def test_a_full_rank_layer_after_a_truncated_one_is_the_least_squares_solution(rank):
    dense, x, targets = chain()
    model = copy.deepcopy(dense)
    ranks = {"layers.0": 2, "layers.2": rank}
    factorize_in_order(model, targets[:2], ranks, KFAC, gathered(dense, x, targets), [{"x": x}], order(1.0))
    lost, wanted = read(model, x, 2), read(dense, x, 3)
    best = lost.numpy() @ np.linalg.lstsq(lost.numpy(), wanted.numpy(), rcond=None)[0]
    np.testing.assert_allclose(read(model, x, 3).numpy(), best, rtol=1e-6, atol=1e-6)
    assert torch.dist(lost @ dense.layers[2].weight.T, wanted) > 1.01 * torch.dist(torch.from_numpy(best), wanted)


@pytest.mark.parametrize(("weighting", "seed"), [(INPUTS, 0), (KFAC, 1)], ids=["inputs", "kfac"])
def test_no_matrix_of_the_same_rank_is_closer_to_the_original_outputs(weighting, seed):
    """Compare ‖L (W Xᵀ − Ŵ X̂ᵀ)‖ with that of other factors, near and far, and of those of the dense weight."""
    dense, x, targets = chain(seed)
    model = copy.deepcopy(dense)
    kept = DenseModules(model)
    kept.keep(targets[:1])
    factorize_at_once(model, targets[:1], {"layers.0": 2}, PLAIN, {})
    lost, wanted = read(model, x, 2), read(dense, x, 3)
    statistics = collect(dense, [{"x": x}], targets[1:2], weighting.statistics)
    with layerwise_forward(model, [targets[1:2]], [{"x": x}], kept) as forward:
        statistics = {**statistics, **forward.advance_to(targets[1:2])}
    norm = ErrorNorm(left=weigh(weighting, targets[1], statistics).left)

    def error(weight: Tensor) -> float:
        return float(weighted_loss((wanted - lost @ weight.detach().T).T, norm))

    plain, best = copy.deepcopy(model), model
    anchor_targets(best, targets[1:2], statistics, 1.0, 1e-9)
    for each in (plain, best):
        factorize_at_once(each, targets[1:2], {"layers.2": 3}, weighting, statistics)
    least, layer = error(best.layers[2].dense()), best.layers[2]
    assert least < 0.999 * error(plain.layers[2].dense())
    generator = torch.Generator().manual_seed(seed)
    for scale in (1e-4, 1e-2, 1.0):
        for _ in range(30):
            noise = [scale * torch.randn(part.shape, generator=generator) for part in layer.factors]
            assert least <= error((layer.left.weight + noise[0]) @ (layer.right.weight + noise[1])) * (1 + 1e-9)


def test_dense_targets_are_anchored_too_and_the_original_weights_are_kept():
    dense, x, targets = chain()
    model = copy.deepcopy(dense)
    modules = [model.get_submodule(target.name) for target in targets]
    before = [module.weight.detach().clone() for module in modules]
    ranks = {"layers.0": 2, "layers.2": None, "layers.3": None}
    factorize_in_order(model, targets, ranks, KFAC, gathered(dense, x, targets), [{"x": x}], order(1.0))
    assert set(factorized(model)) == {"layers.0"}
    assert all(torch.equal(module.weight, weight) for module, weight in zip(modules, before, strict=True))
    assert not any(torch.equal(model.layers[position].weight, before[position - 1]) for position in (2, 3))


# --- whole models ----------------------------------------------------------------------------------------------------


def double(batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
    return [{name: x.double() if x.is_floating_point() else x for name, x in batch.items()} for batch in batches]


def case(family: str, products: bool = False):
    """A model in float64, its targets, some batches and the loss."""
    architecture = tiny.ARCHITECTURES[family]
    examples, everything = double(tiny.unpadded(architecture.kind)), architecture.everything
    model = architecture.build().double().eval()
    batches = [tiny.padded(examples[:4], more=1), tiny.padded(examples[4:])]
    targets = find_targets(model, tiny.padded(examples[:1]), heads=everything, embeddings=everything)
    if products:
        targets = find_products(model, batches[0], targets)
    return model, targets.targets, batches, tiny.loss


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("family", tiny.PECULIAR)
def test_full_rank_gives_the_model_back_in_every_family(family, sums):
    model, targets, batches, loss = case(family)
    with torch.no_grad():
        expected = model(**batches[0]).logits
    ranks = {target.name: min(target.out_features, target.in_features) for target in targets}
    statistics = collect(model, batches, targets, KFAC.statistics, loss)
    factorize_in_order(model, targets, ranks, KFAC, statistics, batches, order(1.0, sums=sums))
    assert factorized(model) == ranks
    torch.testing.assert_close(model(**batches[0]).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "layer", "reader"),
    [
        ("bert", "bert.encoder.layer.1.attention.output.dense", "bert.encoder.layer.1.attention.output.LayerNorm"),
        ("gpt2", "transformer.h.0.mlp.c_proj", "transformer.h.1"),
        ("llama", "model.layers.1.self_attn.o_proj", "model.layers.1.post_attention_layernorm"),
        ("llama", "model.layers.0.mlp.down_proj", "model.layers.1"),
    ],
)
def test_no_weight_restores_the_sum_after_a_residual_connection_better(family, layer, reader):
    """The error that is left in the sum, which `reader` reads, is orthogonal to the inputs of the layer."""
    dense, targets, batches, _ = case(family)
    first, tested = targets[0], next(target for target in targets if target.name == layer)
    left = {}
    for sums in (False, True):
        model = copy.deepcopy(dense)
        ranks = {first.name: 1, layer: None}
        factorize_in_order(model, [first, tested], ranks, INPUTS, {}, batches, order(1.0, NONE, sums))
        error, x = read_by(dense, reader, batches) - read_by(model, reader, batches), read_by(model, layer, batches)
        left[sums] = float((error.T @ x).norm())
    assert left[True] < 1e-4 * left[False]


def read_by(model: PreTrainedModel, name: str, batches: Sequence[Batch]) -> Tensor:
    """Return what the module `name` reads at tokens that are not padding, `(tokens, features)`."""
    read: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs: read.append(first_input(args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    return torch.cat([x[batch["attention_mask"] == 1] for x, batch in zip(read, batches, strict=True)])


def test_a_sum_with_a_norm_between_is_not_found():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = tiny.build("Gemma2ForCausalLM", vocab_size=tiny.VOCABULARY, head_dim=8, num_key_value_heads=2, **sizes)
    batch = {name: BATCHES[0][name] for name in ("input_ids", "attention_mask")}
    assert residual_readers(model, batch, [target.name for target in find_targets(model, batch).targets]) == {}


def test_only_what_a_layer_can_know_is_its_sum() -> None:
    """Attention and MLP of GPT-NeoX run side by side: only the MLP can correct the attention, which runs before it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = tiny.build("GPTNeoXForCausalLM", vocab_size=tiny.VOCABULARY, **sizes)
    batch = {name: BATCHES[0][name] for name in ("input_ids", "attention_mask")}
    found = residual_readers(model, batch, [target.name for target in find_targets(model, batch).targets])
    for layer, hidden in (("0", "gpt_neox.emb_dropout"), ("1", "gpt_neox.layers.1")):
        block = f"gpt_neox.layers.{layer}"
        assert found.pop(f"{block}.attention.dense") == (hidden,)
        assert found.pop(f"{block}.mlp.dense_4h_to_h") == (f"{block}.post_attention_dropout", hidden)
    assert not found


class Skip(torch.nn.Module):
    """Its output has the first hidden states twice, and its second layer reads a sum with the first one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.first_norm, self.second_norm = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        middle = hidden + self.first(self.first_norm(hidden))
        return middle + self.second(self.second_norm(middle)) + hidden


def test_a_later_layer_that_knows_an_output_corrects_beside_it() -> None:
    found = residual_readers(Skip(), {"input_ids": torch.tensor([[1, 2]])}, ["first", "second"])  # type: ignore[arg-type]
    assert found == {"first": ("first_norm",), "second": ("second_norm", "first_norm")}


def test_no_error_is_corrected_twice() -> None:
    """In Falcon, the MLP cannot know what the attention beside it has corrected."""
    model = tiny.build("FalconForCausalLM", vocab_size=tiny.VOCABULARY, **tiny.LAYERS)
    batch = {name: BATCHES[0][name] for name in ("input_ids", "attention_mask")}
    found = residual_readers(model, batch, [target.name for target in find_targets(model, batch).targets])
    assert [*found] == ["transformer.h.0.mlp.dense_4h_to_h", "transformer.h.1.mlp.dense_4h_to_h"]


def test_the_layers_of_a_product_are_anchored():
    model, targets, batches, _ = case("bert", products=True)
    first, second = [target for target in targets if len(target.layers) > 1]
    ranks = {target.name: None for target in targets} | {first.name: 2}
    before = [weight_of(model.get_submodule(each.name)).clone() for each in second.layers]
    factorize_in_order(model, targets, ranks, INPUTS, {}, batches, order(1.0))
    for each, weight in zip(second.layers, before, strict=True):
        assert not torch.equal(weight_of(model.get_submodule(each.name)), weight)


# --- the two models side by side -------------------------------------------------------------------------------------


def everything_read(model: PreTrainedModel, targets: Sequence[Target], batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of each target in all its calls, `(tokens, in)`."""
    seen: dict[str, list[Tensor]] = {}
    hooks = [
        model.get_submodule(target.name).register_forward_hook(
            lambda _, args, __, target=target: seen.setdefault(target.name, []).append(
                args[0].reshape(-1, target.in_features)
            )
        )
        for target in targets
    ]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(calls) for name, calls in seen.items()}


@pytest.mark.parametrize("family", tiny.PECULIAR)
def test_wanted_outputs_are_those_of_the_original_model_in_every_family(family):
    """Their products with the inputs of the compressed model; padded batches against one example at a time."""
    model, targets, batches, _ = case(family)
    dense, kept = copy.deepcopy(model), DenseModules(model)
    targets = [target for target in targets if not is_embedding(model.get_submodule(target.name))]
    below = [target for target in targets if target.repeated] or targets[:2]
    above = [target.model_copy(update={"input_of": target.name}) for target in targets if target not in below]
    kept.keep(below)
    factorize_at_once(model, below, {target.name: 1 for target in below}, PLAIN, {})
    weights = {target.name: weight_of(dense.get_submodule(target.name)) for target in above}
    found: dict[str, Tensor] = {}
    with layerwise_forward(model, [[target] for target in above], batches, kept) as forward:
        for target in above:
            found |= forward.advance_to([target])["wanted_outputs"]
    expected = dict.fromkeys(found, 0.0)
    count = 0
    for sample in double(tiny.unpadded(tiny.ARCHITECTURES[family].kind)):
        one = tiny.padded([sample])
        lost, whole = everything_read(model, above, one), everything_read(dense, above, one)
        products = {name: whole[name].T @ lost[name] for name in found}
        expected = {name: total + weights[name] @ products[name] for name, total in expected.items()}
        count += 1
    for name, moment in found.items():
        torch.testing.assert_close(moment, expected[name] / count, rtol=1e-8, atol=1e-11)


def test_no_pass_keeps_hidden_states_of_earlier_layers():
    """Neither the original model's passes nor those of the compressed one, where sums are corrected."""
    model, targets, batches, _ = case("llama")
    names, dense = [target.name for target in targets], DenseModules(model)
    read: list[weakref.ref[Tensor]] = []
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: read.append(weakref.ref(args[0])))
    readers = residual_readers(model, batches[0], names)
    assert set(readers) == {name for name in names if name.endswith(("o_proj", "down_proj"))}
    with layerwise_forward(model, [[target] for target in targets], batches, dense, readers=readers) as forward:
        for target in targets:
            forward.advance_to([target])
            assert sum(hidden() is not None for hidden in read) <= 2 * len(batches), target.name


def test_sums_are_looked_for_in_a_few_tokens():
    """The search keeps all that the model computes meanwhile."""
    model = tiny.causal_llama().eval()
    ids, seen = torch.ones(1, 400, dtype=torch.long), list[int]()
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    assert residual_readers(model, {"input_ids": ids}, ["model.layers.0.mlp.down_proj"])
    assert set(seen) == {256}


def test_each_model_runs_every_batch_once():
    model = tiny.bert()
    targets = find_targets(model, BATCHES[0]).targets
    ran: list[str] = []
    for name in ("bert.encoder.layer.0", "bert.encoder.layer.1"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    factorize_in_order(model, targets, {target.name: 2 for target in targets}, INPUTS, {}, BATCHES, order(0.5))
    assert Counter(ran) == dict.fromkeys(ran, 2 * len(BATCHES))


def test_the_factorized_model_can_be_trained_afterwards():
    """So can the anchored copies of dense layers, which were made while the model was frozen."""
    model = tiny.bert().train()
    targets = find_targets(model, BATCHES[0]).targets
    ranks = {target.name: 2 if target is targets[0] else None for target in targets}
    model.classifier.requires_grad_(False)
    factorize_in_order(model, targets, ranks, INPUTS, {}, BATCHES, order(0.5))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"classifier.weight", "classifier.bias"}
    assert all(module.training for module in model.modules())


def test_an_error_in_a_forward_reaches_the_caller_and_the_model_is_usable():
    model, batches = tiny.bert().train(), [dict(batch) for batch in BATCHES]
    targets = find_targets(model, BATCHES[0]).targets
    batches[1]["input_ids"] = batches[1]["input_ids"] + 10**6
    ranks = {target.name: 2 for target in targets}
    with pytest.raises(IndexError):
        factorize_in_order(model, targets, ranks, INPUTS, {}, batches, order(0.5))
    assert not factorized(model)
    assert model.training
    assert model(**BATCHES[0]).loss.requires_grad


def test_a_target_that_not_every_batch_runs_is_named():
    class Sometimes(Chain):
        def forward(self, x: Tensor):
            return self.layers[0](x) if len(x) < 3 else self.layers(x)

    weights = draw(0, (5, 5), (5, 5))
    model, (large, small) = Sometimes(weights), draw(1, (4, 3, 5), (2, 3, 5))
    with pytest.raises(ValueError, match=r"layers\.1"):
        factorize_in_order(
            model,
            targets_of(weights),
            {"layers.0": 2, "layers.1": 2},
            INPUTS,
            {},
            [{"x": large}, {"x": small}],
            order(0.5),
        )
