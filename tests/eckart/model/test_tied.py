"""A tied embedding and head are one target: one weight, one rank, one norm, one pair of factors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

import eckart
from eckart.calibration.losses import causal_loss
from eckart.calibration.statistics import collect
from eckart.factorization.factorize import InOrder, factorize_at_once, factorize_in_order
from eckart.factorization.pivoted_storage import pivot
from eckart.factorization.weightings import ErrorNorm, Kfac, Plain, _nearest, weigh
from eckart.model.batches import without_labels
from eckart.model.hf_format import save
from eckart.model.layers import TiedHead, factorized, merge, tied_heads
from eckart.model.targets import Tied, find_targets
from eckart.onnx import export, runner
from eckart.onnx.int8 import quantize
from eckart.ranks.budget import cost, largest_rank, stored
from tests import tiny

PLAIN, KFAC = Plain(kind="none"), Kfac(kind="kfac", shrinkage=0.0)
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def rows(count: int = 6, longest: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Return padded texts whose labels ignore padding."""
    batch = tiny.collate(tiny.samples(count, 2, longest, seed=seed), length=longest)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def language() -> PreTrainedModel:
    return tiny.causal_llama().eval()


def masked() -> PreTrainedModel:
    """Its head has a bias, and a linear layer before it."""
    config = BertConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    return tiny.drawn(BertForMaskedLM, config).eval()


def pair_of(model: PreTrainedModel) -> Tied:
    (target,) = (each for each in find_targets(model, rows(), tied=True).targets if isinstance(each, Tied))
    return target


def logits(model: PreTrainedModel, **others: Tensor) -> Tensor:
    inputs = without_labels(rows(seed=1))
    with torch.no_grad():
        found: Tensor = model(**{**inputs, **others}).logits
    return found


def in_factors(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    target = pair_of(model)
    factorize_at_once(model, [target], {target.name: rank}, PLAIN, {})
    return model


@pytest.mark.parametrize("make", [language, masked])
def test_a_tied_pair_is_one_target_on_request(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    found = find_targets(model, rows(), tied=True)
    (target,) = (each for each in found.targets if isinstance(each, Tied))
    weight = model.get_input_embeddings().weight
    assert model.get_submodule(target.other.name).weight is weight
    assert (target.out_features, target.in_features) == tuple(weight.T.shape)
    assert target.parameters == weight.numel()
    assert not target.looks_up  # alone: its head multiplies
    assert {target.name, target.other.name}.isdisjoint(found.excluded)
    others = find_targets(model, rows())
    assert {each.name for each in others.targets} == {each.name for each in found.targets} - {target.name}


def test_a_model_without_a_tied_pair_is_refused() -> None:
    with pytest.raises(ValueError, match=r"targets\.tied"):
        find_targets(tiny.bert(), rows(), tied=True)


def test_a_model_without_one_input_embedding_is_refused() -> None:
    text = {**tiny.LAYERS, "vocab_size": 30, "max_position_embeddings": 32, "eos_token_id": 2}
    image = {**tiny.LAYERS, "image_size": 16, "patch_size": 8}
    model = tiny.build("CLIPModel", text_config=text, vision_config=image, projection_dim=8)
    with pytest.raises(ValueError, match=r"targets\.tied"):
        find_targets(model, {**rows(), "pixel_values": torch.randn(len(rows()["input_ids"]), 3, 16, 16)}, tied=True)


def test_excluding_one_of_the_pair_excludes_both() -> None:
    found = find_targets(language(), rows(), exclude=[HEAD], tied=True)
    assert not any(isinstance(target, Tied) for target in found.targets)
    assert {EMBEDDING, HEAD} <= set(found.excluded)


def test_statistics_equal_autograds_and_are_diagonal_for_the_head() -> None:
    """For each token of an example."""
    model, batch = language(), rows()
    found = collect(model, [batch], [pair_of(model)], ["inputs", "output_gradients"], causal_loss)
    ends = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, args, y, name=name: ends.update({name: (args[0], y)}))
        for name in (EMBEDDING, HEAD)
    ]
    loss = causal_loss(model, batch).sum()
    (ids, vectors), (states, scores) = ends[EMBEDDING], ends[HEAD]
    of_vectors, of_scores = torch.autograd.grad(loss, [vectors, scores])
    for hook in hooks:
        hook.remove()
    real, count = batch["attention_mask"] == 1, len(ids)
    torch.testing.assert_close(found["inputs"][EMBEDDING], ids[real].bincount(minlength=tiny.VOCABULARY) / count)
    torch.testing.assert_close(found["inputs"][HEAD], states[real].T @ states[real] / count)
    torch.testing.assert_close(found["output_gradients"][HEAD], of_scores[real].square().sum(0) / count)
    torch.testing.assert_close(found["output_gradients"][EMBEDDING], of_vectors[real].T @ of_vectors[real] / count)


def second_moment(size: int, seed: int) -> Tensor:
    x = torch.randn(2 * size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.T @ x


def test_the_norm_is_the_nearest_to_the_sum_of_both() -> None:
    """It is given by singular vectors of the rearranged sum (Van Loan and Pitsianis)."""
    target = pair_of(language())
    norms = [ErrorNorm(second_moment(16, seed), second_moment(30, seed + 5).diagonal()) for seed in (0, 1)]
    found = _nearest(*norms, target)
    rearranged = sum(torch.outer(norm.left.flatten(), norm.right) for norm in norms)
    u, s, v = torch.linalg.svd(rearranged, full_matrices=False)
    expected = s[0] * torch.outer(u[:, 0], v[0])
    torch.testing.assert_close(torch.outer(found.left.flatten(), found.right), expected)
    assert torch.linalg.eigvalsh(found.left).min() > 0


def test_zero_norms_give_a_zero_norm() -> None:
    target = pair_of(language())
    norm = weigh(PLAIN, target, {})
    torch.testing.assert_close(norm.left, torch.ones(16, dtype=torch.float64) * norm.left[0])
    torch.testing.assert_close(norm.right, torch.ones(30, dtype=torch.float64) * norm.right[0])
    zeros = ErrorNorm(torch.zeros(16, 16), torch.zeros(30))
    assert not _nearest(zeros, zeros, target).left.any()


@pytest.mark.parametrize("make", [language, masked])
def test_at_full_rank_the_model_computes_the_same(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    expected = logits(model)
    torch.testing.assert_close(logits(in_factors(model, 16)), expected, rtol=1e-4, atol=1e-5)


def test_both_compute_with_the_same_low_rank_weight() -> None:
    model = language()
    target, before = pair_of(model), model.num_parameters()
    in_factors(model, 3)
    layer, head = model.get_submodule(target.name), model.get_submodule(target.other.name)
    weight = layer.dense()
    assert torch.linalg.matrix_rank(weight) == 3
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(head(x), x @ weight)
    torch.testing.assert_close(layer(torch.arange(30)), weight.T)
    assert before - model.num_parameters() == target.parameters - cost(target, 3) == 16 * 30 - 3 * 46
    assert largest_rank(target) == 10


def test_training_changes_both_and_copies_are_independent() -> None:
    model = in_factors(language(), 3)
    other = copy.deepcopy(model)
    head, layer = other.get_submodule(HEAD), other.get_submodule(EMBEDDING)
    assert isinstance(head, TiedHead)
    assert head.embedding is layer
    with torch.no_grad():
        layer.left.weight += 1
    assert not torch.equal(logits(other), logits(model))
    causal_loss(model, rows()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(name.startswith(HEAD) for name in model.state_dict())


@pytest.mark.parametrize("make", [language, masked])
def test_a_saved_model_loads_with_and_without_its_head(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = in_factors(make(), 3)
    save(model, tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert tied_heads(loaded) == tied_heads(model)
    assert loaded.num_parameters() == model.num_parameters()
    assert all(torch.equal(values, loaded.state_dict()[name]) for name, values in model.state_dict().items())
    torch.testing.assert_close(logits(loaded), logits(model))
    save(loaded, tmp_path / "again")
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path / "again").eval()), logits(model))
    inputs = without_labels(rows(seed=1))
    bare = AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(bare(**inputs)[0], model.base_model(**inputs)[0])


def test_a_nested_text_config_is_untied_too(tmp_path: Path) -> None:
    text = {**tiny.causal_llama().config.to_dict(), "model_type": "llama", "tie_word_embeddings": True}
    vision = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=1, tie_word_embeddings=True)
    model = in_factors(tiny.drawn(LlavaForConditionalGeneration, config).eval(), 3)
    save(model, tmp_path)
    torch.testing.assert_close(logits(LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()), logits(model))


@pytest.mark.parametrize("make", [language, masked])
def test_a_merged_pair_shares_a_dense_weight_again(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = in_factors(make(), 3)
    expected = logits(model)
    for name in factorized(model):
        merge(model, name)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    save(model, tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-5)


def test_in_order_the_pair_comes_first_and_is_not_pivoted() -> None:
    model = language()
    targets = stored(find_targets(model, rows(), tied=True).targets, "pivoted")
    statistics = collect(model, [rows()], targets, ["inputs", "output_gradients"], causal_loss)
    ranks = {target.name: 2 for target in targets}
    factorize_in_order(model, targets, ranks, KFAC, statistics, [rows()], InOrder(anchor=0.5, ridge=0.1))
    pivot(model)
    assert factorized(model) == ranks
    assert tied_heads(model) == {HEAD: EMBEDDING}
    assert logits(model).isfinite().all()


def test_compress_accepts_tied() -> None:
    model = language()
    small, report = eckart.compress(model, [rows(seed=each) for each in range(4)], 0.25, "kfac", tied=True)
    small.init_weights()  # ties no weights that are gone
    assert report.targets[EMBEDDING].rank == factorized(small)[EMBEDDING]
    assert HEAD not in report.targets
    assert report.keep <= 0.25
    assert (
        sum(each.parameters[1] for each in report.targets.values())
        + sum(values.numel() for name, values in small.named_parameters() if name.endswith("norm.weight"))
        == small.num_parameters()
    )


def test_as_onnx_the_weight_is_stored_once_and_rounded_once(tmp_path: Path) -> None:
    config = tiny.causal_llama().config
    config.vocab_size, config.num_hidden_layers = 20_000, 1
    model = in_factors(tiny.drawn(type(tiny.causal_llama()), config).eval(), 4)
    file, small = tmp_path / "model.onnx", tmp_path / "int8.onnx"
    export(model, tiny.words(), file)
    quantize(file, small, [without_labels(rows())])
    for each, kind in ((file, onnx.TensorProto.FLOAT), (small, onnx.TensorProto.INT8)):
        held = [part for part in onnx.load(each).graph.initializer if 20_000 in part.dims and 4 in part.dims]
        assert [part.data_type for part in held] == [kind]
    found = runner(small, 1)(without_labels(rows(seed=1)))["logits"]
    real = rows(seed=1)["attention_mask"] == 1
    assert float((found - logits(model))[real].norm()) < 0.1 * float(logits(model)[real].norm())


def test_an_offloaded_embedding_gives_the_head_its_factors(tmp_path: Path) -> None:
    model = in_factors(language(), 4)
    save(model, tmp_path)
    places = {"model.embed_tokens": "disk", **dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu")}
    for head in ("cpu", "disk"):
        loaded = type(model).from_pretrained(
            tmp_path, device_map={**places, "lm_head": head}, offload_folder=tmp_path / "offloaded"
        )
        assert loaded.lm_head.embedding.left.weight.is_meta
        torch.testing.assert_close(tiny.logits(loaded, rows()), tiny.logits(model, rows()))


def test_a_head_whose_embedding_was_replaced_is_not_saved(tmp_path: Path) -> None:
    """It would be tied to the new embedding when it is loaded."""
    model = in_factors(language(), 4)
    save(model, tmp_path / "tied")
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    for write in (model.save_pretrained, partial(save, model)):
        with pytest.raises(ValueError, match="was replaced"):
            write(tmp_path / "other")
