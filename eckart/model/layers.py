"""The low-rank layers that replace targets in a model."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Layer = TypeVar("Layer", bound="LowRankLayer")
Module = TypeVar("Module", bound=nn.Module)


class LowRankLayer(nn.Module):
    """Base class of low-rank layers, y = x Ŵᵀ + bias: x `(…, in)` → `(…, out)`. Subclasses differ in how they store Ŵ.

    The factors are ordinary linear layers, so that tools that quantize or adapt linear layers do so with the factors.
    The layer itself is not an nn.Linear: such a tool would take Ŵ for a parameter.

    Args:
        in_features, out_features: sizes of the dense weight.
        rank: number of components; of each head, for HeadRows.
    """

    bias: Tensor | None
    """Bias `(out,)`; HeadRows has a shorter one."""
    transposed = False
    """Whether the dense module was a Conv1D; `merge` then restores a Conv1D."""
    narrowed = False
    """Whether the layer belongs to a narrowed MLP, so that its shape is not that of the model's config."""
    reads_ids = False
    """Whether the layer stands for an embedding; the dense module's weight is then `(in, out)`."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank

    @staticmethod
    def _reader(in_features: int, out_features: int) -> nn.Linear | PlainLinear | nn.Embedding:
        """Return a layer without values that reads the layer's inputs."""
        return (uninitialized_linear if out_features else PlainLinear)(in_features, out_features)

    @staticmethod
    def _writer(in_features: int, out_features: int, bias: bool) -> nn.Linear | PlainLinear:
        """Return a layer without values that computes the layer's outputs."""
        return (uninitialized_linear if in_features > 1 else PlainLinear)(in_features, out_features, bias)

    @property
    def dense_bias(self) -> Tensor | None:
        """Bias of the equivalent dense layer `(out,)`."""
        return self.bias

    @property
    def shape(self) -> tuple[int, int]:
        """Shape `(out, in)` of the dense weight."""
        return self.out_features, self.in_features

    @property
    @abstractmethod
    def first_weight(self) -> Tensor:
        """Weight of the module that reads the layer's inputs; its dtype and device are those of the layer."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return Ŵ `(out, in)`."""

    @property
    def weight(self) -> Tensor:
        """Ŵ as the dense module had it, for code that reads the weights of linear layers; it cannot be changed.

        Its dtype, device and shape cost nothing, and its values are computed when they are used: T5 reads the dtype in
        every forward pass. A layer is not a target if the model's own code uses the values (eckart/model/targets.py).
        """
        like = self.first_weight
        if not isinstance(like, Tensor):  # torch.ao's quantized layers have a method of this name
            return like
        return self.merged_weight() if torch.compiler.is_compiling() else _MergedWeight(self, like)

    def merged_weight(self) -> Tensor:
        """Compute Ŵ in the orientation in which the dense module stores it."""
        return self.dense().T if self.transposed or self.reads_ids else self.dense()

    @classmethod
    @abstractmethod
    def renamed(cls) -> dict[str, str]:
        """Return the names that tensors had when factors were parameters of the layer: old name → present name."""

    @classmethod
    def is_transposed(cls, old: str) -> bool:
        """Whether the tensor that was called `old` was the transpose of the present one."""
        return cls.reads_ids and old in ("right", "residual")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Take over tensors with their old names, as in a checkpoint from before factors were linear layers."""
        for old, new in self.renamed().items():
            if prefix + old in state_dict:
                values = state_dict.pop(prefix + old)
                state_dict[prefix + new] = values.T if self.is_transposed(old) else values
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class _MergedWeight(Tensor):
    """Ŵ of a low-rank layer, computed from the factors whenever an operation uses its values."""

    @staticmethod
    def __new__(cls, layer: LowRankLayer, like: Tensor) -> _MergedWeight:
        shape = layer.shape[::-1] if layer.transposed or layer.reads_ids else layer.shape
        # Code in C++ that bypasses `__torch_function__` must not find values that look like weights.
        # Not `like.new_full`, which quantized tensors of torchao do not have.
        unknown = torch.full((), math.nan if like.is_floating_point() else 0, dtype=like.dtype, device=like.device)
        weight: _MergedWeight = unknown.expand(shape).as_subclass(cls)
        weight.layer = layer
        weight._is_hf_initialized = True  # so that transformers draws no weights for it
        return weight

    layer: LowRankLayer
    detached = False
    _is_hf_initialized: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        # The functions of nn.init give the tensor by name.
        changed = [*args[:1], kwargs.get("tensor")] if _CHANGING.search(name) else [kwargs.get("out")]
        if any(isinstance(value, cls) for value in changed):
            raise RuntimeError(
                f"{name} would change the weight of a factorized layer, which is computed from its factors: change "
                "these, or merge the layer first (eckart.model.layers.merge)"
            )
        if func is Tensor.data_ptr:
            raise RuntimeError(
                "the weight of a factorized layer is computed when it is used, so it has no address: use its clone()"
            )
        if func == _DATA:  # a copy would let code change it without effect
            weight = cls(args[0].layer, args[0].layer.first_weight)
            weight.detached = True
            return weight
        args, kwargs = tree_map(lambda value: value.computed() if isinstance(value, cls) else value, (args, kwargs))
        return func(*args, **kwargs)

    def computed(self) -> Tensor:
        """Compute Ŵ, without a gradient if this is the attribute `data` of a weight."""
        weight = self.layer.merged_weight()
        return weight.detach() if self.detached else weight


_CHANGING = re.compile("^__(set|setitem)__$|[^_]_$")
"""Names of torch's methods and functions that change a tensor in place."""
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_DESCRIBING = {
    getter
    for name in ("dtype", "device", "shape", "ndim", "is_meta", "is_cuda", "layout", "requires_grad", "is_sparse")
    if (getter := getattr(getattr(Tensor, name), "__get__", None))
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.is_floating_point, Tensor.get_device}
"""Attributes and methods of a tensor that do not need its values."""


class PlainLinear(nn.Module):
    """A linear layer that is not an nn.Linear, so that no tool replaces it.

    It is the left factor of rank 1, on which torchao fails and bitsandbytes computes noise, and of an embedding, since
    a tied head needs its weight itself.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() and not self.weight.numel():
            # A factor of rank 0: onnxruntime cannot quantize a product of empty matrices.
            zeros = x.new_zeros(*x.shape[:-1], len(self.weight))
            return zeros if self.bias is None else zeros + self.bias
        return linear(x, self.weight, self.bias)


class LowRankLinear(LowRankLayer):
    """Linear layer stored as two, `right` and then `left`: x `(…, in)` → `(…, rank)` → `(…, out)`.

    Their weights are the factors, right `(rank, in)` and left `(out, rank)`; `left` has the bias. With a residual,
    y[rows] += residual(x): some outputs also use a row of a full-rank matrix (LoSparse, eq. 5).
    """

    rows: Tensor | None
    left: nn.Linear | PlainLinear
    right: nn.Linear | PlainLinear | nn.Embedding
    residual: nn.Linear | PlainLinear | nn.Embedding | None

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool, rows: int = 0) -> None:
        super().__init__(in_features, out_features, rank)
        self.right = self._reader(in_features, rank)
        self.left = self._writer(rank, out_features, bias)
        self.residual = self._reader(in_features, rows) if rows else None
        self.register_buffer("rows", torch.arange(rows) if rows else None)
        self.gate: Tensor | None = None
        """Factors `(rank,)` that scale the components while a rank search trains; never saved."""

    @property
    def first_weight(self) -> Tensor:
        return self.right.weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self.left.bias

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors `(out, rank)` and `(rank, in)`; writing to them changes the layer."""
        return self.left.weight, matrix_of(self.right)

    def dense(self) -> Tensor:
        left, right = self.factors
        weight = (left if self.gate is None else left * self.gate) @ right
        if self.residual is None or self.rows is None:
            return weight
        return weight.index_add(0, self.rows, matrix_of(self.residual))

    def keep_rows(self, kept: Tensor | slice) -> None:
        """Remove all rows of the residual but `kept`: a mask `(rows,)`, or a slice."""
        if self.residual is None or self.rows is None:
            return
        values, rows = matrix_of(self.residual).detach()[kept], self.rows[kept]
        self.residual = self._reader(self.in_features, len(rows)).to(values) if len(rows) else None
        self.rows = rows if len(rows) else None
        if self.residual is not None:
            with torch.no_grad():
                matrix_of(self.residual).copy_(values)

    def forward(self, x: Tensor) -> Tensor:
        components = self.right(x)
        if self.gate is not None:
            components = components * self.gate
        y: Tensor = self.left(components)
        if self.residual is None or self.rows is None:
            return y
        return y.index_add(-1, self.rows, self.residual(x).to(y.dtype))  # autocast leaves an embedding's as it is

    def run_dense(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the outputs for `x` with `weight` `(out, in)` in place of Ŵ."""
        return linear(x, weight, self.bias)

    @classmethod
    def renamed(cls) -> dict[str, str]:
        return {"right": "right.weight", "left": "left.weight", "bias": "left.bias", "residual": "residual.weight"}


class PivotedLinear(LowRankLayer):
    """Linear layer in pivoted storage, as `rank` rows of Ŵ (the pivots): x `(…, in)` → `(…, rank)` → `(…, out)`.

    The weight of `right` `(rank, in)` holds the pivots, that of `others` `(out − rank, rank)` coefficients: others @
    right are the other rows of Ŵ (eckart/factorization/pivoted_storage.py).
    """

    places: Tensor
    """For each row of Ŵ, its position in the list that holds first all pivots and then all other rows, `(out,)`."""
    others: nn.Linear | PlainLinear
    right: nn.Linear | PlainLinear | nn.Embedding

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        super().__init__(in_features, out_features, rank)
        self.right = self._reader(in_features, rank)
        self.others = self._writer(rank, out_features - rank, False)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_buffer("places", torch.arange(out_features, dtype=torch.int32))

    @property
    def first_weight(self) -> Tensor:
        return self.right.weight

    def left_factor(self) -> Tensor:
        """Return the left factor `(out, rank)`; its rows at the pivots form an identity matrix."""
        others = self.others.weight
        identity = torch.eye(self.rank, dtype=others.dtype, device=others.device)
        return torch.cat([identity, others]).index_select(0, self.places)

    def dense(self) -> Tensor:
        right = matrix_of(self.right)
        return torch.cat([right, self.others.weight @ right]).index_select(0, self.places)

    def forward(self, x: Tensor) -> Tensor:
        pivots = self.right(x)
        # With more tokens than the rank, reordering the rows of the left factor moves fewer numbers than reordering the
        # outputs. Compiled code must suit any number of tokens, so it always takes this way.
        if (torch.compiler.is_compiling() or pivots.shape[:-1].numel() > self.rank) and self._is_plain:
            return linear(pivots, self.left_factor(), self.bias)
        y = torch.cat([pivots, self.others(pivots)], -1).index_select(-1, self.places)
        return y if self.bias is None else y + self.bias

    @property
    def _is_plain(self) -> bool:
        """Whether `others` is as it was made: no tool has quantized it, given it an adapter, or moved it elsewhere."""
        if type(self.others) not in (nn.Linear, PlainLinear):
            return False
        return type(self.others.weight) is nn.Parameter and not self.others.weight.is_meta

    @classmethod
    def renamed(cls) -> dict[str, str]:
        return {"right": "right.weight", "others": "others.weight"}


class _Embedding(LowRankLayer):
    """Mixin that makes a low-rank layer read token ids `(…,)` in place of one-hot rows x; `in` is the vocabulary size.

    W `(out, in)` is the transpose of the weight that nn.Embedding stores. Padding tokens get no special vector. `right`
    is an embedding, which stores its factor as `(in, rank)`, too.
    """

    reads_ids = True
    padding_idx = None  # Funnel reads it when it is loaded

    @staticmethod
    def _reader(in_features: int, out_features: int) -> nn.Embedding:
        return nn.Embedding(in_features, out_features, _weight=torch.empty(in_features, out_features))

    _writer = staticmethod(PlainLinear)

    def run_dense(self, x: Tensor, weight: Tensor) -> Tensor:
        columns = embedding(x, weight.T)
        return columns if self.bias is None else columns + self.bias


class LowRankEmbedding(_Embedding, LowRankLinear):
    """An embedding stored as two factors."""


class PivotedEmbedding(_Embedding, PivotedLinear):
    """An embedding in pivoted storage."""


class TiedHead(nn.Module):
    """Head that uses the factors of the embedding tied to it: x `(…, out)` → `(…, rank)` → `(…, in)`.

    The head has no factors of its own, so transformers has no weights to tie.
    """

    def __init__(self, embedding: LowRankEmbedding, bias: bool) -> None:
        super().__init__()
        self._embedding = (embedding,)  # the tuple hides it from parameters() and state_dict()
        self.bias = nn.Parameter(embedding.right.weight.new_empty(embedding.in_features)) if bias else None

    @property
    def embedding(self) -> LowRankEmbedding:
        return self._embedding[0]

    @property
    def weight(self) -> Tensor:
        """Ŵ as nn.Linear has it, `(in, out)`, as in LowRankLayer."""
        return self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        left, right, gate = self.embedding.left, self.embedding.right, self.embedding.gate
        # no hooks run, since the factors' weights are read here, so a device map may have left them anywhere
        with _in_memory(left), _in_memory(right):
            components = linear(x, left.weight.to(x.device).T)
            components = components if gate is None else components * gate
            return linear(components, right.weight.to(x.device), self.bias)


def _in_memory(module: nn.Module) -> AbstractContextManager[None]:
    """Load the weights of `module` while the context lasts if a device map has offloaded them."""
    # accelerate's context is only for such modules, so that torch.compile need not trace it
    return align_module_device(module) if hasattr(module, "_hf_hook") else nullcontext()


class HeadRows(LowRankLayer):
    """A linear layer that computes `rank` outputs of each attention head; the head's other outputs are zero.

    x `(…, in)` → `(…, heads · rank)` → `(…, heads · width)`. It replaces the query and the key layer. Their outputs
    only meet in inner products (eckart/model/attention_products.py), and zeros add nothing to an inner product. Its
    rows and its bias are the linear layer `factor`.
    """

    factor: nn.Linear

    def __init__(self, in_features: int, out_features: int, heads: int, rank: int, bias: bool) -> None:
        super().__init__(in_features, out_features, rank)
        self.heads = heads
        self.width = out_features // heads
        self.factor = uninitialized_linear(in_features, heads * rank, bias)

    @property
    def first_weight(self) -> Tensor:
        return self.factor.weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """Bias of `factor` `(heads · rank,)`."""
        return self.factor.bias

    @property
    def dense_bias(self) -> Tensor | None:
        return None if self.bias is None else self._spread(self.bias[:, None])[:, 0]

    def dense(self) -> Tensor:
        return self._spread(self.factor.weight)

    def _spread(self, rows: Tensor) -> Tensor:
        """Insert rows of zeros after the rows of each head: `(heads · rank, n)` → `(heads · width, n)`."""
        return pad(rows.unflatten(0, (self.heads, self.rank)), (0, 0, 0, self.width - self.rank)).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.factor(x).unflatten(-1, (self.heads, self.rank))
        return pad(y, (0, self.width - self.rank)).flatten(-2)

    @classmethod
    def renamed(cls) -> dict[str, str]:
        return {"factor": "factor.weight", "bias": "factor.bias"}


def uninitialized_linear(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """Return a linear layer without values; nn.Linear itself would draw them."""
    with torch.device("meta"):  # draws none, and of size 1: for a matrix without entries, torch would warn
        layer = nn.Linear(1, 1, bias)
    layer.in_features, layer.out_features = in_features, out_features
    layer.weight = nn.Parameter(torch.empty(out_features, in_features))
    if bias:
        layer.bias = nn.Parameter(torch.empty(out_features))
    return layer


def matrix_of(module: nn.Linear | PlainLinear | nn.Embedding) -> Tensor:
    """Return the weight of a layer that reads the inputs of a low-rank layer, as `(…, in)`; it shares memory."""
    return module.weight.T if isinstance(module, nn.Embedding) else module.weight


def gradient_of(module: nn.Linear | PlainLinear | nn.Embedding) -> Tensor | None:
    """Return the gradient by `matrix_of(module)`, if there is one; it shares memory."""
    gradient = module.weight.grad
    return gradient.T if gradient is not None and isinstance(module, nn.Embedding) else gradient


class NarrowedLinear(nn.Linear):
    """A dense layer of a narrowed MLP: it has fewer outputs or inputs than the model's config says."""

    narrowed = True


class NarrowedConv1D(Conv1D):
    """A narrowed dense layer in place of a Conv1D: tools for GPT-2 expect its transposed weight."""

    narrowed = True


def narrowed_like(module: nn.Module, out_features: int, in_features: int) -> NarrowedLinear | NarrowedConv1D:
    """Return an uninitialized layer of another shape with the type, dtype, device and bias of a Linear or Conv1D."""
    like = module.get_parameter("weight")
    layer: NarrowedLinear | NarrowedConv1D
    with torch.device("meta"):  # draws no random weights
        if isinstance(module, Conv1D):
            layer = NarrowedConv1D(out_features, in_features)
        else:
            layer = NarrowedLinear(in_features, out_features, bias=getattr(module, "bias", None) is not None)
    layer = layer.to_empty(device=like.device).to(like.dtype).train(module.training)
    return _trainable_as(layer, like, getattr(module, "bias", None))


def narrowed_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shapes `[out, in]` of all layers of narrowed MLPs of `model` by name, dense or factorized."""
    kinds = (NarrowedLinear, NarrowedConv1D, LowRankLayer)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds) and layer.narrowed}
    return {name: list(shape_of(layer)) for name, layer in layers.items()}


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return `(out, in)` of a Linear, a Conv1D, an Embedding or a low-rank layer."""
    if isinstance(module, LowRankLayer):
        return module.shape
    if isinstance(module, Conv1D):
        columns, rows = module.weight.shape
        return rows, columns
    if isinstance(module, nn.Embedding):
        return module.embedding_dim, module.num_embeddings
    return module.out_features, module.in_features  # type: ignore[return-value]


def low_rank_like(module: nn.Module, rank: int, rows: int = 0) -> LowRankLinear:
    """Return an uninitialized low-rank layer with the shape, dtype, device and bias of a Linear, Conv1D or Embedding.

    Args:
        rows: number of rows of the residual.
    """
    return _like(module, LowRankEmbedding if _reads_ids(module) else LowRankLinear, rank=rank, rows=rows)


def pivoted_like(module: nn.Module, rank: int) -> PivotedLinear:
    """Return an uninitialized pivoted layer to replace a dense module or the low-rank layer `module`."""
    return _like(module, PivotedEmbedding if _reads_ids(module) else PivotedLinear, rank=rank)


def _like(module: nn.Module, kind: Callable[..., Layer], **sizes: int) -> Layer:
    out_features, in_features = shape_of(module)
    like = module.first_weight if isinstance(module, LowRankLayer) else module.get_parameter("weight")
    with torch.device(like.device):
        layer = kind(in_features, out_features, bias=getattr(module, "bias", None) is not None, **sizes)
    layer.transposed = isinstance(module, Conv1D) or getattr(module, "transposed", False)
    layer.narrowed = getattr(module, "narrowed", False)
    return _trainable_as(layer.to(like.dtype), like, getattr(module, "bias", None))


def _trainable_as(layer: Module, weight: Tensor, bias: Tensor | None) -> Module:
    """Freeze the parameters of `layer` that replace a frozen weight or bias, and return it."""
    for name, parameter in layer.named_parameters():
        source = bias if bias is not None and name.endswith("bias") else weight
        parameter.requires_grad_(source.requires_grad)
    return layer


def _reads_ids(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | _Embedding)


def head_rows_like(module: nn.Module, heads: int, rank: int) -> HeadRows:
    """Return an uninitialized HeadRows with the shape, dtype, device and bias of a Linear or Conv1D."""
    return _like(module, HeadRows, heads=heads, rank=rank)


@contextmanager
def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put `modules` (name → module) into `model` while the context lasts, in place of those with the same names."""
    current = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            model.set_submodule(name, module)
        yield
    finally:
        for name, module in current.items():
            model.set_submodule(name, module)


@contextmanager
def restored(model: PreTrainedModel, names: Iterable[str]) -> Iterator[None]:
    """Put the modules `names` back when the context ends, and what the config says of a tied head."""
    configs = model.config, model.config.get_text_config(decoder=True)
    tied = [(config, config.tie_word_embeddings) for config in configs if hasattr(config, "tie_word_embeddings")]
    try:
        with replaced(model, {name: model.get_submodule(name) for name in names}):
            yield
    finally:
        for config, value in tied:
            config.tie_word_embeddings = value


def factorize_target(
    model: PreTrainedModel, name: str, left: Tensor, right: Tensor, residual: Tensor | None = None
) -> LowRankLinear:
    """Replace the target `name` by a low-rank layer with the given factors and the target's bias.

    Args:
        left, right: the factors, `(out, rank)` and `(rank, in)`.
        residual: matrix `(out, in)` that the layer adds to left @ right; None: it adds nothing.

    Raises:
        ValueError: a device map has offloaded the target to the CPU or the disk.
    """
    module = present(model, name)
    layer = low_rank_like(module, right.shape[0], 0 if residual is None else len(residual))
    with torch.no_grad():
        for stored, values in zip(layer.factors, (left, right), strict=True):
            stored.copy_(values)
        if layer.bias is not None:
            layer.bias.copy_(module.get_parameter("bias"))
        if layer.residual is not None and residual is not None:
            matrix_of(layer.residual).copy_(residual)
    model.set_submodule(name, layer)
    return layer


def tie_head(model: PreTrainedModel, name: str, embedding: str) -> TiedHead:
    """Replace the head `name` by a TiedHead that uses the factors of the low-rank layer `embedding`; keep the bias."""
    layer = model.get_submodule(embedding)
    assert isinstance(layer, LowRankEmbedding)
    bias = getattr(model.get_submodule(name), "bias", None)
    head = TiedHead(layer, bias is not None)
    if bias is not None and head.bias is not None and not bias.is_meta:
        with torch.no_grad():
            head.bias.copy_(bias)
    model.set_submodule(name, head)
    _set_tied(model, False)  # there is no weight to tie
    model.all_tied_weights_keys.pop(f"{name}.weight", None)
    return head


def present(model: PreTrainedModel, name: str) -> nn.Module:
    """Return the module `name`, after checking that its weight is not offloaded.

    Raises:
        ValueError: a device map has offloaded the module to the CPU or the disk.
    """
    module = model.get_submodule(name)
    if module.get_parameter("weight").is_meta:
        raise ValueError(
            f"{name} is offloaded to the CPU or the disk, where it cannot be replaced: load the model without a "
            "device map"
        )
    return module


def by_outputs(module: nn.Module, values: Tensor) -> Tensor:
    """Return values of a layer's weight, such as its gradient, as `(out, in)`, or values `(out, in)` as it stores them.

    A Conv1D and an Embedding store the transpose.
    """
    return values.T if isinstance(module, Conv1D | nn.Embedding) else values


def set_weight(module: nn.Module, weight: Tensor) -> None:
    """Copy `weight` `(out, in)` into the weight of a Linear, a Conv1D or an Embedding."""
    with torch.no_grad():
        module.get_parameter("weight").copy_(by_outputs(module, weight))


def merge(model: PreTrainedModel, name: str) -> nn.Module:
    """Replace the factorized target `name` by a dense module of its original type (such as Linear) with the weight Ŵ.

    Raises:
        ValueError: the target is not factorized.
    """
    layer = model.get_submodule(name)
    if not isinstance(layer, LowRankLayer):
        raise ValueError(f"{name} is not factorized, so there is nothing to merge: leave it out")
    weight, bias = layer.dense(), layer.dense_bias
    out_features, in_features = layer.shape
    module: nn.Module
    with torch.device("meta"):  # draws no random weights
        if _reads_ids(layer):
            module = nn.Embedding(in_features, out_features)
        elif layer.transposed:
            module = (NarrowedConv1D if layer.narrowed else Conv1D)(out_features, in_features)
        else:
            kind = NarrowedLinear if layer.narrowed else nn.Linear
            module = kind(in_features, out_features, bias=bias is not None)
    module = module.to_empty(device=weight.device).to(weight.dtype).train(layer.training)
    set_weight(module, weight)
    if bias is not None:
        with torch.no_grad():
            module.get_parameter("bias").copy_(bias)
    for head, owner in tied_heads(model).items():
        if owner == name:
            _untie(model, head, module)
    keep_values(module)
    model.set_submodule(name, module)
    return module


def keep_values(module: nn.Module) -> None:
    """Mark `module` as transformers marks what it has loaded, so that it never draws its weights at random.

    It draws those of unmarked modules if the model becomes part of another one, such as an EncoderDecoderModel.
    """
    for part in module.modules():
        part._is_hf_initialized = True  # type: ignore[assignment]


def _untie(model: PreTrainedModel, name: str, embedding: nn.Module) -> None:
    """Replace the head `name` by a Linear that shares the weight of the dense `embedding`."""
    weight, bias = embedding.get_parameter("weight"), model.get_submodule(name).bias
    rows, columns = weight.shape
    with torch.device("meta"):
        head = nn.Linear(columns, rows, bias=bias is not None)
    head.weight, head.bias = weight, bias  # type: ignore[assignment]
    model.set_submodule(name, head)
    _set_tied(model, True)


def _set_tied(model: PreTrainedModel, tied: bool) -> None:
    """Set `tie_word_embeddings` in the model's config, and in its text config if there is one."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = tied


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """Return all layers of `model` that are stored as two factors: name → layer."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LowRankLinear)}


def factorized(model: nn.Module) -> dict[str, int]:
    """Return the ranks of all factorized layers of `model`: name → rank; for a layer of a product, each head's rank."""
    return {name: layer.rank for name, layer in model.named_modules() if isinstance(layer, LowRankLayer)}


def pivoted(model: nn.Module) -> list[str]:
    """Return the names of the layers of `model` in pivoted storage."""
    return [name for name, layer in model.named_modules() if isinstance(layer, PivotedLinear)]


def head_counts(model: nn.Module) -> dict[str, int]:
    """Return the numbers of heads of the layers of factorized attention products: name of layer → number of heads."""
    return {name: layer.heads for name, layer in model.named_modules() if isinstance(layer, HeadRows)}


def tied_heads(model: nn.Module) -> dict[str, str]:
    """Return the language model heads that use an embedding's factors: name of the head → name of the embedding.

    Raises:
        ValueError: the embedding of a head is not in the model.
    """
    names = {module: name for name, module in model.named_modules()}
    heads = {name: head for head, name in names.items() if isinstance(head, TiedHead)}
    for name, head in heads.items():
        if head.embedding not in names:
            raise ValueError(
                f"{name} uses the factors of an embedding that was replaced, as by peft's modules_to_save: merge the "
                "embedding (eckart.model.layers.merge) before you replace it or its head"
            )
    return {name: names[head.embedding] for name, head in heads.items()}


def residual_rows(model: nn.Module) -> dict[str, int]:
    """Return the sizes of the residuals: name of each layer with a residual → number of its rows."""
    return {name: len(layer.rows) for name, layer in low_rank_layers(model).items() if layer.rows is not None}


def parts_of_layers(model: nn.Module) -> dict[str, str]:
    """Return the modules inside of low-rank layers, such as factors: name of the part → name of the layer."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LowRankLayer)]
    return {f"{name}.{part}": name for name, layer in layers for part, _ in layer.named_modules() if part}
