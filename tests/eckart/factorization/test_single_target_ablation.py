"""Ablation of single targets: it is zero at full rank, and equals a computation by hand."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.nn.functional import kl_div

from eckart.calibration.losses import Objective, mean_loss_times_batch
from eckart.calibration.predictions import logits_of
from eckart.factorization.factorize import factorize_at_once
from eckart.factorization.single_target_ablation import losses_alone
from eckart.factorization.weightings import Plain
from eckart.model.attention_products import find_products
from eckart.model.targets import find_targets
from tests import tiny

PLAIN = Plain(kind="none")
BATCHES = tiny.batches(tiny.samples(7), 3)


def objective(classes: bool = True) -> Objective:
    return Objective(mean_loss_times_batch, mean_loss_times_batch, None, logits_of, classes)


@pytest.mark.parametrize("classes", [True, False])
def test_the_loss_is_that_of_a_model_with_this_target_alone_factorized(classes: bool) -> None:
    """The last batch is smaller and counts by its examples."""
    dense = tiny.bert().eval()
    targets = find_targets(dense, BATCHES[0]).targets
    small = deepcopy(dense)
    factorize_at_once(small, targets, {target.name: 2 for target in targets}, PLAIN, {})
    found = losses_alone(dense, small, targets, BATCHES, objective(classes))
    assert list(found) == [target.name for target in targets]
    for target in targets[::5]:
        other = deepcopy(dense)
        factorize_at_once(other, [target], {target.name: 2}, PLAIN, {})
        with torch.no_grad():
            answers, others = (
                torch.cat([model(**batch).logits for batch in BATCHES]).double() for model in (dense, other)
            )
        logs = others.log_softmax(-1), answers.log_softmax(-1)
        expected = (
            kl_div(*logs, reduction="batchmean", log_target=True) if classes else (others - answers).square().mean()
        )
        assert found[target.name] == pytest.approx(float(expected), rel=1e-3)
        assert float(expected) > 0


def test_the_original_model_is_restored() -> None:
    dense = tiny.gpt2().train()
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    targets = find_targets(dense, BATCHES[0]).targets
    small = deepcopy(dense)
    factorize_at_once(small, targets, {target.name: 1 for target in targets}, PLAIN, {})
    losses_alone(dense, small, targets, BATCHES, objective())
    after = dense.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert dense.training


def test_both_layers_of_a_product_are_replaced_together() -> None:
    """At full rank its layers compute other queries and keys but the same products; one layer alone would not."""
    dense = tiny.bert().eval()
    found = find_products(dense, BATCHES[0], find_targets(dense, BATCHES[0]))
    products = [target for target in found.targets if len(target.layers) > 1]
    small = deepcopy(dense)
    factorize_at_once(small, products, {target.name: products[0].out_features // 2 for target in products}, PLAIN, {})
    losses = losses_alone(dense, small, products, BATCHES, objective())
    assert len(losses) == 2
    assert max(map(abs, losses.values())) < 1e-6
