"""A plug-in for vLLM that runs compressed language models with their low-rank factors (`quant_method: eckart`).

This file is outside the package eckart and imports nothing from it, because vLLM needs older versions of transformers
than eckart. Install it into vLLM's environment with `pip install --no-deps`; vLLM finds it through the entry point
`vllm.general_plugins`.

vLLM fuses linear layers with the same inputs into one layer, such as `qkv_proj` or `gate_up_proj`. So the right factors
of these layers are also joined, and multiplied in one product.

Layers of narrowed MLPs have other shapes than the model's config says. Those that are dense run as vLLM's own layers.

With several devices, vLLM cuts some layers by their outputs and others by their inputs. Of a layer that is cut by
outputs, a device has these rows of the left factor, and the whole right factor. Of one that is cut by inputs, it has
these columns of the right factor, and the whole left factor; vLLM adds the devices' outputs. So devices exchange as
much as for dense layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_MERGE = "merge it with `eckart export --dense`, and serve that"
_QKV = {"q": 0, "k": 1, "v": 2}
_IN_FILES = {name: f"{name}.weight" for name in ("right", "left", "others", "residual")} | {"left_bias": "left.bias"}
"""Our name of a tensor → its name in a weights file of format 2, below the name of the layer; others have one name."""


def register() -> None:
    """Do nothing: vLLM calls this entry point in each of its processes, and the import has registered the plug-in."""


@dataclass(frozen=True)
class Part:
    """Storage of one of the linear layers that vLLM fused into a layer."""

    rank: int | None
    """Rank of the factors; None if the part is dense."""
    rows: int = 0
    """Number of rows of the sparse residual."""
    pivoted: bool = False
    """Whether the part is in pivoted storage (eckart/factorization/pivoted_storage.py)."""
    biased: bool = True
    """Whether the bias belongs to `left` in the weights file, if there is one; if not, vLLM loads it."""

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of this part in the weights file: our name → shape. A bias may be missing there."""
        if self.rank is None:
            return {"weight": (out_features, in_features)}
        right = {"right": (self.rank, in_features)}
        if self.pivoted:
            return {**right, "others": (out_features - self.rank, self.rank), "places": (out_features,)}
        residual = {"residual": (self.rows, in_features), "rows": (self.rows,)} if self.rows else {}
        bias = {"left_bias": (out_features,)} if self.biased else {}
        return {**right, "left": (out_features, self.rank), **bias, **residual}


@dataclass(frozen=True)
class Share:
    """What one device computes of a linear layer: some outputs from some inputs, or all."""

    outputs: slice
    inputs: slice

    def cut(self, name: str, values: Tensor) -> Tensor:
        """Return what the device needs of the tensor `name` of a weights file.

        Tensors that only say together which outputs they belong to stay whole; `finish` cuts them.
        """
        if name in ("left", "left_bias", "weight"):
            values = values[self.outputs]
        return values[:, self.inputs] if name in ("right", "residual", "weight") else values

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert pivots to a left factor, and leave out other devices' outputs; all `tensors` have been through `cut`.

        Returns:
            weight or right and left; also left_bias; with a residual, also residual and the positions `rows` in the
            device's outputs.
        """
        if "others" in tensors:
            others, places = tensors["others"], tensors["places"]
            identity = torch.eye(others.shape[1], dtype=others.dtype, device=others.device)
            left = torch.cat([identity, others]).index_select(0, places[self.outputs])
            return {"right": tensors["right"], "left": left}
        if "rows" in tensors:
            rows = tensors["rows"]
            here = (rows >= self.outputs.start) & (rows < self.outputs.stop)
            return {**tensors, "residual": tensors["residual"][here], "rows": rows[here] - self.outputs.start}
        return tensors


class LowRankMethod(LinearMethodBase):
    """Computes y = (x rightᵀ) leftᵀ for each part of a fused layer: x `(…, in)` → all their outputs `(…, out)`."""

    def __init__(self, parts: list[Part], in_files: Mapping[str, str] = _IN_FILES) -> None:
        """
        Args:
            in_files: our name of a tensor → its name in the weights file, where it is another.
        """
        self.parts, self.in_files = parts, in_files

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Allocate one flat parameter for each tensor name in the weights files, with the parts one after the other."""
        outs = output_partition_sizes if len(self.parts) > 1 else [sum(output_partition_sizes)]
        by_outputs, by_inputs = sum(outs) != output_size, input_size_per_partition != input_size
        if by_outputs and len(outs) < len(output_partition_sizes):
            raise ValueError(
                "several devices cannot share the factors of layers that are one in the weights file: set "
                f"tensor_parallel_size=1, or {_MERGE}"
            )
        place = layer.tp_rank * input_size_per_partition if by_inputs else 0
        inputs = slice(place, place + input_size_per_partition)
        layer.eckart_shares, layer.eckart_shapes, full = [], [], []
        for number, (part, out) in enumerate(zip(self.parts, outs, strict=True)):
            # Where devices outnumber the heads of keys and values, several have the same head.
            same = getattr(layer, "num_kv_head_replicas", 1) if number else 1
            place = layer.tp_rank // same * out if by_outputs else 0
            share = Share(slice(place, place + out), inputs)
            shapes = part.shapes(layer.tp_size // same * out if by_outputs else out, input_size)
            layer.eckart_shares.append(share)
            layer.eckart_shapes.append({name: share.cut(name, _shape(shape)).shape for name, shape in shapes.items()})
            full.append(shapes)
        for name in dict.fromkeys(name for shapes in full for name in shapes):
            sizes = [_numel(shapes.get(name)) for shapes in layer.eckart_shapes]
            dtype = {"places": torch.int32, "rows": torch.int64}.get(name, params_dtype)
            parameter = nn.Parameter(torch.zeros(sum(sizes), dtype=dtype), requires_grad=False)
            loader = _Loader(name, sizes, [shapes.get(name) for shapes in full], layer.eckart_shares)
            parameter.weight_loader = loader  # type: ignore[attr-defined]
            _put(layer, self.in_files.get(name, name), parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Split all tensors by part, convert pivots to factors, and join the right factors into one matrix."""
        names = dict.fromkeys(name for shapes in layer.eckart_shapes for name in shapes)
        stored = {name: list(_split(layer, name, self.in_files.get(name, name))) for name in names}
        for name in {self.in_files.get(name, name).partition(".")[0] for name in stored}:
            delattr(layer, name)
        rights, start = [], 0
        for number, share in enumerate(layer.eckart_shares):
            loaded = {name: values[number] for name, values in stored.items()}
            tensors = share.finish({name: values for name, values in loaded.items() if values is not None})
            end = start + share.outputs.stop - share.outputs.start
            bias = tensors.pop("left_bias", None)
            if bias is not None and getattr(layer, "bias", None) is not None:
                layer.bias.data[start:end] = bias
            start = end
            rights += [tensors.pop("right")] if "right" in tensors else []
            for name, values in tensors.items():
                _register(layer, f"{name}_{number}", values)
        _register(layer, "right", torch.cat(rights))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        components = linear(x, layer.right).split([part.rank for part in self.parts if part.rank is not None], -1)
        low_rank, outputs = iter(components), []
        for number, part in enumerate(self.parts):
            if part.rank is None:
                y = linear(x, getattr(layer, f"weight_{number}"))
            else:
                y = linear(next(low_rank), getattr(layer, f"left_{number}"))
            if part.rows:
                residual = linear(x, getattr(layer, f"residual_{number}"))
                y = y.index_add(-1, getattr(layer, f"rows_{number}"), residual)
            outputs.append(y)
        together = torch.cat(outputs, -1)
        return together if bias is None else together + bias


class _Narrowed(LinearMethodBase):  # type: ignore[misc]
    """Mixin for a layer that has other sizes than vLLM gives it.

    Args:
        name: name of the layer, for errors.
        shapes: shape `[out, in]` of each of the linear layers that vLLM fused into the layer.
        arguments: those of the other base class.
    """

    def __init__(self, name: str, shapes: list[list[int]], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.name, self.shapes = name, shapes

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **loading: Any,
    ) -> None:
        """Give `layer` its true sizes, by which vLLM then makes and loads weight and bias, and allocate the weight."""
        parts = len(output_partition_sizes) // len(self.shapes)  # 2 if the file has gate and up as one layer
        layer.input_size, outs = self.shapes[0][1], [out // parts for out, _ in self.shapes for _ in range(parts)]
        layer.output_size = sum(outs)
        layer.input_size_per_partition = self._share(layer.input_size, input_size // input_size_per_partition)
        devices = output_size // sum(output_partition_sizes)
        layer.output_partition_sizes = [self._share(out, devices) for out in outs]
        layer.output_size_per_partition = sum(layer.output_partition_sizes)
        if hasattr(layer, "output_sizes"):
            layer.output_sizes = outs
        sizes = (layer.input_size_per_partition, layer.output_partition_sizes, layer.input_size, layer.output_size)
        super().create_weights(layer, *sizes, params_dtype, **loading)

    def _share(self, size: int, devices: int) -> int:
        if size % devices:
            raise ValueError(
                f"{self.name} has {size} neurons, which {devices} devices cannot share equally: set "
                f"tensor_parallel_size to a divisor of {size}, or {_MERGE}"
            )
        return size // devices


class NarrowedMethod(_Narrowed, UnquantizedLinearMethod):  # type: ignore[misc]
    """Computes a dense layer of a narrowed MLP."""


class NarrowedLowRankMethod(_Narrowed, LowRankMethod):
    """Computes a layer of a narrowed MLP that has factors, or some parts of it have."""


def _split(layer: nn.Module, name: str, in_file: str) -> Iterator[Tensor | None]:
    """Yield each part's tensor `name` in the flat parameter `in_file`; None for a part without this tensor."""
    start = 0
    for shapes in layer.eckart_shapes:
        end = start + _numel(shapes.get(name))
        yield layer.get_parameter(in_file).data[start:end].view(shapes[name]) if name in shapes else None
        start = end


def _put(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give `layer` a parameter, where a dot in its name means that a module inside has it."""
    inside, _, last = name.rpartition(".")
    if inside and not hasattr(layer, inside):
        layer.add_module(inside, nn.Module())
    layer.get_submodule(inside).register_parameter(last, parameter)


def _register(layer: nn.Module, name: str, values: Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))


@dataclass(frozen=True)
class _Loader:
    """Weight loader that copies the device's share of each part's tensor to its place in a flat parameter.

    Attributes:
        name: name of the tensor in the weights file.
        sizes: number of elements of each part's share.
        shapes: shape of each part's whole tensor; None for a part without this tensor.
        shares: share of each part.
    """

    name: str
    sizes: list[int]
    shapes: list[tuple[int, ...] | None]
    shares: list[Share]

    def __call__(self, parameter: nn.Parameter, loaded: Tensor, shard: str | int | None = None) -> None:
        number = _QKV[shard] if isinstance(shard, str) else shard or 0
        shape = self.shapes[number]
        if shape is None or loaded.numel() != _numel(shape):
            raise ValueError(f"{self.name} has {loaded.numel()} numbers, and config.json says {_numel(shape)}")
        start, size = sum(self.sizes[:number]), self.sizes[number]
        if not loaded.is_contiguous():  # vLLM transposes each weight of a GPT-2, whose dense layers store transposes
            loaded = loaded.t()
        share = self.shares[number].cut(self.name, loaded.reshape(shape))
        parameter.data[start : start + size].copy_(share.reshape(-1))


def _numel(shape: tuple[int, ...] | None) -> int:
    return 0 if shape is None else torch.Size(shape).numel()


def _shape(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of this shape without memory."""
    return torch.empty(shape, device="meta")


@register_quantization_config("eckart")
class EckartConfig(QuantizationConfig):
    """Storage of a compressed model's layers, read from its config.json (eckart/model/hf_format.py)."""

    def __init__(
        self,
        ranks: Mapping[str, int],
        rows: Mapping[str, int],
        pivoted: list[str],
        narrowed: Mapping[str, list[int]],
        format: int,
    ) -> None:
        super().__init__()
        self.narrowed = dict(narrowed)
        # In format 1, factors were parameters of their layer.
        self.in_files = _IN_FILES if format > 1 else {}
        self.parts = {
            name: Part(rank, rows.get(name, 0), name in pivoted, biased=format > 1) for name, rank in ranks.items()
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EckartConfig:
        if config.get("heads"):
            raise ValueError(f"vLLM does not run factorized products of queries and keys: {_MERGE}")
        if config.get("experts"):
            raise ValueError(f"vLLM does not run factorized experts: {_MERGE}")
        if config.get("quantization"):
            raise ValueError("vLLM does not run factors that another method has quantized: save the model without it")
        stored: list[Any] = [config.get("rows") or {}, config.get("pivoted") or [], config.get("narrowed") or {}]
        return cls(config["ranks"], *stored, config.get("format", 1))

    @classmethod
    def get_name(cls) -> str:
        return "eckart"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0, any GPU, because this plug-in has no kernels of its own."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.parts = hf_to_vllm_mapper.apply_dict(self.parts)
        self.narrowed = hf_to_vllm_mapper.apply_dict(self.narrowed)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """Return the object that computes `layer`; None for layers that are not linear.

        Args:
            prefix: name of the layer.

        Raises:
            ValueError: an embedding or a head is factorized.
        """
        if not isinstance(layer, LinearBase):
            if prefix in self.parts:
                raise ValueError(f"vLLM does not run {prefix} in factors: {_MERGE}")
            return None
        parent, _, child = prefix.rpartition(".")
        names = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(child, [child])]
        parts = [self.parts.get(name, Part(None)) for name in names]
        low_rank = any(name in self.parts for name in names)
        if all(name in self.narrowed for name in names):
            shapes = [self.narrowed[name] for name in names]
            narrowed = NarrowedMethod(prefix, shapes)
            return NarrowedLowRankMethod(prefix, shapes, parts, self.in_files) if low_rank else narrowed
        return LowRankMethod(parts, self.in_files) if low_rank else UnquantizedLinearMethod()
