"""A low-rank layer computes x times the product of its factors, and replacing a target changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from eckart.model.layers import (
    HeadRows,
    LowRankEmbedding,
    LowRankLayer,
    LowRankLinear,
    PivotedEmbedding,
    PivotedLinear,
    low_rank_like,
)
from tests import tiny


def drawn(layer: LowRankLayer) -> LowRankLayer:
    for parameter in layer.parameters():  # which are born without values
        nn.init.normal_(parameter)
    return layer


def old_state(layer: LowRankLayer) -> dict[str, Tensor]:
    """Return the state of `layer` as it was when factors were parameters, those of embeddings `(rank, vocabulary)`."""
    state = layer.state_dict()
    for old, new in layer.renamed().items():
        if new in state:
            values = state.pop(new)
            state[old] = values.T if layer.reads_ids and old in ("right", "residual") else values
    return state


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(0, 2**20))
def test_the_layer_computes_x_times_the_product_of_its_factors(rows, columns, rank, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = LowRankLinear(columns, rows, rank, bias).double()
    for parameter in layer.parameters():  # which are born without values
        nn.init.normal_(parameter, generator=generator)
    x = torch.randn(2, 3, columns, generator=generator, dtype=torch.float64)
    approximation = layer.left.weight @ layer.right.weight
    torch.testing.assert_close(layer(x), nn.functional.linear(x, approximation, layer.bias))
    assert layer.rank == rank
    assert sum(p.numel() for p in layer.parameters()) == rank * (rows + columns) + rows * bias


def test_factorizing_a_target_changes_nothing_else():
    model = tiny.bert()
    name = "bert.encoder.layer.0.intermediate.dense"
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tiny.factorize_layer(model, name, 2)
    after = model.state_dict()
    assert set(before) - set(after) == {f"{name}.weight", f"{name}.bias"}
    assert set(after) - set(before) == {f"{name}.left.weight", f"{name}.left.bias", f"{name}.right.weight"}
    assert torch.equal(after[f"{name}.left.bias"], before[f"{name}.bias"])
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
    expected = (layer.left.weight * layer.gate) @ layer.right.weight.T
    expected[3] += layer.residual.weight[:, 0]
    torch.testing.assert_close(layer.dense(), expected)


def test_a_layer_on_the_meta_device_stays_there():
    """As when transformers builds a model before it loads the weights."""
    with torch.device("meta"):
        module = nn.Linear(5, 3)
    assert {parameter.device.type for parameter in low_rank_like(module, 2).parameters()} == {"meta"}


@pytest.mark.parametrize("build", [partial(nn.Linear, 7, 5), partial(Conv1D, 5, 7), partial(nn.Embedding, 7, 5)])
def test_the_weight_is_the_product_as_the_dense_module_stores_it(build: Callable[[], nn.Module]) -> None:
    """Code that reads weights gets its values and gradients, and cannot change it, since it would have no effect."""
    module = build()
    layer = drawn(low_rank_like(module, 2))
    product = layer.dense() if isinstance(module, nn.Linear) else layer.dense().T
    assert (layer.weight.shape, layer.weight.dtype) == (module.weight.shape, module.weight.dtype)
    torch.testing.assert_close(layer.weight + 0, product)
    layer.weight.square().sum().backward()
    (expected,) = torch.autograd.grad(product.square().sum(), [layer.left.weight])
    torch.testing.assert_close(layer.left.weight.grad, expected)
    assert torch.equal(layer.weight.data, product)
    assert not layer.weight.data.clone().requires_grad
    changes: list[Callable[[Tensor], object]] = [
        lambda weight: weight.add_(1),
        lambda weight: weight.data.add_(1),
        lambda weight: nn.init.zeros_(weight),
        lambda weight: torch.add(product, 1, out=weight),
    ]
    for change in changes:
        with torch.no_grad(), pytest.raises(RuntimeError, match="factors"):
            change(layer.weight)
    with pytest.raises(RuntimeError, match="factors"):
        layer.weight.data += 1
    with pytest.raises(RuntimeError, match="clone"):
        layer.weight.data_ptr()  # of memory that would be free again


@pytest.mark.parametrize(
    "build",
    [
        lambda: LowRankLinear(7, 5, 2, bias=True, rows=2),
        lambda: LowRankEmbedding(7, 5, 2, bias=False, rows=2),
        lambda: PivotedLinear(7, 5, 2, bias=True),
        lambda: PivotedEmbedding(7, 5, 2, bias=False),
        lambda: HeadRows(7, 4, 2, 1, bias=True),
    ],
)
def test_a_state_of_the_time_when_factors_were_parameters_is_loaded(build: Callable[[], LowRankLayer]) -> None:
    layer, other = drawn(build()), nn.ModuleDict({"inside": drawn(build())})
    other.load_state_dict({f"inside.{name}": values for name, values in old_state(layer).items()})
    assert all(torch.equal(values, layer.state_dict()[name]) for name, values in other["inside"].state_dict().items())


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


def test_rows_of_an_embedding_are_added_in_mixed_precision():
    """There `left` computes in bfloat16, and the rows are looked up as they are."""
    layer = drawn(LowRankEmbedding(7, 5, 2, bias=False, rows=2))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(torch.arange(7))
    torch.testing.assert_close(found.float(), layer(torch.arange(7)), rtol=0.02, atol=0.02)
