"""Mixtures of experts: taken apart, with statistics of each expert's own tokens, factorized, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mistral.modeling_mistral import MistralMLP

import eckart
from eckart.calibration.losses import causal_loss
from eckart.calibration.routed_tokens import UNREACHED, unreached
from eckart.calibration.statistics import collect
from eckart.factorization.narrowing import Narrowing
from eckart.factorization.weightings import Plain
from eckart.model import hf_format
from eckart.model.batches import Batch, batch_size, row_of
from eckart.model.experts import fuse, is_fused, unfuse, unfused, unfused_experts
from eckart.model.layers import narrowed_shapes
from eckart.model.macs import macs
from eckart.model.mlps import Width, find_mlps
from eckart.model.plain_widths import restore_plain_widths
from eckart.model.targets import Target, Targets, find_targets, weight_of
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer tokens:UserWarning", "ignore:Targets are only:UserWarning")
SIZES: dict[str, Any] = {**tiny.LAYERS, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 64}
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {**FOUR, "moe_intermediate_size": 24, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "DeepseekV3": {**DEEPSEEK, "first_k_dense_replace": 1},
    "Jamba": {**FOUR, **PERIODS, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "NemotronH": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
        **{"moe_shared_expert_intermediate_size": 24, "layers_block_type": ["attention", "moe"]},
    },
}
CHOSEN = 2  # experts of each token


def built(family: str, **options: Any) -> PreTrainedModel:
    """Return a model whose experts are fused, with labels equal to its tokens in `padded`."""
    return tiny.build(f"{family}ForCausalLM", **{**SIZES, **FAMILIES[family], **options}).eval()


def padded(rows: int = 4, tokens: int = 12, seed: int = 0) -> Batch:
    """Return a batch of random tokens, one of whose examples has padding."""
    ids = torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, tokens - 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def taken_apart(family: str) -> tuple[PreTrainedModel, Targets]:
    model = built(family)
    unfuse(model)
    return model, find_targets(model, padded(2))


def routed(found: Targets) -> list[Target]:
    return [target for target in found.targets if target.routed_by]


# --- the modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_taken_apart_compute_the_same_and_can_be_put_together(family):
    model = built(family)
    batch, weights = padded(), copy.deepcopy(model.state_dict())
    expected, operations = tiny.logits(model, batch), macs(model, batch)
    unfuse(model)
    assert unfused_experts(model)
    assert not any(map(is_fused, model.modules()))
    torch.testing.assert_close(tiny.logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    assert macs(model, batch) == operations
    fuse(model)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_copy_that_is_taken_apart_shares_memory_and_leaves_the_model_alone():
    model = built("GptOss")
    same = unfused(model)
    assert not unfused_experts(model)
    tensors = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    assert {tensor.untyped_storage().data_ptr() for tensor in same.parameters()} == tensors
    dense = tiny.llama()
    assert unfused(dense) is dense


@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_is_an_mlp_to_narrow(family):
    """Also one that no token of the batch reaches."""
    model, found = taken_apart(family)
    mlps = [mlp.down for mlp in find_mlps(model, found.targets, padded(1, tokens=1)) if ".experts." in mlp.down]
    assert mlps == [target.name for target in routed(found) if target.name.endswith("down")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_narrower_expert_computes_the_neurons_that_stay(family):
    """Whether gate and up are halves of its first layer or interleaved."""
    model, found = taken_apart(family)
    mlp = next(mlp for mlp in find_mlps(model, found.targets, padded(2)) if ".experts." in mlp.down)
    experts, up = (model.get_submodule(name) for name in (mlp.down.rsplit(".", 2)[0], mlp.up[0]))
    width = Width(up=mlp.up, kept=(0, 3, 4, 17), loss=0.0, interleaved=mlp.interleaved)
    inputs = torch.randn(5, 16)
    expected = experts.neurons(up(inputs))[:, width.kept]
    Narrowing(model, found.targets, {mlp.down: width}, Plain(), {}).narrow(mlp.up[0])
    torch.testing.assert_close(experts.neurons(model.get_submodule(mlp.up[0])(inputs)), expected)


def test_compiled_code_sends_all_tokens_to_all_experts(monkeypatch):
    """A graph cannot depend on how many tokens a router sends to an expert."""
    model, batch = taken_apart("GptOss")[0], padded()
    expected = tiny.logits(model, batch)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer = model.get_submodule(f"{unfused_experts(model)[0]}.0.down")
    calls: list[int] = []
    layer.register_forward_hook(lambda _, args, output: calls.append(len(args[0])))
    torch.testing.assert_close(tiny.logits(model, batch), expected)
    assert calls == [batch["input_ids"].numel()]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_mixture_sends_other_tokens_elsewhere():
    model, _ = taken_apart("Mixtral")
    experts = model.get_submodule(unfused_experts(model)[0])

    def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(6, 4, generator=generator)
        return torch.randn(6, 16, generator=generator), scores.topk(2).indices, scores[:, :2]

    traced = torch.jit.trace(experts, inputs(0))
    torch.testing.assert_close(traced(*inputs(1)), experts(*inputs(1)))


class Odd(nn.Module):
    """Experts with the parts that their classes have, which compute something else than these parts say."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 48, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 24))

    def _apply_gate(self, values: Tensor) -> Tensor:
        return values[:, :24] * values[:, 24:]

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden * weights.sum(1, keepdim=True)


def test_experts_of_an_unknown_kind_stay_as_they_are():
    model = built("Mixtral")
    model.model.layers[0].mlp.experts = Odd()
    unfuse(model)
    assert unfused_experts(model) == ["model.layers.1.mlp.experts"]
    excluded = find_targets(model, padded(2)).excluded
    assert "experts" in excluded["model.layers.0.mlp.experts.gate_up_proj"]


def test_offloaded_experts_stay_as_they_are():
    model = built("Mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.to("meta"))
    unfuse(model)
    assert unfused_experts(model) == ["model.layers.1.mlp.experts"]


# --- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_is_two_targets_and_no_router_is_one(family):
    model, found = taken_apart(family)
    modules = unfused_experts(model)
    assert len(routed(found)) == 2 * 4 * len(modules)
    assert {target.mask for target in routed(found)} == {"attention_mask"}
    assert all(target.input_of == target.name for target in routed(found))
    assert not any(part in target.name.split(".") for part in ("router", "gate") for target in found.targets)
    assert found.census.experts == 0


def test_a_router_that_is_a_linear_layer_is_no_target():
    model = built("Mixtral")
    model.model.layers[0].mlp.gate.wg = nn.Linear(16, 4)
    model.model.layers[0].mlp.router_gate = nn.Linear(16, 4)  # Doge's
    excluded = find_targets(model, padded(2)).excluded
    expected = {"selects experts, tokens or patches"}
    assert {excluded[f"model.layers.0.mlp.{name}"] for name in ("gate.wg", "router_gate")} == expected


def test_an_indexer_which_selects_tokens_is_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no gradient, so any error of it would weigh nothing. Of one with another name, a warning tells."""
    indexer = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    sizes = {**SIZES, **DEEPSEEK, "n_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    model = tiny.build("DeepseekV32ForCausalLM", **{**sizes, **indexer, "num_attention_heads": 4}).eval()
    found = find_targets(model, padded())
    assert sum(".indexer." in name for name in found.excluded) == 6
    assert not [target for target in found.targets if "indexer" in target.name]
    monkeypatch.setattr("eckart.model.targets.in_selector", lambda *_: False)
    with pytest.warns(UserWarning, match=r"select tokens, such as .*\.0\.self_attn\.indexer\."):
        eckart.compress(model, [padded()], 0.9, "kfac", check=False)


# --- statistics ------------------------------------------------------------------------------------------------------


def by_hand(model: PreTrainedModel, found: Targets, batch: Batch) -> dict[tuple[str, str], Tensor]:
    """Return the statistics of routed targets from autograd's gradients for each example without its padding."""
    sums: dict[tuple[str, str], Tensor] = {}

    def add(kind: str, key: str, value: Tensor) -> None:
        sums[kind, key] = sums.get((kind, key), 0) + value / batch_size(batch)

    for row in range(batch_size(batch)):
        alone = row_of(batch, row)
        real = alone["attention_mask"][0] != 0
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def record(name: str, args: tuple[Tensor], output: Tensor, seen: dict = seen) -> None:
            output.retain_grad()
            seen[name] = args[0].detach(), output

        hooks = [
            model.get_submodule(target.name).register_forward_hook(
                lambda _, args, output, name=target.name: record(name, args, output)
            )
            for target in routed(found)
        ]
        model.zero_grad()
        causal_loss(model, {name: values[:, real] for name, values in alone.items()}).backward()
        for hook in hooks:
            hook.remove()
        for name, (x, y) in seen.items():
            assert y.grad is not None
            squares = (y.grad.T @ x) ** 2
            add("inputs", name, x.T @ x)
            add("tokens", name, torch.tensor(float(len(x))))
            add("output_gradients", name, y.grad.T @ y.grad)
            scored = squares * weight_of(model.get_submodule(name)) ** 2
            for kind, values in (("fisher", squares), ("taylor", scored)):
                add(kind, f"{name}.input", values.sum(0))
                add(kind, f"{name}.output", values.sum(1))
    return sums


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_statistics_are_those_of_the_tokens_that_reach_an_expert(family, size):
    """Whatever the batches and the padding: those of each example alone, by autograd."""
    model, found = taken_apart(family)
    model.double()
    batch = padded()
    batches = [{name: x[start : start + size] for name, x in batch.items()} for start in range(0, 4, size)]
    kinds = ("inputs", "output_gradients", "fisher", "taylor")
    statistics = collect(model, batches, found.targets, kinds, causal_loss)
    expected = by_hand(model, found, batch)
    for (kind, key), value in expected.items():
        torch.testing.assert_close(statistics[kind][key].double(), value.double(), msg=f"{kind} of {key}")
    names = {target.name for target in routed(found)}
    given = {(kind, key) for kind, values in statistics.items() for key in values if any(n in key for n in names)}
    assert given == set(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_a_layer_read_each_token_as_often_as_the_router_chooses(family):
    model, found = taken_apart(family)
    batch = padded()
    tokens = collect(model, [batch], found.targets, {"inputs"})["tokens"]
    for module in unfused_experts(model):
        for layer in ("up", "down"):
            names = [target.name for target in routed(found) if target.routed_by == module]
            sums = sum(float(tokens[name]) for name in names if name.endswith(layer) and name in tokens)
            assert sums == pytest.approx(CHOSEN * float(batch["attention_mask"].sum()) / 4)


def test_a_single_expert_has_the_statistics_of_a_plain_network():
    model = built("Mixtral", num_local_experts=1, num_experts_per_tok=1)
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:
        experts, layer.mlp = layer.mlp.experts, MistralMLP(model.config)
        gate, up = experts.gate_up_proj.detach()[0].chunk(2)
        for name, weight in (("gate", gate), ("up", up), ("down", experts.down_proj.detach()[0])):
            layer.mlp.get_submodule(f"{name}_proj").weight = nn.Parameter(weight.clone())
    unfuse(model)
    batch = padded()
    found, other = find_targets(model, batch), find_targets(plain, batch)
    one, two = (collect(m, [batch], f.targets, loss=causal_loss) for m, f in ((model, found), (plain, other)))
    expert, mlp = "model.layers.1.mlp.experts.0", "model.layers.1.mlp"
    close = torch.testing.assert_close
    for kind in ("inputs", "tokens"):
        close(one[kind][f"{expert}.gate_up"], two[kind][f"{mlp}.gate_proj"])
    close(one["inputs"][f"{expert}.down"], two["inputs"][f"{mlp}.down_proj"])
    close(one["output_gradients"][f"{expert}.down"], two["output_gradients"][f"{mlp}.down_proj"])
    joined = one["output_gradients"][f"{expert}.gate_up"]
    for name, part in (("gate", joined[:24, :24]), ("up", joined[24:, 24:])):
        close(part, two["output_gradients"][f"{mlp}.{name}_proj"])
    close(one["fisher"][f"{expert}.down.input"], two["fisher"][f"{mlp}.down_proj.input"])


# --- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["kfac", "anchored"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compressed_mixture_keeps_its_share_and_can_be_loaded(family, recipe, tmp_path: Path):
    """At once, and in order; the experts that stay dense are loaded, too."""
    model, batches = built(family), [padded(seed=seed) for seed in range(3)]
    small, report = eckart.compress(model, batches, 0.5, recipe, check=False)
    assert 0.4 < report.keep <= 0.5
    assert report.census.reached > 0.5
    assert any(".experts." in name for name in report.ranks)
    assert not unfused_experts(model)
    small.save_pretrained(tmp_path)
    tiny.assert_same(small, eckart.load(tmp_path), batches[0])


@pytest.mark.parametrize("options", [{"storage": "pivoted"}, {"sequential": {"refine": {"passes": 1}}}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_with_narrower_experts_keeps_its_share_and_can_be_loaded(family, options, tmp_path: Path):
    """With pivots, and in order, with refinement."""
    recipe = {"weighting": "kfac", "ranks": {"kind": "waterfill", "narrow": True, "multiple": 2}, **options}
    batches = [padded(seed=seed) for seed in range(3)]
    small, report = eckart.compress(built(family), batches, 0.5, recipe, check=False)
    assert 0.4 < report.keep <= 0.5
    assert any(".experts." in name for name in narrowed_shapes(small))
    small.save_pretrained(tmp_path)
    tiny.assert_same(small, eckart.load(tmp_path), batches[0])


@pytest.mark.parametrize(
    ("family", "options", "multiple"),
    [
        *((family, {}, 8) for family in FAMILIES),
        ("Mixtral", {}, 2),  # torch's product for experts needs a multiple of 8
        ("DeepseekV3", {"n_shared_experts": 2}, 8),  # twice as wide, by the same number of the config
    ],
)
def test_experts_of_one_width_become_a_plain_mixture(family, options, multiple, tmp_path: Path):
    """It has as few parameters as the compressed one, and needs no code of ours."""
    same_number = {"DeepseekV3": "*.shared_experts.*", "Jamba": "*.feed_forward.*"}  # of the config
    include = ["*.experts.*", same_number.get(family, "*.experts.*")]
    ranks = {"kind": "waterfill", "narrow": True, "one_width": True, "multiple": multiple}
    model, batches = built(family, **options), [padded(seed=seed) for seed in range(3)]
    recipe = {"weighting": "kfac", "ranks": ranks}
    small, report = eckart.compress(model, batches, 0.7, recipe, include=include, check=False)
    assert not report.ranks
    parameters, expected = small.num_parameters(), tiny.logits(small, batches[0])
    changed, restored = restore_plain_widths(small)
    fuse(small)
    assert [*changed.values()] == [16]
    assert not restored
    if multiple == 8 and not options:
        assert small.num_parameters() == parameters
    small.save_pretrained(tmp_path)
    plain = type(small).from_pretrained(tmp_path)
    assert not hasattr(plain.config, "quantization_config")
    torch.testing.assert_close(tiny.logits(plain, batches[0]), expected, rtol=1e-3, atol=1e-4)


def test_a_search_that_runs_the_compressed_model_refuses_experts():
    with pytest.raises(ValueError, match=r"experts\.0\.gate_up .*targets\.experts"):
        eckart.compress(built("Mixtral"), [padded()], 0.5, "drone_tolerance")


def test_experts_can_be_left_out():
    model = built("Mixtral")
    small, report = eckart.compress(model, [padded()], 0.5, "svd", experts=False, check=False)
    assert not any(".experts." in name for name in report.targets)
    assert not unfused_experts(small)
    assert report.census.experts == 2 * 4 * (16 * 48 + 24 * 16)


def test_experts_that_no_token_reaches_stay_dense_and_are_named():
    model = built("Mixtral")
    batch = padded()
    model.model.layers[0].mlp.gate.register_forward_hook(_never_the_last)
    with pytest.warns(UserWarning, match=r"2 linear layers of experts .*model\.layers\.0\.mlp\.experts\.3\.gate_up"):
        small, report = eckart.compress(model, [batch], 0.5, "kfac", check=False)
    idle = [f"model.layers.0.mlp.experts.3.{layer}" for layer in ("gate_up", "down")]
    assert {name for name, reason in report.excluded.items() if reason == UNREACHED} == set(idle)
    assert report.census.linear[UNREACHED] == 16 * 48 + 24 * 16
    assert report.census.total == model.num_parameters()
    for name in idle:
        part = model.model.layers[0].mlp.experts.get_parameter(f"{name.rpartition('.')[2]}_proj")[3]
        assert torch.equal(small.get_submodule(name).weight, part)
    assert report.keep <= 0.5


def _never_the_last(router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    logits, weights, index = output
    return logits, weights, torch.stack([index[:, 0] % 3, (index[:, 0] + 1) % 3], 1)


def test_padding_alone_reaches_no_expert():
    model, found = taken_apart("Mixtral")
    batch = padded()
    hidden = batch["attention_mask"].flatten() == 0

    def padding_to_the_last(router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, weights, index = _never_the_last(router, args, output)
        return logits, weights, index.masked_fill(hidden[:, None], 3)

    model.model.layers[0].mlp.gate.register_forward_hook(padding_to_the_last)
    statistics = collect(model, [batch], found.targets, {"output_gradients", "fisher"}, causal_loss)
    assert unreached(found.targets, statistics) == [
        f"model.layers.0.mlp.experts.3.{layer}" for layer in ("gate_up", "down")
    ]


def test_a_mixture_whose_block_has_initial_values_of_its_own_can_be_loaded(tmp_path: Path):
    """Qwen3-Omni draws the experts' fused weights where it draws the router's."""
    text = {**SIZES, **FAMILIES["Qwen3Moe"], "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    picture = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 16}
    sound = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    model = tiny.build(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        text_config=text,
        vision_config={**picture, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        audio_config={**sound, "num_mel_bins": 8, "n_window": 4, "output_dim": 16, "downsample_hidden_size": 8},
        **{"image_token_id": 60, "video_token_id": 61, "audio_token_id": 59, "vision_start_token_id": 62},
    ).eval()
    small, _ = eckart.compress(model, [padded()], 0.6, "svd")
    eckart.save(small, tmp_path)
    tiny.assert_same(small, eckart.load(tmp_path), padded())


def test_a_mixture_whose_experts_are_all_dense_can_be_loaded(tmp_path: Path):
    """In the names of the hub's own files, an expert's matrices look like ours."""
    model, _ = taken_apart("Qwen3Moe")
    hf_format.save(model, tmp_path)
    tiny.assert_same(model, eckart.load(tmp_path), padded())
    fuse(model)
    hf_format.save(model, tmp_path / "fused")
    assert not unfused_experts(eckart.load(tmp_path / "fused"))
