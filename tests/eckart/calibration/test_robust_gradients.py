"""Clipped gradients and ends that do not count, in the second moment of output gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from eckart.calibration.losses import causal_loss
from eckart.calibration.robust_gradients import RobustGradients
from eckart.calibration.statistics import collect
from eckart.model.targets import Target, find_targets
from tests import tiny

LEMS, ROBUST = RobustGradients((0.1, 10), 0.125), RobustGradients((0.5, 1.5), 0.125)


class Given(nn.Module):
    """y = x, with a loss whose gradient by y is `delta` of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, delta: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.map(x) * delta).sum() / len(x))


def moment(deltas: list[list[float]], masks: list[list[int]] | None, robust: RobustGradients) -> float:
    """Return C_out of a target with one output, for gradients `(examples, tokens)`."""
    delta = torch.tensor(deltas, dtype=torch.float32).unsqueeze(-1)
    batch = {"x": torch.ones_like(delta), "delta": delta}
    if masks:
        batch["attention_mask"] = torch.tensor(masks)
    target = Target(name="map", out_features=1, in_features=1, input_of="map")
    statistics = collect(Given(), [batch], [target], ["inputs", "output_gradients"], robust=robust)
    tokens = torch.tensor(masks).sum() / len(masks) if masks else delta.shape[1]
    assert statistics["tokens"]["map"] == statistics["inputs"]["map"] == tokens  # inputs all count
    return float(statistics["output_gradients"]["map"])


def test_clip_solved_by_hand():
    """Norms 1, 1, 10, 0: the mean of those that have a gradient is 4, and the limits are 2 and 8."""
    assert moment([[1, -1, 10, 0]], None, RobustGradients((0.5, 2))) == pytest.approx(4 + 4 + 64)


def test_each_example_has_a_mean_of_its_own_to_which_padding_does_not_belong():
    """The limits of the second example are 0.75 and 1.5 · 2 = 3."""
    deltas, masks = [[1, -1, 10, 0], [1, 2, 9, 9]], [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert moment(deltas, masks, RobustGradients((0.5, 2))) == pytest.approx((4 + 4 + 64 + 1 + 4) / 2)


def test_edges_solved_by_hand():
    """A quarter of 8 tokens and of 5 are 2 and 1 at each end; the 4 and 3 that are left stand for 8 and 5."""
    deltas = [[9, 9, 1, 2, 3, 4, 9, 9], [7, 7, 9, 1, 2, 3, 9, 7]]
    masks = [[1] * 8, [0, 0, 1, 1, 1, 1, 1, 0]]
    expected = ((1 + 4 + 9 + 16) * 8 / 4 + (1 + 4 + 9) * 5 / 3) / 2
    assert moment(deltas, masks, RobustGradients(edges=0.25)) == pytest.approx(expected)


def test_ends_do_not_count_for_the_mean_either():
    assert moment([[99, 1, 1, 4, 99]], None, RobustGradients((0, 1), 0.2)) == pytest.approx((1 + 1 + 4) * 5 / 3)


@pytest.mark.parametrize("batches", [1, 3])
def test_a_causal_model_has_the_same_statistics_for_any_batches_and_padding(batches):
    """Also in single precision, in which the first token's query gets a rounding error in place of a zero."""
    model, samples = tiny.causal_llama(), tiny.samples(6, 6, 24)
    targets = find_targets(model, labeled(tiny.collate(samples[:2]))).targets

    def gathered(size: int, more: int, robust: RobustGradients) -> dict[str, Tensor]:
        data = map(labeled, tiny.batches(samples, size, more))
        found = collect(model, data, targets, ["output_gradients"], causal_loss, robust=robust)
        return {name: value / value.norm() for name, value in found["output_gradients"].items()}

    alone, plain = gathered(1, 0, ROBUST), gathered(1, 0, RobustGradients())
    for name, value in gathered(batches, 29, ROBUST).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5)
    assert max(float((alone[name] - plain[name]).norm()) for name in plain) > 0.05


def labeled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def test_limits_that_no_norm_passes_change_no_bit():
    model = tiny.causal_llama()
    data = [labeled(batch) for batch in tiny.batches(tiny.samples(6), 3)]
    targets = find_targets(model, data[0]).targets
    plain, wide = (
        collect(model, data, targets, loss=causal_loss, robust=robust)
        for robust in (RobustGradients(), RobustGradients((0, float("inf"))))
    )
    for kind, tensors in plain.items():
        assert all(torch.equal(value, wide[kind][key]) for key, value in tensors.items())


def test_fisher_scores_are_of_the_gradients_as_they_are():
    """They are other papers' statistics."""
    model, data = tiny.bert(), tiny.batches(tiny.samples(6), 3)
    targets = find_targets(model, data[0]).targets
    plain, clipped = (
        collect(model, data, targets, ["fisher", "taylor"], robust=robust) for robust in (RobustGradients(), LEMS)
    )
    for kind, tensors in plain.items():
        assert all(torch.equal(value, clipped[kind][key]) for key, value in tensors.items())


def test_a_classifier_that_reads_the_first_token_has_gradients_at_an_edge_only():
    model, data = tiny.bert(), tiny.batches([(torch.arange(1, 13), 1)] * 2, 2)
    targets = find_targets(model, data[0]).targets
    with pytest.raises(ValueError, match=r"^bert\.encoder\.layer\.1\.\S+ .*\bedges\b"):
        collect(model, data, targets, ["output_gradients"], robust=LEMS)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"clip": (2, 10)}, "clip"), ({"clip": (0.1, 0.5)}, "clip"), ({"clip": 0.1}, "clip"), ({"edges": 0.5}, "edges")],
)
def test_settings_outside_their_range_are_an_error(wrong, name):
    with pytest.raises(ValueError, match=rf"^{name}="):
        RobustGradients(**wrong)
