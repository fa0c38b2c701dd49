"""Narrowed MLPs: which neurons stay, what they predict, and models that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, silu
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

import eckart
from eckart.calibration.head_loss import objective_of
from eckart.calibration.statistics import StatisticKind, collect
from eckart.factorization.error_compensation import anchored
from eckart.factorization.factorize import InOrder, factorize_model
from eckart.factorization.narrowing import Narrowing
from eckart.factorization.neuron_selection import fitted, of_features, order_neurons
from eckart.factorization.pivoted_storage import pivot
from eckart.factorization.refinement import BlockStore, Refine, RefinedBlock
from eckart.factorization.weighted_svd import absorbed, spectrum, spectrum_of_moment
from eckart.factorization.weightings import ErrorNorm, Inputs, Kfac, weigh
from eckart.model.experts import unfuse
from eckart.model.layers import NarrowedLinear, narrowed_shapes
from eckart.model.layers import merge as made_dense
from eckart.model.mlps import Width, find_mlps
from eckart.model.plain_widths import restore_plain_widths
from eckart.model.targets import Target, find_targets, weight_of
from eckart.ranks import waterfill
from eckart.ranks.budget import NoRank
from eckart.ranks.search import search_ranks
from eckart.ranks.search_problem import SearchProblem
from eckart.ranks.waterfill import Waterfill, _moments
from eckart.recipe import Recipe, complete, contradictions, merge
from tests import tiny

NARROW = {"weighting": "kfac", "ranks": {"kind": "waterfill", "narrow": True, "multiple": 2}}


MODELS = {
    **tiny.FAMILIES,
    "causal": tiny.causal_llama,
    "t5": tiny.t5,
    "phi3": tiny.phi3,
    "glm4": tiny.of("Glm4ForCausalLM", **tiny.GROUPED, head_dim=4),
    "modernbert": tiny.of("ModernBertForSequenceClassification", **tiny.LAYERS, **tiny.LENGTH, mlp_bias=True),
}
FUSED = ("phi3", "glm4", "modernbert")
"""Families whose gate and up are one layer."""


def drawn(family: str) -> tuple[Any, tiny.Batch]:
    """Return a model and a batch; those for classes have labels."""
    batch = tiny.collate(tiny.samples(4))
    if family in ("causal", "phi3", "glm4"):
        batch["labels"] = batch["input_ids"]
    if family == "t5":
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if family == "modernbert":
        del batch["position_ids"]
    return MODELS[family]().eval(), batch


def moment(size: int, samples: int = 50) -> Tensor:
    x = torch.randn(samples, size, dtype=torch.float64) * torch.rand(size, dtype=torch.float64)
    return x.T @ x / samples


def loss_without(weight: Tensor, norm: ErrorNorm, neurons: Tensor) -> float:
    """½ tr(A W E Wᵀ), by the inverse of B's block."""
    assert norm.left is not None
    assert norm.right is not None
    b = norm.right
    remaining = b - b[:, neurons] @ torch.linalg.inv(b[neurons][:, neurons]) @ b[neurons]
    return float(torch.trace(norm.left @ weight @ remaining @ weight.T)) / 2


def in_order(weight: Tensor, norm: ErrorNorm) -> tuple[Tensor, Tensor]:
    """What `order_neurons` takes."""
    weight, norm = absorbed(weight, norm, "left")
    assert norm.right is not None
    return weight, norm.right


def test_predicted_losses_are_those_of_the_best_fit() -> None:
    torch.manual_seed(0)
    weight, norm = torch.randn(5, 12, dtype=torch.float64), ErrorNorm(left=moment(5), right=moment(12))
    order = order_neurons(*in_order(weight, norm), 3)
    assert sorted(order.neurons) == list(range(12))
    assert order.widths == [0, 3, 6, 9, 12]
    assert order.losses == sorted(order.losses, reverse=True)
    for width, loss in list(zip(order.widths, order.losses, strict=True))[1:-1]:
        assert loss == pytest.approx(loss_without(weight, norm, torch.tensor(order.kept(width))), rel=1e-3)


@pytest.mark.parametrize("outputs", [5, 14])
def test_moments_at_widths_give_the_spectra_of_the_fitted_down_layer(outputs: int) -> None:
    torch.manual_seed(0)
    weight, norm = torch.randn(outputs, 12, dtype=torch.float64), ErrorNorm(left=moment(outputs), right=moment(12))
    order = order_neurons(*in_order(weight, norm), 3, moments_at=(3, 9, 10, 12))
    assert [*order.moments] == [3, 9, 12]
    for width, found in order.moments.items():
        kept = torch.tensor(order.kept(width))
        smaller = fitted(weight, norm.right, kept)
        expected = spectrum(smaller, of_features(norm, smaller, kept))
        values = spectrum_of_moment(found)[: min(width, outputs)]
        torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-3 * float(expected[0]))


@pytest.mark.parametrize("family", ["causal", "phi3"])
@pytest.mark.parametrize("weighting", [Kfac(), Inputs()])
def test_moments_at_widths_give_the_spectra_of_a_layer_that_computes_fewer_neurons(family: str, weighting: Any) -> None:
    """Also of one that computes gate and up, and under a weighting without a left side."""
    model, batch = drawn(family)
    targets = {target.name: target for target in find_targets(model, batch).targets}
    mlp = find_mlps(model, [*targets.values()], batch)[0]
    problem = problem_of(model, batch, [*targets.values()], weighting, ["inputs", "output_gradients"])
    down, up = targets[mlp.down], targets[mlp.up[0]]
    weight, of_down = (weight_of(model.get_submodule(target.name)) for target in (up, down))
    norm, norm_of_down = (weigh(weighting, target, problem.statistics) for target in (up, down))
    order = order_neurons(*in_order(of_down, norm_of_down), 6, moments_at=(6, 18, mlp.neurons))
    for width, found in zip(order.moments, _moments(problem, up, mlp, order), strict=True):
        features = Width(up=mlp.up, kept=order.kept(width), loss=0.0).features(len(weight), mlp.neurons)
        expected = spectrum(weight[features], of_features(norm, weight[features], features))
        values = spectrum_of_moment(found)[: len(expected)]
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4 * float(expected[0]))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_each_neuron_is_the_best_after_those_before_it(group: int) -> None:
    """Where all neurons are candidates of a round, the order is greedy in the loss itself."""
    for seed in range(8):
        torch.manual_seed(seed)
        weight, norm = torch.randn(5, 8, dtype=torch.float64), ErrorNorm(left=moment(5), right=moment(8))
        chosen = list[int]()
        for neuron in order_neurons(*in_order(weight, norm), group).neurons[:4]:
            left = set(range(8)) - {*chosen}
            losses = {each: loss_without(weight, norm, torch.tensor([*chosen, each])) for each in left}
            assert losses[neuron] == pytest.approx(min(losses.values()), rel=1e-3)
            chosen.append(neuron)


def test_a_fitted_down_layer_is_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    x, weight, neurons = torch.randn(40, 8).double(), torch.randn(3, 8).double(), torch.tensor([0, 2, 5])
    expected = torch.linalg.lstsq(x[:, neurons], x @ weight.T).solution.T
    torch.testing.assert_close(fitted(weight, x.T @ x, neurons), expected, rtol=1e-4, atol=1e-5)


def test_a_correction_restores_the_outputs_from_fewer_inputs() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 8).double(), torch.randn(3, 8).double()
    fewer = x[:, :5] + 0.1 * torch.randn(40, 5).double()
    expected = torch.linalg.lstsq(fewer, x @ weight.T).solution.T
    corrected = anchored(torch.zeros(3, 5), fewer.T @ fewer, weight @ x.T @ fewer, 1.0, 1e-12)
    torch.testing.assert_close(corrected, expected)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", *FUSED])
def test_the_mlps_of_every_layer_are_found(family: str) -> None:
    model, batch = drawn(family)
    targets = find_targets(model, batch).targets
    mlps = find_mlps(model, targets, batch)
    neurons = {"bert": 40, "gpt2": 64}.get(family, 24)
    assert [mlp.neurons for mlp in mlps] == [neurons] * 2
    assert {len(mlp.up) for mlp in mlps} == {2 if family == "llama" else 1}


def test_layers_whose_names_differ_in_a_number_are_of_different_kinds() -> None:
    """LFM2's w1 and w2: w1 looks like the down layer of an MLP, too, whose test would disturb the test of w2."""
    sizes = {"vocab_size": tiny.VOCABULARY, "block_auto_adjust_ff_dim": False, "layer_types": ["full_attention"] * 2}
    model = tiny.build("Lfm2ForCausalLM", **tiny.GROUPED, **sizes)
    batch = tiny.collate(tiny.samples(4))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    mlps = find_mlps(model, find_targets(model, inputs).targets, inputs)
    assert [mlp.down for mlp in mlps] == [f"model.layers.{n}.feed_forward.w2" for n in range(2)]


def test_a_layer_that_interleaves_gate_and_up_is_not_found() -> None:
    """Its outputs 2j and 2j + 1 belong to neuron j, not j and n + j."""
    model, batch = drawn("phi3")
    mlp: Any = model.model.layers[0].mlp

    def forward(x: Tensor) -> Tensor:
        gate, up = mlp.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        return mlp.down_proj(silu(gate) * up)

    mlp.forward = forward
    mlps = find_mlps(model, find_targets(model, batch).targets, batch)
    assert [found.down for found in mlps] == ["model.layers.1.mlp.down_proj"]


@pytest.mark.parametrize("family", FUSED)
def test_a_layer_of_gate_and_up_computes_the_neurons_that_stay(family: str) -> None:
    """The outputs are those of the original whose down layer reads these neurons alone."""
    original, batch = drawn(family)
    targets = find_targets(original, batch).targets
    statistics = collect(original, [batch], targets, ["inputs"])
    mlp = find_mlps(original, targets, batch)[0]
    for kept in ((0, 3, 4, 11, 23), tuple(range(mlp.neurons))):
        expected, model = deepcopy(original), deepcopy(original)
        weight = expected.get_parameter(f"{mlp.down}.weight").data
        fit = fitted(weight, statistics["inputs"][mlp.down], torch.tensor(kept))
        weight.zero_()[:, list(kept)] = fit.float()
        widths = {mlp.down: Width(up=mlp.up, kept=kept, loss=0.0)}
        narrowing = Narrowing(model, targets, widths, Inputs(), statistics)
        for name in narrowing.down_of:
            narrowing.narrow(name)
            assert narrowing.shape(name) == tuple(model.get_parameter(f"{name}.weight").shape)
        torch.testing.assert_close(tiny.logits(model, batch), tiny.logits(expected, batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tiny.logits(model, batch), tiny.logits(original, batch), rtol=1e-2, atol=1e-3)


def test_both_halves_of_a_layer_keep_the_same_neurons() -> None:
    width = Width(up=("up",), kept=(0, 2), loss=0.0)
    assert width.features(6, 3).tolist() == [0, 2, 3, 5]
    assert width.features(3, 3).tolist() == [0, 2]


def test_neurons_that_a_norm_joins_are_not_found() -> None:
    model, batch = drawn("causal")
    act: Any = model.model.layers[0].mlp
    act.act_fn = nn.Sequential(nn.SiLU(), nn.LayerNorm(model.config.intermediate_size))
    mlps = find_mlps(model, find_targets(model, batch).targets, batch)
    assert [mlp.down for mlp in mlps] == [f"model.layers.{n}.mlp.down_proj" for n in range(1, len(model.model.layers))]


def test_values_of_an_attention_are_no_neurons() -> None:
    """They do not depend on each other, but heads have a fixed width."""
    model, batch = drawn("bert")
    targets = find_targets(model, batch, exclude=["*.query", "*.key"]).targets
    assert "bert.encoder.layer.0.attention.self.value" in {target.name for target in targets}
    mlps = find_mlps(model, targets, batch)
    assert [mlp.down for mlp in mlps] == [f"bert.encoder.layer.{n}.output.dense" for n in range(2)]


def test_copies_of_neurons_are_left_out_without_any_loss() -> None:
    model, batch = drawn("causal")
    mlp = model.model.layers[0].mlp
    half = mlp.gate_proj.out_features // 2
    with torch.no_grad():
        for layer in (mlp.gate_proj, mlp.up_proj):
            layer.weight[half : 2 * half] = layer.weight[:half]
        expected = model(**batch).logits
    targets = find_targets(model, batch).targets
    statistics = collect(model, [batch], targets, ["inputs"])
    names = tuple(f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj"))
    widths = {"model.layers.0.mlp.down_proj": Width(up=names, kept=tuple(range(half)), loss=0.0)}
    narrowing = Narrowing(model, targets, widths, Inputs(), statistics)
    for name in narrowing.down_of:
        narrowing.narrow(name)
    assert isinstance(mlp.gate_proj, NarrowedLinear)
    assert mlp.gate_proj.weight.shape[0] == half
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("causal", {}),
        ("gpt2", {"sequential": {"anchor": 0.5}}),
        ("bert", {"sequential": {"anchor": 0.0}}),
        ("causal", {"storage": "pivoted", "sequential": {"refine": {"passes": 1, "batch_size": 1}}}),
        ("gpt2", {"storage": "pivoted"}),
        ("phi3", {"storage": "pivoted", "sequential": {"refine": {"passes": 1, "batch_size": 1}}}),
        ("glm4", {"sequential": {"anchor": 0.5}}),
        ("modernbert", {"storage": "pivoted"}),
    ],
)
def test_narrowed_models_keep_the_budget_and_survive_saving(family: str, changes: dict[str, Any]) -> None:
    """`compress` itself compares the outputs of the saved model."""
    model, batch = drawn(family)
    small, report = eckart.compress(model, [batch, batch], 0.5, NARROW | changes)
    narrowed = set(narrowed_shapes(small))
    assert narrowed
    assert narrowed == {name for name, target in report.targets.items() if target.narrowed}
    assert bool(narrowed & {*report.ranks}) == (changes.get("storage") == "pivoted")
    before, after = (sum(target.parameters[place] for target in report.targets.values()) for place in (0, 1))
    assert after <= 0.5 * before
    weights = sum(
        values.numel()
        for name in report.targets
        for part, values in small.get_submodule(name).named_parameters()
        if not part.endswith("bias")
    )
    assert weights == after


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shrinkage_helps_mlps_that_read_fewer_tokens_than_they_have_neurons() -> None:
    """Without it, the neurons that stay predict the others on these 20 tokens by chance, and seem to lose nothing."""
    changes = list[float]()
    for seed in range(3):
        torch.manual_seed(seed)
        model = tiny.causal_llama().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
        ids = torch.randint(0, tiny.VOCABULARY, (40, 10))
        seen, others = ({"input_ids": rows, "labels": rows} for rows in (ids[:2], ids[2:]))
        expected = tiny.logits(model, others).log_softmax(-1)
        default = eckart.recipes()["narrowed"].model_copy(update={"ranks": Waterfill(narrow=True, multiple=2)})
        for recipe in (default, default.model_copy(update={"weighting": Kfac()})):
            small, _ = eckart.compress(model, [seen], 0.7, recipe, check=False)
            found = tiny.logits(small, others).log_softmax(-1)
            changes.append(float(kl_div(found, expected, log_target=True, reduction="batchmean")))
    assert sum(changes[::2]) < 0.9 * sum(changes[1::2])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", [None, 47])
def test_narrowing_never_predicts_more_loss(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and widths are best, then widths with nothing besides, then ranks alone.

    With the weights of seed 47 and keep 0.75, a greedy search does worse if it may also take ranks and widths.
    """
    model, batch = drawn("causal")
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
    targets = find_targets(model, batch).targets
    problem = problem_of(model, batch, targets, Kfac(), ["inputs", "output_gradients"])
    for keep in (0.8, 0.75, 0.6, 0.4):
        losses = []
        for search in (Waterfill(narrow=True, multiple=2), Waterfill(multiple=2)):
            losses.append(predicted(replace(problem, keep=keep), search))
        with monkeypatch.context() as patched:
            patched.setattr(waterfill, "_PARTS", 2)
            losses.insert(1, predicted(replace(problem, keep=keep), Waterfill(narrow=True, multiple=2)))
        assert losses[0] < losses[2]
        assert losses == sorted(losses)


def problem_of(
    model: Any, batch: tiny.Batch, targets: Sequence[Target], weighting: Any, statistics: Sequence[StatisticKind]
) -> SearchProblem:
    objective = objective_of(model, [batch], "the test")
    return SearchProblem(
        model=model,
        targets=tuple(targets),
        keep=0.5,
        seed=0,
        objective=objective,
        weighting=weighting,
        statistics=collect(model, [batch], targets, statistics, objective.loss),
        train=lambda *_, **__: None,
        calibration=lambda examples, skip=0: [batch],
    )


def predicted(problem: SearchProblem, search: Waterfill) -> float:
    found = search_ranks(problem, search, storage="pivoted").predicted_loss
    assert found is not None
    return sum(found.values())


def test_copies_in_layers_of_low_rank_take_a_width_and_ranks() -> None:
    """The neurons are twelve and their copies, and the layers have rank 4: at width 12, pivots of rank 4 lose nothing.

    They are 3 · 4 (12 + 16 − 4) numbers, a quarter of the MLP. All 24 neurons would take 3 · 4 (24 + 16 − 4).
    """
    model, batch = drawn("causal")
    torch.manual_seed(0)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        for layer in (mlp.gate_proj, mlp.up_proj):
            layer.weight.copy_((torch.randn(12, 4) @ torch.randn(4, 16)).repeat(2, 1))
        mlp.down_proj.weight.copy_((torch.randn(16, 4) @ torch.randn(4, 12)).repeat(1, 2))
        expected = model(**batch).logits
    targets = [target for target in find_targets(model, batch).targets if target.name.startswith("model.layers.0.mlp")]
    problem = replace(problem_of(model, batch, targets, Inputs(), ["inputs"]), keep=0.25)
    chosen = search_ranks(problem, Waterfill(narrow=True, multiple=1), storage="pivoted")
    (width,) = chosen.widths.values()
    assert width.neurons == 12
    assert {*chosen.ranks.values()} == {4}
    assert chosen.parameters[1] == 3 * 4 * (12 + 16 - 4)
    assert chosen.predicted_loss is not None
    assert sum(chosen.predicted_loss.values()) < 0.01 * predicted(problem, Waterfill(multiple=1))
    factorize_model(model, chosen.targets, chosen.ranks, Inputs(), problem.statistics, widths=chosen.widths)
    pivot(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-2, atol=1e-3)


def test_a_refinement_goes_on_from_a_block_with_width_and_ranks() -> None:
    model, batch = drawn("causal")
    targets = find_targets(model, batch).targets
    problem = problem_of(model, batch, targets, Inputs(), ["inputs"])
    up = tuple(f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj"))
    widths = {"model.layers.0.mlp.down_proj": Width(up=up, kept=(0, 2, 3, 5, 8, 13), loss=0.0)}
    saved: list[Any] = []

    class Store(BlockStore):
        def load(self) -> list[Any]:
            return saved[:1]

        def save(self, block: RefinedBlock, tensors: Mapping[str, Tensor]) -> None:
            saved.append((block, {name: values.clone() for name, values in tensors.items()}))

    def refined() -> Any:
        small = deepcopy(model)
        factorize_model(
            small,
            targets,
            {target.name: 2 for target in targets},
            Inputs(),
            problem.statistics,
            in_order=InOrder(refine=Refine(passes=1, batch_size=1)),
            batches=[batch],
            widths=widths,
            store=Store(),
        )
        return small

    first, resumed = refined(), refined()
    assert resumed.model.layers[0].mlp.down_proj.shape == (16, 6)
    assert all(torch.equal(values, resumed.state_dict()[name]) for name, values in first.state_dict().items())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", ["causal", "gpt2", "phi3", "modernbert"])
def test_narrowed_layers_with_ranks_become_plain(family: str) -> None:
    model, batch = drawn(family)
    small, report = eckart.compress(model, [batch], 0.4, NARROW | {"storage": "pivoted"}, check=False)
    widths = {
        shape[1] for name, shape in narrowed_shapes(small).items() if name.endswith(("down_proj", "c_proj", "Wo"))
    }
    with torch.no_grad():
        expected = small(**batch).logits
        for name in report.ranks:
            made_dense(small, name)
        changed, restored = restore_plain_widths(small)
        torch.testing.assert_close(small(**batch).logits, expected, rtol=1e-3, atol=1e-4)
    assert changed == {"n_inner" if family == "gpt2" else "intermediate_size": max(widths)}
    assert not restored
    assert not narrowed_shapes(small)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_equal_widths_of_two_numbers_become_plain_each_for_itself() -> None:
    """Those of an encoder and a decoder. One of the encoder's MLPs keeps its width, and so does the encoder."""
    model = tiny.build(
        "BartForConditionalGeneration",
        **{"vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    ).eval()
    batch = tiny.collate(tiny.samples(4))
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"labels": batch["input_ids"]}
    recipe = merge(NARROW, {"ranks": {"one_width": True}})
    small = eckart.compress(model, [batch], 0.5, recipe, include=["*.fc*"], exclude=["*encoder.layers.0*"]).model
    with torch.no_grad():
        expected = small(**batch).logits
        changed, restored = restore_plain_widths(small)
        torch.testing.assert_close(small(**batch).logits, expected, rtol=1e-3, atol=1e-4)
    assert [*changed] == ["decoder_ffn_dim"]
    assert restored == [24]
    assert small.config.encoder_ffn_dim == 24


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("storage", ["factors", "pivoted"])
def test_all_mlps_get_one_width(storage: str) -> None:
    """Where each would get another one."""
    model, batch = drawn("causal")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 10

    def widths(one: bool) -> list[int]:
        recipe = merge(NARROW, {"ranks": {"one_width": one}, "storage": storage})
        small = eckart.compress(model, [batch], 0.6, recipe, check=False).model
        return [shape[1] for name, shape in narrowed_shapes(small).items() if name.endswith("down_proj")]

    assert len(set(widths(one=False))) == 2
    first, second = widths(one=True)
    assert first == second
    with pytest.raises(NoRank, match=r"one_width"):
        eckart.compress(
            model, [batch], 0.25, merge(NARROW, {"ranks": {"one_width": True, "multiple": 16}}), check=False
        )


def test_one_width_names_the_experts_that_keep_theirs() -> None:
    """Here, because they are no targets."""
    model, batch = tiny.mixtral()
    unfuse(model)
    name = "model.layers.1.mlp.experts.2"
    targets = [
        target for target in find_targets(model, batch).targets if target.routed_by and not target.name.startswith(name)
    ]
    problem = problem_of(model, batch, targets, Inputs(), ["inputs"])
    found = Waterfill(narrow=True, one_width=True, multiple=2).search(problem)
    assert len(found.widths) == 7
    assert f"experts keep theirs (1, such as {name})" in found.remark


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_smallest_width_is_not_taken_where_only_rank_1_is_paid_for() -> None:
    """Four neurons do nearly all, so the smallest width, 4, saves much more than rank 1, but costs more."""
    model, batch = drawn("causal")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight[4:] *= 1e-4
            layer.mlp.down_proj.weight *= 100
    targets = find_targets(model, batch).targets
    least = sum(target.step for target in targets) / sum(target.parameters for target in targets)
    recipe = merge(NARROW, {"ranks": {"multiple": 4}})
    report = eckart.compress(model, [batch], least, recipe, check=False).report
    assert set(report.ranks.values()) == {1}


def test_a_budget_that_pays_for_no_move_leaves_rank_1() -> None:
    """A layer of 16 × 16 has no multiple of 8 below break-even, and cannot be dense at keep 0.2."""
    model, batch = drawn("causal")
    targets = find_targets(model, batch).targets[:1]
    problem = replace(problem_of(model, batch, targets, Inputs(), ["inputs"]), keep=0.2)
    assert {*Waterfill(narrow=True).search(problem).ranks.values()} == {1}


def test_contradictions_say_what_to_write() -> None:
    recipe = Recipe.model_validate(complete(NARROW | {"residual": "sparse_rows", "recovery": "mixed_rank"}))
    found = [message for part, message in contradictions(recipe) if part == "ranks"]
    assert len(found) == 2
    recipe = Recipe.model_validate(complete(merge(NARROW, {"ranks": {"narrow": False, "one_width": True}})))
    assert "narrow: true" in dict(contradictions(recipe))["ranks"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_search_that_finds_no_mlp_says_so() -> None:
    model, batch = drawn("bert")
    targets = tuple(target for target in find_targets(model, batch).targets if "attention" in target.name)
    problem = problem_of(model, batch, targets, Inputs(), ["inputs"])
    assert "no MLP" in Waterfill(narrow=True).search(problem).remark
    report = eckart.compress(model, [batch], 0.6, NARROW, include="*attention*", check=False).report
    assert "no MLP" in str(report)
    assert not Waterfill().search(problem).remark


def test_of_three_layers_in_a_row_the_middle_one_is_narrowed_once() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "mistral", "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, **sizes}
    image = {"model_type": "pixtral", "image_size": 16, "patch_size": 4, **sizes}
    config = Mistral3Config(text_config=text, vision_config=image, image_token_id=1)
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(config).eval()
    ids = torch.randint(5, 60, (2, 12))
    ids[:, 1:5] = 1
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16), "image_sizes": torch.full((2, 2), 16)}
    recipe = eckart.recipes()["narrowed"].model_copy(update={"weighting": Kfac()})
    _, report = eckart.compress(model, [{"input_ids": ids, "labels": ids, **pixels}], 0.5, recipe)
    projector = [target.narrowed for name, target in report.targets.items() if "multi_modal_projector" in name]
    assert projector == [True, True, False]
