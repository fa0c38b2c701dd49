"""Every family of models: targets, statistics, every closed form and every training rule, saved and loaded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import eckart
from eckart.calibration.statistics import collect
from eckart.factorization.weighted_svd import decompose, spectrum
from eckart.factorization.weightings import ErrorNorm, Inputs, Kfac, Plain, Weighting, weigh
from eckart.model.batches import Batch
from eckart.model.hf_format import save
from eckart.model.layers import factorize_target, factorized
from eckart.model.probing import is_embedding
from eckart.model.targets import Target, Targets, find_targets, weight_of
from eckart.ranks import tolerance
from eckart.ranks.budget import allowance, largest_rank, total
from eckart.ranks.hypernetwork import HypernetworkSearch
from eckart.ranks.search_problem import ByFormula
from eckart.ranks.threshold import ThresholdSearch
from eckart.ranks.uniform import Uniform
from eckart.ranks.waterfill import Waterfill
from eckart.recovery.distillation import Distillation, DistillationRule
from eckart.recovery.mixed_rank import MixedRankRule
from eckart.residual.sparse_rows import RowPruning
from eckart.shaping.pruning import WeightPruning
from eckart.training.rules import Rule
from tests import tiny
from tests.tiny import ARCHITECTURES, AUTO, HEAD, PECULIAR, Architecture, Kind, assert_same, loss, padded, unpadded

KEEP = 0.6


@dataclass(frozen=True)
class Case:
    """A family's model with what every test needs of it; `model` is not to be changed."""

    family: Architecture
    model: PreTrainedModel
    found: Targets
    batch: Batch
    statistics: Mapping[str, Mapping[str, Tensor]]

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.found.targets


def case_of(name: str) -> Case:
    family = ARCHITECTURES[name]
    model = family.build().eval()
    some = unpadded(family.kind)
    found = find_targets(model, padded(some[:1]), heads=family.everything, embeddings=family.everything)
    batch = padded(some)
    return Case(family, model, found, batch, collect(model, [batch], found.targets, loss=loss))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request) -> Case:
    return case_of(request.param)


@pytest.fixture(scope="module", params=PECULIAR)
def peculiar(request) -> Case:
    return case_of(request.param)


# --- targets ---------------------------------------------------------------------------------------------------------


def test_each_family_has_its_targets(case):
    assert len(case.targets) == case.family.targets
    assert Counter(case.found.excluded.values()) == case.family.excluded


def test_each_target_has_the_mask_of_its_side(case):
    """A decoder's cross-attention reads keys and values from the encoder."""
    for target in case.targets:
        if case.family.kind == "images" or "pooler" in target.name or "classifier" in target.name:
            assert target.mask is None
        elif "decoder" in target.name and case.family.kind == "seq2seq":
            crosses = "encoder_attn" in target.name or "EncDecAttention" in target.name
            from_encoder = crosses and target.name.rpartition(".")[2] in ("k_proj", "v_proj", "k", "v")
            assert target.mask == ("attention_mask" if from_encoder else "decoder_attention_mask"), target.name
        else:
            assert target.mask == "attention_mask", target.name


def test_only_shared_layers_and_recurrent_cells_are_repeated(case):
    repeated = {target.name for target in case.targets if target.repeated}
    assert repeated == {
        some.name for some in case.targets if ".albert_layers." in some.name or some.name.endswith("hidden_map")
    }


# --- statistics ------------------------------------------------------------------------------------------------------


def one_sample(model: PreTrainedModel, targets: Iterable[Target], batch: Batch) -> dict[tuple[str, str], Tensor]:
    """Compute the statistics of one example without padding from autograd's gradients."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            seen.setdefault(name, []).append((args[0].detach(), output))

        return record

    hooks = [model.get_submodule(target.name).register_forward_hook(hook(target.name)) for target in targets]
    model.zero_grad()
    loss(model, batch).backward()
    for handle in hooks:
        handle.remove()
    result: dict[tuple[str, str], Tensor] = {}
    for target in targets:
        module, calls = model.get_submodule(target.name), seen[target.name]
        if is_embedding(module):
            calls = [(nn.functional.one_hot(x, target.in_features).to(y), y) for x, y in calls]
        x = torch.cat([x.reshape(-1, target.in_features) for x, _ in calls])
        deltas = [torch.zeros_like(y) if y.grad is None else y.grad for _, y in calls]
        delta = torch.cat([some.reshape(-1, target.out_features) for some in deltas])
        gradient = torch.zeros_like(module.weight) if module.weight.grad is None else module.weight.grad
        gradient = gradient.T if isinstance(module, Conv1D | nn.Embedding) else gradient
        if target.input_of == target.name:
            result["inputs", target.name] = (x.T @ x).diagonal() if is_embedding(module) else x.T @ x
            result["tokens", target.name] = x.new_tensor(len(x))
            result["input_magnitudes", target.name] = x.abs().sum(0)
        moment = delta.T @ delta
        result["output_gradients", target.name] = moment.diagonal() if target.of_vocabulary else moment
        result["gradients", target.name] = gradient
        for kind, squares in (("fisher", gradient**2), ("taylor", (gradient * weight_of(module)) ** 2)):
            result[kind, f"{target.name}.input"] = squares.sum(0)
            result[kind, f"{target.name}.output"] = squares.sum(1)
    return result


def assert_is_by_hand(model: PreTrainedModel, targets: Sequence[Target], family: Architecture) -> None:
    """Assert that statistics of padded batches are the mean of autograd's over single examples without padding."""
    model = model.double().eval()
    found = unpadded(family.kind)
    some = [{name: x.double() if x.is_floating_point() else x for name, x in one.items()} for one in found]
    each = [one_sample(model, targets, padded([one])) for one in some]
    got = collect(model, [padded(some[:4], more=2), padded(some[4:], more=1)], targets, loss=loss)
    assert {(kind, key) for kind, tensors in got.items() for key in tensors} == set(each[0])
    for kind, key in each[0]:
        mean = sum(one[kind, key] for one in each) / len(each)
        least = 1e-12 + family.rounding * float(mean.abs().max())
        torch.testing.assert_close(
            got[kind][key],
            mean,
            rtol=family.rounding,
            atol=least,
            msg=lambda text, what=f"{kind} of {key}": f"{what}: {text}",
        )


def test_statistics_equal_autograds_whatever_the_batches_and_padding(case):
    assert_is_by_hand(copy.deepcopy(case.model), case.targets, case.family)


def test_embeddings_and_heads_can_be_included(peculiar, tmp_path):
    model = copy.deepcopy(peculiar.model)
    found = find_targets(model, padded(unpadded(peculiar.family.kind)[:1]), heads=True, embeddings=True)
    more = {target.name for target in found.targets} - {target.name for target in peculiar.targets}
    assert len(more) == peculiar.family.more, more
    assert HEAD not in found.excluded.values()
    assert all(each.looks_up == isinstance(model.get_submodule(each.name), nn.Embedding) for each in found.targets)
    assert_is_by_hand(copy.deepcopy(model), found.targets, peculiar.family)
    statistics = collect(model, [peculiar.batch], found.targets, loss=loss)
    for target in found.targets:
        if target.name in more:
            weight = weight_of(model.get_submodule(target.name))
            metrics = weigh(KFAC, target, statistics)
            factorize_target(model, target.name, *decompose(weight, metrics).truncate(largest_rank(target)))
    model.train()(**peculiar.batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    assert_loads_as_saved(model, peculiar.family.kind, peculiar.batch, tmp_path)


# --- closed forms ----------------------------------------------------------------------------------------------------

NONE, INPUTS, KFAC = Plain(kind="none"), Inputs(kind="inputs"), Kfac(kind="kfac", shrinkage=0.0)


def compress(case: Case, weighting: Weighting, method: ByFormula, keep: float = KEEP) -> PreTrainedModel:
    """Return a copy of the model, factorized within `keep`."""
    model = copy.deepcopy(case.model)
    weights = {target.name: weight_of(model.get_submodule(target.name)) for target in case.targets}
    metrics = {target.name: weigh(weighting, target, case.statistics) for target in case.targets}
    spectra = {name: spectrum(weight, metrics[name]) for name, weight in weights.items()}
    ranks = method.ranks(case.targets, spectra, keep)
    assert total(case.targets, ranks) <= allowance(case.targets, keep)
    for name, rank in ranks.items():
        if rank is not None:
            factorize_target(model, name, *decompose(weights[name], metrics[name]).truncate(rank))
    assert factorized(model)
    return model


def assert_loads_as_saved(model: PreTrainedModel, kind: Kind, batch: Batch, folder: Path) -> None:
    save(model, folder)
    loaded = AUTO[kind].from_pretrained(folder)
    assert factorized(loaded) == factorized(model)
    assert_same(model, loaded, batch)


def test_a_closed_form_can_be_recovered_saved_and_loaded(case, tmp_path):
    model = compress(case, KFAC, Waterfill(kind="waterfill", multiple=1, embedding_price=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model.train()(**case.batch).loss.backward()
    for name in factorized(model):
        layer = model.get_submodule(name)
        assert layer.left.weight.grad.any(), name
        assert layer.right.weight.grad.any(), name
    optimizer.step()
    assert_loads_as_saved(model, case.family.kind, case.batch, tmp_path)


def test_full_rank_gives_the_logits_back(case):
    model = copy.deepcopy(case.model).double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in case.batch.items()}
    expected = tiny.logits(model, batch)
    for target in case.targets:
        tiny.factorize_layer(model, target.name, min(target.out_features, target.in_features))
    assert len(factorized(model)) == len(case.targets)
    torch.testing.assert_close(tiny.logits(model, batch), expected, rtol=1e-4, atol=1e-6)


# --- rules of training -----------------------------------------------------------------------------------------------

RECIPES = eckart.recipes()


def train(model: PreTrainedModel, rule: Rule, batch: Batch) -> None:
    """One step, as the loop takes it."""
    groups = [{"params": list(model.parameters())}, *rule.parameter_groups()]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    model.train()
    rule.before_forward(0)
    outputs = model(**batch, **rule.forward_options)
    extra = rule.extra_loss(model, batch, outputs)
    (outputs.loss if extra is None else outputs.loss + extra).backward()
    rule.after_backward(0)
    optimizer.step()
    rule.after_update(0)


def test_a_step_of_mixed_rank_recovery(peculiar, tmp_path):
    model = compress(peculiar, NONE, Uniform(kind="uniform", by="share"))
    weights = {name: weight_of(peculiar.model.get_submodule(name)) for name in factorized(model)}
    rule = MixedRankRule(
        model, weights, RECIPES["lpaf_sensitivity"].recovery.model_copy(update={"initial": 0.5}), True, seed=0
    )
    train(model, rule, peculiar.batch)
    rule.finish()
    assert_loads_as_saved(model, peculiar.family.kind, peculiar.batch, tmp_path)


def test_a_step_of_sparse_rows(peculiar, tmp_path):
    model, settings = copy.deepcopy(peculiar.model), RECIPES["losparse"].residual
    for target in peculiar.targets:
        tiny.factorize_layer(model, target.name, 1, slice(None))
    torch.testing.assert_close(
        tiny.logits(model, peculiar.batch), tiny.logits(peculiar.model, peculiar.batch), rtol=1e-3, atol=1e-4
    )
    rule = RowPruning(model, settings, allowance(peculiar.targets, KEEP), steps=1)
    train(model, rule, peculiar.batch)
    rule.finish()
    assert_loads_as_saved(model, peculiar.family.kind, peculiar.batch, tmp_path)


def test_a_step_of_distillation(peculiar):
    model = compress(peculiar, NONE, Uniform(kind="uniform", by="share"))
    terms = {"layers": 0.0 if peculiar.family.kind == "seq2seq" else 1.0, "logits": 1.0, "temperature": 2.0}
    rule = DistillationRule(peculiar.model, Distillation(**terms), True)
    train(model, rule, peculiar.batch)
    assert all(torch.isfinite(error) and error > 0 for error in rule.errors.values())


def test_a_step_of_pruning(peculiar):
    model = copy.deepcopy(peculiar.model)
    rule = WeightPruning(
        model, peculiar.targets, RECIPES["lpaf_sensitivity"].shaping.model_copy(update={"steps": 1}), 0.5
    )
    train(model, rule, peculiar.batch)
    assert rule.measures()["remaining"] == pytest.approx(0.5, abs=0.01)
    assert set(rule.statistics()["movement"]) == {f"{target.name}.output" for target in peculiar.targets}


def test_a_step_of_the_hypernetwork(peculiar):
    model = copy.deepcopy(peculiar.model)
    parts = {
        target.name: decompose(weight_of(model.get_submodule(target.name)), ErrorNorm()) for target in peculiar.targets
    }
    rule = HypernetworkSearch(model, peculiar.targets, parts, RECIPES["ars"].ranks, KEEP, seed=0)
    train(model, rule, peculiar.batch)
    rule.finish()
    assert total(peculiar.targets, rule.ranks()) <= allowance(peculiar.targets, KEEP)
    assert_same(model, peculiar.model, peculiar.batch)


def test_a_step_of_the_threshold(peculiar):
    model = copy.deepcopy(peculiar.model)
    rule = ThresholdSearch(model, peculiar.targets, RECIPES["softlm"].ranks, KEEP)
    train(model, rule, peculiar.batch)
    rule.finish()
    assert not factorized(model)
    assert torch.isfinite(tiny.logits(model, peculiar.batch)).all()


def test_tolerance_finds_ranks(peculiar):
    settings = RECIPES["drone_tolerance"].ranks.model_copy(update={"increase": 0.5, "grid": 2})
    if "labels" in peculiar.batch and peculiar.batch["labels"].dim() == 2:
        batches = [padded([example]) for example in unpadded(peculiar.family.kind)[:2]]  # the loss is a mean of tokens
    else:
        batches = [peculiar.batch]
    model = copy.deepcopy(peculiar.model)
    macs = tolerance.module_macs(model, peculiar.targets, peculiar.batch)
    assert all(macs[target.name] > 0 for target in peculiar.targets)
    ranks = settings.search(tiny.search_problem(model, peculiar.targets, INPUTS, batches, 1.0)).ranks
    assert set(ranks) == {target.name for target in peculiar.targets}
    assert all((ranks[target.name] or 0) <= largest_rank(target) for target in peculiar.targets)
