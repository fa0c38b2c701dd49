"""Attention products: how they are found, the optimum of their error, their layers, and a candidate with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel

import eckart  # noqa: F401  teaches transformers the format
from eckart.calibration.statistics import collect
from eckart.factorization.decomposition import _with_ones, decompose_product
from eckart.factorization.factorize import factorize_at_once
from eckart.factorization.weightings import Weighting, weigh
from eckart.model.attention_products import find_products
from eckart.model.hf_format import save
from eckart.model.layers import factorized
from eckart.model.targets import Product, Target, Targets, find_targets, weight_of
from eckart.onnx import export
from eckart.ranks.budget import cost, largest_rank, total
from eckart.ranks.tolerance import Tolerance
from tests import tiny
from tests.tiny import ARCHITECTURES, AUTO, LAYERS, LENGTH, loss, padded, unpadded
from tests.workspace import repository_params, run_stage, tiny_workspace

WEIGHTING: TypeAdapter[Weighting] = TypeAdapter(Weighting)
NONE, INPUTS = (WEIGHTING.validate_python({"kind": kind}) for kind in ("none", "inputs"))
KFAC = WEIGHTING.validate_python({"kind": "kfac", "shrinkage": 0.0})
FISHER = WEIGHTING.validate_python({"kind": "fisher", "axis": "output"})
BATCHES = tiny.batches(tiny.samples(12), 5)
OF_PRODUCTS = {"bert", "bert-everything", "mobilebert", "roberta", "albert", "opt", "bart", "t5", "vit"}


def found(model: PreTrainedModel, batch: Mapping[str, Tensor] = BATCHES[0]) -> Targets:
    return find_products(model, batch, find_targets(model, batch))


def products(targets: Targets) -> list[Product]:
    return [target for target in targets.targets if isinstance(target, Product)]


@pytest.fixture(scope="module", params=["bert", "t5"])
def case(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Product, Mapping[str, Mapping[str, Tensor]]]:
    """A model with and one without biases, its first product, and statistics of padded batches."""
    model = {"bert": tiny.bert, "t5": lambda: ARCHITECTURES["t5"].build()}[request.param]().eval()
    batches = BATCHES if request.param == "bert" else [padded(unpadded("seq2seq"))]
    targets = found(model, batches[0])
    return model, products(targets)[0], collect(model, batches, targets.targets, loss=loss)


def heads_of(model: PreTrainedModel, product: Product) -> tuple[Tensor, Tensor]:
    """The weights of queries and keys, each `(heads, d, in)` in float64."""
    query, key = (weight_of(model.get_submodule(each.name)).double() for each in product.layers)
    return query.unflatten(0, (product.heads, -1)), key.unflatten(0, (product.heads, -1))


# --- which layers are a product --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_products_are_queries_and_keys_that_only_meet_in_inner_products(name: str) -> None:
    family = ARCHITECTURES[name]
    model, batch = family.build(), padded(unpadded(family.kind)[:1])
    before = find_targets(model, batch, heads=family.everything, embeddings=family.everything)
    if name not in OF_PRODUCTS:
        with pytest.raises(ValueError, match=r"targets\.products"):
            find_products(model, batch, before)
        return
    after = find_products(model, batch, before)
    queries = [target.name for target in before.targets if target.name.endswith((".q", ".query", ".q_proj"))]
    assert [product.name for product in products(after)] == queries
    heads = model.config.get_text_config().num_attention_heads
    for product in products(after):
        assert product.heads == heads
        assert product.other.name == product.name.replace("query", "key").replace("q_", "k_").replace(".q", ".k")
    assert sum(target.parameters for target in after.targets) == sum(target.parameters for target in before.targets)
    assert Targets.model_validate_json(after.model_dump_json()) == after


def test_heads_have_their_full_width_also_if_the_output_is_two_numbers() -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 12, "intermediate_size": 24}
    model = tiny.of("BertForSequenceClassification", **sizes, **LENGTH, num_labels=2)()
    for batch in tiny.batches(tiny.samples(4), 1):
        del batch["labels"]
        assert [product.heads for product in products(found(model, batch))] == [12] * 3


def test_rotated_queries_and_keys_are_no_product() -> None:
    """With as many key heads as query heads, so that only the rotation tells them apart."""
    with pytest.raises(ValueError, match=r"targets\.products"):
        found(tiny.of("LlamaForSequenceClassification", **LAYERS, **LENGTH)())


# --- the optimum -----------------------------------------------------------------------------------------------------


def test_keys_that_several_query_heads_share_are_no_product() -> None:
    """Each of two keys meets two queries; with a key for each query, the same model has a product."""
    attention = {"attn_layer_period": 1, "attn_layer_offset": 0, "num_experts": 1, "mamba_dt_rank": 4}
    sizes = {**LAYERS, **LENGTH, "num_attention_heads": 4, **attention}
    grouped, separate = (tiny.of("JambaForCausalLM", **sizes, num_key_value_heads=keys)() for keys in (2, 4))
    batch = {name: BATCHES[0][name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(ValueError, match="products"):
        found(grouped, batch)
    assert [product.heads for product in products(found(separate, batch))] == [4, 4]


def test_full_rank_is_the_identity(case) -> None:
    model, product, statistics = case
    for weighting in (NONE, INPUTS, KFAC, FISHER):
        parts = decompose_product(model, product, weighting, statistics)
        left, right = parts.truncate(product.out_features // product.heads)
        eye = torch.eye(left.shape[1]).double().expand(product.heads, -1, -1)
        torch.testing.assert_close(left @ right, eye, rtol=0, atol=1e-5)


def scores(model: PreTrainedModel, product: Product) -> list[tuple[Tensor, Tensor]]:
    """Return the queries and keys that the model computes for real tokens, each `(tokens, heads, d)` of a batch."""
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(each.name).register_forward_hook(lambda _, args, y, name=each.name: seen.update({name: y}))
        for each in product.layers
    ]
    result = []
    for batch in BATCHES:
        with torch.no_grad():
            model(**batch)
        real = batch["attention_mask"].bool()
        q, k = (seen[each.name][real].double().unflatten(-1, (product.heads, -1)) for each in product.layers)
        result.append((q, k))
    for hook in hooks:
        hook.remove()
    return result


def lost(pairs: list[tuple[Tensor, Tensor]], error: Tensor) -> Tensor:
    """Σ over heads of ‖q E kᵀ‖²_F over all pairs of tokens ÷ samples², for E `(heads, d, d)`."""
    q, k = (torch.cat(values) for values in zip(*pairs, strict=True))
    return torch.einsum("nhd,hde,mhe->hnm", q, error, k).square().sum() / 12**2


def test_the_error_of_the_scores_is_the_tail_of_the_spectrum_and_no_candidate_has_less() -> None:
    """Corollary 1, for the queries and keys that the model computes, with biases and without padding."""
    model = tiny.bert().eval()
    targets = found(model)
    statistics = collect(model, BATCHES, targets.targets, ["inputs"])
    for product in products(targets):
        parts, pairs = decompose_product(model, product, INPUTS, statistics), scores(model, product)
        eye = torch.eye(8).double()
        for rank in range(1, 8):
            left, right = parts.truncate(rank)
            least = lost(pairs, eye - left @ right)
            torch.testing.assert_close(least, parts.spectrum[rank:].square().sum(), rtol=1e-4, atol=1e-8)
            generator = torch.Generator().manual_seed(rank)
            for scale in (1e-3, 1e-1, 1e1):
                noises = [scale * torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (left, right)]
                assert lost(pairs, eye - (left + noises[0]) @ (right + noises[1])) >= least * (1 - 1e-9)


def test_a_weighting_of_outputs_weighs_the_change_of_the_queries() -> None:
    """‖(q − q M) G^½‖² with G the second moment of the gradients at each head's queries; per token, as kfac has it."""
    model = tiny.bert().eval()
    targets = found(model)
    statistics = collect(model, BATCHES, targets.targets, ["inputs", "output_gradients"])
    product = products(targets)[1]
    parts = decompose_product(model, product, KFAC, statistics)
    q = torch.cat([q for q, _ in scores(model, product)])
    left, right = parts.truncate(3)
    change = q - torch.einsum("nhd,hde->nhe", q, left @ right)
    gradients = statistics["output_gradients"][product.name].double()
    blocks = torch.stack([gradients[at : at + 8, at : at + 8] for at in range(0, 16, 8)])
    expected = torch.einsum("nhd,hde,nhe->", change, blocks, change) / len(q)
    torch.testing.assert_close(parts.spectrum[3:].square().sum(), expected, rtol=1e-4, atol=1e-12)


def test_shrinkage_of_the_inputs_leaves_queries_that_do_not_depend_on_them_as_they_are() -> None:
    """They are the bias, so nothing about them is uncertain."""
    model = tiny.bert().eval()
    targets = found(model)
    statistics = collect(model, BATCHES, targets.targets, ["inputs", "output_gradients"])
    product = products(targets)[0]
    query = model.get_submodule(product.name)
    torch.nn.init.zeros_(query.weight)
    torch.nn.init.normal_(query.bias)
    shrunk = WEIGHTING.validate_python({"kind": "kfac", "input_shrinkage": 0.5})
    expected, spectrum = (decompose_product(model, product, each, statistics).spectrum for each in (KFAC, shrunk))
    torch.testing.assert_close(spectrum, expected, rtol=1e-4, atol=1e-6 * float(expected[0]))


@pytest.mark.parametrize("kind", ["input_shrinkage", "correlation_shrinkage"])
def test_shrinkage_keeps_a_norm_if_inputs_have_large_means(kind: str) -> None:
    """The moments of inputs and of the constant 1 are those of some inputs: no direction has a negative one."""
    sums, tokens = torch.full((4,), 30.0), torch.tensor(10.0)
    statistics = {
        "inputs": {"x": sums.outer(sums) / tokens + torch.eye(4)},
        "input_sums": {"x": sums},
        "tokens": {"x": tokens},
        "output_gradients": {"x": torch.eye(4)},
    }
    weighting = WEIGHTING.validate_python({"kind": "kfac", kind: 0.5})
    target = Target(name="x", input_of="x", in_features=4, out_features=4)
    side = _with_ones(weigh(weighting, target, statistics).right, statistics, "x", weighting.correlations)
    assert torch.linalg.eigvalsh(side)[0] > -1e-6 * side.trace()


def test_without_data_it_is_the_svd_of_each_heads_query_key_product(case) -> None:
    """So it is for inputs of equal variance and mean 0."""
    model, product, statistics = case
    queries, keys = heads_of(model, product)
    isotropic = {
        "inputs": {each.input_of: torch.eye(each.in_features) for each in product.layers},
        "input_sums": {each.input_of: torch.zeros(each.in_features) for each in product.layers},
        "tokens": {each.input_of: torch.tensor(0.0) for each in product.layers},
    }
    for weighting, given in ((NONE, statistics), (INPUTS, isotropic)):
        parts = decompose_product(model, product, weighting, given)
        for rank in (1, 3, 7):
            left, right = parts.truncate(rank)
            found = queries.mT @ left @ right @ keys
            u, s, v = torch.linalg.svd(queries.mT @ keys)
            best = u[:, :, :rank] @ torch.diag_embed(s[:, :rank]) @ v[:, :rank]
            torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-6)
            tail = s[:, rank:].square().sum()
            torch.testing.assert_close(parts.spectrum[rank:].square().sum(), tail, rtol=1e-4, atol=1e-8)


# --- in a model ------------------------------------------------------------------------------------------------------


def compressed(rank: int) -> tuple[PreTrainedModel, Targets]:
    """Return a BERT whose products have `rank` and whose other layers are dense."""
    model = tiny.bert().eval()
    targets = found(model)
    statistics = collect(model, BATCHES, targets.targets, ["inputs"])
    ranks = {each.name: rank if isinstance(each, Product) else None for each in targets.targets}
    factorize_at_once(model, targets.targets, ranks, INPUTS, statistics)
    return model, targets


def test_at_full_rank_the_model_computes_the_same() -> None:
    torch.testing.assert_close(
        tiny.logits(compressed(8)[0], BATCHES[0]), tiny.logits(tiny.bert().eval(), BATCHES[0]), rtol=1e-4, atol=1e-4
    )


def test_scores_are_those_of_the_approximation_and_other_channels_are_zero() -> None:
    dense, (small, targets) = tiny.bert().eval(), compressed(3)
    first = products(targets)[0]
    statistics = collect(dense, BATCHES, targets.targets, ["inputs"])
    left, right = decompose_product(dense, first, INPUTS, statistics).truncate(3)
    for (q, k), (small_q, small_k) in zip(scores(dense, first), scores(small, first), strict=True):
        wanted = torch.einsum("nhd,hde,mhe->hnm", q, left @ right, k)
        torch.testing.assert_close(torch.einsum("nhd,mhd->hnm", small_q, small_k), wanted, rtol=1e-4, atol=1e-4)
        assert not small_q[..., 3:].any()
        assert not small_k[..., 3:].any()


def test_parameters_of_a_factorized_product_are_counted() -> None:
    dense, (small, targets) = tiny.bert(), compressed(3)
    ranks = {each.name: 3 if isinstance(each, Product) else None for each in targets.targets}
    saved = sum(each.parameters for each in targets.targets) - total(targets.targets, ranks)
    biases = sum(each.heads * (8 - 3) * len(each.layers) for each in products(targets))
    assert dense.num_parameters() - small.num_parameters() == saved + biases
    for each in products(targets):
        assert largest_rank(each) == 7
        assert cost(each, 3) == 2 * each.heads * 3 * each.in_features


def test_a_factorized_product_loads_as_saved(tmp_path: Path) -> None:
    model, targets = compressed(3)
    save(model, tmp_path)
    names = [layer.name for product in products(targets) for layer in product.layers]
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["heads"] == dict.fromkeys(names, 2)
    loaded = AUTO["classification"].from_pretrained(tmp_path)
    assert factorized(loaded) == dict.fromkeys(names, 3)
    tiny.assert_same(model, loaded, BATCHES[0])


def test_as_onnx_it_computes_the_same_with_as_many_parameters(tmp_path: Path) -> None:
    model, _ = compressed(3)
    model.bert.encoder.layer = model.bert.encoder.layer[:1]  # each takes the exporter a second
    exported = export(model, tiny.words(), tmp_path / "model.onnx")
    assert exported.difference < 1e-4
    assert exported.parameters <= model.num_parameters() + 100  # constants of the graph


# --- algorithm 2 -----------------------------------------------------------------------------------------------------


def mean_loss(model: PreTrainedModel) -> float:
    with torch.no_grad():
        return sum(float(model(**batch).loss) * len(batch["labels"]) for batch in BATCHES) / 12


def test_tolerance_approximates_products_and_factorizing_them_loses_nothing() -> None:
    dense = tiny.bert().eval()
    targets = [each for each in found(dense).targets if isinstance(each, Product) or "dense" not in each.name]
    settings = Tolerance(kind="tolerance", increase=0.5, grid=4, examples=12, times="macs")
    walked = copy.deepcopy(dense)
    ranks = settings.search(tiny.search_problem(walked, targets, INPUTS, BATCHES, 1.0)).ranks
    assert any(ranks[each.name] for each in targets if isinstance(each, Product))
    assert mean_loss(walked) <= 1.5 * mean_loss(dense)
    statistics = collect(dense, BATCHES, targets, ["inputs"])
    small = copy.deepcopy(walked)
    factorize_at_once(small, targets, ranks, INPUTS, statistics)
    torch.testing.assert_close(tiny.logits(small, BATCHES[0]), tiny.logits(walked, BATCHES[0]), rtol=1e-3, atol=1e-3)


# --- a candidate -----------------------------------------------------------------------------------------------------


def test_a_study_with_products_goes_through_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    svd = repository_params()["recipes"]["svd"]
    svd["recovery"] |= {"steps": 2, "batch_size": 8}
    ranks = {"kind": "tolerance", "increase": None, "grid": 3, "examples": 8, "times": "macs"}
    borrowed = {**svd, "ranks": {"kind": "borrowed", "weighting": {"kind": "inputs"}, "ranks": ranks}}
    names = ["kfac", "borrowed"]
    tiny_workspace(tmp_path, study={"recipes": names}, targets={"products": True}, recipes={"borrowed": borrowed})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for stage in ("extract", "teacher", "control", "dense", "calibration", "importance"):
        run_stage(stage)
    for name in names:
        for stage in ("search", "factorize", "finetune", "evaluate"):
            run_stage(stage, name, "0.5")
        evaluation = json.loads(Path(f"reports/evaluate/{name}-0.5.json").read_text())
        ranks = {target: size["rank"] for target, size in evaluation["targets"].items()}
        assert ranks == json.loads(Path(f"models/ranks/{name}-0.5/ranks.json").read_text())["ranks"]
        assert not any(target.endswith(".key") for target in ranks)
    assert any(ranks[target] for target in ranks if target.endswith(".query"))
    run_stage("benchmark")
    run_stage("compare")
