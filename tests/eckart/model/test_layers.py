"""A low-rank layer computes x times the product of its factors, and replacing a target changes nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from eckart.model.layers import (
    LowRankEmbedding,
    LowRankLinear,
    low_rank_like,
)
from tests import tiny


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 2**20))
def test_the_layer_computes_x_times_the_product_of_its_factors(rows, columns, rank, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = LowRankLinear(columns, rows, rank, bias).double()
    for parameter in layer.parameters():  # which are born without values
        nn.init.normal_(parameter, generator=generator)
    x = torch.randn(2, 3, columns, generator=generator, dtype=torch.float64)
    approximation = layer.left @ layer.right
    torch.testing.assert_close(layer(x), nn.functional.linear(x, approximation, layer.bias))
    assert layer.rank == rank
    assert sum(p.numel() for p in layer.parameters()) == rank * (rows + columns) + rows * bias


def test_factorizing_a_target_changes_nothing_else():
    model = tiny.bert()
    name = "bert.encoder.layer.0.intermediate.dense"
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tiny.factorize_layer(model, name, 2)
    after = model.state_dict()
    assert set(before) - set(after) == {f"{name}.weight"}
    assert set(after) - set(before) == {f"{name}.left", f"{name}.right"}
    assert all(torch.equal(after[key], before[key]) for key in set(before) & set(after))


def test_a_low_rank_embedding_looks_up_rows_of_the_product():
    """Also with a gate and a residual of one row."""
    torch.manual_seed(0)
    layer = LowRankEmbedding(7, 5, 2, bias=False, rows=1).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.rows.fill_(3)
    layer.gate = torch.tensor([0.5, 2.0], dtype=torch.float64)
    ids = torch.tensor([[0, 6, 6], [2, 1, 0]])
    torch.testing.assert_close(layer(ids), layer.dense().T[ids])
    expected = (layer.left * layer.gate) @ layer.right
    expected[3] += layer.residual[0]
    torch.testing.assert_close(layer.dense(), expected)


def test_a_layer_on_the_meta_device_stays_there():
    """As when transformers builds a model before it loads the weights."""
    with torch.device("meta"):
        module = nn.Linear(5, 3)
    assert {parameter.device.type for parameter in low_rank_like(module, 2).parameters()} == {"meta"}


def test_reading_the_weight_costs_nothing() -> None:
    """T5 reads the type of the weight of its last layer in every forward."""
    model = tiny.t5().eval()
    ids = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
    with torch.no_grad(), FlopCounterMode(display=False) as dense:
        model(**ids)
    tiny.factorize(model, ids, lambda _: 1)
    with torch.no_grad(), FlopCounterMode(display=False) as small:
        model(**ids)
    assert small.get_total_flops() < dense.get_total_flops()
