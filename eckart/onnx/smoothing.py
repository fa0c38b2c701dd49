"""Smoothing: the same graph, whose activations lose less where one range of eight bits is for all of their channels.

A few channels' values are often a hundred times the others', which then share a few of 255 steps. Dividing channel j of
what a product reads by s_j, and multiplying row j of its weight by s_j, changes nothing but what rounding loses. With a
share α of what is hard to round left to the weights::

    s_j = max |X_j|^α ÷ max |W_j|^(1 − α).

Source: SmoothQuant (Xiao et al., ICML 2023), equations 3 and 4, where α is 1/2. They divide what norms give. Here it is
all that some node makes which can as well make it smaller: a norm by its scale; a product by the columns of its weight,
so the components between two factors, and what a gate lets through by what it multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eckart.calibration.losses import Batch
from eckart.onnx.running import runner, save_graph

if TYPE_CHECKING:
    import onnx_ir as ir

_SHARE = 0.65  # α (choice)
_LEAST = 0.1  # of a maximum, ÷ the median one: what calibration never saw must not fill the range where it is seen
_OF_CHANNELS = ("Relu", "Reshape", "Slice")  # of as many channels before as behind, each by itself
_WITHOUT_STEPS = 4  # inputs of a Slice, which could turn channels around by the fifth
_MAXIMUM = "maximum."  # how the names of outputs begin that tell them


@dataclass(frozen=True)
class _Weight:
    """An initializer that one node reads, and its axis of the channels in question."""

    value: ir.Value
    axis: int

    @property
    def channels(self) -> int:
        assert self.value.const_value is not None
        return self.value.const_value.numpy().shape[self.axis]

    def read(self) -> Tensor:
        assert self.value.const_value is not None
        return torch.from_numpy(self.value.const_value.numpy().copy()).movedim(self.axis, -1)

    def scale(self, factors: Tensor) -> None:
        import onnx_ir as ir

        scaled = (self.read() * factors).movedim(-1, self.axis).contiguous()
        self.value.const_value = ir.tensor(scaled.numpy(), name=self.value.name)


@dataclass(frozen=True)
class _Activation:
    """What products read, and nothing else does.

    Attributes:
        made_by: whose division divides it.
        read_by: the products' weights.
    """

    value: ir.Value
    channels: int
    made_by: Sequence[_Weight]
    read_by: Sequence[_Weight]


def smooth(file: Path, smoothed: Path, batches: Iterable[Batch]) -> None:
    """Write `file` as a graph of the same nodes and answers, whose activations are smooth where that costs nothing.

    Args:
        batches: rows that tell how large the channels are; inputs of the graph, each `(batch, tokens)`.
    """
    import onnx_ir as ir

    model = ir.load(file)
    activations = _activations(model.graph)
    maxima = _maxima(file, smoothed.with_name("maxima.onnx"), activations, batches) if activations else {}
    for activation in activations if maxima else ():
        weights = torch.stack([weight.read().abs().flatten(0, -2).amax(0) for weight in activation.read_by]).amax(0)
        values = maxima[f"{_MAXIMUM}{activation.value.name}"]
        factors = _positive(values) ** _SHARE / _positive(weights) ** (1 - _SHARE)
        for weight in activation.made_by:
            weight.scale(1 / factors)
        for weight in activation.read_by:
            weight.scale(factors)
    for value in model.graph.initializers.values():
        value.shape = value.type = None  # a tool that transposes a weight refuses the file for the shape that is noted
    save_graph(model, smoothed, like=file)


def _positive(maxima: Tensor) -> Tensor:
    """`(channels,)`; ones where all are zero."""
    used = maxima[maxima > 0]
    return maxima.clamp(min=_LEAST * float(used.median())) if len(used) else torch.ones_like(maxima)


def _activations(graph: ir.Graph) -> list[_Activation]:
    """Those that can be smoothed, in order of execution."""
    found = []
    for node in graph:
        for value in node.outputs:
            weights = [_weight(user, place) for user, place in value.uses()]
            read_by = [weight for weight in weights if weight]
            if not read_by or len(read_by) < len(weights) or value.is_graph_output():
                continue
            channels = read_by[0].channels
            if made_by := _makers(value, channels):
                found.append(_Activation(value, channels, made_by, read_by))
    return found


def _weight(product: ir.Node, place: int) -> _Weight | None:
    """Of a product that reads an activation at `place`, by its inputs."""
    if place or product.op_type not in ("MatMul", "Gemm") or product.attributes.get_int("transA", 0):
        return None
    return _own(product.inputs[1], product.attributes.get_int("transB", 0))


def _makers(value: ir.Value, channels: int) -> list[_Weight] | None:
    """What divides `value` where it is divided; None where nothing does."""
    node = value.producer()
    if node is None or not node.inputs:
        return None
    first, *others = node.inputs
    parts: list[_Weight | None]
    if node.op_type == "MatMul":
        parts = [_own(others[0], 1, channels)]
    elif node.op_type == "Gemm":
        parts = [_own(others[0], 1 - node.attributes.get_int("transB", 0), channels)]
        parts += [_own(bias, -1, channels) for bias in others[1:]]
    elif node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        parts = [_own(first, 1, channels)]
    elif node.op_type in ("LayerNormalization", "RMSNormalization"):
        parts = [_own(each, -1, channels) for each in others]
    elif node.op_type == "Add":
        return _all([_part(each, channels) for each in node.inputs])
    elif node.op_type == "Mul":
        return next((found for each in node.inputs if (found := _part(each, channels))), None)
    elif node.op_type in _OF_CHANNELS and len(node.inputs) <= _WITHOUT_STEPS:
        return _of_node(first, channels)
    else:
        return None
    return _all([[part] if part else None for part in parts])


def _part(value: ir.Value | None, channels: int) -> list[_Weight] | None:
    """As `_makers`, of what one node reads, which is divided with it."""
    if own := _own(value, -1, channels):
        return [own]
    return _of_node(value, channels)


def _of_node(value: ir.Value | None, channels: int) -> list[_Weight] | None:
    if value is None or len(value.uses()) > 1 or value.is_graph_output():
        return None
    return _makers(value, channels)


def _all(parts: list[list[_Weight] | None]) -> list[_Weight] | None:
    return None if None in parts else [weight for part in parts if part for weight in part]


def _own(value: ir.Value | None, axis: int, channels: int | None = None) -> _Weight | None:
    """An initializer that no one else reads, and has that many channels there: a matrix or, at axis -1, a vector."""
    if value is None or not value.is_initializer() or len(value.uses()) > 1 or value.const_value is None:
        return None
    weight, dimensions = _Weight(value, axis), 1 if axis < 0 else 2
    fits = len(value.const_value.shape) == dimensions and channels in (None, weight.channels)
    return weight if fits and value.const_value.dtype.is_floating_point() else None


def _maxima(
    file: Path, measured: Path, activations: Iterable[_Activation], batches: Iterable[Batch]
) -> dict[str, Tensor]:
    """The largest magnitude of each channel; nothing where there are no batches.

    Args:
        measured: where the graph is written that tells them.
    """
    import onnx_ir as ir

    model = ir.load(file)
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    first = ir.Value(name="first_axis", const_value=ir.tensor([0], name="first_axis"))
    graph.register_initializer(first)
    graph.outputs.clear()
    for activation in activations:
        name = f"{_MAXIMUM}{activation.value.name}"
        shape = ir.Value(name=f"{name}.shape", const_value=ir.tensor([-1, activation.channels], name=f"{name}.shape"))
        graph.register_initializer(shape)
        rows = ir.node("Reshape", [values[activation.value.name], shape])
        magnitudes = ir.node("Abs", rows.outputs)
        largest = ir.node("ReduceMax", [magnitudes.outputs[0], first], {"keepdims": 0})
        graph.extend([rows, magnitudes, largest])
        (output,) = largest.outputs
        output.name, output.type, output.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape([activation.channels])
        graph.outputs.append(output)
    save_graph(model, measured, like=file)
    answer = runner(measured, torch.get_num_threads())
    found: dict[str, Tensor] = {}
    for batch in batches:
        found = {name: torch.maximum(found.get(name, values), values) for name, values in answer(batch).items()}
    return found
