"""Calibrated ranks: laws of the error model, a case solved by hand, and the choice by the whole model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import eckart
from eckart.calibration.statistics import collect
from eckart.factorization.factorize import InOrder, factorize_model
from eckart.factorization.single_target_ablation import losses_alone
from eckart.factorization.weightings import Kfac, Plain
from eckart.model.attention_products import find_products
from eckart.model.batches import Batch
from eckart.model.targets import Target, find_targets
from eckart.ranks import calibrated
from eckart.ranks.budget import NoRank, allowance, total
from eckart.ranks.calibrated import Calibrated, depth_factors
from eckart.ranks.search_problem import SearchProblem
from eckart.ranks.waterfill import Waterfill
from tests import tiny

SAMPLES = tiny.samples(12)
BATCHES = tiny.batches(SAMPLES, 4)
METHOD = Calibrated(multiple=1, examples=4, held_out=8, alpha=(1.0,), gamma=(0.0, 3.0))
SQUARE = [Target(name=name, out_features=40, in_features=40, input_of=name) for name in ("h.0.a", "h.1.a", "h.2.a")]


def examples(count: int | None, skip: int = 0) -> Sequence[Batch]:
    stop = None if count is None else skip + count
    return tiny.batches(SAMPLES[skip:stop], 4)


def problem(model: Any = None, keep: float = 0.4, in_order: InOrder | None = None, **options: Any) -> SearchProblem:
    model = model or tiny.bert()
    targets = find_targets(model, BATCHES[0], **options)
    weighting = Kfac()
    statistics = collect(model, BATCHES, targets.targets, weighting.statistics)
    given = tiny.search_problem(model, targets.targets, weighting, [], keep, statistics=statistics, in_order=in_order)
    return replace(given, calibration=examples)


def state(model: nn.Module) -> dict[str, Any]:
    """All that a search might change: parameters by identity and value, modes, gradients' flags, and the config."""
    return {
        "parameters": {name: (id(value), value.detach().clone()) for name, value in model.named_parameters()},
        "modules": {name: (id(module), module.training) for name, module in model.named_modules()},
        "trained": [value.requires_grad for value in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "config": model.config.to_dict(),
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = state(model)
    for name, (identity, value) in before.pop("parameters").items():
        assert after["parameters"][name][0] == identity
        assert torch.equal(after["parameters"][name][1], value)
    assert {name: after[name] for name in before} == before


# --- depth -----------------------------------------------------------------------------------------------------------


def test_depth_solved_by_hand() -> None:
    """Three blocks: with α = 0 h is 1, ½, 0; with α = 1 it is (1 + ½) ÷ (1 + ½), ½ ÷ (1 + ½), 0."""
    assert list(depth_factors(SQUARE, 0.0, 2.0).values()) == pytest.approx([3, 2, 1])
    assert list(depth_factors(SQUARE, 1.0, 3.0).values()) == pytest.approx([4, 2, 1])
    assert list(depth_factors(SQUARE, 2.0, 0.0).values()) == [1, 1, 1]


def test_what_is_outside_of_the_blocks_has_the_depth_of_its_neighbor() -> None:
    names = ["embedding", "encoder.0.a", "encoder.0.b.7", "between", "decoder.0.a", "decoder.1.a", "last"]
    targets = [SQUARE[0].model_copy(update={"name": name}) for name in names]
    factors = depth_factors(targets, 0.0, 2.0)
    assert factors == pytest.approx(dict(zip(names, [3, 3, 3, 3, 2, 1, 1], strict=True)))
    assert set(depth_factors(targets[:3], 0.0, 5.0).values()) == {1.0}  # one block: depth says nothing


# --- the error model -------------------------------------------------------------------------------------------------


def test_two_targets_solved_by_hand() -> None:
    """Spectra 4, 2, 1 … and 4, 2, 1 …; as the first is worth 100 times as much, it gets all that is left.

    40 × 40 at keep 0.1 has 320 of 3,200 parameters, 4 ranks of 80: one each, and the two next of the first.
    """
    targets, values = SQUARE[:2], 4.0 * 0.5 ** torch.arange(40, dtype=torch.float64)
    case = replace(problem(), targets=tuple(targets), keep=0.1)
    spectra = {target.name: values for target in targets}
    labels, ranks = zip(*METHOD._candidates(case, spectra, {"h.0.a": 100.0, "h.1.a": 1.0}), strict=True)
    assert labels[:2] == ("plain losses", "alpha 0, gamma 0")
    assert ranks[0] == {"h.0.a": 2, "h.1.a": 2}
    assert ranks[1] == {"h.0.a": 3, "h.1.a": 1}
    undepthed = METHOD.model_copy(update={"gamma": (0.0,)})
    for scale, first in ((3.0, 2), (5.0, 3)):  # the third rank of the first saves 1, the second of the other 4
        *_, (_, ranks_at) = undepthed._candidates(case, spectra, {"h.0.a": scale, "h.1.a": 1.0})
        assert ranks_at == {"h.0.a": first, "h.1.a": 4 - first}


def test_without_calibration_and_depth_the_ranks_are_the_waterfills() -> None:
    """If KL = E everywhere and γ = 0, there is one candidate; an equal scale of all targets changes nothing either."""
    case = problem()
    spectra = case.spectra()
    plain = Waterfill(multiple=1).ranks(case.targets, spectra, case.keep)
    method = METHOD.model_copy(update={"gamma": (0.0,)})
    for scale in (1.0, 4.0):
        assert method._candidates(case, spectra, dict.fromkeys(spectra, scale)) == [("plain losses", plain)]


def test_a_target_that_matters_more_gets_no_smaller_rank() -> None:
    case = problem()
    spectra = case.spectra()
    method = METHOD.model_copy(update={"gamma": (0.0,)})
    before = method.filled(case.targets, spectra, case.keep)
    for target in case.targets:
        scales = {name: 100.0 if name == target.name else 1.0 for name in spectra}
        after = method._candidates(case, spectra, scales)[-1][1]
        sizes = [size_of(ranks[target.name]) for ranks in (before, after)]
        assert sizes[1] >= sizes[0], target.name


def size_of(rank: int | None) -> int:
    return 10**6 if rank is None else rank


def test_each_scale_is_the_divergence_of_the_target_alone_over_its_energy() -> None:
    case = problem()
    spectra = case.spectra()
    scales = calibrated._scales(case, spectra, BATCHES)
    small = tiny.bert()
    ranks = dict.fromkeys(spectra, 1)  # a tenth of every break-even rank is below 1
    factorize_model(small, case.targets, ranks, case.weighting, case.statistics)
    alone = losses_alone(tiny.bert(), small, case.targets, BATCHES, case.objective)
    for name, values in spectra.items():
        assert scales[name] == pytest.approx(alone[name] / float(values[1:].square().sum() / 2), rel=1e-4)


def test_a_weight_of_low_rank_is_measured_where_it_still_loses() -> None:
    energies = torch.tensor([4.0, 1.0, 1e-9, 0.0])
    target = Target(name="a", out_features=400, in_features=400, input_of="a")  # a tenth of break-even is 19
    assert calibrated._measured_rank(target, energies) == 1
    assert calibrated._measured_rank(target, torch.arange(400.0).flip(0)) == 19


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [None, InOrder()], ids=["at once", "anchored"])
def test_the_nearest_of_the_compressed_models_is_chosen(in_order: InOrder | None) -> None:
    """Each candidate is compressed again by hand; the model that the search had is as before, bit for bit."""
    case = problem(in_order=in_order)
    case.model.train()
    case.model.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    before = state(case.model)
    result = METHOD.search(case)
    assert_unchanged(case.model, before)
    assert result.changed is False
    assert total(case.targets, result.ranks) <= allowance(case.targets, case.keep)

    spectra = case.spectra()
    scales = calibrated._scales(case, spectra, examples(4))
    candidates = METHOD._candidates(case, spectra, scales)
    assert len(candidates) > 2
    dense, measured = tiny.bert().eval(), []
    for _, ranks in candidates:
        small = tiny.bert().eval()
        factorize_model(
            small, case.targets, ranks, case.weighting, case.statistics, in_order=in_order, batches=examples(None)
        )
        with torch.no_grad():
            logs = [model(**tiny.collate(SAMPLES[4:])).logits.double().log_softmax(-1) for model in (small, dense)]
        measured.append(float((logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean()))
    assert result.ranks == candidates[measured.index(min(measured))][1]
    found = re.search(r"([\d.e-]+) at", result.remark)
    assert found
    assert float(found[1]) == pytest.approx(min(measured), rel=1e-3)


@pytest.mark.parametrize("family", ["products", "tied"])
def test_targets_of_two_layers(family: str) -> None:
    if family == "products":
        case = problem()
        found = find_products(case.model, BATCHES[0], find_targets(case.model, BATCHES[0]))
        statistics = collect(case.model, BATCHES, found.targets, Kfac.statistics)
        case = replace(case, targets=found.targets, statistics=statistics)
    else:
        texts = [{"input_ids": ids} for ids in torch.stack([ids for ids, _ in tiny.samples(12, 5, 5)]).split(4)]
        model = tiny.causal_llama()
        targets = find_targets(model, texts[0], tied=True).targets
        case = replace(problem(), model=model, targets=targets, weighting=Plain(), statistics={})
        case = replace(case, calibration=lambda count, skip=0: texts[:1] if skip else texts[1:])
    assert any(len(target.layers) > 1 for target in case.targets)
    before = state(case.model)
    ranks = METHOD.search(case).ranks
    assert_unchanged(case.model, before)
    assert set(ranks) == {target.name for target in case.targets}


def test_examples_that_leave_none_to_choose_by_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.sizes\.calibration.*ranks\.examples"):
        METHOD.model_copy(update={"examples": 12}).search(problem())
    with pytest.raises(NoRank):
        METHOD.search(replace(problem(keep=0.01), calibration=tiny.refuse))


def test_a_divergence_that_rounding_made_negative_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()
    first = given.targets[0].name

    def rounded(model: Any, alone: Any, *args: Any) -> dict[str, float]:
        return {name: -1e-12 if name == first else 1.0 for name in alone}

    monkeypatch.setattr(calibrated, "losses_of_replacements", rounded)
    scales = calibrated._scales(given, given.spectra(), examples(4))
    assert scales.pop(first) == 0.0
    assert min(scales.values()) > 0


def test_predictions_that_are_not_finite_are_an_error() -> None:
    case = problem()
    with torch.no_grad():
        case.model.classifier.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"^predictions .*query.* float32"):
        METHOD.search(case)


def test_compress_runs_it() -> None:
    recipe = {
        "weighting": "kfac",
        "ranks": {"kind": "calibrated", "examples": 4, "alpha": [1.0], "gamma": [0.0, 3.0], "multiple": 1},
        "sequential": {"anchor": 0.5},
    }
    (small, report), (_, larger) = eckart.compress(tiny.bert(), BATCHES, [0.4, 0.6], recipe, check=False)
    assert report.keep <= 0.4 < larger.keep <= 0.6
    assert small.num_parameters() == report.parameters[1]
    with pytest.raises(ValueError, match="residual"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, {"ranks": "calibrated", "residual": "sparse_rows"})
