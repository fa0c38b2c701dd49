"""A graph in int8: smooth activations, weights with a scale for each output, tables of embeddings for each row."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eckart.calibration.losses import Batch
from eckart.onnx.running import explained, quiet, save_graph, weights_of
from eckart.onnx.smoothing import smooth

if TYPE_CHECKING:
    import onnx_ir as ir

_LARGEST = 63  # of seven bits


def quantize(file: Path, quantized: Path, calibration: Iterable[Batch] = ()) -> None:
    """Write what `export` wrote with weights in int8: of maps with a scale for each output, of embeddings for each row.

    Activations stay float32 between the maps and are rounded where one reads them, by the range that they have there.
    Weights take seven of the eight bits: processors without VNNI sum two products in 16 bits, and what overflows there
    is cut off. A dense model hardly notices; one in factors, whose first component is large, answers at chance.

    Args:
        calibration: rows like those that will come, by which activations are smoothed (eckart/onnx/smoothing.py);
            inputs of the graph, each `(batch, tokens)`. None: activations stay as they are.

    Raises:
        ExportError: onnxruntime cannot do it.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with (
        explained("cannot quantize what torch exported"),
        quiet(),
        tempfile.TemporaryDirectory(prefix=f".{quantized.name}-", dir=quantized.parent) as folder,
    ):
        smoothed, rounded = Path(folder) / "smooth.onnx", Path(folder) / "rounded.onnx"
        smooth(file, smoothed, calibration)
        quantize_dynamic(
            smoothed,
            rounded,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=weights_of(file).exists(),
        )
        _round_tables(rounded, quantized)


def _round_tables(file: Path, rounded: Path) -> None:
    """Round what rows are looked up in, and heads that have such a table for their weight, which then multiply in int8.

    `quantize_dynamic` has one scale for all rows, and makes the weight of such a head float32 anew with each token.
    """
    import onnx_ir as ir

    model = ir.load(file)
    for table in list(model.graph.initializers.values()):
        lookups, heads = _readers(table)
        every = len(lookups) + len(heads) == len(table.uses())
        if lookups and every and np.isfinite(table.const_value.numpy()).all():  # type: ignore[union-attr]
            _round_table(model.graph, table, lookups, heads)
    save_graph(model, rounded, like=file)


def _readers(table: ir.Value) -> tuple[list[ir.Node], list[ir.Node]]:
    """Nodes that look rows of a weight up, and those that transpose it for a product with all of them."""
    import onnx_ir as ir

    nodes, weight = table.consumers(), table.const_value
    if weight is None or len(weight.shape) != 2 or weight.dtype != ir.DataType.FLOAT:
        return [], []
    lookups = [node for node in nodes if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0]
    heads = [
        node
        for node in nodes
        if node.op_type == "Transpose"
        and all(user.op_type == "MatMul" and place == 1 for user, place in node.outputs[0].uses())
    ]
    return lookups, heads


def _round_table(graph: ir.Graph, table: ir.Value, lookups: list[ir.Node], heads: list[ir.Node]) -> None:
    import onnx_ir as ir

    assert table.const_value is not None
    assert table.name is not None
    weight = torch.from_numpy(table.const_value.numpy().copy())
    steps = weight.abs().amax(1).clamp(min=torch.finfo(weight.dtype).tiny) / _LARGEST
    rounded = (weight / steps.unsqueeze(1)).round().to(torch.int8)
    integers = _initializer(graph, f"{table.name}.int8", rounded)
    of_rows = _initializer(graph, f"{table.name}.steps_of_rows", steps.unsqueeze(1))
    for lookup in lookups:
        ids = lookup.inputs[1]
        row, step = ir.node("Gather", [integers, ids]), ir.node("Gather", [of_rows, ids])
        exact = ir.node("Cast", row.outputs, {"to": ir.DataType.FLOAT})
        _put(graph, lookup, row, step, exact, ir.node("Mul", [exact.outputs[0], step.outputs[0]]))
    for head in heads:
        of_columns = _initializer(graph, f"{head.outputs[0].name}.steps", steps)
        columns = ir.node("Transpose", [integers], dict(head.attributes))
        graph.insert_before(head, columns)
        for product in head.outputs[0].consumers():
            read = ir.node("DynamicQuantizeLinear", product.inputs[:1], num_outputs=3)
            inputs, scale, zero = read.outputs
            sums = ir.node("MatMulInteger", [inputs, columns.outputs[0], zero])
            exact = ir.node("Cast", sums.outputs, {"to": ir.DataType.FLOAT})
            both = ir.node("Mul", [scale, of_columns])
            _put(graph, product, read, sums, exact, both, ir.node("Mul", [exact.outputs[0], both.outputs[0]]))
        graph.remove(head)
    del graph.initializers[table.name]


def _initializer(graph: ir.Graph, name: str, values: Tensor) -> ir.Value:
    import onnx_ir as ir

    value = ir.Value(name=name, const_value=ir.tensor(values.numpy(), name=name))
    graph.register_initializer(value)
    return value


def _put(graph: ir.Graph, node: ir.Node, *others: ir.Node) -> None:
    """Have `others`, of which the last gives what `node` gave, take its place."""
    from onnx_ir.convenience import replace_nodes_and_values

    replace_nodes_and_values(graph, node, [node], others, node.outputs, others[-1].outputs)
