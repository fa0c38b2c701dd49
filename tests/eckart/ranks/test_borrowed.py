"""Laws of borrowed ranks: they leave the weights as they are, and predicted losses are the recipe's own."""

from __future__ import annotations

import torch

from eckart.factorization.weighted_svd import spectrum
from eckart.factorization.weightings import ErrorNorm
from eckart.model.targets import find_targets, weight_of
from eckart.ranks.borrowed import Borrowed
from tests import tiny
from tests.eckart.ranks.test_tolerance import BATCHES, INPUTS, NONE, method, same, state


def test_the_weights_stay_and_losses_are_those_of_the_own_weighting() -> None:
    """The search that is borrowed factorizes as it goes, under another weighting."""
    model = tiny.bert()
    targets, before = find_targets(model, BATCHES[0]).targets, state(model)
    result = Borrowed(weighting=INPUTS, ranks=method(None)).search(
        tiny.search_problem(model, targets, NONE, BATCHES, 0.5)
    )
    assert any(rank is not None for rank in result.ranks.values())
    assert same(state(model), before)
    assert result.spectra is not None
    for target in targets:
        own = spectrum(weight_of(model.get_submodule(target.name)), ErrorNorm())
        torch.testing.assert_close(result.spectra[target.name], own)
