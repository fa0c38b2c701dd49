"""Smoothing: a rescaling of channels before quantization, so that activations lose less in one common range of 8 bits.

A few channels are often a hundred times as large as the others. The others then use only a few of the 255 steps. If
channel j of a product's input is divided by s_j and row j of the weight is multiplied by s_j, nothing changes but the
rounding error. A share α of the difficulty is moved to the weights with::

    s_j = max |X_j|^α ÷ max |W_j|^(1 − α).

Source: SmoothQuant (Xiao et al., ICML 2023), equations 3 and 4, with α = 1/2. The paper divides the outputs of norms.
Here every output is divided if the weights of its node can absorb the division: the scale of a norm; the columns of a
product's weight, including the components between two factors; or one factor of a gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from eckart.model.batches import Batch
from eckart.onnx.graph_edits import save_graph
from eckart.onnx.running import runner

_SHARE = 0.65  # α (choice)
_LEAST = 0.1
"""Smallest maximum that a channel counts with, ÷ the median maximum. Without it, a channel that calibration hardly uses
would be scaled up so much that it fills the whole range as soon as it is used."""
_CHANNELWISE = ("Relu", "Reshape", "Slice")  # each output channel depends only on the same input channel
_WITHOUT_STEPS = 4  # largest number of inputs of a Slice; a fifth, the steps, could reverse the channels
_MAXIMUM = "maximum."  # prefix of the names of the outputs that are maxima of channels


@dataclass(frozen=True)
class _Weight:
    """Stored weight that only one node reads, and the axis of its channels."""

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
        scaled = (self.read() * factors).movedim(-1, self.axis).contiguous()
        self.value.const_value = ir.tensor(scaled.numpy(), name=self.value.name)


@dataclass(frozen=True)
class _Activation:
    """Activation that is read only by products.

    Attributes:
        made_by: weights that must be divided in order to divide the activation.
        read_by: weights of the products that read the activation; they are multiplied instead.
    """

    value: ir.Value
    channels: int
    made_by: Sequence[_Weight]
    read_by: Sequence[_Weight]


def smooth(file: Path, smoothed: Path, batches: Iterable[Batch]) -> None:
    """Write the graph in `file` to the file `smoothed`: same nodes and outputs, but smoothed activations.

    Activations that could only be smoothed by an additional node stay as they are.

    Args:
        batches: typical inputs of the graph, each `(batch, tokens)`, on which the channels are measured.
    """
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
        value.shape = value.type = None  # else a tool that transposes a weight would find the noted shape wrong
    save_graph(model, smoothed, like=file)


def _positive(maxima: Tensor) -> Tensor:
    """Raise small maxima `(channels,)` to a share of their median; return ones if all are zero."""
    used = maxima[maxima > 0]
    return maxima.clamp(min=_LEAST * float(used.median())) if len(used) else torch.ones_like(maxima)


def _activations(graph: ir.Graph) -> list[_Activation]:
    """Return the activations whose scales can move into the weights on both sides of them, in order of execution.

    All readers of such an activation are products with weights, and weights before it can absorb the inverse scales.
    """
    activations = []
    for node in graph:
        for value in node.outputs:
            weights = [_weight(user, place) for user, place in value.uses()]
            read_by = [weight for weight in weights if weight]
            if not read_by or len(read_by) < len(weights) or value.is_graph_output():
                continue
            channels = read_by[0].channels
            if made_by := _makers(value, channels):
                activations.append(_Activation(value, channels, made_by, read_by))
    return activations


def _weight(product: ir.Node, place: int) -> _Weight | None:
    """Return the weight by which the node `product` multiplies the activation that it reads as input number `place`.

    None if the node does not multiply this input by a stored weight.
    """
    if place or product.op_type not in ("MatMul", "Gemm") or product.attributes.get_int("transA", 0):
        return None
    return _owned(product.inputs[1], product.attributes.get_int("transB", 0))


def _makers(value: ir.Value, channels: int) -> list[_Weight] | None:
    """Return the weights that must be divided to divide `value`, or None if its node cannot absorb the division."""
    node = value.producer()
    if node is None or not node.inputs:
        return None
    first, *others = node.inputs
    parts: list[_Weight | None]
    if node.op_type == "MatMul":
        parts = [_owned(others[0], 1, channels)]
    elif node.op_type == "Gemm":
        parts = [_owned(others[0], 1 - node.attributes.get_int("transB", 0), channels)]
        parts += [_owned(bias, -1, channels) for bias in others[1:]]
    elif node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        parts = [_owned(first, 1, channels)]
    elif node.op_type in ("LayerNormalization", "RMSNormalization"):
        parts = [_owned(weight, -1, channels) for weight in others]
    elif node.op_type == "Add":
        return _all([_makers_or_own(term, channels) for term in node.inputs])
    elif node.op_type == "Mul":
        return next((makers for factor in node.inputs if (makers := _makers_or_own(factor, channels))), None)
    elif node.op_type in _CHANNELWISE and len(node.inputs) <= _WITHOUT_STEPS:
        return _makers_of_unshared(first, channels)
    else:
        return None
    return _all([[part] if part else None for part in parts])


def _makers_or_own(value: ir.Value | None, channels: int) -> list[_Weight] | None:
    """Return `value` itself if it is a stored weight, or else its makers (see `_makers`)."""
    if own := _owned(value, -1, channels):
        return [own]
    return _makers_of_unshared(value, channels)


def _makers_of_unshared(value: ir.Value | None, channels: int) -> list[_Weight] | None:
    """Return the makers of `value`, or None if another node reads it, too."""
    if value is None or len(value.uses()) > 1 or value.is_graph_output():
        return None
    return _makers(value, channels)


def _all(parts: list[list[_Weight] | None]) -> list[_Weight] | None:
    return None if None in parts else [weight for part in parts if part for weight in part]


def _owned(value: ir.Value | None, axis: int, channels: int | None = None) -> _Weight | None:
    """Return `value` as a weight with its channels along `axis`; None if it cannot be scaled.

    It must be a stored matrix, or for axis -1 a vector, with this number of channels, that only one node reads.
    """
    if value is None or not value.is_initializer() or len(value.uses()) > 1 or value.const_value is None:
        return None
    weight, dimensions = _Weight(value, axis), 1 if axis < 0 else 2
    fits = len(value.const_value.shape) == dimensions and channels in (None, weight.channels)
    return weight if fits and value.const_value.dtype.is_floating_point() else None


def _maxima(
    file: Path, measured: Path, activations: Iterable[_Activation], batches: Iterable[Batch]
) -> dict[str, Tensor]:
    """Measure the largest magnitude of each channel of the activations.

    Args:
        measured: path to write the graph to that measures them.

    Returns:
        _MAXIMUM + name of the activation → maxima `(channels,)`; empty if there are no batches.
    """
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
    maxima: dict[str, Tensor] = {}
    for batch in batches:
        maxima = {name: torch.maximum(maxima.get(name, values), values) for name, values in answer(batch).items()}
    return maxima
