"""The low-rank layers that replace targets in a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Layer = TypeVar("Layer", bound="LowRankLayer")


class LowRankLayer(nn.Module):
    """Base class of low-rank layers, y = x Ŵᵀ + bias: x `(…, in)` → `(…, out)`. Subclasses differ in how they store Ŵ.

    The factors are parameters and not Linear modules, so that code that looks for linear layers does not find them.
    """

    right: nn.Parameter
    """Right factor `(rank, in)`; HeadRows has `factor` instead."""
    bias: nn.Parameter | None
    transposed = False
    """Whether the dense module was a Conv1D; `merge` then restores a Conv1D."""
    narrowed = False
    """Whether the layer belongs to a narrowed MLP, so that its shape is not that of the model's config."""

    @staticmethod
    def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x matrixᵀ + bias `(…, n)` for a matrix `(n, in)`."""
        return linear(x, matrix, bias)

    @property
    def rank(self) -> int:
        return self.right.shape[0]

    @property
    def dense_bias(self) -> Tensor | None:
        """Bias of the equivalent dense layer `(out,)`."""
        return self.bias

    @property
    def out_features(self) -> int:
        """Number of outputs, as in nn.Linear; some models read it to initialize weights."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs, as in nn.Linear."""
        return self.shape[1]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Shape `(out, in)` of the dense weight."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return Ŵ `(out, in)`."""

    @property
    def weight(self) -> Tensor:
        """Uninitialized memory in the dense weight's shape, for models (T5) that read its dtype and device.

        Such models read them in each forward, and computing Ŵ would cost more than the forward itself. A layer is no
        target if the model uses the values of its weight (eckart/model/targets.py).
        """
        return self.right.new_empty(self.shape[::-1] if self.transposed else self.shape)


class LowRankLinear(LowRankLayer):
    """Linear layer stored as two factors, y = (x rightᵀ) leftᵀ + bias: x `(…, in)` → `(…, rank)` → `(…, out)`.

    With a residual, y[rows] += x residualᵀ: some outputs also use a row of a full-rank matrix (LoSparse, eq. 5).
    """

    rows: Tensor | None

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool, rows: int = 0) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(out_features, rank))
        self.right = nn.Parameter(torch.empty(rank, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.residual = nn.Parameter(torch.empty(rows, in_features)) if rows else None
        self.register_buffer("rows", torch.arange(rows) if rows else None)
        self.gate: Tensor | None = None
        """Factors `(rank,)` that scale the components while a rank search trains; never saved."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.left), self.right.shape[1]

    def dense(self) -> Tensor:
        weight = (self.left if self.gate is None else self.left * self.gate) @ self.right
        return weight if self.residual is None or self.rows is None else weight.index_add(0, self.rows, self.residual)

    def forward(self, x: Tensor) -> Tensor:
        components = self.project(x, self.right)
        if self.gate is not None:
            components = components * self.gate
        y = linear(components, self.left, self.bias)
        if self.residual is None or self.rows is None:
            return y
        return y.index_add(-1, self.rows, self.project(x, self.residual))


class PivotedLinear(LowRankLayer):
    """Linear layer in pivoted storage, as `rank` rows of Ŵ (the pivots): x `(…, in)` → `(…, rank)` → `(…, out)`.

    `right` holds the pivots. `others` `(out − rank, rank)` holds coefficients: others @ right are the other rows of Ŵ
    (eckart/factorization/pivoted_storage.py).
    """

    places: Tensor
    """For each row of Ŵ, its position in the list that holds first all pivots and then all other rows, `(out,)`."""

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.others = nn.Parameter(torch.empty(out_features - rank, rank))
        self.right = nn.Parameter(torch.empty(rank, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_buffer("places", torch.arange(out_features, dtype=torch.int32))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.places), self.right.shape[1]

    def left(self) -> Tensor:
        """Return the left factor `(out, rank)`; its rows at the pivots form an identity matrix."""
        identity = torch.eye(self.rank, dtype=self.others.dtype, device=self.others.device)
        return torch.cat([identity, self.others]).index_select(0, self.places)

    def dense(self) -> Tensor:
        return torch.cat([self.right, self.others @ self.right]).index_select(0, self.places)

    def forward(self, x: Tensor) -> Tensor:
        pivots = self.project(x, self.right)
        # With more tokens than the rank, reordering the rows of `left` moves fewer numbers than reordering the outputs.
        # Compiled code must suit any number of tokens, so it always takes this way.
        if torch.compiler.is_compiling() or pivots.shape[:-1].numel() > self.rank:
            return linear(pivots, self.left(), self.bias)
        y = torch.cat([pivots, linear(pivots, self.others)], -1).index_select(-1, self.places)
        return y if self.bias is None else y + self.bias


class _Embedding(LowRankLayer):
    """Mixin that makes a low-rank layer read token ids `(…,)` in place of one-hot rows x; `in` is the vocabulary size.

    W `(out, in)` is the transpose of the weight that nn.Embedding stores. Padding tokens get no special vector.
    """

    @staticmethod
    def project(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the columns of a matrix `(n, in)` for the ids x `(…,)`, plus bias: `(…, n)`."""
        columns = embedding(x, matrix.T)
        return columns if bias is None else columns + bias


class LowRankEmbedding(_Embedding, LowRankLinear):
    """An embedding stored as two factors."""


class PivotedEmbedding(_Embedding, PivotedLinear):
    """An embedding in pivoted storage."""


class TiedHead(nn.Module):
    """Head that uses the factors of the embedding tied to it: x `(…, out)` → `(…, rank)` → `(…, in)`.

    The head has no factors of its own, so transformers has no weights to tie.
    """

    transposed = False

    def __init__(self, embedding: LowRankEmbedding, bias: bool) -> None:
        super().__init__()
        self._embedding = (embedding,)  # the tuple hides it from parameters() and state_dict()
        self.bias = nn.Parameter(embedding.right.new_empty(embedding.right.shape[1])) if bias else None

    @property
    def embedding(self) -> LowRankEmbedding:
        return self._embedding[0]

    @property
    def weight(self) -> Tensor:
        """Uninitialized memory in the dense weight's shape, as in LowRankLayer."""
        out_features, in_features = self.embedding.shape
        return self.embedding.right.new_empty(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        left, right, gate = self.embedding.left, self.embedding.right, self.embedding.gate
        components = linear(x, left.T)
        return linear(components if gate is None else components * gate, right.T, self.bias)


class HeadRows(LowRankLayer):
    """A linear layer that computes `rank` outputs of each attention head; the head's other outputs are zero.

    x `(…, in)` → `(…, heads · rank)` → `(…, heads · width)`. It replaces the query and the key layer. Their outputs
    only meet in inner products (eckart/model/attention_products.py), and zeros add nothing to an inner product.
    """

    def __init__(self, in_features: int, out_features: int, heads: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.width = out_features // heads
        self.factor = nn.Parameter(torch.empty(heads * rank, in_features))
        self.bias = nn.Parameter(torch.empty(heads * rank)) if bias else None

    @property
    def rank(self) -> int:
        return len(self.factor) // self.heads

    @property
    def shape(self) -> tuple[int, int]:
        return self.heads * self.width, self.factor.shape[1]

    @property
    def dense_bias(self) -> Tensor | None:
        return None if self.bias is None else self._spread(self.bias[:, None])[:, 0]

    def dense(self) -> Tensor:
        return self._spread(self.factor)

    def _spread(self, rows: Tensor) -> Tensor:
        """Insert rows of zeros after the rows of each head: `(heads · rank, n)` → `(heads · width, n)`."""
        return pad(rows.unflatten(0, (self.heads, self.rank)), (0, 0, 0, self.width - self.rank)).flatten(0, 1)

    @property
    def weight(self) -> Tensor:
        return self.factor.new_empty(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.factor, self.bias).unflatten(-1, (self.heads, self.rank))
        return pad(y, (0, self.width - self.rank)).flatten(-2)


class NarrowedLinear(nn.Linear):
    """A dense layer of a narrowed MLP: it has fewer outputs or inputs than the model's config says."""

    narrowed = True


class NarrowedConv1D(Conv1D):
    """The same in place of a Conv1D, with whose transposed weight tools for GPT-2 reckon."""

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
    return layer.to_empty(device=like.device).to(like.dtype).train(module.training)


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


def _like(module: nn.Module, kind: type[Layer], **sizes: int) -> Layer:
    out_features, in_features = shape_of(module)
    like = module.right if isinstance(module, LowRankLayer) else module.get_parameter("weight")
    with torch.device(like.device):
        layer = kind(in_features, out_features, bias=getattr(module, "bias", None) is not None, **sizes)
    layer.transposed = isinstance(module, Conv1D) or getattr(module, "transposed", False)
    layer.narrowed = getattr(module, "narrowed", False)
    return layer.to(like.dtype)


def _reads_ids(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | _Embedding)


def head_rows_like(module: nn.Module, heads: int, rank: int) -> HeadRows:
    """Return an uninitialized HeadRows with the shape, dtype, device and bias of a Linear or Conv1D."""
    return _like(module, HeadRows, heads=heads, rank=rank)


def replace(model: PreTrainedModel, name: str, layer: nn.Module) -> None:
    """Put `layer` in place of the module `name` of `model`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


@contextmanager
def replaced(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put `modules` (name → module) into `model` while the context lasts, in place of those with the same names."""
    current = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            replace(model, name, module)
        yield
    finally:
        for name, module in current.items():
            replace(model, name, module)


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
        layer.left.copy_(left)
        layer.right.copy_(right)
        if layer.bias is not None:
            layer.bias.copy_(module.get_parameter("bias"))
        if layer.residual is not None and residual is not None:
            layer.residual.copy_(residual)
    replace(model, name, layer)
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
    replace(model, name, head)
    _set_tied(model, False)  # there is no weight to tie
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


def set_weight(module: nn.Module, weight: Tensor) -> None:
    """Copy `weight` `(out, in)` into the weight of a Linear, a Conv1D or an Embedding."""
    with torch.no_grad():
        module.get_parameter("weight").copy_(weight.T if isinstance(module, Conv1D | nn.Embedding) else weight)


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
    replace(model, name, module)
    return module


def _untie(model: PreTrainedModel, name: str, embedding: nn.Module) -> None:
    """Replace the head `name` by a Linear that shares the weight of the dense `embedding`."""
    weight, bias = embedding.get_parameter("weight"), model.get_submodule(name).bias
    rows, columns = weight.shape
    with torch.device("meta"):
        head = nn.Linear(columns, rows, bias=bias is not None)
    head.weight, head.bias = weight, bias  # type: ignore[assignment]
    replace(model, name, head)
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
    """Return the language model heads that use an embedding's factors: name of the head → name of the embedding."""
    names = {module: name for name, module in model.named_modules()}
    return {name: names[head.embedding] for head, name in names.items() if isinstance(head, TiedHead)}


def residual_rows(model: nn.Module) -> dict[str, int]:
    """Return the sizes of the residuals: name of each layer with a residual → number of its rows."""
    return {name: len(layer.rows) for name, layer in low_rank_layers(model).items() if layer.rows is not None}
