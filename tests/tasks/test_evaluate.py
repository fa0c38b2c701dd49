"""Sizes of a candidate's targets."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload

from eckart.model.targets import Tied, find_targets
from tasks.evaluate import _sizes
from tests import tiny


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_tied_weight_that_stays_dense_counts_once(offloaded: bool) -> None:
    model = tiny.causal_llama()
    targets = find_targets(model, {"input_ids": torch.ones(2, 7, dtype=torch.long)}, tied=True).targets
    if offloaded:  # then each module has a parameter of its own
        cpu_offload(model, torch.device("cpu"))
    for target, size in zip(targets, _sizes(model, targets, {}).values(), strict=True):
        assert (size.rank, size.parameters) == (None, target.parameters)
    assert any(isinstance(target, Tied) for target in targets)
