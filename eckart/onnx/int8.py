"""Quantization of a graph to int8, with smoothed activations and a scale for each output or embedding row."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.convenience import replace_nodes_and_values
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor

from eckart.model.batches import Batch
from eckart.onnx.graph_edits import save_graph
from eckart.onnx.running import explained, quiet, weights_of
from eckart.onnx.smoothing import smooth

_LARGEST = 63  # largest integer of seven bits with a sign


def quantize(file: Path, quantized: Path, calibration: Iterable[Batch] = ()) -> None:
    """Write the graph in `file` to the file `quantized`, with int8 weights.

    Linear layers get one scale for each output, and embeddings one for each row. Activations stay float32 between
    linear layers. Each layer rounds its inputs to int8, by the range that they have at run time.

    Weights use seven of the eight bits, because processors without VNNI add two products in 16 bits and cut off
    overflow. With eight bits, this overflow hardly changes a dense model, but a factorized one predicts at chance: its
    first component is large.

    Args:
        file: a graph that `export` wrote.
        calibration: typical inputs of the graph, each `(batch, tokens)`, for smoothing activations
            (eckart/onnx/smoothing.py). If empty, activations are not smoothed.

    Raises:
        ExportError: onnxruntime cannot quantize the graph.
    """
    with (
        explained("cannot quantize the file"),
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
    """Round the tables of embeddings in `file` to int8, with one scale for each row, and write the graph to `rounded`.

    Heads that share a table then multiply in int8. `quantize_dynamic` would use one scale for all rows, and convert the
    weight of such a head to float32 for each token.
    """
    model = ir.load(file)
    for table in list(model.graph.initializers.values()):
        lookups, heads = _readers(table)
        all_known = len(lookups) + len(heads) == len(table.uses())
        if lookups and all_known and np.isfinite(table.const_value.numpy()).all():  # type: ignore[union-attr]
            _round_table(model.graph, table, lookups, heads)
    save_graph(model, rounded, like=file)


def _readers(table: ir.Value) -> tuple[list[ir.Node], list[ir.Node]]:
    """Return the nodes that look up rows of a table, and the nodes that transpose the table for a product."""
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
    value = ir.Value(name=name, const_value=ir.tensor(values.numpy(), name=name))
    graph.register_initializer(value)
    return value


def _put(graph: ir.Graph, node: ir.Node, *others: ir.Node) -> None:
    """Replace `node` with the nodes `others`, the last of which computes its output."""
    replace_nodes_and_values(graph, node, [node], others, node.outputs, others[-1].outputs)
