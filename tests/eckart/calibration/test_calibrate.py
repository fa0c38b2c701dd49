"""Calibration in several passes: the statistics are those of one pass, and warnings name what misleads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

from eckart.calibration.calibrate import calibrate
from eckart.calibration.losses import mean_loss_times_batch
from eckart.calibration.passes import passes
from eckart.calibration.statistics import StatisticKind, collect
from eckart.calibration.warnings import hidden_sounds_warning
from eckart.model.batches import Batch, without_labels
from eckart.model.targets import find_targets
from tests import tiny

SAMPLES = tiny.samples(4)
KINDS = ("inputs", "output_gradients")


def test_each_group_has_a_pass_and_a_warning_of_its_own() -> None:
    """Four examples have fewer tokens than the layers have inputs."""
    model, batches = tiny.bert(), tiny.batches(SAMPLES, 2)
    targets = find_targets(model, batches[0]).targets
    groups, said, passed = passes(targets, 1), [], []

    def once_more() -> list[dict[str, torch.Tensor]]:
        passed.append(len(passed))
        return batches

    parts = list(
        calibrate(
            model, once_more, groups, KINDS, mean_loss_times_batch, examples=4, checked=batches[:1], warn=said.append
        )
    )
    assert len(parts) == len(groups) == len(passed) > 1
    whole = collect(model, batches, targets, KINDS)
    for kind in KINDS:
        together = {key: value for part in parts for key, value in part[kind].items()}
        assert together.keys() == whole[kind].keys()
        assert all(torch.equal(value, whole[kind][key]) for key, value in together.items())
    underflow, few, no_gradient = said[2::3], said[3::3], said[4::3]
    assert {*said[:2], *underflow, *no_gradient} == {None}
    assert len(few) == len(underflow) == len(groups)
    assert all("fewer tokens" in str(message) for message in few[:2])


@pytest.mark.parametrize("kinds", [("inputs", "output_gradients"), ("fisher",), ("taylor",), ("gradients",)])
def test_underflow_is_tested_by_what_is_gathered_until_it_is_found(
    kinds: Sequence[StatisticKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments of all layers may not fit in memory, nor those that a recipe does not read."""
    gathered: list[tuple[int, Collection[str]]] = []

    def noted(model: Any, batches: Any, targets: Any, kinds: Collection[StatisticKind], loss: Any) -> Any:
        gathered.append((len(targets), kinds))
        return collect(model, batches, targets, kinds, loss)

    monkeypatch.setattr("eckart.calibration.warnings.collect", noted)
    model, batches = tiny.bert().half(), tiny.batches(SAMPLES, 2)
    groups = passes(find_targets(model, batches[0]).targets, 1)
    for factor, found in ((1e-5, 1), (1.0, 0)):
        said: list[str | None] = []

        def scaled(model: Any, batch: Batch, factor: float = factor) -> torch.Tensor:
            return factor * mean_loss_times_batch(model, batch)

        gathered.clear()
        given = calibrate(model, lambda: batches, groups, kinds, scaled, examples=4, checked=batches, warn=said.append)
        assert len(list(given)) == len(groups)
        assert sum("underflow" in str(message) for message in said) == found
        assert max(size for size, _ in gathered) == max(len(group.targets) for group in groups)
        assert all({*chosen} <= {*kinds} for _, chosen in gathered)


def test_a_pass_whose_targets_the_loss_does_not_reach_has_statistics_of_zero() -> None:
    """An embedding model's pooler has them, in a pass of its own as in one with all others. A warning names it."""
    said: list[str | None] = []
    model = tiny.bert().bert
    batches = [without_labels(batch) for batch in tiny.batches(SAMPLES, 2)]
    targets = find_targets(model, batches[0]).targets

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch).last_hidden_state.square().sum()

    one, many = (
        [
            *calibrate(
                model,
                lambda: batches,
                passes(targets, layers),
                KINDS,
                loss,
                examples=4,
                checked=batches[:1],
                warn=said.append,
            )
        ]
        for layers in (None, 1)
    )
    for kind in KINDS:
        together = {key: value for part in many for key, value in part[kind].items()}
        assert together.keys() == one[0][kind].keys()
        assert all(torch.equal(value, one[0][kind][key]) for key, value in together.items())
    assert not one[0]["output_gradients"][targets[-1].name].any()
    warned = [message for message in said if message and "does not depend on 1 of" in message]
    assert len(warned) == 2
    assert all("pooler.dense" in message for message in warned)


def test_without_a_group_only_padding_is_checked() -> None:
    """GPT-2 counts positions from the first column, where it is not told them."""
    left = tiny.batches(tiny.samples(12), 4, side="left")
    untold = [{name: values for name, values in batch.items() if name != "position_ids"} for batch in left]
    said: list[str | None] = []
    given = calibrate(
        tiny.gpt2(), lambda: untold, [], [], mean_loss_times_batch, examples=12, checked=untold, warn=said.append
    )
    assert list(given) == []
    assert [str(message).split()[0] for message in said if message] == ["padding"]


@pytest.mark.parametrize("name", ["feature_attention_mask", "input_features_mask"])
def test_hidden_parts_of_sounds_are_warned_of(name: str) -> None:
    """Layers that read sounds compute them, too."""
    mask = torch.ones(2, 5)
    assert hidden_sounds_warning([{name: mask}, {"attention_mask": torch.eye(2)}]) is None
    mask[1, 3:] = 0
    assert name in str(hidden_sounds_warning([{"input_ids": mask}, {name: mask}]))
