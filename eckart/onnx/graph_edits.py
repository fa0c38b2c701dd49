"""Edits of exported graphs. Needs the extra `onnx`, so importers import this module only when they need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from eckart.onnx.running import KEPT, weights_of


def add_kept_logits(model: Any) -> None:
    """Add the optional input KEPT, the number of last tokens to compute logits for; 0: all.

    The head is half of the work of a small language model on a prompt, but generation needs only the logits of the last
    token. If the logits of a graph are a sum of products, the graph stays unchanged.
    """
    (logits,) = (value for value in model.graph.outputs if value.name == "logits")
    product = logits.producer()
    while product.op_type != "MatMul":  # skip nodes that bound or scale the logits
        makers = [value.producer() for value in product.inputs if value is not None]
        computed = [maker for maker in makers if maker is not None and maker.op_type != "Constant"]
        if len(computed) != 1:
            return
        (product,) = computed
    count = ir.Value(name=KEPT, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    # an initializer is the default value of an input
    count.const_value = ir.tensor(0, dtype=ir.DataType.INT64, name=KEPT)
    one, end = (
        ir.Value(name=f"{KEPT}.{name}", const_value=ir.tensor([number], name=f"{KEPT}.{name}"))
        for name, number in (("one", 1), ("end", torch.iinfo(torch.int64).max))
    )
    negative = ir.node("Neg", [count])
    start = ir.node("Reshape", [negative.outputs[0], one])
    last = ir.node("Slice", [product.inputs[0], start.outputs[0], end, one])
    model.graph.insert_before(product, [negative, start, last])
    product.replace_input_with(0, last.outputs[0])
    model.graph.inputs.append(count)
    for value in (count, one, end):
        model.graph.register_initializer(value)
    rows, _, classes = logits.shape
    logits.shape = ir.Shape([rows, "kept", classes])


def strip(model: Any) -> None:
    """Remove the exporter's stack traces: they contain paths of this machine and are larger than the graph.

    Also remove all shapes except those of inputs and outputs. onnx infers them, and otherwise a tool that transposes a
    weight would refuse the file, because the weight's shape would differ from the shape stored for it.
    """
    nodes = list(model.graph.all_nodes())
    values = [value for node in nodes for value in node.outputs]
    for value in (*values, *model.graph.initializers.values()):
        if not value.is_graph_output():
            value.shape = value.type = None
    for part in (model, model.graph, *nodes, *values, *model.graph.inputs, *model.graph.initializers.values()):
        part.metadata_props.clear()


def save_graph(model: ir.Model, file: Path, like: Path) -> None:
    """Write `model` to `file`; its weights get a separate file if those of the graph in the file `like` have one."""
    ir.save(model, file, external_data=weights_of(file).name if weights_of(like).exists() else None)
