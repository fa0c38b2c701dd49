"""What a benchmark counts as a module, and how it rounds weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.bits import round_weights
from benchmarks.modules import Stopwatch, modules_to_time
from eckart.model.layers import low_rank_like
from tests import tiny


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (
            "bert",  # attention and three feed-forward layers, as in DRONE's tables 5 and 6
            {
                "bert.encoder.layer.*.attention.self": 2,
                "bert.encoder.layer.*.attention.output.dense": 2,
                "bert.encoder.layer.*.intermediate.dense": 2,
                "bert.encoder.layer.*.output.dense": 2,
            },
        ),
        ("lstm", {"model.layers.*": 2, "lm_head": 1}),  # as in its table 4
    ],
)
def test_rows_are_the_modules_of_the_paper_and_add_up(name: str, rows: dict[str, int]) -> None:
    model = tiny.ARCHITECTURES[name].build().eval()
    linear = [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = modules_to_time(model, [layer for layer in linear if "pooler" not in layer and layer != "classifier"])
    assert {title: len(names) for title, names in found.items()} == rows
    watch = Stopwatch(model, found)
    watch.forward({"input_ids": torch.ones(1, 4, dtype=torch.long)})
    (seconds,) = watch.seconds
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])


def test_each_factor_is_rounded_to_its_own_step_and_nothing_else_is() -> None:
    model = nn.ModuleDict({"first": low_rank_like(nn.Linear(8, 6), 2), "second": nn.Linear(4, 4)})
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    round_weights(model, ["first"], bits=3)
    for name, parameter in model.named_parameters():
        if name in ("first.left.weight", "first.right.weight"):
            steps = 3 * parameter / before[name].abs().max()  # integers from -3 to 3
            torch.testing.assert_close(steps, (3 * before[name] / before[name].abs().max()).round())
        else:
            assert torch.equal(parameter, before[name])
